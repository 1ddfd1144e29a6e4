"""Text that a model writes: answers to many prompts at once, or one text, shown as it is written."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..train.tuning.conversations import PromptStyle, prompts_by_style
from .model import positions_of, token_ids
from .tasks import ANSWER_SENTENCE, EvalTask, MultipleChoice

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BEAMS, NEW_TOKENS = 4, 32
"""As in LLM-Adapters' evaluation, which sets a temperature as well but does not sample."""


def prompted(instruction: str, style: PromptStyle, tokenizer: Any) -> str:
    """The prompt for an instruction, in this style."""
    if style == "chat":
        said = [{"role": "user", "content": instruction}]
        return tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
    return prompts_by_style(instruction)[style]


@torch.inference_mode()
def written_answers(
    model: "PreTrainedModel", tokenizer: Any, prompts: Sequence[str], special: bool, beams: int
) -> list[str]:
    """The most likely text after each prompt, as found by beam search."""
    padded = tokenizer.pad({"input_ids": token_ids(tokenizer, prompts, special)}, return_tensors="pt")
    tokens, mask = padded["input_ids"].to(model.device), padded["attention_mask"].to(model.device)
    generate: Any = model.generate
    found = generate(input_ids=tokens, attention_mask=mask, do_sample=False, num_beams=beams, max_new_tokens=NEW_TOKENS)
    return tokenizer.batch_decode(found[:, tokens.shape[1] :], skip_special_tokens=True)


def answered(question: MultipleChoice, task: EvalTask, text: str) -> dict[str, Any]:
    """The result of an item whose answer was written. As in LLM-Adapters, the first answer word in the text counts."""
    right = question.requests[question.answer][1].removeprefix(ANSWER_SENTENCE)
    match = re.search("|".join(task.answers), text.strip())
    found = match[0] if match else None
    return {"text": text, "found": found, "answer": right, "acc": int(found == right)}


class TextWriter:
    """Shows a model's text on standard output as it is written."""

    def __init__(self, model: "PreTrainedModel", tokenizer: Any, length: int, temperature: float, top_p: float):
        self.model, self.tokenizer, self.length = model, tokenizer, length
        sampled = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0}
        self.search = sampled if temperature > 0 else {"do_sample": False}

    def write(self, prompt: str) -> None:
        """Print the prompt and the model's continuation."""
        self._continued(prompt, special=True, shown=prompt)

    def answer(self, said: Sequence[dict[str, str]]) -> str:
        """Print and return the model's answer in a conversation."""
        prompt = self.tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
        return self._continued(prompt, special=False, shown="")

    @torch.inference_mode()
    def _continued(self, prompt: str, special: bool, shown: str) -> str:
        from transformers import TextStreamer

        tokens = torch.tensor(token_ids(self.tokenizer, [prompt], special), device=self.model.device)
        count, positions = tokens.shape[1], positions_of(self.model)
        if not 0 < count < positions:
            raise ValueError(f"the prompt is {count} tokens, and the model takes 1 to {positions - 1}")
        print(shown, end="", flush=True)
        streamer = TextStreamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True)
        generate: Any = self.model.generate
        options = {"max_new_tokens": min(self.length, positions - count), "streamer": streamer, **self.search}
        found = generate(input_ids=tokens, attention_mask=torch.ones_like(tokens), **options)
        return self.tokenizer.decode(found[0, count:], skip_special_tokens=True)
