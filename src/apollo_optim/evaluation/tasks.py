"""Tasks as data: where their documents are, and how a document becomes a prompt with answers to choose from.

The prompts of the zero-shot tasks and of MMLU are those of lm-eval, whose names the tasks have.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ..choices import nearest

Fields = Mapping[str, Any]
"""A document as its file has it."""


@dataclass(frozen=True)
class MultipleChoice:
    """A prompt with answers to choose from, one of which is right."""

    requests: tuple[tuple[str, str], ...]
    """For each answer the text before it, and the text whose likelihood is the answer's."""
    answer: int
    """The index of the right answer."""
    lengths: tuple[int, ...]
    """Characters of each answer: acc_norm compares log-likelihoods divided by these."""
    subject: str = ""
    """The subject, in MMLU."""

    def put(self, prompt: Callable[[str], str]) -> "MultipleChoice":
        """The same question, with another text before the answers."""
        return replace(self, requests=tuple((prompt(given), answer) for given, answer in self.requests))


@dataclass(frozen=True)
class EvalTask:
    """A task: where its documents are, and how each becomes a question."""

    name: str
    suite: str
    files: tuple[str, ...]
    """Places of the documents below --task-data, without the ending; the first that exists counts."""
    question: Callable[[Fields], MultipleChoice] | None = None
    """Makes a question of a document; None for MMLU, whose questions follow examples."""
    normed: bool = False
    """True if lm-eval reports acc_norm for it."""
    answers: tuple[str, ...] = ()
    """Words that answer a commonsense question. In a written text the first of them counts."""


def choice(context: str, answers: Sequence[str], answer: int, subject: str = "") -> MultipleChoice:
    """A question whose answers all follow the same text, after a space."""
    requests = tuple((context, f" {each}") for each in answers)
    return MultipleChoice(requests, answer, tuple(map(len, answers)), subject)


def _boolq(doc: Fields) -> MultipleChoice:
    context = f"{doc['passage']}\nQuestion: {doc['question']}?\nAnswer:"
    return choice(context, ("no", "yes"), int(doc["label"] if "label" in doc else doc["answer"]))


def _rte(doc: Fields) -> MultipleChoice:
    context = f"{doc['sentence1']}\nQuestion: {doc['sentence2']} True or False?\nAnswer:"
    return choice(context, ("True", "False"), int(doc["label"]))


def _hellaswag(doc: Fields) -> MultipleChoice:
    if "ctx_a" in doc:
        begun, rest = doc["ctx_a"], doc["ctx_b"]
    else:
        begun, rest = _split_context(doc["ctx"])
    context = _without_brackets(f"{doc['activity_label']}: {begun} {rest.capitalize()}")
    return choice(context, [_without_brackets(ending) for ending in doc["endings"]], int(doc["label"]))


def _split_context(context: str) -> tuple[str, str]:
    """HellaSwag's ctx_a and ctx_b: whole sentences, and the beginning of the next one. A text with brackets is from
    WikiHow, and all of it is ctx_a.
    """
    whole = re.fullmatch(r"([^\[]*[.!?]) ([^\[]*)", context)
    return (whole[1], whole[2]) if whole else (context, "")


def _without_brackets(text: str) -> str:
    """The text without WikiHow's marks."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


def _winogrande(doc: Fields) -> MultipleChoice:
    """A question in which either option is in the text, and the likelihood is that of the ending after it."""
    before, _, after = doc["sentence"].partition("_")
    contexts = [before + doc["option1"], before + doc["option2"]]
    requests = tuple((context, f" {after.strip()}") for context in contexts)
    return MultipleChoice(requests, ("1", "2").index(str(doc["answer"])), tuple(map(len, contexts)))


def _openbookqa(doc: Fields) -> MultipleChoice:
    choices = doc["choices"]
    return choice(doc["question_stem"], choices["text"], list(choices["label"]).index(doc["answerKey"].lstrip()))


def _arc(doc: Fields) -> MultipleChoice:
    choices = doc["choices"]
    context = f"Question: {doc['question']}\nAnswer:"
    return choice(context, choices["text"], list(choices["label"]).index(doc["answerKey"]))


def _piqa(doc: Fields) -> MultipleChoice:
    return choice(f"Question: {doc['goal']}\nAnswer:", (doc["sol1"], doc["sol2"]), int(doc["label"]))


def _sciq(doc: Fields) -> MultipleChoice:
    context = f"{doc['support'].lstrip()}\nQuestion: {doc['question']}\nAnswer:"
    wrong = [doc[f"distractor{number}"] for number in (1, 2, 3)]
    return choice(context, [*wrong, doc["correct_answer"]], 3)


def _mathqa(doc: Fields) -> MultipleChoice:
    if "Problem" in doc:
        problem, options, correct = doc["Problem"], doc["options"], doc["correct"]
    else:  # instruction data; MathQA itself is in small letters throughout
        problem, _, options = doc["instruction"].partition(" The options: ")
        options, correct = options.lower(), doc["answer"].lower()
    found = re.findall(r"[abcd] \) .*?, |e \) .*?$", options)
    context = f"Question: {problem}\nAnswer:"
    return choice(context, [each[4:].rstrip(" ,") for each in found], "abcde".index(correct))


def _zero_shot(name: str, question: Callable[[Fields], MultipleChoice], normed: bool = False) -> EvalTask:
    return EvalTask(name, "zeroshot", (name, f"zeroshot/{name}"), question, normed)


ZERO_SHOT = (
    _zero_shot("boolq", _boolq),
    _zero_shot("rte", _rte),
    _zero_shot("hellaswag", _hellaswag, normed=True),
    _zero_shot("winogrande", _winogrande),
    _zero_shot("openbookqa", _openbookqa, normed=True),
    _zero_shot("arc_easy", _arc, normed=True),
    _zero_shot("arc_challenge", _arc, normed=True),
    _zero_shot("piqa", _piqa, normed=True),
    _zero_shot("sciq", _sciq, normed=True),
    _zero_shot("mathqa", _mathqa, normed=True),
)
"""In the order of the paper's zero-shot table."""

ANSWER_SENTENCE = "the correct answer is "
"""The beginning of every answer in the commonsense training set."""


def _commonsense_question(doc: Fields, answers: Sequence[str]) -> MultipleChoice:
    """The question of a commonsense document. Its answers are sentences as in the training set."""
    offered = [each for each in answers if each in doc["instruction"].rpartition("Answer format:")[2]]
    requests = tuple((doc["instruction"], ANSWER_SENTENCE + each) for each in offered)
    return MultipleChoice(requests, offered.index(doc["answer"]), tuple(map(len, offered)))


ANSWERS = "answer1", "answer2", "answer3", "answer4", "answer5"


def _commonsense(name: str, file: str, answers: tuple[str, ...]) -> EvalTask:
    places = f"commonsense/test/{file}", f"commonsense/{file}", f"test/{file}", f"{file}/test", file
    question = partial(_commonsense_question, answers=answers)
    return EvalTask(f"commonsense_{name}", "commonsense", places, question, answers=answers)


COMMONSENSE = (
    _commonsense("winogrande", "winogrande", ("option1", "option2")),
    _commonsense("piqa", "piqa", ("solution1", "solution2")),
    _commonsense("siqa", "social_i_qa", ANSWERS),
    _commonsense("openbookqa", "openbookqa", ANSWERS),
    _commonsense("hellaswag", "hellaswag", ("ending1", "ending2", "ending3", "ending4")),
    _commonsense("boolq", "boolq", ("true", "false")),
    _commonsense("arc_easy", "ARC-Easy", ANSWERS),
    _commonsense("arc_challenge", "ARC-Challenge", ANSWERS),
)
"""In the order of the paper's commonsense table."""

MMLU = EvalTask("mmlu", "mmlu", ("mmlu/test", "test"))
MMLU_EXAMPLES = "mmlu/dev", "dev"
"""Files that may have the examples for its prompts."""
MMLU_CATEGORIES: dict[str, tuple[str, ...]] = {
    "STEM": (
        "abstract_algebra", "anatomy", "astronomy", "college_biology", "college_chemistry", "college_computer_science",
        "college_mathematics", "college_physics", "computer_security", "conceptual_physics", "electrical_engineering",
        "elementary_mathematics", "high_school_biology", "high_school_chemistry", "high_school_computer_science",
        "high_school_mathematics", "high_school_physics", "high_school_statistics", "machine_learning",
    ),
    "social sciences": (
        "econometrics", "high_school_geography", "high_school_government_and_politics", "high_school_macroeconomics",
        "high_school_microeconomics", "high_school_psychology", "human_sexuality", "professional_psychology",
        "public_relations", "security_studies", "sociology", "us_foreign_policy",
    ),
    "humanities": (
        "formal_logic", "high_school_european_history", "high_school_us_history", "high_school_world_history",
        "international_law", "jurisprudence", "logical_fallacies", "moral_disputes", "moral_scenarios", "philosophy",
        "prehistory", "professional_law", "world_religions",
    ),
    "other": (
        "business_ethics", "clinical_knowledge", "college_medicine", "global_facts", "human_aging", "management",
        "marketing", "medical_genetics", "miscellaneous", "nutrition", "professional_accounting",
        "professional_medicine", "virology",
    ),
}  # fmt: skip
"""The 57 subjects."""
CATEGORY = {subject: category for category, subjects in MMLU_CATEGORIES.items() for subject in subjects}


def mmlu_question(doc: Fields, examples: Mapping[str, Sequence[Fields]], shots: int) -> MultipleChoice:
    """A question of MMLU after the first `shots` examples of its subject."""
    subject = doc["subject"]
    if subject not in CATEGORY:
        near = nearest(subject, CATEGORY)
        raise ValueError(f"{subject!r} is no subject of MMLU" + (f"; did you mean {near!r}?" if near else ""))
    solved = examples.get(subject, ())[:shots]
    if len(solved) < shots:
        raise ValueError(f"{subject!r} has {len(solved)} examples of the {shots} that --shots asks for")
    context = f"The following are multiple choice questions (with answers) about {subject.replace('_', ' ')}.\n\n"
    context += "".join(f"{_with_letters(each)} {'ABCD'[each['answer']]}\n\n" for each in solved)
    return choice(context + _with_letters(doc), "ABCD", int(doc["answer"]), subject)


def _with_letters(doc: Fields) -> str:
    lettered = "\n".join(f"{letter}. {each}" for letter, each in zip("ABCD", doc["choices"], strict=True))
    return f"{doc['question'].strip()}\n{lettered}\nAnswer:"


TASKS: dict[str, EvalTask] = {task.name: task for task in (*ZERO_SHOT, *COMMONSENSE, MMLU)}
SUITES: dict[str, tuple[EvalTask, ...]] = {"commonsense": COMMONSENSE, "mmlu": (MMLU,), "zeroshot": ZERO_SHOT}
OUR_TASKS = tuple(dict.fromkeys((*SUITES, *TASKS)))
"""Values of --tasks, beside the names of lm-eval."""
