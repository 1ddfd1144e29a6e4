"""What a measurement was taken on, and how it is kept."""

import csv
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from apollo_optim.evidence.timing import summary, times_ms
from apollo_optim.evidence.workload import ALLOCATOR


def facts(device: str) -> dict[str, str]:
    """Hardware, versions and commit, for every row of a result."""
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    if device == "cuda":
        import triton

        properties = torch.cuda.get_device_properties(0)
        versions |= {"device": properties.name, "cuda": str(torch.version.cuda), "triton": triton.__version__}
    else:
        versions |= {"device": f"{cpu()}, {torch.get_num_threads()} threads"}
    return versions | {"commit": commit(), "date": time.strftime("%Y-%m-%d")}


def cpu() -> str:
    """The processor's name, where the system tells it."""
    described = Path("/proc/cpuinfo")
    lines = described.read_text().splitlines() if described.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def commit() -> str:
    """Of the sources, with a + where they differ from it; COMMIT names it where there is no repository."""
    if named := os.environ.get("COMMIT"):
        return named
    try:
        found = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True)
        dirty = subprocess.run(["git", "status", "--porcelain", "src"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return found.stdout.strip() + ("+" if dirty.stdout.strip() else "")


def copy_bandwidth(device: str) -> float:
    """Bytes per second, read and written, of a large copy."""
    size = 2**31 if device == "cuda" else 2**28
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    median = summary(times_ms(lambda: target.copy_(source), device, 3, 10))["median_ms"]
    return 2 * size / (median * 1e-3)


def answer(script: str, *arguments: str) -> Any:
    """What a script prints last, read as JSON: it runs in a process of its own."""
    environment = {"PYTORCH_CUDA_ALLOC_CONF": ALLOCATOR} | os.environ
    ran = subprocess.run(
        [sys.executable, script, *arguments], stdout=subprocess.PIPE, text=True, check=True, env=environment
    )
    return json.loads(ran.stdout.splitlines()[-1])


class Process(NamedTuple):
    """Memory of a whole process, its context included, and who says so."""

    bytes: int
    source: str


def process_memory(context: int | None) -> Process:
    """Of this process: by nvidia-smi, or else by what is taken of the device.

    `context` is what a process takes besides its tensors; it is needed where others are on the device.
    """
    listed = listed_processes()
    if os.getpid() in listed:
        return Process(listed[os.getpid()], "nvidia-smi")
    # In a container processes have other numbers, or are not listed at all.
    if context is not None:
        return Process(torch.cuda.memory_reserved() + context, "reserved + context of an idle process")
    if len(listed) == 1:
        return Process(*listed.values(), "nvidia-smi, the only process")
    free, total = torch.cuda.mem_get_info()
    return Process(total - free, "all that is taken of the device")


def listed_processes() -> dict[int, int]:
    """Bytes by process number, as nvidia-smi lists them; nothing where it does not."""
    command = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return {}
    return parsed_processes(ran.stdout.splitlines())


def parsed_processes(lines: Iterable[str]) -> dict[int, int]:
    cells = [[cell.strip() for cell in line.split(",")] for line in lines]
    return {
        int(row[0]): int(row[1]) * 2**20 for row in cells if len(row) == 2 and row[0].isdigit() and row[1].isdigit()
    }


Row = dict[str, Any]


def rows_of(path: Path, commit: str | None = None) -> list[Row]:
    """The rows of a file that were measured at `commit`, by default at that of the last row."""
    rows = recorded(path)
    wanted = commit or rows[-1]["commit"]
    return [row for row in rows if row["commit"] == wanted]


def record_rows(path: Path, rows: Sequence[Row]) -> None:
    """Append to what a file had when this process first wrote to it: earlier measurements are never replaced."""
    before = _BEFORE.setdefault(path, recorded(path))
    columns = list(dict.fromkeys(key for row in (*before, *rows) for key in row))
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows([*before, *rows])


_BEFORE: dict[Path, list[Row]] = {}


def recorded(path: Path) -> list[Row]:
    """All rows of a file; none where there is no such file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))
