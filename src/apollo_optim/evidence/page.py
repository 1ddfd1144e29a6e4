"""Pages of plots, each one file with its styles, scripts and data inside; and the page of one measurement."""

import json
import shlex
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..terminal import width_of, wrapped
from ..train.troubles import out_trouble_named
from .runs import csv_text, significant

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

TEMPLATE = Path(__file__).with_name("page.html")


def write_page(path: Path, title: str, body: str, figures: Mapping[str, "Figure"], files: Mapping[str, str]) -> None:
    """Write a page. Each figure is drawn into the element of the body with its name; `files` can be downloaded."""
    from plotly.offline import get_plotlyjs

    drawn = {name: json.loads(figure.to_json()) for name, figure in figures.items()}
    # A text might contain the end of a script, so "<" is escaped.
    content = json.dumps({"figures": drawn, "files": dict(files)}).replace("<", "\\u003c")
    parts = {
        "title": escape(title),
        "plotly": get_plotlyjs(),
        "body": body,
        "version": __version__,
        "date": time.strftime("%Y-%m-%d"),
        "content": content,
    }
    text = TEMPLATE.read_text(encoding="utf-8")
    pieces: list[str] = []
    for name, part in parts.items():  # in the template's order: a part that was put in is not searched again
        before, _, text = text.partition(f"{{{{{name}}}}}")
        pieces += [before, part]
    with out_trouble_named(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join([*pieces, text]), encoding="utf-8")


def chips(names: Sequence[str]) -> str:
    """Buttons in the groups' colours that show and hide them: the legend of all plots."""
    buttons = "".join(
        f'<button type="button" data-group="{number}" aria-pressed="true"><span class="dot"></span>'
        f"{escape(name)}</button>"
        for number, name in enumerate(names)
    )
    return f'<nav class="chips" aria-label="Methods shown">{buttons}</nav>'


def plot(name: str, heading: str, under: str = "", wide: bool = False) -> str:
    """The element of a figure with its heading; `under` is HTML between the two."""
    return (
        f"<figure{' class=wide' if wide else ''}><h3>{escape(heading)}</h3>{under}"
        f'<div class="plot" id="{escape(name)}" role="img" aria-label="{escape(heading)}"></div></figure>'
    )


def key(kinds: Iterable[str]) -> str:
    """The legend of bars that are coloured by kind."""
    entries = (f'<span><span class="dot" data-kind="{escape(kind)}"></span>{escape(kind)}</span>' for kind in kinds)
    return f'<div class="key">{"".join(entries)}</div>'


def typed(command: Sequence[str]) -> str:
    """A command line, with a button that copies it."""
    return f'<pre><button class="copy" type="button">copy</button><code>{escape(shlex.join(command))}</code></pre>'


def downloads(files: Mapping[str, str]) -> str:
    """Links to the files of a page, which have a text for each name."""
    links = "".join(f'<a download="{escape(name)}" href="#">{escape(what)}</a>' for name, what in files.items())
    return f'<p class="downloads">{links}</p>'


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The outcome of a measurement: plots and numbers, and what the paper shows."""

    title: str
    verdict: str
    """The outcome here, in a sentence or two."""
    paper: str
    """The paper's result on the same question."""
    setting: str
    """The model and data that were trained here, and for how long."""
    names: Sequence[str]
    """Names of what is drawn, in the order of their colours."""
    figures: Mapping[str, "Figure"]
    """Plots by heading."""
    table: Sequence[Mapping[str, Any]]
    """Rows of the table above the plots."""
    rows: Sequence[Mapping[str, Any]]
    """Every number that was measured, for the CSV."""
    caution: str = ""
    """Reasons to doubt the verdict."""
    reading: str = ""
    """The meaning of the dashes and bars in the plots."""
    kinds: Sequence[str] = ()
    """Kinds of which bars are stacked, which have colours of their own."""


def publish(finding: Finding, folder: Path, name: str) -> None:
    """Write NAME.html and NAME.csv, and print the verdict and their paths."""
    numbers = csv_text(list(finding.rows[0]), finding.rows)
    page, file = folder / f"{name}.html", folder / f"{name}.csv"
    places = {f"plot-{number}": made for number, made in enumerate(finding.figures.values())}
    alone = len(places) == 1
    under = key(finding.kinds) if finding.kinds else ""
    headed = zip(places, finding.figures, strict=True)
    plots = "".join(plot(place, heading, under, wide=alone) for place, heading in headed)
    caution = f'<div class="notes"><p>{escape(finding.caution)}</p></div>' if finding.caution else ""
    reading = f'<p class="soft">{escape(finding.reading)}</p>' if finding.reading else ""
    body = (
        f'<h1>{escape(finding.title)}</h1><p class="soft">{escape(finding.setting)}</p>'
        f'<p class="verdict">Measured here: {escape(finding.verdict)}</p>'
        f'<p class="verdict soft">The paper: {escape(finding.paper)}</p>'
        f"{caution}{chips(finding.names)}"
        f'<h2>Numbers</h2>{_table(finding.table)}{reading}<div class="grid">{plots}</div>'
        f"<h2>To repeat it</h2>{typed(['apollo', *sys.argv[1:]])}"
        f"{downloads({file.name: 'Numbers as CSV'})}"
    )
    write_page(page, finding.title, body, places, {file.name: numbers})
    with out_trouble_named(file):
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
