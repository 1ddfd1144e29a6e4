"""What the scripts share: options, facts about the machine, times of kernels, and files of results."""

import argparse
import csv
import os
import platform
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from apollo_optim.evidence.timing import summary, times_ms


def common_parser(
    text: str | None, device: str | None = "cuda" if torch.cuda.is_available() else "cpu", **out: Any
) -> argparse.ArgumentParser:
    """A parser of the options that most scripts have: --device, unless that is None, and --out."""
    made = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    if device is not None:
        made.add_argument("--device", default=device, choices=("cpu", "cuda"))
    made.add_argument("--out", type=Path, **{"help": "the CSV that rows are appended to", **out})
    return made


def facts(device: str) -> dict[str, str]:
    """Hardware, versions and commit, for every row of a result."""
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    if device == "cuda":
        import triton

        properties = torch.cuda.get_device_properties(0)
        versions |= {"device": properties.name, "cuda": str(torch.version.cuda), "triton": triton.__version__}
    else:
        versions |= {"device": f"{cpu()}, {torch.get_num_threads()} threads"}
    return versions | {"commit": COMMIT, "date": time.strftime("%Y-%m-%d")}


def cpu() -> str:
    """The processor's name, or its architecture if the system does not tell the name."""
    described = Path("/proc/cpuinfo")
    lines = described.read_text().splitlines() if described.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def commit() -> str:
    """The commit, with a + if the sources differ from it. COMMIT names it where there is no repository."""
    if named := os.environ.get("COMMIT"):
        return named
    try:
        found = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True)
        dirty = subprocess.run(["git", "status", "--porcelain", "src"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return found.stdout.strip() + ("+" if dirty.stdout.strip() else "")


COMMIT = commit()
"""That of the sources which run: asked at the start, because a repository may move on while a script measures."""


def copy_bandwidth(device: str) -> float:
    """Bytes per second, read and written, of a large copy."""
    size = 2**31 if device == "cuda" else 2**28
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    median = summary(times_ms(lambda: target.copy_(source), device, 3, 10))["median_ms"]
    return 2 * size / (median * 1e-3)


def kernel_times(call: Callable[[], Any], repeats: int) -> dict[str, tuple[float, float]]:
    """(milliseconds of the GPU, launches) of each kernel in a call, the slowest first."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as trace:
        for _ in range(repeats):
            call()
        torch.cuda.synchronize()
    found = {event.key: (event.self_device_time_total / repeats / 1e3, event.count / repeats)
             for event in trace.key_averages()}  # fmt: skip
    return dict(sorted(found.items(), key=lambda item: -item[1][0]))


Row = dict[str, Any]
RESULTS = Path(__file__).parent / "results"
"""The folder of the files from which docs and pictures are made."""


def record_rows(path: Path | None, rows: Sequence[Row]) -> None:
    """Append rows to a file, if one is named: earlier measurements are never replaced."""
    if path is None:
        return
    listed = [*recorded(path), *rows]
    columns = list(dict.fromkeys(key for row in listed for key in row))
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(listed)


def recorded(path: Path) -> list[Row]:
    """All rows of a file; none if there is no such file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))
