"""`apollo write`: a model continues a text, or answers in a conversation."""

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from ..flags import Place, check_each, check_utf8

if TYPE_CHECKING:
    from ..evaluation.generation import TextWriter


@dataclass(frozen=True, kw_only=True)
class Write:
    """Let a model go on with a text, or with --chat answer, and show it as it is written."""

    model: Place
    """Folder of a finished run, a Hugging Face model's folder or org/name, or a .gguf file."""
    prompt: str | None = field(default=None, metadata={"placed": True})
    """The text. Without it, standard input is read: all of it from a pipe, line after line from a terminal."""
    chat: bool = False
    """Put the prompt as a message, by the model's chat template; at a terminal, as a conversation."""
    length: int = 200
    """Tokens to write at most."""
    temperature: float = 0.7
    """How freely words are drawn: 0 takes the likeliest, 1 draws as the model has learnt."""
    top_p: float = 0.95
    """Draw among the likeliest words that have this much probability together."""
    seed: int | None = None
    """The same text each time; by default another one."""
    device: Literal["cpu", "cuda"] | None = None
    """By default cuda where there is a GPU."""
    dtype: Literal["bf16", "fp32"] | None = None
    """Dtype of the weights; by default bf16 on a GPU and fp32 on a CPU."""
    trust_remote_code: bool = False
    """Run the Python code that comes with a model or tokenizer; without it, one that needs its own is refused."""

    def execute(self) -> int:
        """Write; 0."""
        import torch

        from ..evaluation.generation import TextWriter
        from ..evaluation.model import loaded_model, place_of
        from ..train.ranks import device_of

        self._check()
        place = place_of(self.model)
        device = device_of(self.device)
        talks = self.prompt is None and sys.stdin.isatty()
        prompt = sys.stdin.read() if self.prompt is None and not talks else self.prompt or ""
        if not talks and not prompt.strip():
            raise ValueError("PROMPT is empty: give a text, or pipe one in")
        check_utf8("PROMPT", prompt)
        model, tokenizer = loaded_model(place, device, self.dtype, self.trust_remote_code)
        if self.chat and not tokenizer.chat_template:
            raise ValueError(f"--chat: the tokenizer of {self.model} has no chat template; leave --chat out")
        if self.seed is not None:
            torch.manual_seed(self.seed)
        writer = TextWriter(model, tokenizer, self.length, self.temperature, self.top_p)
        if talks:
            self._talk(writer)
        elif self.chat:
            writer.answer([_message("user", prompt)])
        else:
            writer.write(prompt)
        return 0

    def _check(self) -> None:
        """Raise ValueError for the first option that cannot be."""
        from ..options import check_option

        check_each(self, "at least 1 token", lambda length: length >= 1, "length")
        check_each(self, "a number from 0 up", lambda number: 0 <= number < float("inf"), "temperature")
        check_each(self, "above 0 and at most 1", lambda share: 0 < share <= 1, "top_p")
        if self.seed is not None:
            check_option("--seed", "seed", self.seed)

    def _talk(self, writer: "TextWriter") -> None:
        """Continue each line typed at the terminal, until its end; with --chat answer them as one conversation."""
        print("Ctrl-C stops an answer, Ctrl-D ends.", file=sys.stderr)
        said: list[dict[str, str]] = []
        while True:
            try:
                line = input("> ")
            except EOFError:
                print()
                return
            if not line.strip():
                continue
            try:
                if self.chat:
                    said.append(_message("user", line))
                    said.append(_message("assistant", writer.answer(said)))
                else:
                    writer.write(line)
            except KeyboardInterrupt:
                print()
                del said[len(said) - len(said) % 2 :]  # a question without an answer


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
