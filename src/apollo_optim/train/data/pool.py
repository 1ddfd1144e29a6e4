"""Batches through many processes, in order."""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial

from .encode import Encoded, Encoding, encoded_batch, encoder_of
from .readers import Batch

AHEAD = 4
"""Batches under way for each process: enough that none waits, few enough to hold in memory."""


def usable_cores() -> int:
    """Cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def encoded_batches(batches: Iterable[Batch], encoding: Encoding, workers: int) -> Generator[Encoded, None, None]:
    """The batches' tokens in the batches' order, made by this process if `workers` is 1, else by so many others."""
    if workers == 1:
        encode = encoder_of(encoding)
        for batch in batches:
            yield encoded_batch(batch, encoding, encode)
        return
    # Not forked: threads of tokenizers, arrow and torch are already running here.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_begin, initargs=(encoding,))
    waiting: deque[Future[Encoded]] = deque()
    try:
        for batch in batches:
            waiting.append(pool.submit(_work, batch))
            if len(waiting) >= AHEAD * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise ValueError(
            f"workers={workers}: a process that tokenises died: too little memory for so many, or a calling script "
            "without `if __name__ == '__main__':`. What is done is kept: run it again, with workers=1 if need be"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


# One process tokenises for one preparation only.
_work_of_this_process: Callable[[Batch], Encoded] | None = None


def _begin(encoding: Encoding) -> None:
    """Make a new process ready for `_work`."""
    global _work_of_this_process
    # Ctrl-C reaches every process of the terminal; the parent decides what becomes of it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _work_of_this_process = partial(encoded_batch, encoding=encoding, encode=encoder_of(encoding))


def _work(batch: Batch) -> Encoded:
    assert _work_of_this_process is not None
    return _work_of_this_process(batch)


def _die_with_parent() -> None:
    # A killed parent cannot say so, and its queue never ends, since its other readers can write to it too.
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
