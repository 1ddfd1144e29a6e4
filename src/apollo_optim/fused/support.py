"""Checks of which weights the kernels can step. Imports without Triton."""

import importlib.util
import os

import torch

from ..core.projection import keeps_basis
from ..distributed import Part
from ..quant.blocks import BLOCK
from ..quant.int8 import Int8Weight
from ..stepping.crossing import CrossingMoments
from ..stepping.weight import WeightStep

FUSED_DTYPES = torch.float32, torch.bfloat16, torch.float16
MIN_CAPABILITY = (8, 0)
MIN_COLUMNS = 8
MOST_GROUP = 1024
"""Elements of a group that a kernel's tile can hold."""
MOST_COLUMNS = 2**31
"""Elements of a row up to which kernels find a group that the end of the row cuts off."""


def unfusable(job: WeightStep) -> str | None:
    """Why the kernels cannot step this weight, or None."""
    if reason := no_triton(job.weight.device):
        return reason
    if job.weight.dtype not in FUSED_DTYPES or job.dtype != torch.float32:
        return f"the kernels compute in float32, not for a weight of {job.weight.dtype} with {job.dtype} arithmetic"
    if job.grad.dtype not in FUSED_DTYPES:
        return f"there is no kernel for a gradient of {job.grad.dtype}"
    if isinstance(job.weight, Int8Weight) and job.weight.group_size > MOST_GROUP:
        return f"there is no kernel for groups of {job.weight.group_size}, more than {MOST_GROUP}"
    # Of a part every rank must say the same, so the whole is asked.
    if not (job.parameter if job.is_split else job.weight).is_contiguous():
        return "the weight is not contiguous"
    if job.by_factors:
        return _unfusable_factors(job)
    if job.rule.is_spectral:
        return _unfusable_momentum(job)
    if job.part is not None and job.part.is_split and (reason := _unfusable_part(job, job.part)):
        return reason
    if job.shape is None:
        return _ungrouped(job)
    if "exp_avg_scale" in job.state and (job.rule.projection == "identity" or job.shape.full_rank):
        return "there is no kernel for moments of full rank with state_dtype=torch.int8"
    if job.rule.granularity == "element":
        return f"there is no kernel for projection={job.rule.projection!r}, granularity={job.rule.granularity!r}"
    if job.is_split and keeps_basis(job.rule, job.shape):
        return f"there is no kernel for projection={job.rule.projection!r} where a weight is spread over several ranks"
    columns = job.shape.columns if job.part is None else job.part.fewest_columns
    return f"rows shorter than {MIN_COLUMNS}" if columns < MIN_COLUMNS else None


def _unfusable_part(job: WeightStep, part: Part) -> str | None:
    """Why the kernels cannot step a part of this weight, or None."""
    in_8_bits = not job.in_4_bits and ("exp_avg_scale" in job.state or "exp_avg_sq_scale" in job.state)
    if in_8_bits and not (job.shape is None or job.by_factors):
        return "its 8-bit moments are those of a projection, and spread over several ranks"
    if in_8_bits and len(part.shape) > 2:
        return "it has 8-bit moments and more than two dimensions, and is spread over several ranks"
    if in_8_bits and CrossingMoments.of(part, job.state) is not None:
        return "blocks of its 8-bit moments are spread over several ranks"
    if job.by_row and part.axes("N"):
        return "its rows, with a second moment each, are spread over several ranks"
    if job.shape is None:
        inner = next((dim for dim in range(2, len(part.shape)) if part.splits_dim(dim)), None)
        return None if inner is None else f"it is not projected, and spread over several ranks on dimension {inner}"
    if job.shape.full_rank and job.rule.granularity == "channel" and part.axes("S"):
        return "its channels, of full rank, are spread over several ranks"
    if not job.shape.full_rank and len(part.axes("S")) > 1:
        return "its smaller side is spread over several axes of a mesh"
    return None


def _unfusable_momentum(job: WeightStep) -> str | None:
    """Why the kernels cannot step a weight whose update is orthogonalised, or None."""
    kernels = "there is no kernel for granularity='spectral'"
    if job.is_split:
        return f"{kernels} where a weight is spread over several ranks"
    if "exp_avg" in job.state and "basis" not in job.state and not job.in_4_bits:
        return f"{kernels} with state_dtype={job.group['state_dtype']}, only with 'nf4'"
    return None


def _unfusable_factors(job: WeightStep) -> str | None:
    """Why the kernels cannot step a weight that is not projected and has a factored second moment, or None."""
    if job.shape is not None and job.shape.experts is not None:
        return "there is no kernel for second_moment='factored' on experts"
    if job.part is not None and job.part.is_split and (reason := _unfusable_part(job, job.part)):
        return reason
    return _ungrouped(job)


def _ungrouped(job: WeightStep) -> str | None:
    """Why the rows of a weight that is not projected cannot be cut into groups of a kernel, or None."""
    narrow = "exp_avg_scale" in job.state
    if narrow and isinstance(job.weight, Int8Weight) and job.weight.group_size != BLOCK:
        kept = job.group["state_dtype"]
        return f"with state_dtype={kept} there are kernels for groups of {BLOCK} only, not of {job.weight.group_size}"
    size = job.weight.numel()
    if narrow and job.weight.dim() == 1 and size >= MOST_COLUMNS and size % BLOCK > 0:
        return f"8-bit moments of {size} elements in one row have no kernel unless groups of {BLOCK} divide them"
    if narrow and job.by_row and job.weight.dim() > 2:
        return "rows of more than one dimension have no kernel with state_dtype=torch.int8"
    return None


def no_triton(device: torch.device) -> str | None:
    """Why no kernel runs on this device, or None."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if device.type == "cuda":
        if interpreted:
            return "TRITON_INTERPRET=1 runs kernels on the CPU"
        if torch.version.hip is not None:
            return "the kernels are for NVIDIA GPUs"
        capability = torch.cuda.get_device_capability(device)
        return None if capability >= MIN_CAPABILITY else f"compute capability {capability} is below {MIN_CAPABILITY}"
    # Triton's interpreter runs the kernels on the CPU, for tests.
    return None if interpreted else f"the kernels need a CUDA device, not {device}"
