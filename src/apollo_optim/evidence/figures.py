"""Plots of groups of runs. The page chooses colours and hides groups: a trace only names the group it belongs to."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ..terminal import in_bytes
from .runs import SPEED, STEP_TIME, CurvePoint, Quantity, RunGroup, memory_kinds

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

BAR = 34
"""Height of a bar with the space around it, in pixels."""
LABEL = 76
"""Room for a value to the right of the longest bar, in pixels."""


CURVES = {"loss": ("train", "training loss"), "perplexity": ("validation", "validation perplexity")}
"""Quantities that are drawn as curves: the kind of the lines of the log that have them, and their names."""


def figure(**layout: Any) -> "Figure":
    """An empty plot in the style of the pages, without title and legend, and with narrow margins."""
    from plotly.graph_objects import Figure

    made = Figure()
    made.update_layout(
        template="none",
        showlegend=False,
        margin={"l": 8, "r": 12, "t": 8, "b": 8},
        height=320,
        **layout,
    )
    made.update_xaxes(automargin=True, title_standoff=8)
    made.update_yaxes(automargin=True, title_standoff=8)
    return made


def add_trace(made: "Figure", number: int, name: str | None, x: Iterable[Any], y: Iterable[Any], **look: Any) -> None:
    """Draw a line for the group of this number. `look` has options of plotly, and `paint`, which the page reads."""
    meta = {"group": number, "paint": look.pop("paint", "line")}
    made.add_scatter(x=list(x), y=list(y), name=name, meta=meta, **{"mode": "lines", **look})


def curve_figure(groups: Sequence[RunGroup], key: str, against: str) -> "Figure":
    """A line for each group, with a band from its lowest seed to its highest, against "tokens" or "seconds"."""
    kind, name = CURVES[key]
    made = figure(hovermode="x unified" if against == "tokens" else "closest")
    curves = [group.curve(kind, key) for group in groups]
    for number, (group, points) in enumerate(zip(groups, curves, strict=True)):
        add_band(made, number, group.name, [getattr(point, against) for point in points], points)
    made.update_xaxes(title_text={"tokens": "tokens", "seconds": "seconds of training"}[against], rangemode="tozero")
    if key == "perplexity":
        log_scale_(made, [value for curve in curves for point in curve for value in point.value.values])
    made.update_yaxes(title_text=name)
    return made


def log_scale_(made: "Figure", values: Sequence[float]) -> None:
    """Make the axis logarithmic if the values differ so much that small ones would be a flat line."""
    if values and max(values) > 4 * min(values):
        low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
        ticks = [digit * 10.0**power for power in range(low, high + 1) for digit in (1, 1.5, 2, 3, 4, 5, 7)]
        made.update_yaxes(type="log", tickvals=ticks, ticktext=[f"{tick:,g}" for tick in ticks])


def add_band(made: "Figure", number: int, name: str, across: Sequence[float], points: Sequence[CurvePoint]) -> None:
    """Draw the mean of a group, and its spread if it has several seeds."""
    values = [point.value for point in points]
    seeds = len(values[0].values) if values else 0
    if seeds > 1:
        low, high = [value.low for value in values], [value.high for value in values]
        made.add_scatter(
            x=[*across, *reversed(across)],
            y=[*high, *reversed(low)],
            fill="toself",
            mode="none",
            hoverinfo="skip",
            meta={"group": number, "paint": "band"},
        )
    spread = "  (%{customdata[0]:.4~f} to %{customdata[1]:.4~f})" if seeds > 1 else ""
    look = {"mode": "lines+markers"} if len(points) < 30 else {}
    ends, hover = [[value.low, value.high] for value in values], f"%{{y:.4~f}}{spread}"
    means = [value.mean for value in values]
    add_trace(made, number, name, across, means, customdata=ends, hovertemplate=hover, **look)


def error_bars(
    values: Sequence[float], low: Sequence[float], high: Sequence[float], visible: bool = True
) -> dict[str, Any]:
    """Plotly's options for a line from the lowest to the highest at each value."""
    return {
        "type": "data",
        "symmetric": False,
        "array": [top - value for top, value in zip(high, values, strict=True)],
        "arrayminus": [value - bottom for bottom, value in zip(low, values, strict=True)],
        "visible": visible,
    }


def stacked_figure(held: Mapping[str, Mapping[str, float]]) -> "Figure":
    """A bar for each name, stacked from its kinds of bytes, in gigabytes or megabytes."""
    unit, bytes_of = ("GB", 1e9) if max(sum(kinds.values()) for kinds in held.values()) >= 1e9 else ("MB", 1e6)
    made = _bars(list(held), unit, barmode="stack")
    for number, (name, kinds) in enumerate(held.items()):
        for kind, size in kinds.items():
            made.add_bar(
                x=[size / bytes_of],
                y=[name],
                orientation="h",
                name=kind,
                hovertemplate=f"{kind}: {in_bytes(size)}<extra>{name}</extra>",
                meta={"group": number, "paint": "kind", "kind": kind},
            )
    return made


class Bar(NamedTuple):
    """A value and the range that it varied in."""

    value: float
    low: float
    high: float


def quantity_figure(groups: Sequence[RunGroup], quantity: Quantity, axis: str) -> "Figure":
    """A bar for each group, with its spread over the seeds."""
    found = {group.name: group.measured(quantity) for group in groups}
    bars = {name: None if each is None else Bar(each.mean, each.low, each.high) for name, each in found.items()}
    return bar_figure(bars, axis, quantity.shown)


def bar_figure(bars: Mapping[str, Bar | None], axis: str, shown: Callable[[float], str] = "{:.4g}".format) -> "Figure":
    """A bar for each name, with its spread; none for a name without a value."""
    made = _bars(list(bars), axis)
    for number, (name, bar) in enumerate(bars.items()):
        if bar is None:
            continue
        spread = f" ({shown(bar.low)} to {shown(bar.high)})" if bar.low < bar.high else ""
        made.add_bar(
            x=[bar.value],
            y=[name],
            orientation="h",
            name=name,
            error_x=error_bars([bar.value], [bar.low], [bar.high], visible=bool(spread)),
            hovertemplate=f"{shown(bar.value)}{spread}<extra>{name}</extra>",
            meta={"group": number, "paint": "bar"},
        )
        made.add_scatter(  # beyond the spread, which would cross out a label on the bar
            x=[bar.high],
            y=[name],
            mode="text",
            text=[f" {shown(bar.value)}"],
            textposition="middle right",
            cliponaxis=False,
            hoverinfo="skip",
            meta={"group": number, "paint": "label"},
        )
    made.update_layout(margin_r=LABEL)
    return made


def _bars(names: Sequence[str], axis: str, **layout: Any) -> "Figure":
    made = figure(bargap=0.3, dragmode=False, **layout)
    made.update_layout(height=70 + BAR * len(names))
    made.update_yaxes(categoryorder="array", categoryarray=list(reversed(names)), showgrid=False, fixedrange=True)
    made.update_xaxes(title_text=axis, rangemode="tozero", fixedrange=True)
    return made


def report_figures(groups: Sequence[RunGroup]) -> dict[str, "Figure"]:
    """Every plot of a report, by the id of its element on the page."""
    figures = {
        f"{key}-{against}": curve_figure(groups, key, against) for key in CURVES for against in ("tokens", "seconds")
    }
    return figures | {
        "memory": stacked_figure({group.name: memory_kinds(group) for group in groups}),
        "step": quantity_figure(groups, STEP_TIME, "milliseconds"),
        "speed": quantity_figure(groups, SPEED, "tokens per second"),
    }
