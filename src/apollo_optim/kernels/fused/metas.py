"""One matrix's row of the table of what stays the same from step to step."""

import struct

from ...quant.blocks import BLOCK
from ...quant.int8 import Int8Weight
from . import layout as at
from .matrix import Kind, Matrix


def _float_bits(value: float) -> int:
    return struct.unpack("<i", struct.pack("<f", value))[0]


def meta_row(kind: Kind, matrix: Matrix) -> list[int]:
    """All that does not depend on the company it is in."""
    job, state = matrix.job, matrix.job.state
    moments = matrix.expert * matrix.moment_rows * matrix.moment_pitch * kind.moments.itemsize
    row = [0] * at.META_WIDTH.value
    row[at.EXP_AVG.value] = state["exp_avg"].data_ptr() + moments if kind.momentum else 0
    row[at.EXP_AVG_SQ.value] = state["exp_avg_sq"].data_ptr() + moments
    scales = 0 if job.shape is None else matrix.expert * matrix.rank * -(-matrix.channels // BLOCK) * 4
    for column, name in ((at.EXP_AVG_SCALE, "exp_avg_scale"), (at.EXP_AVG_SQ_SCALE, "exp_avg_sq_scale")):
        row[column.value] = state[name].data_ptr() + scales if name in state else 0
    if kind.limited and not matrix.stands_in:
        row[at.LAST_NORM.value] = state["last_norm"].data_ptr() + matrix.expert * state["last_norm"].element_size()
    if isinstance(job.weight, Int8Weight):
        row[at.CODE_SCALE.value] = job.weight.scale.data_ptr()
    row[at.STEP.value] = state["step"].data_ptr() if kind.capturable else 0
    row[at.SEED.value] = int(state["seed"])
    place = matrix.place
    row[at.EXPERT.value], row[at.FIRST.value], row[at.PITCH.value] = place.expert, place.first, place.pitch
    row[at.SIDE.value], row[at.CHANNELS.value] = matrix.side, matrix.channels
    row[at.FIRST_SIDE.value], row[at.ALL_CHANNELS.value] = place.first_side, place.all_channels
    row[at.KEPT.value], row[at.FIRST_KEPT.value] = matrix.kept, place.first_kept
    row[at.FIRST_MOMENT_ROW.value], row[at.MOMENT_PITCH.value] = place.first_moment_row, matrix.moment_pitch
    row[at.ROWS.value], row[at.COLUMNS.value] = matrix.sides
    row[at.RANK.value] = matrix.rank
    row[at.HYPER.value] = matrix.hyper
    if job.shape is not None:
        row[at.SCALE.value] = _float_bits(job.scale)
        row[at.BASIS_SCALE.value] = _float_bits(
            job.shape.rank**-0.5 if kind.basis is None else 1 / at.STORED_SCALE.value
        )
    if kind.basis is not None:
        basis = matrix.expert * matrix.rank * matrix.side * kind.basis.itemsize
        row[at.STORED_BASIS.value] = state["basis"].data_ptr() + basis
    return row
