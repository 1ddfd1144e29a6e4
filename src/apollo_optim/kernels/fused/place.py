"""Where one matrix of a weight, or this rank's part of it, lies in the whole weight."""

import math
from typing import NamedTuple

from ...distributed import Part
from ...stepping.weight import Job


class Place(NamedTuple):
    """By what a kernel finds global rows, columns and positions."""

    expert: int
    first_side: int
    """Where the contracted side begins."""
    first: int
    """Position of the first element in the whole weight, flattened."""
    pitch: int
    """From one row to the next in the whole weight."""
    all_channels: int
    kept: int
    """Channels whose moments this rank keeps."""
    first_kept: int
    first_moment_row: int


def place_of(job: Job, expert: int, size: int, columns: int) -> Place:
    """Of expert number `expert` of those that this rank holds, a matrix of `size` elements in rows of `columns`."""
    if job.part is None or not job.part.is_split:
        channels = 0 if job.shape is None else job.shape.channels
        return Place(expert, 0, expert * size, columns, channels, channels, 0, 0)
    part = job.part
    if part.matrix is None or job.shape is None:
        if len(part.shape) == 1:
            return Place(0, 0, part.ranges[0][0], columns, 0, 0, 0, 0)
        return Place(0, 0, *_first_and_pitch(part, 0), 0, 0, 0, 0)
    number = job.shape.begins.expert + expert
    first, pitch = _first_and_pitch(part, len(part.matrix.batch))
    first += number * part.matrix.rows * part.matrix.columns
    (first_row, _), (first_kept, end) = part.state_ranges("exp_avg")[-2:]
    kept = end - first_kept
    return Place(number, job.shape.begins.side, first, pitch, part.matrix.channels, kept, first_kept, first_row)


def _first_and_pitch(part: Part, dim: int) -> tuple[int, int]:
    """Where a part begins in a whole matrix whose rows are dimension `dim`, and the length of that matrix's rows."""
    pitch = math.prod(part.shape[dim + 1 :])
    column = part.ranges[dim + 1][0] * math.prod(part.shape[dim + 2 :])
    return part.ranges[dim][0] * pitch + column, pitch


def ranks_that_share(part: Part) -> int:
    """Among how many ranks the moments of this rank's channels are shared out."""
    return math.prod(axis.size for axis in part.axes("S")) if part.moments_are_shared_out else 1
