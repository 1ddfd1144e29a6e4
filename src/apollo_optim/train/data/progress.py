"""How far some work is, for a person who waits."""

import time
from collections.abc import Callable

SECONDS_BETWEEN_LINES = 10.0


class Progress:
    """Shows lines through `show`, among them how far the work is: of those one in ten seconds at most."""

    def __init__(self, show: Callable[[str], None]):
        self.show = show
        self.last = time.monotonic()

    def __call__(self, line: str) -> None:
        self.last = time.monotonic()
        self.show(line)

    def advance(self, share: float, text: str) -> None:
        """Say that `share` of the work is done, and what it is."""
        if time.monotonic() - self.last >= SECONDS_BETWEEN_LINES:
            self(f"{text} ({share:.0%})")


def progress_of(report: Callable[[str], None] | Progress) -> Progress:
    """`report` itself if it knows how to show progress, else lines through it."""
    return report if isinstance(report, Progress) else Progress(report)
