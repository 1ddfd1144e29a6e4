"""Pre-training runs small enough for tests: a model of a few thousand numbers, a corpus that can be learnt."""

import json
import os
import random
import resource
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from apollo_optim.cli import main
from apollo_optim.train.distributed_checkpoint import saved_tensors
from apollo_optim.train.loop import Trainer

SEQUENCE, ROWS, MICRO_BATCH, STEPS = 24, 8, 4, 12
EVAL_TOKENS = 8 * SEQUENCE
TIMINGS = "tokens_per_second", "mfu", "memory", "seconds"
"""What differs between two runs that are otherwise the same."""


class Ground(NamedTuple):
    """What every run of the tests shares."""

    model: Path
    """A Hugging Face configuration."""
    data: Path
    cache: Path

    def flags(self, out: Path, *more: str) -> list[str]:
        """A command line; flags in `more` come last and so count."""
        flags = {
            "model": self.model, "data": self.data, "cache": self.cache, "vocabulary": 300, "workers": 1, "out": out,
            "sequence": SEQUENCE, "batch-tokens": SEQUENCE * ROWS, "micro-batch": MICRO_BATCH, "steps": STEPS,
            "log-every": 3, "eval-every": 6, "save-every": 4, "eval-tokens": EVAL_TOKENS, "device": "cpu",
        }  # fmt: skip
        return ["pretrain", *(text for name, value in flags.items() for text in (f"--{name}", str(value))), *more]

    def run(self, out: Path, *more: str) -> int:
        """The exit status of a run."""
        return main(self.flags(out, *more))


def make_ground(folder: Path) -> Ground:
    """A model's configuration, and two files of sentences in which each word says what may follow."""
    model, data = folder / "tiny", folder / "text"
    model.mkdir(parents=True)
    data.mkdir()
    configuration = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 300, "hidden_size": 32,
        "intermediate_size": 88, "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 1,
        "max_position_embeddings": 64, "tie_word_embeddings": False,
    }  # fmt: skip
    (model / "config.json").write_text(json.dumps(configuration))
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghij", k=draw.randint(2, 6))) for _ in range(60)]
    for name in ("first", "second"):
        follows = {word: draw.sample(words, 3) for word in words}
        lines = [json.dumps({"text": _sentence(draw, words, follows)}) for _ in range(400)]
        (data / f"{name}.jsonl").write_text("\n".join(lines))
    return Ground(model, data, folder / "cache")


def _sentence(draw: random.Random, words: list[str], follows: dict[str, list[str]]) -> str:
    said = [draw.choice(words)]
    while len(said) < 40:
        said.append(draw.choice(follows[said[-1]]))
    return " ".join(said)


def outcome(run: Path) -> dict[str, Any]:
    """Everything that a run has learnt and logged, without times: equal for runs that did the same."""
    last = sorted((run / "checkpoints").glob("step-*"))[-1]
    return {
        "exported": (run / "model" / "model.safetensors").read_bytes(),
        **_saved(last),
        "random": flattened(torch.load(last / "random.pt", weights_only=True)),
        "position": (last / "position.json").read_text(),
        "log": [{key: value for key, value in line.items() if key not in TIMINGS} for line in log(run)],
    }


def _saved(checkpoint: Path) -> dict[str, Any]:
    """Weights and optimizer in a checkpoint."""
    if not (checkpoint / "shards").exists():
        optimizer = torch.load(checkpoint / "optimizer.pt", weights_only=True)
        return {"weights": (checkpoint / "model.safetensors").read_bytes(), "optimizer": flattened(optimizer)}
    groups = torch.load(checkpoint / "groups.pt", weights_only=True)
    return {"tensors": flattened(saved_tensors(checkpoint / "shards")), "groups": groups}


def log(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def flattened(value: Any) -> Any:
    """Nested containers of tensors as something that == compares."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.tolist()
    if isinstance(value, dict):
        return {key: flattened(each) for key, each in value.items()}
    return [flattened(each) for each in value] if isinstance(value, (list, tuple)) else value


def in_children(*works: Callable[[], int]) -> list[int]:
    """How copies of this process ended that did these together: exit statuses, or minus the signals that ended them."""
    children = [_child(work) for work in works]
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def _child(work: Callable[[], int]) -> int:
    child = os.fork()
    if child == 0:
        status = 99
        try:
            status = work()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return child


def killed() -> None:
    """The end, with no time for anything."""
    os.kill(os.getpid(), signal.SIGKILL)


def advancing(step: int, act: Callable[[], None], rank: int | None = None) -> Callable[..., Any]:
    """`Trainer.advance`, but that it acts after a step, on one rank or all, before anything is saved of the step."""
    advance = Trainer.advance

    def advanced(self: Trainer, *arguments: Any, **options: Any) -> Any:
        result = advance(self, *arguments, **options)
        if self.step == step and rank in (None, self.ranks.rank):
            act()
        return result

    return advanced


def torchrun(ranks: int, restarts: int, work: Callable[..., Any], *arguments: Any) -> int:
    """The exit status of torchrun with so many processes: copies of this one, which begin sooner."""
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        max_restarts=restarts,
        monitor_interval=0.1,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        start_method="fork",
    )
    try:
        elastic_launch(config, work)(*arguments)
    except ChildFailedError:
        return 1
    return 0


@contextmanager
def resized(most: int | None) -> Iterator[None]:
    """A disk with room for files of `most` bytes: writing beyond is an OSError in any library."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (before[0] if most is None else most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
