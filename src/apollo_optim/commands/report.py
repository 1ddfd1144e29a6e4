"""`apollo report`: a page on runs that exist."""

import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """Write one page on runs: who is ahead and at what cost, with curves, tables, and how to repeat each run."""

    runs: tuple[Path, ...]
    """Folders of runs, or folders that have some inside; those that differ only in their seed are shown together."""
    out: Path = Path("report.html")
    """The page: one file, which needs no network."""

    def execute(self) -> int:
        """Write; 0."""
        from ..evidence.report import write_report
        from ..evidence.runs import found_runs

        if self.out.suffix.lower() not in (".html", ".htm"):
            raise ValueError(f"--out must be a page (.html), got {self.out}")
        runs, silent = found_runs(self.runs)
        write_report(runs, self.out, silent)
        for sentence in silent:
            print(sentence, file=sys.stderr)
        print(self.out)
        return 0
