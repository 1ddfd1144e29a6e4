"""A request to stop, made by a signal and answered between two steps."""

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

SIGNALS = signal.SIGTERM, signal.SIGINT

# A terminal sends Ctrl-C to a launcher and to its workers, and the launcher passes its own on: one press, two signals.
ONE_PRESS = 1.0

# What an interrupted run has to come to its end by itself.
GRACE = 1.0

END = b"\0"
"""Tells the listener that the run is over; no signal has this number."""


class Stop:
    """Within this context SIGTERM and Ctrl-C only set `requested`; a second Ctrl-C ends the process at once.

    `say` is told of both the moment they happen. Python runs a signal's handler between two of its own operations, and
    a backward pass is one; so a thread listens for signals, too, and ends the process where the main thread does not.
    """

    def __init__(self, say: Callable[[str], None] = lambda text: None) -> None:
        self.requested: str | None = None
        self._say = say
        self._since = 0.0
        self._before: dict[int, Any] = {}
        self._ended = threading.Event()

    def __enter__(self) -> "Stop":
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        self._wakeup_before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        os.write(self._write, END)
        self._listener.join()
        os.close(self._write)
        os.close(self._read)

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.requested is None:
            self.requested, self._since = signal.Signals(number).name, now
        elif number == signal.SIGINT and now - self._since > ONE_PRESS:
            raise KeyboardInterrupt

    def _listen(self) -> None:
        since: float | None = None
        while (heard := os.read(self._read, 1)) != END:
            number, now = heard[0], time.monotonic()
            if number not in SIGNALS:
                continue
            if since is None:
                since = now
                first, again = ("Ctrl-C", "again") if number == signal.SIGINT else ("SIGTERM", "Ctrl-C")
                self._say(f"{first}: finishing this step, then saving; {again} to quit at once")
            elif number == signal.SIGINT and now - since > ONE_PRESS:
                self._say("quitting at once: steps since the last checkpoint are lost; --resume goes on from there")
                if not self._ended.wait(GRACE):
                    os._exit(128 + signal.SIGINT)
