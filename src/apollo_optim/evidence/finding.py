"""What an analysis found: a page with its plots, and its numbers as CSV."""

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..terminal import width_of, wrapped
from .page import chips, downloads, key, plot, write_page
from .runs import csv_text, significant

if TYPE_CHECKING:
    from plotly.graph_objects import Figure


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Plots and numbers, with what to compare them to."""

    title: str
    verdict: str
    """What was measured here, in a sentence or two."""
    paper: str
    """What the paper shows of this."""
    setting: str
    """What was trained here, on what and for how long."""
    names: Sequence[str]
    """What is drawn, in the order of its colours."""
    figures: Mapping[str, "Figure"]
    """By heading."""
    table: Sequence[Mapping[str, Any]]
    """Rows to show above the plots."""
    rows: Sequence[Mapping[str, Any]]
    """Every number that was measured."""
    caution: str = ""
    """Why it may say less than it seems to."""
    reading: str = ""
    """What dashes and bars in the plots stand for."""
    kinds: Sequence[str] = ()
    """What is told apart by colours other than those of the names."""


def publish(finding: Finding, folder: Path, name: str) -> None:
    """Write NAME.html and NAME.csv, and print the verdict and where they are."""
    numbers = csv_text(list(finding.rows[0]), finding.rows)
    page, file = folder / f"{name}.html", folder / f"{name}.csv"
    places = {f"plot-{number}": made for number, made in enumerate(finding.figures.values())}
    alone = len(places) == 1
    under = key(finding.kinds) if finding.kinds else ""
    headed = zip(places, finding.figures, strict=True)
    plots = "".join(plot(place, heading, under, wide=alone) for place, heading in headed)
    caution = f'<div class="notes"><p>{escape(finding.caution)}</p></div>' if finding.caution else ""
    reading = f'<p class="soft">{escape(finding.reading)}</p>' if finding.reading else ""
    command = escape(shlex.join(["apollo", *sys.argv[1:]]))
    body = (
        f'<h1>{escape(finding.title)}</h1><p class="soft">{escape(finding.setting)}</p>'
        f'<p class="verdict">Measured here: {escape(finding.verdict)}</p>'
        f'<p class="verdict soft">The paper: {escape(finding.paper)}</p>'
        f"{caution}{chips(finding.names)}"
        f'<h2>Numbers</h2>{_table(finding.table)}{reading}<div class="grid">{plots}</div>'
        f'<h2>To repeat it</h2><pre><button class="copy" type="button">copy</button><code>{command}</code></pre>'
        f"{downloads({file.name: 'Numbers as CSV'})}"
    )
    write_page(page, finding.title, body, places, {file.name: numbers})
    file.write_text(numbers, encoding="utf-8")
    print(wrapped(f"Measured here: {finding.verdict}", width_of(sys.stdout)), page, file, sep="\n")


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return ""
    heads = "".join(f"<th>{escape(name)}</th>" for name in rows[0])
    lines = "".join(
        "<tr>"
        + "".join(
            f'<td data-label="{escape(name)}"><span>{escape(_shown(value))}</span></td>' for name, value in row.items()
        )
        + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{lines}</tbody></table><br>"


def _shown(value: Any) -> str:
    return significant(value) if isinstance(value, float) else "-" if value is None else str(value)
