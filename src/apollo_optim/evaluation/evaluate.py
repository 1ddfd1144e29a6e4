"""`apollo eval`: the perplexity of a model on text, by source, or its answers to multiple-choice tasks.

Before the tasks everything is checked that can be without the model; then task after task is done.
"""

import json
import logging
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch

from ..choices import nearest
from ..extras import installation
from ..flags import check_each, check_unused
from ..terminal import table, width_of
from ..train.atomic import replace_text_
from ..train.data.files import content_hash
from ..train.display import Display
from ..train.model import dtype_name
from ..train.ranks import device_of
from ..train.troubles import make_out, out_trouble_named
from ..train.tuning.conversations import PromptStyle, prompt_style
from .documents import documents, found_file, questions
from .generation import BEAMS, NEW_TOKENS, answered, prompted, written_answers
from .likelihood import batches, encoded, log_likelihoods
from .model import ModelPlace, loaded_model, place_of, positions_of, token_ids
from .perplexity import EvalOptions, scores
from .report import ItemLog, Scores, averages, judged, score_table, summed_up, task_table
from .tasks import (
    MMLU_EXAMPLES,
    OUR_TASKS,
    SUITES,
    TASKS,
    EvalTask,
    Fields,
    MultipleChoice,
    mmlu_question,
)

SHOTS = 5
"""Default of --shots, and as many examples as MMLU has."""
BATCH_TOKENS = {"cpu": 2048, "cuda": 16384}
WRITTEN_BATCH_TOKENS = {"cpu": 4096, "cuda": 65536}
"""Writing keeps the logits of only one token of each row, and so has room for more rows."""
HARNESS_ROWS = 16
TASK_NAME = re.compile(r"""^["']?(?:task|group|tag)["']?:[ \t]*["']?([\w.-]+)""", re.MULTILINE)
"""Finds the names of tasks in a YAML file for lm-eval."""
PERPLEXITY_ONLY = "data", "text_field", "source_field", "sequence", "tokens", "micro_batch", "cache"
"""Options that have no effect with --tasks."""


@dataclass(frozen=True, kw_only=True)
class TaskOptions:
    """Tasks, in place of perplexity"""

    tasks: str | None = None
    """commonsense, mmlu, zeroshot, or names of tasks, with commas between; a name that is not ours is lm-eval's."""
    task_data: Path | None = None
    """Folder of the tasks' documents (.jsonl, .json, .parquet; .zst, .gz), and of YAML files for lm-eval."""
    by: Literal["generation", "likelihood"] | None = None
    """How commonsense questions are answered: by a text that is written (the default), or by the likeliest answer."""
    prompt: PromptStyle | None = None
    """How commonsense questions are put: by default chat where the model has a chat template, else alpaca."""
    beams: int | None = None
    """Beams of the search by which answers are written; by default 4, as in LLM-Adapters. 1 is greedy."""
    shots: int | None = None
    """Examples before a question of MMLU; by default 5."""
    limit: int | None = None
    """Only the first N documents of each task; of MMLU, of each subject."""
    batch_tokens: int | None = None
    """Tokens that are read at once, padding included; by default what suits the device."""
    out: Path | None = None
    """Folder for results, item by item; by default RUN/evals, or evals/NAME for a model by itself."""

    def check(self) -> None:
        """Raise ValueError for the first option that cannot be. Nothing is loaded."""
        if not self.names:
            raise ValueError(f"--tasks {self.tasks!r} names no task; there are {', '.join(OUR_TASKS)}")
        check_each(self, "at least 1", lambda number: number >= 1, "limit", "batch_tokens", "beams")
        check_each(self, f"0 to {SHOTS} (as many examples as MMLU has)", lambda shots: 0 <= shots <= SHOTS, "shots")
        if self.task_data is not None and not self.task_data.is_dir():
            raise ValueError(f"--task-data {self.task_data} is not a folder")
        if self.beams is not None and self.by == "likelihood":
            raise ValueError(f"--beams {self.beams} has no effect with --by likelihood: nothing is written")
        suites = {TASKS[name].suite for name in self.names if name in TASKS}
        for flags, suite in ((("by", "prompt", "beams"), "commonsense"), (("shots",), "mmlu")):
            for name in flags:
                if getattr(self, name) is not None and suite not in suites:
                    raise ValueError(f"--{name} {getattr(self, name)} has no effect without --tasks {suite}")

    @property
    def asked(self) -> list[str]:
        """The suites and tasks in --tasks."""
        return [name.strip() for name in (self.tasks or "").split(",") if name.strip()]

    @property
    def names(self) -> list[str]:
        """The tasks, each once."""
        found = [[task.name for task in SUITES[name]] if name in SUITES else [name] for name in self.asked]
        return list(dict.fromkeys(name for names in found for name in names))


@dataclass(frozen=True, kw_only=True)
class Eval(EvalOptions):
    __doc__ = EvalOptions.__doc__

    task: TaskOptions = field(default_factory=TaskOptions)

    def execute(self) -> int:
        """Print the perplexities, or the scores of the tasks; 0."""
        if self.task.tasks is None:
            check_unused(self.task, "without --tasks")
            found = scores(self)
            columns = score_table(found["sources"])
        else:
            found = task_scores(self)
            columns = task_table(found)
        print(json.dumps(found, indent=2) if self.json else table(columns, width_of(sys.stdout)))
        return 0


@dataclass(frozen=True)
class TaskRun:
    """A task of ours with its questions, whose texts are not yet in the style of a prompt."""

    task: EvalTask
    questions: list[MultipleChoice]

    @property
    def digest(self) -> str:
        """A hash of the questions and their right answers."""
        texts = (dict.fromkeys(text for request in each.requests for text in request) for each in self.questions)
        return content_hash(f"{list(each)} {asked.answer}" for each, asked in zip(texts, self.questions, strict=True))


Work = Callable[[list[int]], dict[int, dict[str, Any]]]
"""Evaluates the items of a batch, given by their numbers."""


class Evaluation:
    """A loaded model, and how questions are put to it."""

    def __init__(self, options: Eval, place: ModelPlace, screen: Display):
        self.wanted, self.screen = options.task, screen
        device = device_of(options.device)
        dtype = dtype_name(options.dtype, device)
        limit = self.wanted.limit
        self.facts = {"model": place.identity, "tokenizer": options.tokenizer, "dtype": dtype, "limit": limit}
        screen(f"loading {place.gguf or place.name}")
        self.model, self.tokenizer = loaded_model(place, device, dtype, options.trust_remote_code, options.tokenizer)
        self.positions = positions_of(self.model)
        self.style: PromptStyle = prompt_style(self.wanted.prompt, self.tokenizer)
        if self.style == "chat" and not self.tokenizer.chat_template:
            raise ValueError("--prompt chat: the tokenizer has no chat template; use alpaca or plain")

    def scores(self, run: TaskRun, folder: Path) -> Scores:
        """The scores of a task. Items that were evaluated before are not evaluated again."""
        name, count = run.task.name, len(run.questions)
        log = ItemLog(folder, name, self._settings(run))
        if log.finished is not None:
            self.screen(f"{name}: done before, in {log.summary}")
            return log.finished
        planned, work = self._written(run) if self._writes(run.task) else self._scored(run)
        for batch in planned:
            # If an item of a batch is missing, all of it is evaluated: the last digit of a result may depend on the
            # others in the batch.
            if any(item not in log.items for item in batch):
                log.add(self._done(work, batch))
            self.screen.advance(len(log.items) / count, f"{name}: {len(log.items)}/{count} questions")
        self.screen.close()
        items = [log.items[number] for number in range(count)]
        found = summed_up(run.task, items, [each.subject for each in run.questions])
        log.finish(found)
        return found

    def _settings(self, run: TaskRun) -> dict[str, Any]:
        """All settings on which a task's results depend."""
        own: dict[str, Any] = {"task": run.task.name, "documents": run.digest, **self.facts}
        if run.task.suite == "commonsense":
            own |= {"by": self.wanted.by or "generation", "prompt": self.style}
        if self._writes(run.task):
            own |= {"beams": self.wanted.beams or BEAMS, "new_tokens": NEW_TOKENS}
        return own

    def _writes(self, task: EvalTask) -> bool:
        """True if answers are written, rather than chosen by likelihood."""
        return task.suite == "commonsense" and self.wanted.by != "likelihood"

    def _prompted(self, run: TaskRun) -> tuple[list[MultipleChoice], bool]:
        """The questions in the style of the prompt, and whether the tokenizer adds its special tokens to them."""
        if run.task.suite != "commonsense":
            return run.questions, True
        asked = [each.put(lambda text: prompted(text, self.style, self.tokenizer)) for each in run.questions]
        return asked, self.style != "chat"  # a chat template has special tokens already

    def _scored(self, run: TaskRun) -> tuple[Iterator[list[int]], Work]:
        asked, special = self._prompted(run)
        items = encoded(asked, self.tokenizer, self.positions, special)
        full = sum(any(len(each.read) == self.positions for each in item) for item in items)
        if full:
            self.screen.note(
                f"note: {full} of {len(items)} questions of {run.task.name} fill the {self.positions} positions of the "
                "model; what was before is left out"
            )

        def work(batch: list[int]) -> dict[int, dict[str, Any]]:
            found = log_likelihoods(self.model, [items[item] for item in batch])
            return {item: judged(asked[item], each) for item, each in zip(batch, found, strict=True)}

        lengths = [[len(read) for read in dict.fromkeys(each.read for each in item)] for item in items]
        most = self.wanted.batch_tokens or BATCH_TOKENS[self.model.device.type]
        return batches(lengths, most, [each.subject for each in asked]), work

    def _written(self, run: TaskRun) -> tuple[Iterator[list[int]], Work]:
        asked, special = self._prompted(run)
        beams = self.wanted.beams or BEAMS
        prompts = [each.requests[0][0] for each in asked]
        lengths = [len(ids) + NEW_TOKENS for ids in token_ids(self.tokenizer, prompts, special)]
        if max(lengths) > self.positions:
            raise ValueError(
                f"{run.task.name}: the longest prompt and an answer of {NEW_TOKENS} tokens are {max(lengths)}, more "
                f"than the {self.positions} positions of the model; --by likelihood cuts what is too long"
            )

        def work(batch: list[int]) -> dict[int, dict[str, Any]]:
            some = [prompts[item] for item in batch]
            texts = written_answers(self.model, self.tokenizer, some, special, beams)
            return {item: answered(asked[item], run.task, text) for item, text in zip(batch, texts, strict=True)}

        rows = [[length] * beams for length in lengths]
        return batches(rows, self.wanted.batch_tokens or WRITTEN_BATCH_TOKENS[self.model.device.type]), work

    def _done(self, work: Work, batch: list[int]) -> dict[int, dict[str, Any]]:
        try:
            return work(batch)
        except torch.OutOfMemoryError as error:
            written, read = WRITTEN_BATCH_TOKENS["cuda"], BATCH_TOKENS["cuda"]
            raise ValueError(
                f"the GPU has no memory for {len(batch)} questions at once; what was done is kept. Give a smaller "
                f"--batch-tokens; by default it is {written} for written answers and {read} for others"
            ) from error


class Harness:
    """Tasks of lm-eval: its own, with documents on the Hugging Face hub, and those of YAML files in --task-data."""

    def __init__(self, names: Sequence[str], wanted: TaskOptions):
        """Raises ValueError if lm-eval does not know one of the names, or is not installed."""
        self.limit = wanted.limit
        texts = _texts_about_tasks(wanted.task_data)
        # A name that is in none of these texts is no task's. Having lm-eval parse them would take much longer.
        for name in names:
            if not any(name in text for text in texts):
                raise _unknown(name, texts)
        from lm_eval.tasks import TaskManager

        logging.getLogger("lm_eval").setLevel(logging.ERROR)
        folder = None if wanted.task_data is None else str(wanted.task_data)
        self.manager = TaskManager(include_path=folder, include_defaults=False)
        self.local = set(self.manager.all_tasks)
        if not set(names) <= self.local:
            self.manager = TaskManager(include_path=folder)
        for name in names:
            if name not in self.manager.all_tasks:
                raise _unknown(name, texts)

    def scores(self, name: str, evaluation: Evaluation, folder: Path) -> Scores:
        """The scores of a task and of its parts, by lm-eval with the same model."""
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM

        log = ItemLog(folder, name, {"task": name, "engine": "lm-eval", **evaluation.facts})
        if log.finished is not None and name not in self.local:  # the documents of a local task may have changed
            evaluation.screen(f"{name}: done before, in {log.summary}")
            return log.finished
        evaluation.screen(f"{name}: by lm-eval")
        model = HFLM(pretrained=evaluation.model, tokenizer=evaluation.tokenizer, batch_size=HARNESS_ROWS)
        try:
            found: Any = simple_evaluate(
                model, tasks=[name], limit=self.limit, task_manager=self.manager, log_samples=False
            )
        except (OSError, ConnectionError, RuntimeError) as error:
            said = str(error).strip().partition("\n")[0][:300]
            raise ValueError(
                f"--tasks {name}: lm-eval cannot get or run it ({type(error).__name__}: {said}). Without a network, "
                "put a YAML file into --task-data that defines it on documents that are here"
            ) from error
        parts = {task: _harness_scores(scores) for task, scores in found["results"].items()}
        scores = {**parts.pop(name, {}), **({"parts": parts} if parts else {})}
        log.finish(scores)
        return scores


def _texts_about_tasks(folder: Path | None) -> list[str]:
    """The texts of the YAML files of lm-eval and of the user's folder; none if lm-eval is not installed."""
    spec = find_spec("lm_eval")
    if spec is None or spec.origin is None:
        return []
    roots = [Path(spec.origin).parent / "tasks", *([] if folder is None else [folder])]
    return [path.read_text("utf-8", "replace") for root in roots for path in sorted(root.rglob("*.yaml"))]


def _unknown(name: str, texts: Sequence[str]) -> ValueError:
    """The error for a task that is neither ours nor in these files of lm-eval's."""
    near = nearest(name, (*OUR_TASKS, *(found for text in texts for found in TASK_NAME.findall(text))))
    meant = "." if near is None else f"; did you mean {near!r}?"
    other = "lm-eval has none of that name" if texts else f"for lm-eval's, {installation('lm_eval')}"
    return ValueError(f"--tasks {name!r} is unknown{meant} Ours are {', '.join(OUR_TASKS)}; {other}")


def _harness_scores(found: Mapping[str, Any]) -> Scores:
    """Items and metrics. A metric's name includes its filter's only if a task has several filters."""
    numbers = {key: value for key, value in found.items() if "," in key and isinstance(value, (int, float))}
    single = len({key.partition(",")[2] for key in numbers}) == 1
    counted: Scores = {"items": found["sample_len"]} if "sample_len" in found else {}
    return counted | {key.partition(",")[0] if single else key: value for key, value in numbers.items()}


def task_scores(options: Eval) -> dict[str, Any]:
    """A model's scores by task and the averages of suites. They are also kept in a folder as they come."""
    wanted = options.task
    wanted.check()
    check_unused(options, "with --tasks", PERPLEXITY_ONLY)
    place = place_of(options.model)
    device_of(options.device)
    folder = wanted.out or _default_folder(place)
    others = [name for name in wanted.names if name not in TASKS]
    harness = Harness(others, wanted) if others else None
    runs = {name: _task_run(TASKS[name], wanted) for name in wanted.names if name in TASKS}
    make_out(folder)
    with Display() as screen:
        evaluation = Evaluation(options, place, screen)
        tasks: dict[str, Scores] = {}
        for name in wanted.names:
            if harness is not None and name not in runs:
                tasks[name] = harness.scores(name, evaluation, folder)
            else:
                tasks[name] = evaluation.scores(runs[name], folder)
        suites = [name for name in wanted.asked if name in SUITES]
        found = {"model": options.model, "tasks": tasks, "averages": averages(tasks, suites)}
        with out_trouble_named(folder):
            replace_text_(folder / "results.json", json.dumps(found, indent=2) + "\n")
        screen(f"results of every item: {folder}")
    return found


def _task_run(task: EvalTask, wanted: TaskOptions) -> TaskRun:
    """The task with its questions; ValueError if a document cannot be one."""
    if wanted.task_data is None:
        raise ValueError(f"--tasks {task.name} needs --task-data, the folder where its documents are")
    path = found_file(task.files, task.name, wanted.task_data)
    found = documents(path, None if task.suite == "mmlu" else wanted.limit)
    asked = questions(found, path, _question_of(task, wanted, wanted.task_data))
    return TaskRun(task, _first_of_each(asked, wanted.limit))


def _first_of_each(asked: Sequence[MultipleChoice], limit: int | None) -> list[MultipleChoice]:
    """The first `limit` questions of each subject, as in lm-eval. Other tasks than MMLU have one subject."""
    by_subject: dict[str, list[MultipleChoice]] = {}
    for each in asked:
        by_subject.setdefault(each.subject, []).append(each)
    return [each for some in by_subject.values() for each in some[:limit]]


def _question_of(task: EvalTask, wanted: TaskOptions, folder: Path) -> Callable[[Fields], MultipleChoice]:
    """The function that makes a question of a document of the task."""
    if task.question is not None:
        return task.question
    shots = SHOTS if wanted.shots is None else wanted.shots
    return partial(mmlu_question, examples=_examples(folder) if shots else {}, shots=shots)


def _examples(folder: Path) -> dict[str, list[Fields]]:
    """MMLU's examples by subject."""
    found: dict[str, list[Fields]] = {}
    for doc in documents(found_file(MMLU_EXAMPLES, "mmlu", folder)):
        found.setdefault(str(doc.get("subject")), []).append(doc)
    return found


def _default_folder(place: ModelPlace) -> Path:
    if place.run is not None:
        return place.run / "evals"
    return Path("evals") / (Path(place.gguf).stem if place.gguf else Path(place.name).resolve().name)
