"""One matrix's row of the table of what stays the same from step to step."""

import struct

from ...quant.blocks import BLOCK
from ...quant.int8 import Int8Weight
from .layout import (
    ALL_CHANNELS,
    BASIS_SCALE,
    CHANNELS,
    CODE_SCALE,
    COLUMNS,
    EXP_AVG,
    EXP_AVG_SCALE,
    EXP_AVG_SQ,
    EXP_AVG_SQ_SCALE,
    EXPERT,
    FIRST,
    FIRST_KEPT,
    FIRST_MOMENT_ROW,
    FIRST_SIDE,
    HYPER,
    KEPT,
    LAST_NORM,
    META_WIDTH,
    MOMENT_PITCH,
    PITCH,
    RANK,
    ROWS,
    SCALE,
    SEED,
    SIDE,
    STEP,
    STORED_BASIS,
    STORED_SCALE,
)
from .matrix import Kind, Matrix


def _float_bits(value: float) -> int:
    return struct.unpack("<i", struct.pack("<f", value))[0]


def meta_row(kind: Kind, matrix: Matrix) -> list[int]:
    """All that does not depend on the company it is in."""
    job, state = matrix.job, matrix.job.state
    moments = matrix.expert * matrix.moment_rows * matrix.moment_pitch * kind.moments.itemsize
    row = [0] * META_WIDTH.value
    row[EXP_AVG.value] = state["exp_avg"].data_ptr() + moments if kind.momentum else 0
    row[EXP_AVG_SQ.value] = state["exp_avg_sq"].data_ptr() + moments
    scales = 0 if job.shape is None else matrix.expert * matrix.rank * -(-matrix.channels // BLOCK) * 4
    for column, name in ((EXP_AVG_SCALE, "exp_avg_scale"), (EXP_AVG_SQ_SCALE, "exp_avg_sq_scale")):
        row[column.value] = state[name].data_ptr() + scales if name in state else 0
    if kind.limited and not matrix.stands_in:
        row[LAST_NORM.value] = state["last_norm"].data_ptr() + matrix.expert * state["last_norm"].element_size()
    if isinstance(job.weight, Int8Weight):
        row[CODE_SCALE.value] = job.weight.scale.data_ptr()
    row[STEP.value] = state["step"].data_ptr() if kind.capturable else 0
    row[SEED.value] = int(state["seed"])
    place = matrix.place
    row[EXPERT.value], row[FIRST.value], row[PITCH.value] = place.expert, place.first, place.pitch
    row[SIDE.value], row[CHANNELS.value] = matrix.side, matrix.channels
    row[FIRST_SIDE.value], row[ALL_CHANNELS.value] = place.first_side, place.all_channels
    row[KEPT.value], row[FIRST_KEPT.value] = matrix.kept, place.first_kept
    row[FIRST_MOMENT_ROW.value], row[MOMENT_PITCH.value] = place.first_moment_row, matrix.moment_pitch
    row[ROWS.value], row[COLUMNS.value] = matrix.sides
    row[RANK.value] = matrix.rank
    row[HYPER.value] = matrix.hyper
    if job.shape is not None:
        row[SCALE.value] = _float_bits(job.scale)
        row[BASIS_SCALE.value] = _float_bits(job.shape.rank**-0.5 if kind.basis is None else 1 / STORED_SCALE.value)
    if kind.basis is not None:
        basis = matrix.expert * matrix.rank * matrix.side * kind.basis.itemsize
        row[STORED_BASIS.value] = state["basis"].data_ptr() + basis
    return row
