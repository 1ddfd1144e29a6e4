"""`apollo doctor`: what is installed, which devices there are, and what to install for more."""

import os
import platform
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import nn

from .. import APOLLO, __version__
from ..extras import EXTRAS, missing, pip_install


@dataclass(frozen=True, kw_only=True)
class Doctor:
    """Show versions, devices, and which parts of the package can be used here."""

    def execute(self) -> int:
        """Print it; 0."""
        rows = [*_versions(), *_devices(), ("", ""), ("optimizers", "usable"), ("fused kernels", _kernels())]
        rows += [(f"extra {extra}", _extra(extra)) for extra in EXTRAS]
        widest = max(len(name) for name, _ in rows)
        print("\n".join(f"{name.ljust(widest)}  {text}".rstrip() for name, text in rows))
        return 0


def _versions() -> list[tuple[str, str]]:
    triton = "not installed"
    if find_spec("triton") is not None:
        import triton as found

        triton = found.__version__
    return [
        ("apollo-optim", __version__),
        ("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        ("torch", torch.__version__),
        ("triton", triton),
    ]


def _devices() -> list[tuple[str, str]]:
    gpus = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    found = [(f"GPU {n}", f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB") for n, gpu in enumerate(gpus)]
    cpu = f"{os.cpu_count()} cores, {torch.get_num_threads()} threads in use"
    return [*(found or [("GPU", "none that PyTorch can use")]), ("CPU", cpu)]


def _kernels() -> str:
    """Take a fused step, and say whether it works, or why it does not."""
    if not torch.cuda.is_available():
        return "not usable: they need an NVIDIA GPU; without one, plain PyTorch does the same"
    weight = nn.Parameter(torch.zeros(64, 96, device="cuda", dtype=torch.bfloat16))
    weight.grad = torch.ones_like(weight)
    try:
        APOLLO([weight], lr=1e-2, rank=4, fused=True).step()
        torch.cuda.synchronize()
    except Exception as error:  # the user wants to see whatever a compiler or driver raises
        return f"not usable: {error}"
    return "usable"


def _extra(extra: str) -> str:
    """Say whether an extra is usable, or what to install."""
    absent = missing(extra)
    if not absent:
        return "usable"
    return f"missing {', '.join(absent)}; in a clone of the repository: {pip_install(extra)}"
