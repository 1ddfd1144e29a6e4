"""A request to stop, made by a signal and answered between two steps."""

import signal
import time
from types import FrameType, TracebackType
from typing import Any

SIGNALS = signal.SIGTERM, signal.SIGINT

# A terminal sends Ctrl-C to a launcher and to its workers, and the launcher passes its own on: one press, two signals.
ONE_PRESS = 1.0


class Stop:
    """Within this context SIGTERM and Ctrl-C only set `requested`; a second Ctrl-C interrupts at once."""

    def __init__(self) -> None:
        self.requested: str | None = None
        self._since = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Stop":
        self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.requested is None:
            self.requested, self._since = signal.Signals(number).name, now
        elif number == signal.SIGINT and now - self._since > ONE_PRESS:
            raise KeyboardInterrupt
