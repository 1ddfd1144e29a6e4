"""The extras of the package, and how to install the one that something needs."""

from importlib.util import find_spec

EXTRAS: dict[str, tuple[str, ...]] = {
    "train": ("matplotlib", "numpy", "pyarrow", "safetensors", "tokenizers", "transformers", "yaml"),
    "data": ("datasets", "sentencepiece", "zstandard"),
    "losses": ("liger_kernel",),
    "baselines": ("adam_mini", "peft", "torchao"),
    "finetune": ("gguf", "peft", "trl"),
    "report": ("plotly",),
    "eval": ("lm_eval",),
    "tensorboard": ("tensorboard",),
}
"""Modules of each extra that a user may want; the library itself needs only torch."""


def missing(extra: str) -> list[str]:
    """The modules of an extra that are not installed."""
    return [module for module in EXTRAS[extra] if find_spec(module) is None]


def pip_install(extra: str) -> str:
    """The command that installs an extra, in a clone of the repository."""
    return f"pip install '.[{extra}]'"


def installation(module: str, command: str = "") -> str:
    """The command that installs a module and all else that its subcommand uses, in a clone of the repository."""
    extra = next((name for name, modules in EXTRAS.items() if module in modules), "train")
    if extra == "train" and command in EXTRAS:  # an extra by the name of a command includes that of training
        extra = command
    return pip_install(extra)
