"""The state of a weight: names, shapes and dtypes, decided in one place.

The optimizer creates state from this, `load_state_dict` checks against it, and `optimizer_memory` adds it up.
"""

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from .core.projection import keeps_basis
from .core.rule import ADAFACTOR, ADAMW, ROWWISE_ADAMW, Rule
from .core.shape import MatrixShape, has_size, matrix_shape
from .distributed import Entry, Part, is_sharded, local, part_of, placed_as, sampled
from .host_state import STAYS, kept_on_host
from .quant.blocks import BLOCK, packed_shape, scale_shape
from .quant.int8 import Int8Weight

VECTOR = 16
"""Elements whose multiples rows should begin at."""

PITCHED = frozenset({"cuda"})
"""Kinds of devices where rows are kept that far apart, if they are not so by themselves."""

NAMES = frozenset(
    {
        "step", "seed", "exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale", "exp_avg_sq_side",
        "exp_avg_sq_channel", "last_norm", "basis",
    }
)  # fmt: skip
"""Names of all state that any rule keeps. Users may keep other things beside it."""

WRAPPER_PREFIXES = re.compile(r"(^|(?<=\.))(module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")


StateDtype = torch.dtype | Literal["nf4"]
"""The dtype of moments; torch has none for 4 bits."""


def arithmetic_dtype(weight_dtype: torch.dtype, state_dtype: StateDtype) -> torch.dtype:
    """The dtype of a step's arithmetic: float32, or float64 where the weight or its state is that wide."""
    return torch.float64 if torch.float64 in (weight_dtype, state_dtype) else torch.float32


def projected_shape(shape: Sequence[int], group: Mapping[str, Any]) -> MatrixShape | None:
    """The shape by which a weight is projected by the options of `group`, or None where it is not."""
    rank = None if has_size(shape, group["vocabulary"]) else group["rank"]
    if rank is not None and group["projection"] == "identity":
        rank = max(shape, default=1)  # The identity keeps every row, whatever rank was asked for.
    return matrix_shape(shape, rank, group["flatten"])


def rule_of(shape: Sequence[int], group: Mapping[str, Any]) -> Rule:
    """The rule that a weight is stepped by: its group's, or where it is not projected, that of its second moment."""
    factored = group["projection"] == "identity" and group["second_moment"] == "factored"
    if projected_shape(shape, group) is not None:
        return ADAFACTOR if factored else Rule.of(group)
    if group["rank"] is not None or len(shape) < 2:  # left to AdamW, as a vocabulary or a vector
        return ADAMW
    return {"elementwise": ADAMW, "rowwise": ROWWISE_ADAMW, "factored": ADAFACTOR}[group["second_moment"]]


def matrices_of(shape: Sequence[int], group: Mapping[str, Any]) -> MatrixShape | None:
    """A weight of this shape as the matrices that are projected or factored; None for AdamW."""
    if rule_of(shape, group) is ADAFACTOR:
        return matrix_shape(shape, max(shape), group["flatten"])
    return projected_shape(shape, group)


def state_entries(shape: Sequence[int], dtype: torch.dtype, group: Mapping[str, Any]) -> dict[str, Entry]:
    """Every tensor of the state of a weight with this shape and dtype, by name."""
    entries = _entries(shape, dtype, group)
    if group["state_device"] is None:
        return entries
    return {name: replace(entry, on_host=True, by_rows=False) for name, entry in entries.items()}


def _entries(shape: Sequence[int], dtype: torch.dtype, group: Mapping[str, Any]) -> dict[str, Entry]:
    scalar = arithmetic_dtype(dtype, group["state_dtype"])
    entries = {
        "step": Entry((), torch.float32, on_host=not group["capturable"]),
        "seed": Entry((), torch.int64, on_host=True),
    }
    matrix = matrices_of(shape, group)
    rule = rule_of(shape, group)
    # The default is no narrower than the weight; 4 bits are too few for AdamW.
    is_wide = group["state_dtype"] == torch.float32 or (group["state_dtype"] == "nf4" and matrix is None)
    moments: Any = scalar if is_wide else group["state_dtype"]
    if matrix is None:
        if rule.second_moment == "elementwise":
            return entries | _moment("exp_avg", shape, moments, "W") | _moment("exp_avg_sq", shape, moments, "W")
        momentum = _moment("exp_avg", shape, moments, "W") if group["betas"][0] > 0 else {}
        return entries | momentum | {"exp_avg_sq": Entry((shape[0],), scalar, "W")}
    batch = "E" * len(matrix.batch)
    # Eight bits would bend a basis, which all of a weight's directions are measured by.
    narrow = torch.bfloat16 if moments == torch.int8 else moments
    if rule.is_spectral and group["betas"][0] == 0:
        return entries
    if rule.projection == "power":
        # Every rank needs all of it, and it is small: nothing of it is split but experts.
        low, basis = ((*matrix.batch, matrix.rank, length) for length in (matrix.side, matrix.channels))
        return entries | _moment("exp_avg", low, moments, batch + "RR") | {"basis": Entry(basis, narrow, batch + "RR")}
    if rule.is_spectral:
        return entries | _momentum(matrix, moments)
    if rule is ADAFACTOR and group["betas"][0] > 0:
        entries |= _momentum(matrix, moments)
    low = batch + ("SC" if matrix.full_rank else "RP")
    by_kernels = rule.granularity != "element" and scalar == torch.float32
    by_rows = by_kernels and not matrix.full_rank and matrix.rank > 1
    if rule is not ADAFACTOR:
        entries |= _moment("exp_avg", matrix.low, moments, low, by_rows)
    if rule.second_moment == "factored":
        entries["exp_avg_sq_side"] = Entry((*matrix.batch, matrix.side), scalar, batch + "S")
        entries["exp_avg_sq_channel"] = Entry((*matrix.batch, matrix.channels), scalar, batch + "C")
    else:
        entries |= _moment("exp_avg_sq", matrix.low, moments, low, by_rows)
    if rule.limits_growth:
        entries["last_norm"] = Entry(matrix.batch, scalar, batch)
    if keeps_basis(rule, matrix):
        entries["basis"] = Entry((*matrix.batch, matrix.rank, matrix.side), narrow, batch + "RS")
    return entries


def _momentum(matrix: MatrixShape, dtype: StateDtype) -> dict[str, Entry]:
    """The momentum of a weight that is not projected, which lies as it does: blocks go along the weight's own rows."""
    dims = "E" * len(matrix.batch) + ("CS" if matrix.channels_are_rows else "SC")
    return _moment("exp_avg", (*matrix.batch, matrix.rows, matrix.columns), dtype, dims)


def _moment(name: str, shape: Sequence[int], dtype: StateDtype, dims: str, by_rows: bool = False) -> dict[str, Entry]:
    """One moment; in 8 or 4 bits, its scales and its codes."""
    if dtype == "nf4":
        codes = Entry(packed_shape(shape), torch.uint8, dims)
    elif dtype == torch.int8:
        codes = Entry(tuple(shape), torch.int8 if name == "exp_avg" else torch.uint8, dims)
    else:
        return {name: Entry(tuple(shape), dtype, dims, by_rows=by_rows)}
    # A scalar's scale is a vector, which lies whole on every rank as the scalar does.
    return {f"{name}_scale": Entry(scale_shape(shape), torch.float32, dims if shape else ""), name: codes}


def part_of_weight(name: str, weight: Tensor, group: Mapping[str, Any]) -> Part | None:
    """This rank's part of the weight called `name` and of its state; None where it holds all of it."""
    if not is_sharded(weight):
        return None
    if group["state_device"] is not None:
        raise ValueError(
            f"{name} is sharded, which state_device={group['state_device']!r} does not support: give FSDP2 an "
            "offload_policy, or leave it out"
        )
    part = part_of(name, weight, matrices_of(weight.shape, group), state_entries(weight.shape, weight.dtype, group))
    if isinstance(local(weight), Int8Weight) and part.splits_dim(1):
        raise ValueError(
            f"{name} {part.shape} is int8 and sharded inside its rows, whose elements share scales: shard it on "
            "dimension 0"
        )
    check_blocks(name, part, group)
    return part


def check_blocks(name: str, part: Part, group: Mapping[str, Any]) -> None:
    """Raise ValueError where blocks of 4-bit codes, two to a byte, would cross from one rank's columns to another's."""
    if group["state_dtype"] != "nf4" or "exp_avg_scale" not in part.entries:
        return
    assert part.matrix is not None
    columns, ranks = part.matrix.columns, math.prod(axis.size for axis in part.axes_of_columns("exp_avg"))
    if columns % (ranks * BLOCK) != 0 and ranks > 1:
        # As hybrid sharding does, over some of the ranks.
        fits = math.gcd(ranks, columns // BLOCK) if columns % BLOCK == 0 else 1
        among = f": among {fits} ranks, in a mesh that replicates over the others" if fits > 1 else ""
        raise ValueError(
            f"{name} {part.shape}: the {columns} columns of its exp_avg are split among {ranks} ranks, and with "
            f"state_dtype='nf4' every {BLOCK} of them share a scale. Give its group state_dtype=torch.bfloat16 or "
            f"torch.int8, or shard it so that each rank holds a multiple of {BLOCK} columns{among}"
        )


def zeros(key: str, entry: Entry, weight: Tensor, part: Part | None) -> Tensor:
    """A new state tensor where it belongs."""
    device = torch.device("cpu") if entry.on_host else weight.device
    if part is None or not entry.dims:
        made = _local_zeros(entry, entry.shape, device)
        return kept_on_host(made, weight) if entry.on_host and key not in STAYS else made
    return part.wrapped(key, _local_zeros(entry, part.local_shape(key), device))


def _local_zeros(entry: Entry, shape: Sequence[int], device: torch.device | str, kind: str | None = None) -> Tensor:
    """This rank's part of an entry, laid out for a device of this kind, or of its own."""
    if not entry.by_rows or (kind or torch.device(device).type) not in PITCHED:
        return torch.zeros(tuple(shape), dtype=entry.dtype, device=device)
    *outer, last = shape
    return torch.zeros(*outer, -(-last // VECTOR) * VECTOR, dtype=entry.dtype, device=device)[..., :last]


def laid_out(key: str, entry: Entry, tensor: Tensor, part: Part | None) -> Tensor:
    """A state tensor from elsewhere, in memory as it would have been made here."""
    held = local(tensor)
    if held.stride() == _local_zeros(entry, held.shape, "meta", held.device.type).stride():
        return tensor
    moved = _local_zeros(entry, held.shape, held.device).copy_(held)
    return moved if part is None or not entry.dims else part.wrapped(key, moved)


def bare_name(name: str) -> str:
    """A weight's name without what wrappers add."""
    return WRAPPER_PREFIXES.sub("", name)


SAMPLED = 64
"""Values by which a weight without a name is told from others."""


Identity = str | int | tuple[float, ...]


def identity_of(name: str | None, position: int, weight: Tensor, part: Part | None) -> Identity:
    """The identity of a weight: its name; without one, what it begins with; where that says nothing, its place.

    A place depends on which other weights share the optimizer. Values do not, so that groups step as several
    optimizers would, and differ all the same between weights of one shape.
    """
    if name is not None:
        return name
    held = local(weight)
    if isinstance(held, Int8Weight):
        weight = held.codes if part is None else placed_as(weight, held.codes)
    values = sampled(weight, part, SAMPLED)
    return tuple(values) if len(set(values)) > 1 else position


def folded_seed(seed: int, identity: Identity) -> int:
    """One 63-bit seed from the user's and the weight's identity, of whose name wrappers are no part."""
    if isinstance(identity, str):
        identity = bare_name(identity)
    digest = hashlib.blake2b(f"{seed}:{identity!r}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
