"""Gradients that come one after another, and wait for a few of their neighbours to be applied together."""

from collections.abc import Callable

import torch
from torch import Tensor

from ..distributed import local
from ..fused.streams import gpu_number, raw_stream

MOST_WAITING = 2
"""Buckets' worth of gradients that wait at a time, if they come in another order than before."""


def gradient_bytes(weight: Tensor) -> int:
    return weight.numel() * weight.element_size()


class Bucket:
    """Weights that are stepped together."""

    def __init__(self, weights: list[Tensor]):
        self.weights = weights
        self.empty()

    def empty(self) -> None:
        """Forget the gradients that wait."""
        self.came: list[Tensor] = []
        """Weights whose gradients wait."""
        self.streams: list[int] = []
        """The stream on which each of these was made."""
        self.bytes = 0
        """Bytes of the gradients that wait."""


class Buckets:
    """The weights of one device in buckets, and their gradients of this batch that wait to be applied by `step_`.

    A step costs the host its launches and their preparation, whether it is of one weight or of several, so they should
    be several. But the gradients that wait for it take memory, and the largest one takes enough: a bucket holds no
    more than that, and nothing waits when it comes.

    Backward itself shows in what order it goes through a model, and repeats it. A weight whose gradient comes for the
    first time is stepped by itself; when that backward is over, it goes into a bucket with those that came just before.
    From then on a bucket is stepped when all of it has come. One that comes in part, because a batch does not use the
    rest, stays in parts: weights that are always used together stay together, and what steps a bucket is made once.
    """

    def __init__(self, device: torch.device, largest: int, step_: Callable[[list[Tensor]], None]):
        """`largest` is the bytes of the largest gradient."""
        self._gpu = gpu_number(device)
        self._most, self._step_ = largest, step_
        self._places: dict[int, tuple[Bucket, int]] = {}
        """Bucket and gradient bytes of each weight, by its id, which is quicker to look up than the weight."""
        self._new: list[Tensor] = []
        """Weights whose gradients came for the first time in this backward, in order."""
        self._waiting: dict[Bucket, None] = {}
        """Buckets of which something has come, oldest first."""
        self._bytes = 0
        """Bytes of all gradients that wait."""

    def add(self, weight: Tensor) -> None:
        """Take a gradient, which is complete, and step what it was the last one of."""
        place = self._places.get(id(weight))
        if place is None:
            self._new.append(weight)
            self._step_([weight])
            return
        bucket, size = place
        if not bucket.came:
            self._waiting[bucket] = None
        bucket.came.append(weight)
        bucket.streams.append(raw_stream(self._gpu))
        bucket.bytes += size
        self._bytes += size
        if len(bucket.came) == len(bucket.weights):
            self._apply(bucket)
        while self._bytes > MOST_WAITING * self._most:
            self._apply(next(iter(self._waiting)))

    def flush(self) -> bool:
        """Step whatever waits, and put those that came for the first time into buckets; whether there were any."""
        while self._waiting:
            self._apply(next(iter(self._waiting)))
        bucket, held = Bucket([]), 0
        for weight in self._new:
            size = gradient_bytes(weight)
            if held + size > self._most:
                bucket, held = Bucket([]), 0
            bucket.weights.append(weight)
            held += size
            self._places[id(weight)] = bucket, size
        had_new = bool(self._new)
        self._new = []
        return had_new

    def waiting(self) -> list[Tensor]:
        """Weights whose gradients have come and are not applied yet."""
        return [weight for bucket in self._waiting for weight in bucket.came]

    def _apply(self, bucket: Bucket) -> None:
        """Step those of a bucket that have come; the others are a bucket by themselves from now on."""
        came = set(map(id, bucket.came))
        # After a backward that failed, `zero_grad` may have taken gradients away.
        ready = [weight for weight in bucket.weights if id(weight) in came and weight.grad is not None]
        self._wait_for_streams(bucket)
        # Nothing of it waits any longer, even if the step fails: what it has stepped must not be stepped again.
        self._bytes -= bucket.bytes
        del self._waiting[bucket]
        bucket.empty()
        if len(ready) < len(bucket.weights):
            self._split(bucket, ready)
        if ready:
            self._step_(ready)

    def _split(self, bucket: Bucket, ready: list[Tensor]) -> None:
        first = set(map(id, ready))
        for weights in (ready, [weight for weight in bucket.weights if id(weight) not in first]):
            part = Bucket(list(weights))
            for weight in weights:
                self._places[id(weight)] = part, gradient_bytes(weight)

    def _wait_for_streams(self, bucket: Bucket) -> None:
        """Let the stream that steps the bucket wait for gradients made on another, and their memory for the step."""
        here = raw_stream(self._gpu)
        for weight, there in zip(bucket.came, bucket.streams, strict=True):
            if there != here and weight.grad is not None:
                now = torch.cuda.current_stream(self._gpu)
                now.wait_stream(torch.cuda.get_stream_from_external(there, self._gpu))
                local(weight.grad).record_stream(now)
