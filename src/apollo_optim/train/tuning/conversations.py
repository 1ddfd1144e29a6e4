"""Instruction data: records of any of three schemas as conversations, each with the place it was read from."""

import codecs
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ..data.config import Reading
from ..data.files import TextFile, found_files
from ..data.readers import BLOCK_BYTES, TooLong, breakage_named, file_batches, opened, table_batches
from ..data.sources import HubDataset, is_local

USER, ASSISTANT = "user", "assistant"

SCHEMAS = (
    '"messages" (a list of {"role", "content"}), "prompt" and "completion" (text, or messages), or "instruction" with '
    '"output" or "answer" and perhaps "input"'
)
"""What a record may hold, in words."""

PromptStyle = Literal["chat", "alpaca", "plain"]
"""What a question is put into: the tokenizer's chat template, Alpaca's prompt, or nothing."""

WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
    "response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{context}\n\n### Response:\n"
)
WITHOUT_INPUT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)
"""Alpaca's prompts, for models without a chat template; LLM-Adapters and DoRA have them with indented lines."""


class BadExampleError(ValueError):
    """An example that nothing can be learned from; its message says why."""


@dataclass(frozen=True)
class Conversation:
    """One example: messages, of which the assistant's are learned."""

    messages: Sequence[Mapping[str, str]]
    prompts: Mapping[str, str] = field(default_factory=dict[str, str])
    """What comes before the answer where there is no chat template, by the style of prompts; none where the assistant
    speaks more than once.
    """

    @property
    def answer(self) -> str:
        """What the assistant says last."""
        return next(message["content"] for message in reversed(self.messages) if message["role"] == ASSISTANT)


@dataclass(frozen=True)
class Located:
    """A record, or the reason why there is none, with where it was found."""

    place: str
    """The file, or the dataset."""
    number: int
    """Its line or row, from 1."""
    source: str
    """The name under which validation examples of this place are reported."""
    record: Any
    """What was read; a BadExampleError where that is not possible."""

    def __str__(self) -> str:
        return f"{self.place}:{self.number}"


def conversation(record: Any) -> Conversation:
    """The conversation that a record holds. BadExampleError where it has no answer, or none of the schemas."""
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
    """The style that was asked for, or else chat where the tokenizer has a template for it."""
    return asked or ("chat" if pretrained.chat_template else "alpaca")


def alpaca_prompt(instruction: str, context: str = "") -> str:
    """An instruction, and what it is about if anything, as Alpaca asks a model that has no chat template."""
    return (WITH_INPUT if context else WITHOUT_INPUT).format(instruction=instruction, context=context)


def _of_messages(messages: Any) -> Conversation:
    checked = _messages("messages", messages)
    spoken = [message for message in checked if message["role"] == ASSISTANT]
    if not any(message["content"].strip() for message in spoken):
        raise BadExampleError("no answer: no message of the assistant says anything")
    alone = [message["role"] for message in checked] == [USER, ASSISTANT]
    return Conversation(checked, prompts_by_style(checked[0]["content"]) if alone else {})


def _messages(field: str, value: Any) -> list[dict[str, str]]:
    """Messages with role and content. BadExampleError where `value` is something else."""
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
    # The published sets name a whole sentence "output", and the word that is scored "answer".
    answer = next((value for name in ("output", "answer") if (value := record.get(name)) is not None), None)
    for name, value in (("instruction", instruction), ("input", context)):
        if not isinstance(value, str):
            raise BadExampleError(f"{name} must be text, got {_shown(value)}")
    if not isinstance(answer, str) or not answer.strip():
        raise BadExampleError('no answer: neither "output" nor "answer" says anything')
    asked = f"{instruction}\n\n{context}" if context else instruction
    return Conversation(_exchange(asked, answer), prompts_by_style(instruction, context))


def prompts_by_style(instruction: str, context: str = "") -> dict[str, str]:
    """An instruction, and what it is about if anything, in the styles of prompts that need no chat template."""
    lines = (instruction, "", context) if context else (instruction,)
    return {"alpaca": alpaca_prompt(instruction, context), "plain": "\n".join((*lines, ""))}


def _exchange(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": USER, "content": question}, {"role": ASSISTANT, "content": answer}]


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def located_records(option: str, value: str) -> Iterator[Located]:
    """The records of files that are here, or of a Hugging Face dataset, in their own order."""
    if not is_local(value):
        dataset = HubDataset(option, value, Reading())
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
    """Records of JSON lines, a JSON list or a table, by line or row; a BadExampleError for a line that is none."""
    if file.is_table:
        for first, batch, _ in table_batches(file):
            yield from enumerate(batch.to_pylist(), first + 1)
    elif _begins_a_list(file):
        yield from _listed(file)
    else:
        for batch in file_batches(file, 0, Reading()):
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
    """Whether a JSON file is one list, as LLM-Adapters publishes its data, and not a record a line."""
    with opened(file) as (stream, _):
        block = stream.read(len(codecs.BOM_UTF8)).removeprefix(codecs.BOM_UTF8)
        while not block.strip() and (more := stream.read(BLOCK_BYTES)):
            block = more
        return block.lstrip().startswith(b"[")


def _listed(file: TextFile) -> Iterator[tuple[int, Any]]:
    """The members of a file that is one JSON list, with the lines they begin on; counted where all are on one line."""
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
