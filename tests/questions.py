"""Documents of every task, as the hub has them, and a model small enough to answer them in a test."""

import json
import random
from pathlib import Path
from typing import Any

import torch

from apollo_optim.evaluation.tasks import MMLU_CATEGORIES, TASKS

WORDS = (
    "the", "a", "cat", "dog", "sun", "moon", "walks", "sees", "eats", "under", "over", "red", "blue", "old", "small",
    "river", "stone", "makes", "light", "because",
)  # fmt: skip
SUBJECTS = "abstract_algebra", "sociology", "philosophy", "virology"
"""One of each category."""


def make_model(folder: Path, seed: int = 0) -> Path:
    """A LLaMA with random weights, large enough that no two answers are alike, and a tokenizer with a chat template."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from apollo_optim.train.data.tokenizer import trained_tokenizer

    draw = random.Random(1)
    tokenizer = trained_tokenizer((sentence(draw, 9) for _ in range(200)), 320)
    tokenizer.pretrained.chat_template = (
        "{% for each in messages %}<{{ each.role }}>{{ each.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    config = LlamaConfig(
        vocab_size=tokenizer.vocabulary, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.3,
        bos_token_id=None, eos_token_id=tokenizer.eos_id,
    )  # fmt: skip
    torch.manual_seed(seed)
    model: Any = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def sentence(draw: random.Random, most: int) -> str:
    return " ".join(draw.choices(WORDS, k=draw.randint(1, most)))


def make_documents(folder: Path, count: int = 5) -> Path:
    """Files of all tasks of ours, `count` documents each and as many for each subject, of very different lengths."""
    for name, makes in MAKES.items():
        draw = random.Random(name)
        write(folder / f"zeroshot/{name}.jsonl", [makes(draw) for _ in range(count)])
    for task in TASKS.values():
        if task.suite == "commonsense":
            draw = random.Random(task.name)
            write(folder / f"{task.files[0]}.jsonl", [_instruction(draw, task.answers) for _ in range(count)])
    for name in ("dev", "test"):
        draw = random.Random(name)
        write(folder / f"mmlu/{name}.jsonl", [_mmlu(draw, each) for each in SUBJECTS for _ in range(count)])
    assert all(any(each in members for each in SUBJECTS) for members in MMLU_CATEGORIES.values())
    return folder


def write(path: Path, docs: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(doc) + "\n" for doc in docs))


def _options(draw: random.Random, count: int = 4) -> dict[str, list[str]]:
    return {"text": [sentence(draw, 12) for _ in range(count)], "label": list("ABCDE"[:count])}


def _instruction(draw: random.Random, answers: tuple[str, ...]) -> dict[str, Any]:
    offered = answers[: draw.randint(2, len(answers))]
    asked = f"Please choose: {sentence(draw, 40)}?\n\nAnswer format: {'/'.join(offered)}"
    answer = draw.choice(offered)
    return {"instruction": asked, "input": "", "output": f"the correct answer is {answer}", "answer": answer}


def _mmlu(draw: random.Random, subject: str) -> dict[str, Any]:
    choices = [sentence(draw, 6) for _ in range(4)]
    return {"subject": subject, "question": f" {sentence(draw, 10)}? ", "choices": choices, "answer": draw.randrange(4)}


def _mathqa(draw: random.Random) -> dict[str, Any]:
    options = " , ".join(f"{letter} ) {draw.randrange(100)} / {draw.randrange(9)}" for letter in "abcde")
    return {"Problem": sentence(draw, 20), "options": options, "correct": draw.choice("abcde")}


MAKES: dict[str, Any] = {
    "boolq": lambda draw: {
        "passage": sentence(draw, 60),
        "question": sentence(draw, 8),
        "label": draw.randrange(2),
    },
    "rte": lambda draw: {
        "sentence1": sentence(draw, 30),
        "sentence2": sentence(draw, 8),
        "label": draw.randrange(2),
    },
    "hellaswag": lambda draw: {
        "activity_label": sentence(draw, 2),
        "ctx_a": f"{sentence(draw, 20)} [title] {sentence(draw, 3)} [step]  {sentence(draw, 5)}.",
        "ctx_b": draw.choice(["", sentence(draw, 3)]),
        "endings": [f"{sentence(draw, 15)} [substeps] {sentence(draw, 3)}." for _ in range(4)],
        "label": str(draw.randrange(4)),
    },
    "winogrande": lambda draw: {
        "sentence": f"{sentence(draw, 9)} _ {sentence(draw, 9)}.",
        "option1": sentence(draw, 2),
        "option2": sentence(draw, 2),
        "answer": draw.choice("12"),
    },
    "openbookqa": lambda draw: {
        "question_stem": sentence(draw, 12),
        "choices": _options(draw),
        "answerKey": draw.choice("ABCD"),
    },
    "arc_easy": lambda draw: {
        "question": sentence(draw, 25),
        "choices": _options(draw, 5),
        "answerKey": draw.choice("ABCDE"),
    },
    "arc_challenge": lambda draw: {
        "question": sentence(draw, 25),
        "choices": _options(draw, 3),
        "answerKey": draw.choice("ABC"),
    },
    "piqa": lambda draw: {
        "goal": sentence(draw, 12),
        "sol1": sentence(draw, 25),
        "sol2": sentence(draw, 25),
        "label": draw.randrange(2),
    },
    "sciq": lambda draw: {
        "support": draw.choice(["", f" {sentence(draw, 60)}"]),
        "question": sentence(draw, 12),
        "correct_answer": sentence(draw, 3),
        **{f"distractor{number}": sentence(draw, 3) for number in (1, 2, 3)},
    },
    "mathqa": _mathqa,
}
"""A document of each zero-shot task, under the names of fields that lm-eval reads."""
