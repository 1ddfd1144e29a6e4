"""Conversations as tokens, and which of them are learned: the assistant's words, and their end."""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..data.files import content_hash
from ..data.tokenizer import Tokenizer
from .conversations import (
    ASSISTANT,
    USER,
    BadExampleError,
    Conversation,
    Located,
    PromptStyle,
    conversation,
)

ENCODED_AT_ONCE = 1000
SHOWN = 3
"""Bad examples to show of each kind."""

BAD = "bad.json"

VERSION = 2
"""Version of the encoding; examples that were cached by another version are encoded again."""

MARKERS = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""The mark of the assistant's words in chat templates that are made for training."""

Span = tuple[int, int]
"""Begin and end of characters in a text."""


@dataclass(frozen=True)
class AnswerSet:
    """Encoded examples in flat arrays."""

    tokens: NDArray[np.int32]
    learned: NDArray[np.bool_]
    """True for tokens that are learned."""
    starts: NDArray[np.int64]
    """The start of each example, and the end of the last one."""
    sources: Sequence[str]
    """The source of each example."""

    def __len__(self) -> int:
        return len(self.sources)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each example that the model reads: all but the last, which is only predicted."""
        return np.diff(self.starts) - 1

    @property
    def targets(self) -> NDArray[np.int64]:
        """Tokens of each example that are learned."""
        return np.add.reduceat(self.learned.astype(np.int64), self.starts[:-1])

    @property
    def key(self) -> str:
        """A hash of the examples and their order."""
        return content_hash([self.tokens.tobytes(), self.learned.tobytes(), self.starts.tobytes()])

    def example(self, number: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Tokens of an example, and which of them are learned."""
        part = slice(self.starts[number], self.starts[number + 1])
        return self.tokens[part], self.learned[part]

    def save(self, folder: Path) -> None:
        """Write the examples into a folder."""
        names = list(dict.fromkeys(self.sources))
        codes = np.array([names.index(source) for source in self.sources], dtype=np.int32)
        for name, array in (("tokens", self.tokens), ("learned", self.learned), ("starts", self.starts)):
            np.save(folder / f"{name}.npy", array)
        np.save(folder / "sources.npy", codes)
        (folder / "sources.json").write_text(json.dumps(names), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> "AnswerSet":
        """The examples in a folder."""
        tokens, learned, starts, codes = (
            np.load(folder / f"{name}.npy") for name in ("tokens", "learned", "starts", "sources")
        )
        names = json.loads((folder / "sources.json").read_text(encoding="utf-8"))
        return cls(tokens, learned, starts, [names[code] for code in codes.tolist()])

    def chosen(self, numbers: NDArray[np.int64]) -> "AnswerSet":
        """Some of the examples."""
        return answer_set((*self.example(number), self.sources[number]) for number in numbers.tolist())


def answer_set(examples: Iterable[tuple[Any, Any, str]]) -> AnswerSet:
    """An `AnswerSet` of examples: tokens, which of them are learned, and source."""
    tokens: list[NDArray[np.int32]] = []
    learned: list[NDArray[np.bool_]] = []
    sources: list[str] = []
    for ids, marks, source in examples:
        tokens.append(np.asarray(ids, dtype=np.int32))
        learned.append(np.asarray(marks, dtype=np.bool_))
        sources.append(source)
    starts = np.concatenate(([0], np.cumsum([len(ids) for ids in tokens]))).astype(np.int64)
    return AnswerSet(
        np.concatenate([np.empty(0, np.int32), *tokens]),
        np.concatenate([np.empty(0, np.bool_), *learned]),
        starts,
        sources,
    )


@dataclass
class BadExamples:
    """Numbers of examples that were left out by reason, with a few of them."""

    counts: Counter[str] = field(default_factory=Counter[str])
    shown: dict[str, list[str]] = field(default_factory=dict[str, list[str]])

    def add(self, located: Located, why: str) -> None:
        """Count an example."""
        kind = why.partition(":")[0] if why.startswith(("no answer", "not JSON", "too long")) else "unknown schema"
        self.counts[kind] += 1
        examples = self.shown.setdefault(kind, [])
        if len(examples) < SHOWN:
            examples.append(f"{located}: {why}")

    def save(self, folder: Path) -> None:
        """Write them into a folder."""
        (folder / BAD).write_text(json.dumps([self.counts, self.shown]), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> "BadExamples":
        """The bad examples in a folder."""
        counts, shown = json.loads((folder / BAD).read_text(encoding="utf-8"))
        return cls(Counter(counts), shown)

    @property
    def total(self) -> int:
        return self.counts.total()

    def __str__(self) -> str:
        counted = ", ".join(f"{count:,} {kind}" for kind, count in self.counts.most_common())
        return "\n  ".join([f"{counted}:", *(line for lines in self.shown.values() for line in lines)])


class AnswerEncoder:
    """Encodes conversations by a tokenizer and a style of prompts."""

    def __init__(self, tokenizer: Tokenizer, style: PromptStyle, longest: int):
        """`longest` is the largest number of tokens of an example that the model reads."""
        self.pretrained: Any = tokenizer.pretrained
        self.eos_id, self.style, self.longest = tokenizer.eos_id, style, longest
        if not self.pretrained.is_fast:
            raise ValueError(
                f"tokenizer {type(self.pretrained).__name__} does not say which characters its tokens stand for, and "
                "so not where an answer begins: use one with a tokenizer.json"
            )
        self._render: Callable[[Conversation], tuple[str, list[Span]]] = self._plain
        template = ""
        if style == "chat":
            template = self.pretrained.chat_template
            if not template:
                raise ValueError(
                    "--prompt chat: the tokenizer has no chat template; use --chat-template, or --prompt alpaca"
                )
            template = template["default"] if isinstance(template, dict) else template  # some have several, by name
            if MARKERS.search(template):
                self._render = self._by_markers(template)
            elif self._keeps_prefixes():
                self._render = self._by_prefixes
            else:
                template = _trl_template(self.pretrained)
                self._render = self._by_markers(template)
        today = str(date.today()) if "strftime_now" in template else ""  # some templates contain the date
        special = json.dumps(self.pretrained.special_tokens_map, sort_keys=True, default=str)
        self.key = content_hash([str(VERSION), tokenizer.fingerprint, special, style, template, today, str(longest)])
        """A hash of everything that decides the tokens of a conversation."""

    def encoded(self, records: Iterable[Located], bad: BadExamples) -> Iterator[tuple[list[int], list[bool], str]]:
        """Tokens, which of them are learned, and source of each good example; adds the others to `bad`."""
        rendered = self._rendered(records, bad)
        while batch := list(islice(rendered, ENCODED_AT_ONCE)):
            texts = [text for _, text, _ in batch]
            special = self.style != "chat"  # a template has them in its text
            found = self.pretrained(texts, add_special_tokens=special, return_offsets_mapping=True)
            for (located, _, spans), ids, offsets in zip(
                batch, found["input_ids"], found["offset_mapping"], strict=True
            ):
                learned = _marked(offsets, spans)
                if special:
                    ids, learned = _ended(ids, learned, self.eos_id)
                if len(ids) - 1 > self.longest:
                    bad.add(
                        located, f"too long: {len(ids) - 1:,} tokens, and --sequence takes at most {self.longest:,}"
                    )
                elif not any(learned[1:]):
                    bad.add(located, "no answer: the chat template marks nothing of it as one ({% generation %})")
                else:
                    # The first token cannot be predicted.
                    yield ids, [False, *learned[1:]], located.source

    def _rendered(self, records: Iterable[Located], bad: BadExamples) -> Iterator[tuple[Located, str, list[Span]]]:
        for located in records:
            try:
                text, spans = self._render(conversation(located.record))
                text.encode()
            except BadExampleError as error:
                bad.add(located, str(error))
            except UnicodeEncodeError as error:
                bad.add(located, f"half of a character, which no tokenizer takes: {error.object[error.start]!r}")
            else:
                yield located, text, spans

    def _plain(self, said: Conversation) -> tuple[str, list[Span]]:
        prompt = said.prompts.get(self.style)
        if prompt is None:
            raise BadExampleError(f"messages of several turns need a chat template, and this is --prompt {self.style}")
        text = prompt + said.answer
        return text, [(len(prompt), len(text))]

    def _by_markers(self, template: str) -> Callable[[Conversation], tuple[str, list[Span]]]:
        """A renderer by which answers are the text between a template's generation marks."""
        from transformers.utils.chat_template_utils import render_jinja_template

        def render(said: Conversation) -> tuple[str, list[Span]]:
            with _template_trouble():
                (text,), found = render_jinja_template(
                    [[dict(message) for message in said.messages]],
                    chat_template=template,
                    return_assistant_tokens_mask=True,
                    **self.pretrained.special_tokens_map,
                )
            spans: Any = found[0]
            return text, list(spans)

        return render

    def _by_prefixes(self, said: Conversation) -> tuple[str, list[Span]]:
        """Render messages without marks: an answer is the text that the assistant's message adds to its prompt."""
        messages, spans = list(said.messages), list[Span]()
        if messages[0]["role"] == ASSISTANT:
            raise BadExampleError("messages that begin with the assistant: nothing asks for what it says")
        text = self._said(messages)
        for number, message in enumerate(messages):
            if message["role"] == ASSISTANT:
                before = self._said(messages[:number], add_generation_prompt=True)
                after = text if number == len(messages) - 1 else self._said(messages[: number + 1])
                if not (after.startswith(before) and text.startswith(after)):
                    raise BadExampleError("messages that the chat template writes in another way when more follow")
                spans.append((len(before), len(after)))
        return text, spans

    def _keeps_prefixes(self) -> bool:
        """True if the template renders an answer in the same way whatever follows it; ValueError if it fails."""
        turns = [{"role": role, "content": role} for role in (USER, ASSISTANT, USER, ASSISTANT)]
        try:
            self._said(turns)
        except BadExampleError as error:
            raise ValueError(
                f"the chat template fails ({error.__cause__}): give another one by --chat-template"
            ) from None
        try:
            self._by_prefixes(Conversation(turns))
        except BadExampleError:
            return False
        return True

    def _said(self, messages: Sequence[Any], **options: Any) -> str:
        with _template_trouble():
            return self.pretrained.apply_chat_template(list(messages), tokenize=False, **options)


@contextmanager
def _template_trouble() -> Iterator[None]:
    """Turn an error of a template, which may raise anything, into a BadExampleError."""
    try:
        yield
    except Exception as error:
        raise BadExampleError(f"messages that the chat template refuses: {error}") from error


def _ended(ids: list[int], learned: list[bool], eos_id: int) -> tuple[list[int], list[bool]]:
    """Tokens and marks, with an end-of-document token that is learned."""
    if ids[-1] == eos_id:
        return ids, [*learned[:-1], True]
    return [*ids, eos_id], [*learned, True]


def _marked(offsets: Sequence[Span], spans: Sequence[Span]) -> list[bool]:
    """True for tokens with a character of an answer; special tokens without text have none."""
    begins, ends = np.asarray(offsets, dtype=np.int64).reshape(-1, 2).T
    marked = np.zeros(len(begins), dtype=bool)
    for begin, end in spans:
        marked |= np.maximum(begins, begin) < np.minimum(ends, end)
    return marked.tolist()


def _trl_template(pretrained: Any) -> str:
    """TRL's version of the tokenizer's chat template, with generation marks; ValueError if it has none."""
    try:
        from trl.chat_template_utils import get_training_chat_template

        template = get_training_chat_template(pretrained)
    except (ImportError, ValueError) as error:
        raise ValueError(
            "the tokenizer's chat template writes an answer in another way when more follows, and does not say where "
            f"answers are ({{% generation %}}); TRL, which knows many templates, has nothing for it ({error}): give "
            "one that does by --chat-template"
        ) from None
    return template or pretrained.chat_template
