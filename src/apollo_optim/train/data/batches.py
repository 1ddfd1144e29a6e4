"""The rows that a step trains on: a function of where it is in the run, and of nothing that must be saved."""

from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count, islice

import numpy as np
import torch
from torch import Tensor

from .shuffle import shuffled
from .tokens import TokenSet


class Batches:
    """The corpus in windows of `length` tokens, in a random order of each epoch's own."""

    def __init__(self, tokens: TokenSet, length: int, seed: int):
        if tokens.sequences(length) == 0:
            raise ValueError(f"too little text: {len(tokens):,} tokens are less than one sequence of {length}")
        if not 0 <= seed < 2**64:
            raise ValueError(f"seed must be an integer in [0, 2**64), got {seed!r}")
        self.tokens = tokens
        self.length = length
        self.seed = seed
        self.sequences = tokens.sequences(length)
        """In one epoch."""

    def rows(self, first: int, count: int) -> Tensor:
        """Sequences number `first` to `first + count` of the run [count, length], int64.

        A rank takes its own of these numbers, so that what is trained on does not depend on how many ranks there are.
        """
        indices = np.arange(first, first + count, dtype=np.int64)
        return self.tokens.windows(shuffled(indices, self.sequences, self.seed), self.length)


def prefetched(
    load: Callable[[int], Tensor], first: int, last: int | None = None, *, ahead: int = 4, pin: bool | None = None
) -> Generator[Tensor, None, None]:
    """`load(number)` from `first` up to but not including `last`, or for ever, made in a thread up to `ahead` before.

    They come in pinned memory if `pin`, by default where there is CUDA. Closing the generator stops the thread.
    """
    pinned = torch.cuda.is_available() if pin is None else pin

    def loaded(number: int) -> Tensor:
        return load(number).pin_memory() if pinned else load(number)

    numbers = iter(count(first) if last is None else range(first, last))
    with ThreadPoolExecutor(1, thread_name_prefix="batches") as thread:
        waiting: deque[Future[Tensor]] = deque(thread.submit(loaded, number) for number in islice(numbers, ahead))
        try:
            while waiting:
                result = waiting.popleft().result()
                waiting.extend(thread.submit(loaded, number) for number in islice(numbers, 1))
                yield result
        finally:
            for future in waiting:
                future.cancel()
