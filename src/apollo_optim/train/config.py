"""Every option of a training run: frozen dataclasses whose fields are flags, and keys of a file."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import yaml

from ..flags import Place, built, check_each, file_values, flag_of, option_name, options_of
from ..llama import PRESETS
from ..options import check_option
from .atomic import replace_text_
from .data.files import absolute, is_there
from .data.sources import PYTHON
from .losses import PACKAGES
from .methods import OWN, Method
from .model import Model, dtype_name
from .ranks import by_device, device_of
from .recipes import DEFAULT_STEPS
from .schedule import Schedule
from .sinks import check_sinks

Options = TypeVar("Options", bound="TrainingOptions")


@dataclass(frozen=True, kw_only=True)
class Run:
    """Folder, device, checkpoints and log."""

    out: Place | None = None
    """Folder of the run; by default runs/MODEL-METHOD."""
    resume: bool = False
    """Continue the run in that folder from its last whole checkpoint, with its own options."""
    auto_resume: bool = False
    """The same, and begin a run where there is none: for jobs that are started again by themselves."""
    seed: int = 0
    """Decides the weights, the order of the data and every random number."""
    device: Literal["cpu", "cuda"] | None = None
    """By default cuda where there is a GPU."""
    deterministic: bool = False
    """On a GPU, use only algorithms that give the same bits every time: slower. On a CPU runs are the same anyway."""
    shard: Literal["ddp", "fsdp"] = "ddp"
    """Held by each of several ranks: ddp: the whole model; fsdp: a part of every weight, gradient and state."""
    step_in_backward: bool = False
    """Step each weight inside the backward pass and free its gradient at once; earlier micro-batches keep them all."""
    quiet: bool = False
    """Show no progress: only warnings, and the result at the end."""
    log_every: int = 10
    """Steps from one line of the log to the next."""
    eval_every: int = 1000
    """Steps from one evaluation to the next; the last step is evaluated in any case."""
    eval_tokens: int = field(default_factory=by_device(1_000_000, 65_536))
    """Tokens of an evaluation, or as many as there are; of each source. By default a million, on a CPU 65,536."""
    save_every: int = 1000
    """Steps from one checkpoint to the next; the last step is saved in any case."""
    keep: int = 2
    """Checkpoints that are kept, the newest; and the best of those that were evaluated when they were saved."""
    tensorboard: bool = False
    """Write events for TensorBoard into the folder."""
    wandb: str | None = None
    """Log to this project of Weights & Biases."""
    trackio: str | None = None
    """Log to this project of Trackio."""
    mlflow: str | None = None
    """Log to this experiment of MLflow, where MLFLOW_TRACKING_URI says."""

    @property
    def sinks(self) -> list[str]:
        """Libraries that get the log."""
        return [name for name in ("tensorboard", "wandb", "trackio", "mlflow") if getattr(self, name)]

    @property
    def resumes(self) -> bool:
        """True if an existing run is to be continued."""
        return self.resume or self.auto_resume

    def check(self) -> None:
        """Raise ValueError for the first option that is not possible."""
        counts = "log_every", "eval_every", "eval_tokens", "save_every", "keep"
        check_each(self, "at least 1", lambda number: number >= 1, *counts)
        check_option("--seed", "seed", self.seed)
        device_of(self.device)

    def place(self) -> torch.device:
        """The kind of device that the run is on."""
        return device_of(self.device)


SETTINGS = "config.yaml"
"""The file in a run's folder that holds its options."""

NOT_KEPT = "config", "resume", "auto_resume", "out", "quiet", "trust_remote_code"
"""Options that are not saved with a run, because they say what to do with it: its folder may be moved, or copied."""

FREE = (
    *NOT_KEPT, "shard", "step_in_backward", "log_every", "eval_every", "eval_tokens", "save_every", "keep",
    "tensorboard", "wandb", "trackio", "mlflow", "device", "micro_batch", "compile", "cache", "workers", "bad_lines",
    "bad_examples", "merge",
)  # fmt: skip
"""Options that may change when a run is resumed, because what is learned does not depend on them."""


LENGTH = "steps", "tokens", "epochs"
"""Options that say how long a run is; it may be resumed for longer."""

FORMER = ("positions",)
"""Former options, which `apollo finetune` has saved with runs."""

ALWAYS_SAVED = frozenset({"model", "data", "method", "seed", "micro_batch"})
"""Options that every run saves; another program's `config.yaml` lacks some of them."""


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """The options of every training command. A command adds the section of its data."""

    config: Place | None = None
    """A YAML file of options, named as here without the dashes in front; flags count more than the file."""
    model: Model = field(default_factory=Model)
    data: Any = None
    method: Method = field(default_factory=Method)
    schedule: Schedule = field(default_factory=Schedule)
    run: Run = field(default_factory=Run)

    @classmethod
    def with_files(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """The options of a command line, then those of --config, then those of the run that is to be resumed."""
        values = with_config(cls, given)
        options = built(cls, values)
        if not options.goes_on:
            return values
        saved = flat(saved_options(options.folder / SETTINGS, cls))
        if any(values.get(name) is not None for name in LENGTH):
            saved = {name: value for name, value in saved.items() if name not in LENGTH}
        return saved | values

    @property
    def folder(self) -> Path:
        """The folder of the run."""
        named = f"runs/{Path(self.model.model).stem or 'model'}-{self.method.method}"
        return Path(self.run.out or named)

    @property
    def goes_on(self) -> bool:
        """True if its folder has a run that is to be continued."""
        return self.run.resumes and (self.folder / SETTINGS).exists()

    @property
    def steps(self) -> int:
        """Optimizer steps of the run."""
        return self.schedule.total_steps(DEFAULT_STEPS.get(self.model.model))

    def check(self, world: int) -> None:
        """Raise ValueError for the first option that is not possible, or contradicts another; loads nothing."""
        self.schedule.check()
        self.run.check()
        self.model.check()
        self._check_loss()
        self.method.check(self.steps)
        check_sinks(self.run.sinks)
        self.schedule.rows_of_a_rank(world)
        self._check_sharding(world)
        self._check_memory(world)

    def resolved(self: Options, resuming: bool) -> Options:
        """The options with defaults that depend on machine or files made explicit, such as the dtype of the weights."""
        return with_values(self, {"dtype": dtype_name(self.model.dtype, self.run.place())})

    def located(self: Options, places: Mapping[str, str]) -> Options:
        """The options with the paths in `places`, by option, as far as those still exist."""
        names = self._naming_files()
        there = {name: str(at) for name, at in places.items() if name in names and is_there(str(at))}
        return with_values(self, file_values(type(self), there, Path("run.json")))

    def places(self) -> dict[str, str]:
        """Absolute paths of the files and folders that options name, by option."""
        values = flat(self)
        named = {name: str(values[name]) for name in self._naming_files() if values[name] is not None}
        return {name: absolute(at) for name, at in named.items() if at not in (PYTHON, *PRESETS) and is_there(at)}

    def _naming_files(self) -> list[str]:
        """Options that may name files. A run that is resumed from another folder looks for them where they were."""
        known = options_of(type(self)).items()
        return [name for name, option in known if option.names_files and name not in NOT_KEPT]

    def _check_loss(self) -> None:
        """Raise ValueError if a loss of another package cannot do what is asked for."""
        loss = self.model.loss
        if loss not in PACKAGES:
            return
        if self.run.place().type != "cuda":
            raise ValueError(f"--loss {loss} needs a GPU, and this run is on a CPU: use --loss chunked or plain")
        if loss == "cce" and self.model.dtype == "fp32":
            raise ValueError("--loss cce needs --dtype bf16, got fp32: use that, or --loss chunked, liger or plain")
        if loss == "cce" and self.run.deterministic:
            raise ValueError(
                "--deterministic does not go with --loss cce, which takes sums in another order every time: use --loss "
                "chunked, liger or plain"
            )

    def _check_sharding(self, world: int) -> None:
        """Raise ValueError if weights are to be sharded and cannot be."""
        if self.run.shard == "ddp":
            return
        if world == 1:
            raise ValueError(
                "--shard fsdp splits weights among ranks, and there is one: start with torchrun, or give --shard ddp"
            )
        if self.method.method not in OWN:
            raise ValueError(f"--shard fsdp is for {', '.join(OWN)}; not for {self.method.method}")
        if self.schedule.micro_batch == "auto" and self.run.place().type == "cuda":
            raise ValueError(
                "--micro-batch auto does not go with --shard fsdp, where a rank that runs out of memory would leave "
                "the others waiting: give a number"
            )

    def _check_memory(self, world: int) -> None:
        """Raise ValueError if ways to save memory contradict other options."""
        in_backward, own = self.run.step_in_backward, self.method.method in OWN
        if self.method.state_device is not None and (in_backward or self.run.shard == "fsdp"):
            other = "--step-in-backward" if in_backward else "--shard fsdp"
            raise ValueError(
                f"--state-device {self.method.state_device} does not go with {other}: leave out one of them"
            )
        if self.model.int8 is not None and not own:
            raise ValueError(
                f"--int8 {self.model.int8} is for the optimizers of this library, which write int8 weights: "
                f"{', '.join(OWN)}; not for {self.method.method}"
            )
        if self.model.int8 is not None and world > 1 and not in_backward and self.run.shard == "ddp":
            raise ValueError(
                "--int8 on several ranks needs --step-in-backward or --shard fsdp: DistributedDataParallel keeps all "
                "gradients, in twice the bytes of int8 weights"
            )
        if not in_backward:
            if self.schedule.clip_previous is not None:
                raise ValueError(
                    "--clip-previous is for --step-in-backward; without it, --clip clips by the norm itself"
                )
            return
        if not own:
            raise ValueError(f"--step-in-backward is for {', '.join(OWN)}; not for {self.method.method}")
        if self.schedule.clip is not None:
            raise ValueError(
                f"--clip {self.schedule.clip} needs all gradients at once, which --step-in-backward never has; "
                "--clip-previous clips by the norm of the step before"
            )


def flat(options: Any) -> dict[str, Any]:
    """Every option of a dataclass and of its sections, by name."""
    found: dict[str, Any] = {}
    for option in fields(options):
        value = getattr(options, option.name)
        found |= flat(value) if is_dataclass(value) else {option.name: value}
    return found


def with_values(options: Options, values: Mapping[str, Any]) -> Options:
    """The options with some of them replaced, by name."""
    return built(type(options), {**flat(options), **values})


def kept(options: TrainingOptions) -> dict[str, Any]:
    """The options that are saved with a run, by name."""
    names = options_of(type(options)).keys() - NOT_KEPT
    return {name: value for name, value in flat(options).items() if name in names}


LARGEST_FILE, DEEPEST = 2**20, 2
"""Limits of a file of options, in bytes and in levels of nesting: options, and lists of values."""


class _Loader(yaml.SafeLoader):
    """Refuses what no options are while it reads, before anything is built."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise ValueError("it has an alias (*), for which options have no use")
        self.depth += self.check_event(yaml.CollectionStartEvent)
        if self.depth > DEEPEST:
            raise ValueError("it is nested deeper than options and lists of values")
        node = super().compose_node(parent, index)
        self.depth -= isinstance(node, yaml.CollectionNode)
        return node


def read_yaml(path: Path) -> Any:
    """The content of a YAML file of options. ValueError if it is none, before anything large can be built from it."""
    try:
        with path.open("rb") as file:
            text = file.read(LARGEST_FILE + 1).decode()
        if len(text) > LARGEST_FILE:
            raise ValueError(f"it has more than {LARGEST_FILE:,} bytes")
        loader = _Loader(text)
        node = loader.get_single_node()
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        for name, after in pairwise(sorted(option_name(str(key.value)) for key, _ in pairs)):
            if name == after:
                raise ValueError(f"{name} is there twice")
        return None if node is None else loader.construct_document(node)
    except (OSError, ValueError, AttributeError, LookupError, yaml.YAMLError) as error:  # PyYAML's, of values
        said = str(error).replace("<unicode string>", path.name)  # PyYAML's word for a text that it did not open
        raise ValueError(f"{path} cannot be read as YAML: {said}") from error


def with_config(command: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a command line, then those of the YAML file that its --config names."""
    if not given.get("config"):
        return dict(given)
    path = Path(given["config"])
    values = read_yaml(path) or {}
    if not isinstance(values, dict):
        raise ValueError(f"{path} must be options and their values (model: 60m), got {type(values).__name__}")
    for name in values.keys() & set(FORMER) - options_of(command).keys():
        raise ValueError(f"{path}: {name} is no option of this command any more, and had no effect: delete the line")
    return {**file_values(command, values, path), **given}


def save_settings(path: Path, options: TrainingOptions) -> None:
    """Write the options of a run to a file that `saved_options` and `with_config` read."""
    replace_text_(path, yaml.safe_dump(plain(kept(options)), sort_keys=False, allow_unicode=True))


def saved_options(path: Path, command: type[Options]) -> Options:
    """The options of a run from its `config.yaml`. ValueError if the file is damaged."""
    values = read_yaml(path)
    if not isinstance(values, dict):
        raise ValueError(f"{path} no longer holds the options of a run; restore it, or begin another run")
    missing = ", ".join(sorted(ALWAYS_SAVED - values.keys()))
    if missing:
        raise ValueError(f"{path} was not written by a run: it lacks {missing}. Name another --out, or move it away")
    known = options_of(command).keys() - {"config"}
    if is_tuned(values) != is_tuned(known):
        theirs = "finetune" if is_tuned(values) else "pretrain"
        raise ValueError(f"{path} is of a run by `apollo {theirs}`: use that command for it, or name another --out")
    return built(command, file_values(command, {name: values[name] for name in known & values.keys()}, path))


def is_tuned(options: Iterable[str]) -> bool:
    """True if these are options of `apollo finetune`, and not of `apollo pretrain`."""
    return "epochs" in options


def plain(value: Any) -> Any:
    """A value, or options by name, in types that YAML and JSON have."""
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    if isinstance(value, tuple):
        return [plain(each) for each in value]
    return str(value) if isinstance(value, Path) else value


def check_unchanged(before: TrainingOptions, now: TrainingOptions, places: Mapping[str, str]) -> None:
    """Raise ValueError for the first option that decides what is learned and has changed since the run began.

    Files that are no longer at their `places` may be named where they are now: what is in them is compared.
    """
    saved, given = kept(before), kept(now)
    free = *FREE, *LENGTH, *(name for name, at in places.items() if not is_there(str(at)))
    pairs = {name: (saved[name], value) for name, value in given.items() if name not in free}
    if now.steps < before.steps:
        pairs["steps"] = before.steps, now.steps
    for name, (was, value) in pairs.items():
        if was != value:
            began = "without it" if was is None else f"with {plain(was)}"
            raise ValueError(
                f"{flag_of(name)} is {plain(value)}, and the run began {began}; a resumed run keeps its options, and "
                "may only become longer. Leave the option out, or begin a new run in another --out"
            )
