"""Where results come from: versions, commit, machine and command."""

import platform
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

LIBRARIES = "apollo-optim", "torch", "triton", "transformers", "tokenizers", "safetensors", "numpy", "peft", "torchao"


def provenance(device: torch.device, world: int) -> dict[str, Any]:
    """What to know to get the same result again."""
    return {
        "began": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": sys.argv,
        "python": platform.python_version(),
        "versions": {library: found for library in LIBRARIES if (found := _version(library))},
        "commit": commit(),
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "cuda": torch.version.cuda if device.type == "cuda" else None,
        "ranks": world,
        "threads": torch.get_num_threads(),
    }


def commit() -> str | None:
    """The commit of this package's sources, with "+" where they were changed since; None outside of a repository."""
    here = Path(__file__).parent
    head = _git(here, "rev-parse", "HEAD")
    if head is None:
        return None
    return head + ("+" if _git(here, "status", "--porcelain", "--untracked-files=no") else "")


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _version(library: str) -> str | None:
    try:
        return version(library)
    except PackageNotFoundError:
        return None
