"""The command `apollo`: flags and files become a subcommand's options, and `execute` gives the exit status."""

import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from .choices import chosen
from .commands.evaluate import Eval
from .commands.memory import Memory
from .commands.plot import Plot
from .commands.pretrain import Pretrain


class Command(Protocol):
    """A subcommand with its options."""

    def execute(self) -> int:
        """Do it; the exit status."""
        ...


@runtime_checkable
class Configured(Command, Protocol):
    """A subcommand whose options may also stand in files."""

    def file_flags(self) -> list[str]:
        """Options of the file that was asked for, as flags."""
        ...

    def saved_flags(self) -> list[str]:
        """Options of the run that is to be resumed, as flags."""
        ...


COMMANDS: dict[str, Callable[..., Command]] = {"pretrain": Pretrain, "eval": Eval, "plot": Plot, "memory": Memory}

INTERRUPTED = 130
"""As shells count an exit by Ctrl-C."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status of `apollo` with these arguments, or with the command line's."""
    try:
        import rich  # noqa: F401
        import tyro  # noqa: F401
    except ImportError as error:
        return _failed(f"{error.name} is missing; install the extra: pip install 'apollo-optim[cli]'")
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if given and not given[0].startswith("-"):
            chosen("the command", given[0], COMMANDS)
        if given[:1] == ["pretrain"]:
            Pretrain.check_flags(given[1:])
        return _command(given).execute()
    except ValueError as error:
        return _failed(str(error))
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("apollo_optim"):
            raise
        return _failed(f"{error.name} is missing; install the extra: pip install 'apollo-optim[train]'")
    except KeyboardInterrupt:
        return INTERRUPTED


def _failed(message: str) -> int:
    print(f"apollo: {message}", file=sys.stderr)
    return 2


def _command(given: list[str]) -> Command:
    """The subcommand with its options: flags before those of a file, and those before a resumed run's."""
    command = _parsed(given)
    if not isinstance(command, Configured):
        return command
    name, *flags = given
    if in_file := command.file_flags():
        flags = [*in_file, *flags]
        command = _parsed([name, *flags])
    if saved := command.saved_flags():
        command = _parsed([name, *saved, *flags])
    return command


def _parsed(arguments: list[str]) -> Any:
    """The subcommand that these arguments make. The last of a repeated option counts."""
    import tyro

    return tyro.extras.subcommand_cli_from_dict(
        COMMANDS,
        prog="apollo",
        description="Train large models with SGD-like memory.",
        args=arguments,
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.PositionalRequiredArgs),
    )
