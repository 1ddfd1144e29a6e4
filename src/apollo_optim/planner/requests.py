"""What a step of the family asks of other ranks, weight by weight, and the collectives that this makes.

Requests that wait for the same kind of answer over the same axis travel together. Sums are of float64 and wait for
those of all other weights; everything else is of the arithmetic's float32.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from ..core.projection import keeps_basis
from ..core.rule import ADAFACTOR, Rule
from ..stepping.collectives import BUCKET_BYTES, PRIORITY
from .layout import Axis
from .parts import Part

KINDS = {"scatter": "reduce-scatter", "reduce": "all-reduce", "gather": "all-gather", "sum": "all-reduce"}
"""The collective of each kind of request."""

FLOAT32, FLOAT64 = 4, 8


@dataclass(frozen=True)
class Request:
    """What one weight needs from the other ranks of an axis."""

    kind: str
    axis: Axis
    bytes: int
    """Of all that is gathered, or of what is to be added up."""
    cost: int
    """Bytes to count it with: those that wait together are sent from BUCKET_BYTES on."""
    itemsize: int = FLOAT32


@lru_cache(maxsize=1024)
def requests(part: Part, rule: Rule, gradient_itemsize: int, refresh: bool) -> Sequence[Request]:
    """What the step of one weight asks for, in order; `refresh` where it begins a new basis."""
    if _is_local(part, rule):
        source = _source(part, rule, gradient_itemsize) if refresh else []
        return [*_sums(part, [(1, "W")]), *source]
    if rule.second_moment == "factored":
        return _factored(part, rule, gradient_itemsize, refresh)
    begins: list[Request] = []
    by_host = refresh and part.matrix is not None and keeps_basis(rule, part.matrix)
    if by_host or (rule.granularity == "element" and not rule.residual):
        begins = _sums(part, [(1, "W")])
    if by_host:
        begins += _source(part, rule, gradient_itemsize)
    return begins + _measured(part, rule)


def _is_local(part: Part, rule: Rule) -> bool:
    """Whether a rank needs nothing of others but to know that the gradient is finite."""
    if part.matrix is None or not part.axes("SC"):
        return True
    if rule.granularity != "element" or rule.second_moment == "factored":
        return False
    return part.matrix.full_rank or not (rule.residual or part.axes("S"))


def _measured(part: Part, rule: Rule) -> list[Request]:
    """The projected gradient, added up where the side is split, and the norms that the rule needs."""
    assert part.matrix is not None
    full, batch, channels = part.matrix.full_rank, part.numbers("E"), part.numbers("C")
    low = [] if full else _scattered(part)
    kept = "SC" if full else "P"
    if rule.granularity == "element":
        steps = low + _gathered(part, part.matrix.rank * (2 if rule.residual else 1))
        return steps + (_sums(part, [(1, "W"), (batch, "SC"), (batch, kept)]) if rule.residual else [])
    if rule.granularity == "tensor":
        return low + _sums(part, [(1, "W"), *[(batch, kept)] * 3, (batch, "SC")])
    if full and part.axes("S"):
        rows = batch * channels
        first = _sums(part, [(1, "W"), (batch, kept), (rows, "S"), (rows, "S")])
        return first + _sums(part, [(batch, "C"), (batch, "C")])
    gains = [] if full else _gathered(part, 1)
    return low + gains + _sums(part, [(1, "W"), (batch, "SC"), (batch, kept), (batch, "C")])


def _factored(part: Part, rule: Rule, gradient_itemsize: int, refresh: bool) -> list[Request]:
    """Means of squares along both sides; then the size of Adafactor's update, or Flora's momentum like GaLore's."""
    assert part.matrix is not None
    batch, rank = part.numbers("E"), part.matrix.rank
    means = (batch * part.numbers("S"), "C"), (batch * part.numbers("C"), "S")
    asked = _sums(part, [(1, "W"), *means, (batch, "SC"), (batch, "S")])
    if rule is ADAFACTOR:
        return asked + _sums(part, [(batch, "SC")])
    if part.matrix.full_rank:
        return asked
    if refresh:
        asked += _source(part, rule, gradient_itemsize)
    asked += _scattered(part)
    if refresh:
        asked += _sums(part, [(batch * rank * rank, "S")])
    return asked + _gathered(part, rank)


def _sums(part: Part, values: Sequence[tuple[int, str]]) -> list[Request]:
    """One sum per axis, of the values (how many numbers, by what they are split) that it splits."""
    over = {axis for _, letters in values for axis in part.axes(letters)}
    return [
        Request(
            "sum", axis, FLOAT64 * sum(count for count, letters in values if axis in part.axes(letters)), 0, FLOAT64
        )
        for axis in sorted(over, key=lambda axis: axis.name)
    ]


def _cost(part: Part, rows: int) -> int:
    """Bytes of [(E,) rows, C] as every rank counts them."""
    assert part.matrix is not None
    whole = math.prod(part.matrix.batch) * rows * part.matrix.channels * FLOAT32
    return whole // math.prod(axis.size for axis in part.axes("EC"))


def _scattered(part: Part) -> list[Request]:
    """The low-rank gradient [(E,) R, C], added up over the parts of the side."""
    assert part.matrix is not None
    rank, channels = part.matrix.rank, part.numbers("C")
    cost, asked = _cost(part, rank), list[Request]()
    for axis in part.axes("S"):
        if not part.moments_are_shared_out:
            asked.append(Request("reduce", axis, part.numbers("E") * rank * channels * FLOAT32, cost))
            continue
        chunk = -(-channels // axis.size)
        asked.append(Request("scatter", axis, part.numbers("E") * rank * chunk * axis.size * FLOAT32, cost))
        channels = chunk
    return asked


def _gathered(part: Part, rows: int) -> list[Request]:
    """[(E,) rows, C] from the channels whose moments each rank keeps."""
    if not part.moments_are_shared_out:
        return []
    cost, channels, asked = _cost(part, rows), part.numbers("C"), list[Request]()
    for axis in part.axes("S"):
        chunk = -(-channels // axis.size)
        asked.append(Request("gather", axis, part.numbers("E") * rows * chunk * axis.size * FLOAT32, cost))
        channels = chunk
    return asked[::-1]


def _source(part: Part, rule: Rule, itemsize: int) -> list[Request]:
    """All of the gradient, where an SVD is to decompose it and a rank has not got it."""
    if part.matrix is None or not keeps_basis(rule, part.matrix):
        return []
    gathered, whole = part.numbers("ESC") * itemsize, math.prod(part.shape) * itemsize
    asked: list[Request] = []
    for axis in part.axes("SC"):
        gathered *= axis.size
        asked.append(Request("gather", axis, gathered, whole, itemsize))
    return asked


@dataclass
class _Queue:
    requests: list[Request] = field(default_factory=list[Request])
    weights: list[int] = field(default_factory=list[int])
    cost: int = 0


@dataclass(frozen=True)
class Sent:
    """Requests that one collective answers."""

    kind: str
    axis: Axis
    bytes: int


def collectives(steps: Sequence[Sequence[Request]]) -> list[Sent]:
    """The collectives of many weights' steps that run side by side, in the order in which they are sent."""
    return _Lockstep(steps).sent()


class _Lockstep:
    """The order in which the optimizer sends what its weights wait for."""

    def __init__(self, steps: Sequence[Sequence[Request]]):
        self._steps = steps
        self._done = [0] * len(steps)
        self._queues: dict[tuple[str, str, int], _Queue] = defaultdict(_Queue)
        self._sent: list[Sent] = []

    def sent(self) -> list[Sent]:
        for number in range(len(self._steps)):
            self._advance(number)
        while self._queues:
            self._send(min(self._queues, key=lambda key: (PRIORITY[key[0]], key[1])))
        return self._sent

    def _advance(self, number: int) -> None:
        if self._done[number] == len(self._steps[number]):
            return
        request = self._steps[number][self._done[number]]
        self._done[number] += 1
        key = request.kind, request.axis.name, request.itemsize
        queue = self._queues[key]
        queue.requests.append(request)
        queue.weights.append(number)
        queue.cost += request.cost
        if queue.cost >= BUCKET_BYTES:
            self._send(key)

    def _send(self, key: tuple[str, str, int]) -> None:
        queue = self._queues.pop(key)
        self._sent.append(Sent(key[0], queue.requests[0].axis, sum(request.bytes for request in queue.requests)))
        for number in queue.weights:
            self._advance(number)
