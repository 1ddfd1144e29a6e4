"""The command `apollo`: flags and files become a subcommand's options, and `execute` gives the exit status.

Nothing heavier than the standard library is imported before a subcommand is known.
"""

import errno
import io
import os
import select
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from . import __version__
from .choices import chosen
from .extras import installation
from .flags import built, flag_values, help_text

COMMANDS: dict[str, tuple[str, str]] = {
    "pretrain": ("train.pretrain:PretrainOptions", "Train a language model from text."),
    "finetune": ("train.tuning.finetune:Finetune", "Train a language model further, on instructions and answers."),
    "eval": ("evaluation.evaluate:Eval", "Measure the perplexity of a model, or its score on tasks."),
    "write": ("commands.write:Write", "Let a model go on with a text, or answer."),
    "compare": ("evidence.compare:Compare", "Train by several methods under the same conditions, and report."),
    "report": ("commands.report:RunReport", "Write a page on runs: curves, costs, and how to repeat them."),
    "analyze": ("evidence.analyses:Analyze", "Measure one of the paper's figures anew, at any size."),
    "bench": ("evidence.benches:Bench", "Measure optimizer steps and their memory on this machine."),
    "plot": ("commands.plot:Plot", "Draw the curves of runs into one picture."),
    "memory": ("commands.memory:Memory", "Plan memory: weights and optimizer state, by model and optimizer."),
    "doctor": ("commands.doctor:Doctor", "Show versions, devices, and which parts can be used here."),
}
"""The dataclass of each subcommand's options, written as an entry point, and what it does in a line."""

INTERRUPTED, UNREAD = 130, 141
"""Exit statuses of Ctrl-C and of a closed pipe, as in shells."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status of `apollo` with these arguments, or with the command line's."""
    _open_output()
    try:
        status = _status(list(sys.argv[1:] if arguments is None else arguments))
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        output = select.poll()
        output.register(sys.stdout.fileno(), 0)
        if not output.poll(0):  # some other pipe
            raise
        status = UNREAD
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        status = _failed(f"{error.filename or 'the output'} cannot be written: {error.strerror}")
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # discards what is still in its buffer
    return status


def _open_output() -> None:
    """Make the output streams take any text: either may be closed, and stdout may have a narrow encoding."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def _status(given: list[str]) -> int:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        # DistributedDataParallel warns, on every rank and past Python's filters, of an option that we set on purpose.
        # PyTorch reads this when it is imported.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if not given or given[0] in ("-h", "--help", "help"):
        print(_help())
        return 0
    if given[0] == "--version":
        print(f"apollo-optim {__version__}")
        return 0
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")  # PyTorch's own, where there is none
    try:
        name, *flags = given
        if {"-h", "--help"} & set(flags):
            print(help_text(_class(name), name))
            return 0
        return _command(given).execute()
    except ValueError as error:
        return _failed(str(error))
    except PermissionError as error:
        # A library that raises it without the file's name has that in the text.
        what = given[0] if error.filename is None else f"{error.filename} cannot be opened"
        return _failed(f"{what}: {error.strerror or error}")
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if module == __package__:
            raise
        install = installation(module, given[0])
        return _failed(f"{given[0]} needs {module}, which is not installed. In a clone of the repository: {install}")
    except KeyboardInterrupt:
        print("apollo: interrupted", file=sys.stderr)
        return INTERRUPTED


def _help() -> str:
    commands = "\n".join(f"  {name:<10}{summary}" for name, (_, summary) in COMMANDS.items())
    return (
        "usage: apollo COMMAND [options]\n\nTrain large models with SGD-like memory.\n\n"
        f"{commands}\n\n"
        "apollo COMMAND --help lists the options of a command; apollo --version prints the version."
    )


def _failed(message: str) -> int:
    print(f"apollo: {message}", file=sys.stderr)
    return 2


def _class(name: str) -> type[Any]:
    """The dataclass of a subcommand."""
    module, _, kind = COMMANDS[chosen("the command", name, COMMANDS)][0].partition(":")
    return getattr(import_module(f"{__package__}.{module}"), kind)


def _command(given: Sequence[str]) -> Any:
    """The subcommand with its options, whose `execute` returns the exit status.

    If it has `with_files`, options without flags come from files: from that of --config, then from a resumed run's.
    """
    name, *flags = given
    kind = _class(name)
    values = flag_values(kind, flags)
    return built(kind, kind.with_files(values) if hasattr(kind, "with_files") else values)
