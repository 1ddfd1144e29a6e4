"""Pages of plots, one file each, that load nothing: styles, scripts and data are inside."""

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from .. import __version__

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

TEMPLATE = Path(__file__).with_name("page.html")


def write_page(
    path: Path, title: str, body: str, figures: Mapping[str, "Figure"], files: Mapping[str, str] | None = None
) -> None:
    """Write a page: `figures` are drawn into the elements of the body with their names, `files` can be downloaded."""
    from plotly.offline import get_plotlyjs

    drawn = {name: json.loads(figure.to_json()) for name, figure in figures.items()}
    # A text could hold the end of a script, which JSON spells otherwise.
    content = json.dumps({"figures": drawn, "files": dict(files or {})}).replace("<", "\\u003c")
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
    for name, part in parts.items():  # in the order of the template, so that no part is searched for the next
        before, _, text = text.partition(f"{{{{{name}}}}}")
        pieces += [before, part]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join([*pieces, text]), encoding="utf-8")
    except OSError as error:
        raise ValueError(f"--out {path} cannot be written: {error.strerror}") from None


def chips(names: Sequence[str]) -> str:
    """Buttons that show and hide groups, in their colours: the legend of every plot."""
    buttons = "".join(
        f'<button type="button" data-group="{number}" aria-pressed="true"><span class="dot"></span>'
        f"{escape(name)}</button>"
        for number, name in enumerate(names)
    )
    return f'<nav class="chips" aria-label="Methods shown">{buttons}</nav>'


def plot(name: str, heading: str, under: str = "", wide: bool = False) -> str:
    """The place of a figure, with its heading; `under` is HTML between them."""
    return (
        f"<figure{' class=wide' if wide else ''}><h3>{escape(heading)}</h3>{under}"
        f'<div class="plot" id="{escape(name)}" role="img" aria-label="{escape(heading)}"></div></figure>'
    )


def key(kinds: Iterable[str]) -> str:
    """What the colours of bars by kind stand for."""
    entries = (f'<span><span class="dot" data-kind="{escape(kind)}"></span>{escape(kind)}</span>' for kind in kinds)
    return f'<div class="key">{"".join(entries)}</div>'


def downloads(files: Mapping[str, str]) -> str:
    """Links to the files of a page: by name, what they hold."""
    links = "".join(f'<a download="{escape(name)}" href="#">{escape(what)}</a>' for name, what in files.items())
    return f'<p class="downloads">{links}</p>'
