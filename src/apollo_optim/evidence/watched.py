"""Analyses that look into a training: what projections see of gradients, and where updates lead.

Shapes: R rank, S the smaller side of a weight, C its channels.
"""

import itertools
import math
import re
import statistics
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..core.direction import Adam, Moments, corrected_step, update_moments_
from ..core.limiter import gain
from ..core.projection import gaussian_basis, project, random_rows, svd_basis
from ..core.shape import MatrixShape, matrix_shape
from ..param_groups import param_groups
from ..terminal import counted
from ..train.data.batches import Windows
from ..train.data.corpus import prepared_corpus
from ..train.methods import prepared_method
from ..train.model import built_model, objective, silence_libraries
from ..train.pretrain import PretrainOptions
from .figures import add_trace, error_bars, figure
from .page import Finding
from .runs import significant

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

SEEN = 5
"""Steps of a training that are looked at, evenly spread."""
REFRESH_EVERY = 200
"""Steps that a basis is kept for, as in the paper."""
THEORY = {"paint": "theory", "hoverinfo": "skip"}
"""The look of a line that theory predicts: dashes."""
ADAM = {"betas": (0.9, 0.999), "eps": 1e-8}


@dataclass(frozen=True)
class Matrix2D:
    """A projected weight and its place in the model."""

    name: str
    weight: nn.Parameter
    shape: MatrixShape

    @property
    def kind(self) -> str:
        """Its name within the layer: q_proj, down_proj."""
        return self.name.split(".")[-2]

    @property
    def depth(self) -> int:
        """Its layer, counted from 0."""
        found = re.search(r"\.(\d+)\.", self.name)
        return int(found[1]) if found else 0

    def gradient_SC(self) -> Tensor:
        """Its gradient in float32, smaller side first."""
        assert self.weight.grad is not None
        return (self.weight.grad.mT if self.shape.channels_are_rows else self.weight.grad).float()


@dataclass(frozen=True)
class Moment:
    """A training with gradients, just before a step."""

    step: int
    """The number of steps taken before."""
    loss: float
    batch: tuple[Tensor, Tensor]
    model: nn.Module
    objective: nn.Module
    matrices: Sequence[Matrix2D]


def training(options: PretrainOptions) -> Iterator[Moment]:
    """The moments of a run with these options, of which nothing is saved."""
    silence_libraries()
    device, schedule, seed = options.run.place(), options.schedule, options.run.seed
    corpus = prepared_corpus(options.data, tokens_wanted=options.tokens_read)
    model = built_model(options.model, corpus.tokenizer.vocabulary, device, seed)
    corpus.check(schedule.sequence + 1, model.config.vocab_size)
    matrices = _matrices(model)
    prepared = prepared_method(options.method, model, options.steps, seed)
    loss_of = objective(options.model, prepared.model, device)
    examples = Windows(corpus.train, schedule.sequence, seed)
    rates = [(group, float(group["lr"])) for group in prepared.optimizer.param_groups]
    for step in range(options.steps):
        for group, rate in rates:
            group["lr"] = rate * schedule.lr_factor(step, options.steps)
        tokens, labels = examples.batch(step * schedule.batch_rows, schedule.batch_rows)
        batch = tokens.to(device), labels.to(device)
        loss = loss_of(*batch)
        loss.backward()
        yield Moment(step, loss.item(), batch, prepared.model, loss_of, matrices)
        if schedule.clip is not None:
            nn.utils.clip_grad_norm_(prepared.model.parameters(), schedule.clip)
        prepared.optimizer.step()
        prepared.optimizer.zero_grad(set_to_none=True)


def _matrices(model: nn.Module) -> list[Matrix2D]:
    """The weights that APOLLO projects."""
    projected = [named for group in param_groups(model, rank=1) if group["rank"] for named in group["params"]]
    shapes = [(name, weight, matrix_shape(weight.shape, 1)) for name, weight in projected if weight.dim() == 2]
    return [Matrix2D(name, weight, shape) for name, weight, shape in shapes if shape is not None]


def seen_steps(steps: int, most: int = SEEN) -> list[int]:
    """The steps that are looked at, including the first and the last."""
    count = min(most, steps)
    return sorted({round(number * (steps - 1) / max(count - 1, 1)) for number in range(count)})


def setting(options: PretrainOptions) -> str:
    """The model, the data and the length of a training, in words."""
    batch = options.schedule.batch_tokens
    return (
        f"{options.model.model} on {options.data.data}, {options.steps} steps of {batch} tokens "
        f"({counted(options.steps * batch)} in all)"
    )


FRACTIONS = {"S/8": 1 / 8, "S/4": 1 / 4}
"""Ranks of the paper's figure, as shares of the smaller side."""


def ratio(options: PretrainOptions) -> Finding:
    """APOLLO's factor of each channel relative to full rank's, which is sqrt(R / S) by the paper's theorem."""
    kept: dict[tuple[str, str], Moments] = {}
    rows: list[dict[str, Any]] = []
    seen = seen_steps(options.steps)
    for moment in training(options):
        adam = Adam(step=moment.step + 1, **ADAM)
        for matrix in moment.matrices:
            grad_SC = matrix.gradient_SC()
            gains = {
                name: _gain_C(grad_SC, matrix, share, kept, name, adam)
                for name, share in {"S": 1.0, **FRACTIONS}.items()
            }
            if moment.step in seen:
                rows += [_ratios(matrix, moment.step, name, gains[name] / gains["S"]) for name in FRACTIONS]
    medians = {
        (name, step): statistics.median(row["ratio"] for row in rows if (row["rank"], row["step"]) == (name, step))
        for name, step in itertools.product(FRACTIONS, seen)
    }
    table = [
        {"rank": name, "in theory": math.sqrt(share), **{f"step {step}": medians[name, step] for step in seen}}
        for name, share in FRACTIONS.items()
    ]
    off = [median / math.sqrt(FRACTIONS[name]) - 1 for (name, _), median in medians.items()]
    furthest = max(rows, key=lambda row: abs(row["ratio"] / row["theory"] - 1))
    last = _by_kind([row for row in rows if row["step"] == seen[-1]])
    figures = {"All weights, over the training": _ratio_figure(rows, "step")}
    figures |= {f"{kind}, by layer, at step {seen[-1]}": _ratio_figure(own, "layer") for kind, own in last.items()}
    return Finding(
        title="Channel factors of a projection against full rank",
        verdict=f"the medians over all weights are {min(off):+.1%} to {max(off):+.1%} from theory at the "
        f"{'step' if len(seen) == 1 else f'{len(seen)} steps'} looked at. Furthest from it is {furthest['weight']} of "
        f"layer {furthest['layer']} at step {furthest['step']}, with {furthest['ratio']:.3f} in place of "
        f"{furthest['theory']:.3f}.",
        paper="the factors of rank S/8, S/4 and S are as 1 : sqrt(2) : 2 sqrt(2), in every kind of layer, at every "
        "stage (LLaMA-350M). So their ratios to full rank are 0.354 and 0.5.",
        setting=f"{setting(options)}, {options.method.method}, seed {options.run.seed}",
        names=list(FRACTIONS),
        figures=figures,
        table=table,
        rows=rows,
        reading="S is the smaller side of a weight, R the rank. Shown is the factor by which a channel of the gradient "
        "(a row or a column) is scaled, divided by the factor at full rank: medians over channels. Bars have the "
        "middle 80% of them, dashes are the theory's sqrt(R/S).",
    )


def _by_kind(rows: Iterable[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The rows of each kind of weight."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["weight"], []).append(row)
    return found


def _gain_C(
    grad_SC: Tensor, matrix: Matrix2D, share: float, kept: dict[tuple[str, str], Moments], name: str, adam: Adam
) -> Tensor:
    """The factor of each channel at a share of full rank. `kept` has the moments, which are updated."""
    basis_RS = None
    if share < 1:
        shape = matrix_shape(matrix.weight.shape, share)
        assert shape is not None
        basis_RS = gaussian_basis(shape, 0, int(adam.step - 1) // REFRESH_EVERY, torch.float32, grad_SC.device)
    low_RC = project(grad_SC, basis_RS)
    moments = kept.setdefault((matrix.name, name), Moments(torch.zeros_like(low_RC), torch.zeros_like(low_RC)))
    update_moments_(moments, low_RC, adam.betas)
    return gain(corrected_step(moments, adam), low_RC, "channel")


def _ratios(matrix: Matrix2D, step: int, name: str, ratio_C: Tensor) -> dict[str, Any]:
    """The row of a weight at a rank: its ratios' median and middle 80%."""
    low, median, high = ratio_C.nanquantile(torch.tensor([0.1, 0.5, 0.9], device=ratio_C.device)).tolist()
    where = {"weight": matrix.kind, "layer": matrix.depth, "step": step, "rank": name}
    return where | {"ratio": median, "low_10%": low, "high_90%": high, "theory": math.sqrt(FRACTIONS[name])}


def _ratio_figure(rows: Sequence[dict[str, Any]], across: str) -> "Figure":
    """Medians with the middle 80% of channels, and theory as a dashed line."""
    made = figure(hovermode="closest")
    for number, (name, share) in enumerate(FRACTIONS.items()):
        places = sorted({row[across] for row in rows})
        at = [[row for row in rows if row["rank"] == name and row[across] == place] for place in places]
        middle, low, high = (
            [statistics.median(row[key] for row in found) for found in at] for key in ("ratio", "low_10%", "high_90%")
        )
        _line(made, number, name, places, middle, low, high)
        add_trace(made, number, None, places, [math.sqrt(share)] * len(places), **THEORY)
    _name_axis_(made, rows, across)
    made.update_yaxes(title_text="factor / full rank's", rangemode="tozero")
    return made


def _name_axis_(made: "Figure", rows: Sequence[dict[str, Any]], across: str) -> None:
    """Title the axis, with a tick for each rank, or for each layer if there are few."""
    made.update_xaxes(title_text="rank" if across == "share_of_side" else across)
    if across == "share_of_side":
        made.update_xaxes(type="log", tickvals=RANK_SHARES, ticktext=[f"S/{round(1 / share)}" for share in RANK_SHARES])
    elif across == "layer" and len({row[across] for row in rows}) <= 12:
        made.update_xaxes(dtick=1)


def _line(made: "Figure", number: int, name: str, x: Sequence[float], y: Sequence[float], *ends: Any) -> None:
    """Draw values, and if `ends` are given, a bar from the lowest to the highest at each."""
    spread = {"error_y": error_bars(y, *ends)} if ends else {}
    hover = f"%{{y:.4~g}}<extra>{name}</extra>"
    add_trace(made, number, name, x, y, hovertemplate=hover, mode="lines+markers", **spread)


SEERS = "SVD of this gradient", "SVD of an earlier gradient", "random"
"""The source of the R directions of a projection."""


def spectrum(options: PretrainOptions) -> Finding:
    """The share of a gradient's norm that a projection sees: |P G| / |G|, where P projects on R directions."""
    rows: list[dict[str, Any]] = []
    earlier: dict[str, Tensor] = {}
    seen = seen_steps(options.steps)
    for moment in training(options):
        if moment.step in seen:
            for matrix in moment.matrices:
                rows += _seen(matrix, moment.step, earlier)
    last = seen[-1]
    quarter = [row for row in rows if row["share_of_side"] == 0.25]
    at_end = [row for row in rows if row["step"] == last]
    figures = {
        f"All weights against rank, at step {last}": _seen_figure(at_end, "share_of_side"),
        "All weights at rank S/4, over the training": _seen_figure(quarter, "step"),
    }
    figures |= {
        f"{kind} at rank S/4, by layer, at step {last}": _seen_figure(
            [row for row in own if row["step"] == last], "layer"
        )
        for kind, own in _by_kind(quarter).items()
    }
    shares = sorted({row["share_of_side"] for row in rows})
    seen_by = {by: _seen_median(at_end, by, 0.25) for by in SEERS}
    told = ", ".join(f"{by} {part:.0%}" for by, part in seen_by.items() if part is not None)
    table = [
        {"directions": by} | {f"rank S/{round(1 / share)}": _seen_median(at_end, by, share) for share in shares}
        for by in SEERS
    ]
    return Finding(
        title="What a projection sees of a gradient",
        verdict=f"at rank S/4, at step {last}, these see so much of a gradient's norm: {told}. In theory "
        "random ones see 50%.",
        paper="GaLore needs the gradient to lie in few directions, and pays for their SVD; APOLLO only scales the "
        "whole gradient by what it sees in random ones, which see sqrt(R/S) of any.",
        setting=f"{setting(options)}, {options.method.method}, seed {options.run.seed}",
        names=list(SEERS),
        figures=figures,
        table=table,
        rows=rows,
        reading="S is the smaller side of a weight, R the rank; 1 is all of a gradient's norm. Medians over weights; "
        "bars go from the lowest to the highest of them, dashes are the theory's sqrt(R/S) of random directions. The "
        "earlier gradient is that of the point before.",
    )


RANK_SHARES = 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2


def _seen(matrix: Matrix2D, step: int, earlier: dict[str, Tensor]) -> Iterator[dict[str, Any]]:
    """Rows on one weight. `earlier` has its singular directions at the last step looked at, and is updated."""
    grad_SC, side = matrix.gradient_SC(), matrix.shape.side
    norm = torch.linalg.vector_norm(grad_SC)
    directions_SS = svd_basis(grad_SC, side)
    before_SS, earlier[matrix.name] = earlier.get(matrix.name), directions_SS
    for share in RANK_SHARES:
        shape = matrix_shape(matrix.weight.shape, share)
        assert shape is not None
        random_RS = random_rows(shape, step, torch.float32, grad_SC.device)
        taken = zip(SEERS, (directions_SS, before_SS, random_RS), strict=True)
        for by, basis in taken:
            if basis is not None and norm > 0:
                part = torch.linalg.vector_norm(basis[: shape.rank] @ grad_SC) / norm
                where = {"weight": matrix.kind, "layer": matrix.depth, "step": step, "directions": by}
                yield where | {"rank": shape.rank, "share_of_side": share, "seen": part.item()}


def _seen_median(rows: Sequence[dict[str, Any]], by: str, share: float) -> float | None:
    found = [row["seen"] for row in rows if row["directions"] == by and row["share_of_side"] == share]
    return statistics.median(found) if found else None


def _seen_figure(rows: Sequence[dict[str, Any]], across: str) -> "Figure":
    made = figure(hovermode="closest")
    for number, by in enumerate(SEERS):
        own = [row for row in rows if row["directions"] == by]
        places = sorted({row[across] for row in own})
        found = [[row["seen"] for row in own if row[across] == place] for place in places]
        if places:
            _line(made, number, by, places, *_spread(found))
    shares = dict(sorted((row[across], math.sqrt(row["share_of_side"])) for row in rows))
    add_trace(made, SEERS.index("random"), None, shares, shares.values(), **THEORY)
    _name_axis_(made, rows, across)
    made.update_yaxes(title_text="share of the norm", range=[0, 1.03])
    return made


def _spread(found: Sequence[Sequence[float]]) -> tuple[list[float], list[float], list[float]]:
    """Median, lowest and highest of each."""
    return [statistics.median(each) for each in found], [min(each) for each in found], [max(each) for each in found]


SHARPNESS_SEEN = 12
"""Steps whose curvature is measured. One batch's may be a hundred times another's; their median is steadier."""


def sharpness(*runs: PretrainOptions) -> Finding:
    """The curvature of the loss along each optimizer's own update: v' H v / |v|^2."""
    rows = [row for options in runs for row in _sharpnesses(options)]
    steps = sorted({row["step"] for row in rows})
    methods = list(dict.fromkeys(row["method"] for row in rows))
    values = {(row["method"], row["step"]): row["sharpness"] for row in rows}
    made, losses = figure(hovermode="x unified"), figure(hovermode="x unified")
    for number, method in enumerate(methods):
        curved = [step for step in steps if values[method, step] > 0]
        _line(made, number, method, curved, [values[method, step] for step in curved])
        _line(losses, number, method, steps, [row["loss"] for row in rows if row["method"] == method])
    for each in (made, losses):
        each.update_xaxes(title_text="step")
    made.update_yaxes(title_text="curvature along the update", **_log_axis(list(values.values())))
    losses.update_yaxes(title_text="training loss")
    found = {method: [row["sharpness"] for row in rows if row["method"] == method] for method in methods}
    medians = {method: statistics.median(each) for method, each in found.items()}
    told = ", ".join(f"{method} {significant(median, 2)}" for method, median in medians.items())
    ours = [method for method in methods if method.startswith("apollo")]
    agree = {
        "SGD's is the highest": all(medians["sgd"] > medians[method] for method in methods if method != "sgd"),
        **{f"{method}'s is below AdamW's": medians[method] < medians["adamw"] for method in ours},
    }
    as_there, otherwise = ([claim for claim, holds in agree.items() if holds is wanted] for wanted in (True, False))
    return Finding(
        title="Directional sharpness of updates",
        verdict=f"the median curvature over {len(steps)} steps is {told}."
        + (f" As in the paper {', '.join(as_there)}." if as_there else "")
        + (f" Not as in the paper, where {', '.join(otherwise)}." if otherwise else ""),
        paper="along the updates of SGD the loss curves by 1.5 to 3.2, along Adam's by 0.0002 to 0.009, along those of "
        "APOLLO and Mini by less than along Adam's, at epochs 2 to 20 of a small model.",
        setting=f"{setting(runs[0])}, seed {runs[0].run.seed}",
        names=methods,
        figures={"Sharpness along the update": made, "Loss at that step": losses},
        table=[
            {"method": method, "median": medians[method], "lowest": min(each), "highest": max(each)}
            for method, each in found.items()
        ],
        rows=rows,
        caution="The curvature is that of one batch at one step, and may be a hundred times another's: what counts "
        "is the order of magnitude, over a training long enough to learn.",
        reading="The curvature of the loss along an update v is v'Hv / |v|^2, where H is the Hessian. Where the loss "
        "curves downwards there is no point on the logarithmic axis.",
    )


def _log_axis(values: Sequence[float]) -> dict[str, Any]:
    """A logarithmic axis with ticks at powers of ten; also at 2 and 5 if there would be only one or two."""
    above = [value for value in values if value > 0]
    few = not above or max(above) < 100 * min(above)
    return {"type": "log", "tickformat": "~g", "dtick": "D2" if few else 1}


def _sharpnesses(options: PretrainOptions) -> Iterator[dict[str, Any]]:
    seen = seen_steps(options.steps, SHARPNESS_SEEN)
    before: tuple[Moment, list[Tensor]] | None = None
    for moment in itertools.chain(training(options), [None]):  # None: an update is known only after its step
        if before is not None:
            earlier, values = before
            curved = directional_sharpness(earlier, _trained(earlier.model), values)
            where = {"method": options.method.method, "step": earlier.step}
            yield where | {"loss": earlier.loss, "sharpness": curved}
        if moment is not None and moment.step in seen:
            before = moment, [weight.detach().clone() for weight in _trained(moment.model)]
        else:
            before = None


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [weight for weight in model.parameters() if weight.requires_grad]


def directional_sharpness(moment: Moment, weights: Sequence[nn.Parameter], before: Sequence[Tensor]) -> float:
    """The loss's curvature at the weights `before`, on that moment's batch, along the change of the weights since."""
    update = [(now - then).detach() for now, then in zip(weights, before, strict=True)]
    size = torch.stack([direction.square().sum() for direction in update]).sum()
    with _values_of(weights, before), sdpa_kernel(SDPBackend.MATH):  # others cannot be differentiated twice
        gradients = torch.autograd.grad(moment.objective(*moment.batch), weights, create_graph=True)
        slope = torch.stack([(each * way).sum() for each, way in zip(gradients, update, strict=True)]).sum()
        products = torch.autograd.grad(slope, weights)
    curved = torch.stack([(each * way).sum() for each, way in zip(products, update, strict=True)]).sum()
    return (curved / size).item()


@contextmanager
def _values_of(weights: Sequence[nn.Parameter], values: Sequence[Tensor]) -> Iterator[None]:
    """Give weights other values for the duration."""
    own = [weight.detach().clone() for weight in weights]
    try:
        _set_(weights, values)
        yield
    finally:
        _set_(weights, own)


@torch.no_grad()
def _set_(weights: Sequence[nn.Parameter], values: Sequence[Tensor]) -> None:
    for weight, value in zip(weights, values, strict=True):
        weight.copy_(value)
