"""What an analysis found: a page with its plots, and its numbers as CSV."""

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .page import chips, downloads, plot, write_page
from .runs import csv_text, significant

if TYPE_CHECKING:
    from plotly.graph_objects import Figure


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Plots and numbers, with what to compare them to."""

    title: str
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


def write_finding(finding: Finding, folder: Path, name: str) -> list[Path]:
    """Write NAME.html and NAME.csv; where they are."""
    numbers = csv_text(list(finding.rows[0]), finding.rows)
    page, file = folder / f"{name}.html", folder / f"{name}.csv"
    places = {f"plot-{number}": made for number, made in enumerate(finding.figures.values())}
    alone = len(places) == 1
    plots = "".join(plot(place, heading, wide=alone) for place, heading in zip(places, finding.figures, strict=True))
    caution = f'<div class="notes"><p>{escape(finding.caution)}</p></div>' if finding.caution else ""
    reading = f'<p class="soft">{escape(finding.reading)}</p>' if finding.reading else ""
    command = escape(shlex.join(["apollo", *sys.argv[1:]]))
    body = (
        f'<h1>{escape(finding.title)}</h1><p class="soft">{escape(finding.setting)}</p>'
        f'<p class="verdict">The paper: {escape(finding.paper)}</p>{caution}{chips(finding.names)}'
        f'<h2>Measured here</h2>{_table(finding.table)}{reading}<div class="grid">{plots}</div>'
        f'<h2>To repeat it</h2><pre><button class="copy" type="button">copy</button><code>{command}</code></pre>'
        f"{downloads({file.name: 'Numbers as CSV'})}"
    )
    write_page(page, finding.title, body, places, {file.name: numbers})
    file.write_text(numbers, encoding="utf-8")
    return [page, file]


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
