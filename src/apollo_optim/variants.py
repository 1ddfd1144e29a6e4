"""The optimizers by name, each with its paper's defaults."""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from typing_extensions import TypedDict, Unpack

from .core import rule as rules
from .core.rule import Granularity, Projection
from .core.shape import FULL_RANK, Rank
from .optimizer import Params, ProjectedOptimizer
from .options import unexpected

Betas = Sequence[float | Tensor]
Init = TypeVar("Init", bound=Callable[..., None])


class SharedOptions(TypedDict, total=False):
    """Options that every optimizer has, with the same default; `foreach` and `differentiable` may only be off."""

    seed: int
    state_dtype: torch.dtype | Literal["float32", "bfloat16", "float64", "int8", "nf4"]
    state_device: Literal["cpu"] | None
    rounding: Literal["stochastic", "nearest"]
    fused: bool | None
    capturable: bool
    maximize: bool
    foreach: Literal[False] | None
    differentiable: Literal[False]


SHARED: SharedOptions = {
    "seed": 0,
    "state_dtype": torch.float32,
    "state_device": None,
    "rounding": "stochastic",
    "fused": None,
    "capturable": False,
    "maximize": False,
}


IN_4_BITS: SharedOptions = {**SHARED, "state_dtype": "nf4"}
IN_BFLOAT16: SharedOptions = {**SHARED, "state_dtype": torch.bfloat16}


def _spelled_out(init: Init, defaults: SharedOptions = SHARED) -> Init:
    """`init` with a signature that has the shared options by name, for `help` and whoever inspects it."""
    signature = inspect.signature(init)
    own = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
    types = SharedOptions.__annotations__
    shared = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=value, annotation=types[name])
        for name, value in defaults.items()
    ]
    vars(init)["__signature__"] = signature.replace(parameters=[*own, *shared])
    return init


def _options(arguments: dict[str, Any], defaults: SharedOptions = SHARED) -> dict[str, Any]:
    """A constructor's own arguments and the shared ones, as options of a group."""
    shared: dict[str, Any] = arguments["shared"]
    own = {name: value for name, value in arguments.items() if name not in ("self", "params", "shared", "__class__")}
    for name in shared.keys() - SharedOptions.__annotations__.keys():
        raise unexpected(type(arguments["self"]).__name__, name, [*own, *SharedOptions.__annotations__])
    return {**own, **defaults, **shared}


class APOLLO(ProjectedOptimizer):
    """AdamW's factors for whole channels, from the moments of a small random projection of the gradient.

    A random projection of the gradient carries Adam moments; they tell how much each channel of the *full* gradient
    is to be scaled:

        low    = basis @ grad               basis ~ N(0, 1/R), made from a seed, never stored
        step   = m_hat / (sqrt(v_hat) + eps)            Adam moments of low
        update = scale * grad * |step| / |low|          per channel, norm growing by at most 1% a step
        W     <- (1 - lr * weight_decay) * W - lr * update

    State per projected weight of sides S <= C: two matrices R x C and three scalars, against AdamW's two S x C.
    Norms, biases, embeddings and head take AdamW in the same object.

    Choose it to pre-train or fine-tune all weights where AdamW's state does not fit. For the least memory take
    `APOLLOMini`. The learning rate is about ten times AdamW's; the default is that of the paper's pre-training.

    Args:
        params: A model (embeddings and head are then left to AdamW), parameters, named parameters, or group dicts;
            a group with `rank=None` is AdamW.
        lr: Learning rate, a number or a tensor, also of the weights that AdamW steps; `param_groups` can give those
            their own. Fine-tuning wants 1e-4 to 3e-4.
        betas, eps, weight_decay: As in `torch.optim.AdamW`, by position too. In a thousand steps, (0.9, 0.98) with a
            decay of 0.1 had 3% less perplexity than the defaults, the paper's; neither did by itself (docs/quality.md).
        rank: Rows R of the projected gradient: an integer, or a fraction of the smaller side (the paper's 1/4).
            Where it reaches the smaller side the basis is the identity.
        scale: Factor on the update, the paper's alpha. "auto" is sqrt(S / R), which makes one learning rate serve
            every rank.
        refresh_every: Steps between new bases.
        projection: "gaussian", "svd" (of the gradient, kept in state), "svd_lowrank" (the same by a random sketch),
            or "identity".
        granularity: What shares a gain: "channel", "tensor", or "element" (the lifted step itself is the update).
        growth_limit: Largest ratio between the norms of one update and the next; None for no limit. At granularity
            "element", Adam's own step, there is none.
        seed: Seed of the bases and of stochastic rounding, together with each parameter's name, or its first values.
        state_dtype: Dtype of the moments: float32, bfloat16 or int8 (rounded stochastically), or float64; also by name.
        state_device: "cpu" keeps the state of weights on GPUs in memory of the host, from where it visits them.
        rounding: How bfloat16 and float16 weights are written: "stochastic" or "nearest".
        fused: True for the Triton kernels, False for plain PyTorch, None for kernels where there are any.
        capturable: Keep step counts on the device, for CUDA graphs.
        maximize: Ascend instead.

    Examples:
        >>> model = torch.nn.Linear(64, 256)
        >>> optimizer = APOLLO(model, lr=1e-2, rank=16)
        >>> model(torch.randn(8, 64)).square().mean().backward()
        >>> optimizer.step()
        >>> tuple(optimizer.state[model.weight]["exp_avg"].shape)
        (16, 256)
    """

    @_spelled_out
    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-2,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        rank: Rank = 0.25,
        scale: float | str = 1.0,
        refresh_every: int = 200,
        projection: Projection = "gaussian",
        granularity: Granularity = "channel",
        growth_limit: float | None = 1.01,
        **shared: Unpack[SharedOptions],
    ):
        super().__init__(params, rules.APOLLO, _options(locals()))


class APOLLOMini(ProjectedOptimizer):
    """APOLLO at rank 1 with one gain for the whole tensor: SGD's memory.

        low    = basis @ grad               one row
        update = scale * grad * |step| / |low|          one ratio for the tensor, its growth limited

    State per projected weight: two vectors of length C and three scalars, about 0.02% of AdamW's.

    Choose it where memory decides. `scale` is the paper's sqrt(128), but at most sqrt(S): the estimate of rank 1 is
    sqrt(S) too small, and a weight with fewer than 128 rows would be overscaled. The paper trains at a learning rate of
    0.01; the default is half of it, because that fails on narrow models and in short runs.

    Args: As in `APOLLO`.

    Examples:
        >>> model = torch.nn.Linear(64, 256)
        >>> optimizer = APOLLOMini(model, lr=1e-2)
        >>> model(torch.randn(8, 64)).square().mean().backward()
        >>> optimizer.step()
        >>> tuple(optimizer.state[model.weight]["exp_avg"].shape)
        (1, 256)
    """

    @_spelled_out
    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 5e-3,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        rank: Rank = 1,
        scale: float | str = 128**0.5,
        refresh_every: int = 200,
        projection: Projection = "gaussian",
        granularity: Granularity = "tensor",
        growth_limit: float | None = 1.01,
        **shared: Unpack[SharedOptions],
    ):
        super().__init__(params, rules.APOLLO_MINI, _options(locals()))


class StructuredAdamW(ProjectedOptimizer):
    """AdamW whose element-wise step is coarsened to one gain per channel or tensor (the paper's section 3.2).

        step   = m_hat / (sqrt(v_hat) + eps)            Adam moments of the full gradient
        update = scale * grad * |step| / |grad|         per channel or tensor, its growth limited

    State is AdamW's own and a scalar. Choose it to see what APOLLO approximates; at granularity "element" it is AdamW.

    Args: As in `APOLLO`, with no projection to choose; updates are twice as long as at a quarter of the rank, so `lr`
        is half of APOLLO's.

    Examples:
        >>> model = torch.nn.Linear(64, 256)
        >>> optimizer = StructuredAdamW(model, lr=5e-3, granularity="tensor")
        >>> model(torch.randn(8, 64)).square().mean().backward()
        >>> optimizer.step()
        >>> tuple(optimizer.state[model.weight]["exp_avg"].shape)
        (64, 256)
    """

    @_spelled_out
    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 5e-3,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        granularity: Granularity = "channel",
        scale: float | str = 1.0,
        growth_limit: float | None = 1.01,
        **shared: Unpack[SharedOptions],
    ):
        options = _options(locals())
        super().__init__(params, rules.STRUCTURED_ADAMW, options | {"rank": FULL_RANK, "refresh_every": 1})


class GaLore(ProjectedOptimizer):
    """Adam in the subspace of the gradient's leading singular vectors, lifted back (Zhao et al., 2024).

        low    = basis @ grad               basis: R left singular vectors of the gradient, every 200 steps
        update = scale * basis.T @ step     step: Adam's on low

    State per projected weight: two matrices R x C and the basis R x S. Choose it to compare with, or for its low-rank
    updates; `projection="gaussian"` is the paper's ablation and keeps no basis.

    Args: As in `APOLLO`; `scale` is GaLore's alpha of 0.25, and its paper trains at lr 0.01.

    Examples:
        >>> model = torch.nn.Linear(64, 256)
        >>> optimizer = GaLore(model, lr=1e-2, rank=16)
        >>> model(torch.randn(8, 64)).square().mean().backward()
        >>> optimizer.step()
        >>> tuple(optimizer.state[model.weight]["basis"].shape)
        (16, 64)
    """

    @_spelled_out
    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-2,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        rank: Rank = 0.25,
        scale: float | str = 0.25,
        refresh_every: int = 200,
        projection: Projection = "svd",
        granularity: Granularity = "element",
        **shared: Unpack[SharedOptions],
    ):
        super().__init__(params, rules.GALORE, _options(locals()))


class Fira(ProjectedOptimizer):
    """GaLore with what its subspace leaves out added back, scaled per channel (Chen et al., 2024).

        update = scale * (basis.T @ step + (grad - basis.T @ low) * |step| / |low|)

    The second part's norm grows by at most 1% a step. Fira's own package leaves the second part unscaled: `scale=0.25`
    here is a quarter of it. State per projected weight: GaLore's and two scalars. Choose it
    for short runs and small models, where the APOLLO paper finds it slightly ahead, if an SVD is affordable.

    Args: As in `APOLLO`.

    Examples:
        >>> model = torch.nn.Linear(64, 256)
        >>> optimizer = Fira(model, lr=1e-2, rank=16)
        >>> model(torch.randn(8, 64)).square().mean().backward()
        >>> optimizer.step()
        >>> tuple(optimizer.state[model.weight]["basis"].shape)
        (16, 64)
    """

    @_spelled_out
    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-2,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        rank: Rank = 0.25,
        scale: float | str = 1.0,
        refresh_every: int = 200,
        projection: Projection = "svd",
        growth_limit: float | None = 1.01,
        **shared: Unpack[SharedOptions],
    ):
        super().__init__(params, rules.FIRA, _options(locals()))


class Flora(ProjectedOptimizer):
    """Adafactor whose momentum is kept in a random subspace (Hao et al., 2024).

        normalized = grad / (sqrt(factored second moment) + eps)
        m          = beta1 * m + (1 - beta1) * basis @ normalized
        update     = scale * basis.T @ m_hat
        m         <- new_basis @ old_basis.T @ m        when the basis is renewed

    State per projected weight: one matrix R x C, and the means of the squared gradient along both sides (S + C).
    Choose it to compare with; its noise falls only with the rank.

    Args: As in `APOLLO`; the basis is renewed every 1000 steps, and `lr` is AdamW's, whose steps are as long.

    Examples:
        >>> model = torch.nn.Linear(64, 256)
        >>> optimizer = Flora(model, lr=1e-3, rank=16)
        >>> model(torch.randn(8, 64)).square().mean().backward()
        >>> optimizer.step()
        >>> tuple(optimizer.state[model.weight]["exp_avg"].shape)
        (16, 256)
    """

    @_spelled_out
    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        rank: Rank = 0.25,
        scale: float | str = 1.0,
        refresh_every: int = 1000,
        projection: Projection = "gaussian",
        **shared: Unpack[SharedOptions],
    ):
        super().__init__(params, rules.FLORA, _options(locals()))


class FactoredAdamW(ProjectedOptimizer):
    """AdamW with a factored second moment and its momentum in 4 bits: for a matrix 7% of AdamW's state.

    Every number of a gradient is divided by what its row and its column say of its size (as by Adafactor, Shazeer &
    Stern, 2018). The momentum of that is kept in the 4-bit codes of QLoRA (Dettmers et al., 2023):

        normalized = grad / (sqrt(factored second moment) + eps)      its root mean square at most 1
        m         <- beta1 m + (1 - beta1) normalized                 NF4: blocks of 128 along a row, one scale a block
        W         <- (1 - lr * weight_decay) * W - lr * m_hat

    State per matrix: half a byte for each number and 4 bytes for each block, and one number for each row and column.
    Given a model, embeddings and head keep one number for each row and column, too, at 1.6 times `lr`. Norms and biases
    take AdamW in the same object, with float32 moments unless `state_dtype` says otherwise. Of bare parameters an
    embedding is one matrix more.

    Choose it in place of AdamW: steps are as long, so learning rates are AdamW's, and they take no products. It is in
    no paper of those whose optimizers are here; the 4-bit Factor of Li et al., 2023, has both kinds of state.

    Args: As in `APOLLO`, but:
        state_dtype: Dtype of the momentum: "nf4", or as in `APOLLO`.

    Examples:
        >>> model = torch.nn.Linear(64, 256)
        >>> optimizer = FactoredAdamW(model, lr=1e-3)
        >>> model(torch.randn(8, 64)).square().mean().backward()
        >>> optimizer.step()
        >>> tuple(optimizer.state[model.weight]["exp_avg"].shape)  # two to a byte
        (256, 32)
    """

    own_vocabulary = "factored"
    vocabulary_lr_ratio = 1.6

    @partial(_spelled_out, defaults=IN_4_BITS)
    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: Betas = (0.9, 0.98),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        **shared: Unpack[SharedOptions],
    ):
        options = _options(locals(), IN_4_BITS)
        super().__init__(params, rules.ADAFACTOR, options | {"rank": FULL_RANK, "scale": 1.0, "refresh_every": 1})


class Artemis(ProjectedOptimizer):
    """Orthogonalised momentum, kept in 4 bits: for a matrix 7% of AdamW's state. Ours, not the paper's.

    Every matrix is moved along its Nesterov momentum with all singular values brought near 1 (as by Muon, Jordan et
    al., 2024), which is kept in the 4-bit codes of QLoRA (Dettmers et al., 2023):

        m      <- beta m + (1 - beta) grad              NF4: blocks of 128 along a row, one float32 scale a block
        update  = scale * sqrt(C) * orthogonalized(beta m + (1 - beta) grad)        its root mean square is about scale
        W      <- (1 - lr * weight_decay) * W - lr * update

    State per matrix: half a byte for each number and 4 bytes for each block, no second moment. Given a model,
    embeddings and head keep one number for each row and column (Adafactor without momentum), at 0.4 times `lr`, where
    this was measured; `param_groups` leaves them to AdamW. Norms and biases take AdamW in the same object, with float32
    moments unless `state_dtype` says otherwise.

    Choose it to pre-train, where a batch is large beside the fifteen products of a weight's size that a step takes.
    Learning rates are four to eight times AdamW's: 0.005 to 0.01 at 60M (docs/quality.md).

    Args: As in `APOLLO`, but:
        betas: The first is the decay of the momentum. 0.9 is better in 4 bits than Muon's 0.95.
        scale: Root mean square of an update; 0.2 makes it as large as AdamW's, and "auto" is 1.
        state_dtype: Dtype of the momentum: "nf4", or as in `APOLLO`.

    Examples:
        >>> model = torch.nn.Linear(64, 256)
        >>> optimizer = Artemis(model, lr=1e-2)
        >>> model(torch.randn(8, 64)).square().mean().backward()
        >>> optimizer.step()
        >>> tuple(optimizer.state[model.weight]["exp_avg"].shape)  # two to a byte
        (256, 32)
    """

    own_vocabulary = "factored"
    vocabulary_lr_ratio = 0.4

    @partial(_spelled_out, defaults=IN_4_BITS)
    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-2,
        betas: Betas = (0.9, 0.98),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        scale: float | str = 0.2,
        **shared: Unpack[SharedOptions],
    ):
        # The identity keeps every row whatever rank is asked for. Rank 1 says that something is lost where a weight
        # that looks like a vocabulary is stepped by the rule: it is left to AdamW.
        super().__init__(params, rules.ARTEMIS, _options(locals(), IN_4_BITS) | {"rank": 1, "refresh_every": 1})


class ArtemisMini(ProjectedOptimizer):
    """`Artemis` with a momentum of low rank: less than 1% of AdamW's state for a matrix. Ours, not the paper's.

    Of the momentum only its leading directions are kept, which one power iteration a step follows (as in PowerSGD,
    Vogels et al., 2019, and Dion, Ahn et al., 2025). What they leave out is forgotten, but not before it is stepped by:

        m       = beta Q^T L + (1 - beta) grad
        Q      <- an orthonormal basis of the columns of m L^T,    L <- Q m                       R x C, R x S
        update  = scale * sqrt(C) * orthogonalized(beta m + (1 - beta) grad)
        W      <- (1 - lr * weight_decay) * W - lr * update

    State per matrix: R (S + C) numbers. With `betas=(0, ...)` there is no momentum, and no state but two scalars.

    Args: As in `Artemis`, but:
        rank: Rank of the momentum: an integer, or a fraction of the smaller side.
        state_dtype: Dtype of the momentum and of AdamW's moments, as in `APOLLO`.

    Examples:
        >>> model = torch.nn.Linear(64, 256)
        >>> optimizer = ArtemisMini(model, lr=1e-2)
        >>> model(torch.randn(8, 64)).square().mean().backward()
        >>> optimizer.step()
        >>> tuple(optimizer.state[model.weight]["exp_avg"].shape)
        (1, 64)
    """

    own_vocabulary = Artemis.own_vocabulary
    vocabulary_lr_ratio = Artemis.vocabulary_lr_ratio

    @partial(_spelled_out, defaults=IN_BFLOAT16)
    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-2,
        betas: Betas = (0.9, 0.98),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        rank: Rank = 1 / 64,
        scale: float | str = 0.2,
        **shared: Unpack[SharedOptions],
    ):
        super().__init__(params, rules.ARTEMIS_MINI, _options(locals(), IN_BFLOAT16) | {"refresh_every": 1})
