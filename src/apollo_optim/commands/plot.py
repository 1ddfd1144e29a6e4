"""`apollo plot`: the curves of runs over each other."""

from dataclasses import dataclass
from pathlib import Path

PICTURES = ".png", ".svg", ".pdf"


@dataclass(frozen=True, kw_only=True)
class Plot:
    """Draw loss, perplexity, learning rate, memory and throughput of runs into one picture."""

    runs: tuple[Path, ...]
    """Folders of runs."""
    out: Path = Path("curves.png")
    """The picture: .png, .svg or .pdf."""

    def execute(self) -> int:
        """Draw; 0."""
        from ..train.metrics import draw_curves, records
        from ..train.run import RunFolder
        from ..train.troubles import out_trouble_named

        if self.out.suffix.lower() not in PICTURES:
            raise ValueError(f"--out must be a picture ({', '.join(PICTURES)}), got {self.out}")
        lines = {run: records(RunFolder(run).metrics) for run in self.runs}
        for run, found in lines.items():
            if not found:
                log = RunFolder(run).metrics
                raise ValueError(f"{run} is no run with a log: {log} is missing, or no line of it can be read")
        with out_trouble_named(self.out):
            draw_curves(_by_shortest_name(lines), self.out)
        print(self.out)
        return 0


def _by_shortest_name(lines: dict[Path, list[dict[str, object]]]) -> dict[str, list[dict[str, object]]]:
    """The lines of runs by the names of their folders if those differ, and else by their paths."""
    short = {run.resolve().name: found for run, found in lines.items()}
    return short if len(short) == len(lines) else {str(run): found for run, found in lines.items()}
