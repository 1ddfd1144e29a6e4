"""Instruction data: records of three schemas as conversations, with the files and lines that they were read from."""

import codecs
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ..data.config import Data
from ..data.files import TextFile, found_files
from ..data.readers import BLOCK_BYTES, TooLong, breakage_named, file_batches, opened, table_batches
from ..data.sources import HubDataset, is_local

USER, ASSISTANT = "user", "assistant"

SCHEMAS = (
    '"messages" (a list of {"role", "content"}), "prompt" and "completion" (text, or messages), or "instruction" with '
    '"output" or "answer" and perhaps "input"'
)
"""The schemas of records, in words."""

PromptStyle = Literal["chat", "alpaca", "plain"]
"""The format of questions: the tokenizer's chat template, Alpaca's prompt, or plain text."""

WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
    "response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{context}\n\n### Response:\n"
)
WITHOUT_INPUT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)
"""Alpaca's prompts, for models without a chat template. LLM-Adapters and DoRA indent the lines."""


class BadExampleError(ValueError):
    """The reason why nothing can be learned from an example."""


@dataclass(frozen=True)
class Conversation:
    """An example: messages, of which those of the assistant are learned."""

    messages: Sequence[Mapping[str, str]]
    prompts: Mapping[str, str] = field(default_factory=dict[str, str])
    """The text before the answer by style, for styles other than chat; empty if there are several turns."""

    @property
    def answer(self) -> str:
        """The last message of the assistant."""
        return next(message["content"] for message in reversed(self.messages) if message["role"] == ASSISTANT)


@dataclass(frozen=True)
class Located:
    """A record with its file and line."""

    place: str
    """The file, or the dataset."""
    number: int
    """Its line or row, from 1."""
    source: str
    """The name under which validation examples of this place are reported."""
    record: Any
    """The record, or a BadExampleError if it cannot be read."""

    def __str__(self) -> str:
        return f"{self.place}:{self.number}"


def conversation(record: Any) -> Conversation:
    """The conversation in a record; BadExampleError if it has no answer, or none of the schemas."""
    if isinstance(record, BadExampleError):
        raise record
    if not isinstance(record, Mapping):
        raise BadExampleError(f"a {type(record).__name__}, not an object of fields")
    if record.get("messages") is not None:
        return _of_messages(record["messages"])
    if "prompt" in record and "completion" in record:
        return _of_completion(record["prompt"], record["completion"])
    if "instruction" in record:
        return _of_instruction(record)
    raise BadExampleError(f"fields {', '.join(map(str, record)) or 'none'}: expected {SCHEMAS}")


def prompt_style(asked: PromptStyle | None, pretrained: Any) -> PromptStyle:
    """The style that was asked for; by default chat if the tokenizer has a template for it, else alpaca."""
    return asked or ("chat" if pretrained.chat_template else "alpaca")


def _of_messages(messages: Any) -> Conversation:
    checked = _messages("messages", messages)
    spoken = [message for message in checked if message["role"] == ASSISTANT]
    if not any(message["content"].strip() for message in spoken):
        raise BadExampleError("no answer: no message of the assistant says anything")
    alone = [message["role"] for message in checked] == [USER, ASSISTANT]
    return Conversation(checked, prompts_by_style(checked[0]["content"]) if alone else {})


def _messages(field: str, value: Any) -> list[dict[str, str]]:
    """Messages with role and content; BadExampleError if `value` is something else."""
    if not isinstance(value, (list, tuple)) or not value:
        raise BadExampleError(f'{field} must be a list of {{"role", "content"}}, got {_shown(value)}')
    for message in value:
        whole = isinstance(message, Mapping) and all(isinstance(message.get(name), str) for name in ("role", "content"))
        if not whole:
            raise BadExampleError(f"{field}: a message must have a role and a content of text, got {_shown(message)}")
    return [{"role": message["role"], "content": message["content"]} for message in value]


def _of_completion(prompt: Any, completion: Any) -> Conversation:
    if not isinstance(prompt, str) or not isinstance(completion, str):
        return _of_messages([*_messages("prompt", prompt), *_messages("completion", completion)])
    if not completion.strip():
        raise BadExampleError("no answer: completion is empty")
    return Conversation(_exchange(prompt, completion), {"alpaca": prompt, "plain": prompt})


def _of_instruction(record: Mapping[str, Any]) -> Conversation:
    instruction, context = record["instruction"], record.get("input") or ""
    # The published datasets have a sentence in "output", and the word that is scored in "answer".
    answer = next((value for name in ("output", "answer") if (value := record.get(name)) is not None), None)
    for name, value in (("instruction", instruction), ("input", context)):
        if not isinstance(value, str):
            raise BadExampleError(f"{name} must be text, got {_shown(value)}")
    if not isinstance(answer, str) or not answer.strip():
        raise BadExampleError('no answer: neither "output" nor "answer" says anything')
    asked = f"{instruction}\n\n{context}" if context else instruction
    return Conversation(_exchange(asked, answer), prompts_by_style(instruction, context))


def prompts_by_style(instruction: str, context: str = "") -> dict[str, str]:
    """The prompts for an instruction, with or without a context, in the styles that need no chat template."""
    alpaca = (WITH_INPUT if context else WITHOUT_INPUT).format(instruction=instruction, context=context)
    lines = (instruction, "", context) if context else (instruction,)
    return {"alpaca": alpaca, "plain": "\n".join((*lines, ""))}


def _exchange(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": USER, "content": question}, {"role": ASSISTANT, "content": answer}]


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def located_records(option: str, value: str) -> Iterator[Located]:
    """The records of local files or of a Hugging Face dataset, in order."""
    if not is_local(value):
        dataset = HubDataset(option, value, Data())
        for number, record in enumerate(dataset.opened(), 1):
            yield Located(value, number, dataset.label, record)
        return
    for file in found_files(option, value):
        if file.kind == "text":
            raise ValueError(
                f"{option} {file.path} is plain text: expected .json, .jsonl, .parquet or .arrow with {SCHEMAS}"
            )
        with breakage_named(file):
            for number, record in numbered_records(file):
                yield Located(str(file.path), number, file.source, record)


def numbered_records(file: TextFile) -> Iterator[tuple[int, Any]]:
    """The records of JSON lines, a JSON list or a table, by line or row; a BadExampleError for an unreadable line."""
    if file.is_table:
        for first, batch, _ in table_batches(file):
            yield from enumerate(batch.to_pylist(), first + 1)
    elif _begins_a_list(file):
        yield from _listed(file)
    else:
        for batch in file_batches(file, 0, Data()):
            for number, line in enumerate(batch.records, batch.first_line):
                if isinstance(line, TooLong) or line.strip():
                    yield number, _parsed(line)


def _parsed(line: bytes | TooLong) -> Any:
    if isinstance(line, TooLong):
        return BadExampleError(f"a line of more than {line.most:,} bytes")
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        return BadExampleError(f"not JSON: {error}")


def _begins_a_list(file: TextFile) -> bool:
    """True if a JSON file is one list, as those of LLM-Adapters, and not a record per line."""
    with opened(file) as (stream, _):
        block = stream.read(len(codecs.BOM_UTF8)).removeprefix(codecs.BOM_UTF8)
        while not block.strip() and (more := stream.read(BLOCK_BYTES)):
            block = more
        return block.lstrip().startswith(b"[")


def _listed(file: TextFile) -> Iterator[tuple[int, Any]]:
    """The items of a JSON list, with the lines they begin on, or their numbers if all are on one line."""
    with opened(file) as (stream, _):
        content = stream.read()
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = 1 + content.count(b"\n", 0, error.start)
        raise ValueError(f"{file.path}:{line} is not UTF-8, which JSON must be: {error.reason}") from None
    decoder, place, line, counted = json.JSONDecoder(), text.index("[") + 1, 1, 0
    in_lines = "\n" in text.strip()
    for number in itertools.count(1):
        while place < len(text) and (text[place].isspace() or text[place] == ","):
            place += 1
        line, counted = line + text.count("\n", counted, place), place
        if text[place : place + 1] == "]":
            if rest := text[place + 1 :].strip():
                raise ValueError(f"{file.path}:{line} ends a list, and a file has one, but more follows: {rest[:40]}")
            return
        try:
            record, place = decoder.raw_decode(text, place)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{file.path}:{line} is not JSON, and so nothing after it can be read: {error}") from None
        yield line if in_lines else number, record
