"""Gradients that come one after another, and wait for a few of their neighbours to be applied together."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from ..fused.streams import gpu_number, raw_stream

BUCKET = 1.6
"""How much of the largest gradient a bucket may hold: all of a layer, in the shape of LLaMA-7B."""

MOST_WAITING = 2
"""Buckets' worth of gradients that wait at a time, if they come in another order than before."""


def bucket_bytes(weights: Iterable[Tensor]) -> int:
    """How many bytes of gradients are gathered before they are applied.

    A step costs the host its launches and their preparation, whether it is of one weight or of several, so they should
    be several. The largest gradient must be there at some time, all of it: little more may be there at any time, and
    the peak is little higher.
    """
    return int(BUCKET * max(map(gradient_bytes, weights)))


def gradient_bytes(weight: Tensor) -> int:
    return weight.numel() * weight.element_size()


class Bucket:
    """Weights that are stepped together."""

    def __init__(self, weights: list[Tensor]):
        self.weights = weights
        self.empty()

    def empty(self) -> None:
        """Nothing waits."""
        self.came: list[Tensor] = []
        """Those whose gradients wait."""
        self.streams: list[int] = []
        """On which each of these was made."""
        self.bytes = 0
        """Of the gradients that wait."""


class Buckets:
    """The weights of one device in buckets, and their gradients of this batch that wait to be applied by `step_`.

    A weight goes into a bucket when its gradient comes for the first time, with those that came just before: backward
    itself shows in what order it goes through a model, and repeats it. From then on a bucket is stepped when all of it
    has come. One that comes in part, because a batch does not use the rest, stays in parts: weights that are always
    used together stay together, no set of weights is stepped in two ways, and what steps a bucket is made once.
    """

    def __init__(self, device: torch.device, budget: int, step_: Callable[[list[Tensor]], None]):
        self._gpu = gpu_number(device)
        self._budget, self._step_ = budget, step_
        self._places: dict[int, tuple[Bucket, int]] = {}
        """By the weight's id, which is quicker to ask for than the weight: its bucket and its gradient's bytes."""
        self._growing: Bucket | None = None
        """Takes the weights that come for the first time."""
        self._waiting: dict[Bucket, None] = {}
        """Those of which something has come, oldest first."""
        self._bytes = 0
        """Of all gradients that wait."""

    def add(self, weight: Tensor) -> None:
        """Take a gradient, which is complete, and step what it was the last one of."""
        bucket, size = self._places.get(id(weight)) or self._joined(weight)
        if not bucket.came:
            self._waiting[bucket] = None
        bucket.came.append(weight)
        bucket.streams.append(raw_stream(self._gpu))
        bucket.bytes += size
        self._bytes += size
        if len(bucket.came) == len(bucket.weights) and bucket is not self._growing:
            self._apply(bucket)
        while self._bytes > MOST_WAITING * self._budget:
            self._apply(next(iter(self._waiting)))

    def flush(self) -> None:
        """Step whatever waits."""
        self._growing = None
        while self._waiting:
            self._apply(next(iter(self._waiting)))

    def waiting(self) -> list[Tensor]:
        """Weights whose gradients have come and are not applied yet."""
        return [weight for bucket in self._waiting for weight in bucket.came]

    def _joined(self, weight: Tensor) -> tuple[Bucket, int]:
        """The bucket of a weight that has had none, with the weight in it."""
        size, bucket = gradient_bytes(weight), self._growing
        if bucket is not None and _full_bytes(bucket) + size > self._budget:
            self._apply(bucket)
            bucket = None
        if bucket is None:
            bucket = self._growing = Bucket([])
        bucket.weights.append(weight)
        if _full_bytes(bucket) >= self._budget:
            self._growing = None
        self._places[id(weight)] = bucket, size
        return bucket, size

    def _apply(self, bucket: Bucket) -> None:
        """Step those of a bucket that have come; the others are a bucket by themselves from now on."""
        if bucket is self._growing:
            self._growing = None
        came = set(map(id, bucket.came))
        # After a backward that failed, `zero_grad` may have taken gradients away.
        ready = [weight for weight in bucket.weights if id(weight) in came and weight.grad is not None]
        if ready:
            self._wait_for_streams(bucket)
        # Nothing of it waits any longer, even if the step fails: what it has stepped must not be stepped again.
        self._bytes -= bucket.bytes
        del self._waiting[bucket]
        bucket.empty()
        if 0 < len(ready) < len(bucket.weights):
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
                weight.grad.record_stream(now)


def _full_bytes(bucket: Bucket) -> int:
    """Of the gradients of all its weights."""
    return sum(map(gradient_bytes, bucket.weights))
