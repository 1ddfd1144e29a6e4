"""Update rules that are not in the package, to be tried before any of them is built: dense fp32 arithmetic, no kernels.

A group's rule is a chain of stages on a stack of equal matrices [N, O, I], each named by an option:

    normalize   "factored" divides by a row-and-column second moment (Adafactor's); "apollo" multiplies by APOLLO's gain
    momentum    the average of what came out of that, kept in fp32, 8, 4 or 1 bits, or at a low rank
    shape       "orthogonal" (Newton-Schulz), "rows" (unit rows), or as it is
    size        "fixed" multiplies by `rms`, "rms" makes that the root mean square of every matrix, "clip" the largest;
                None leaves it
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

NEWTON_SCHULZ = 3.4445, -4.7750, 2.0315
NF4 = (
    -1.0, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105, 0.0,
    0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0,
)  # fmt: skip
"""QLoRA's sixteen quantiles of a normal distribution."""
BLOCK = 128
TINY = 1e-30

DEFAULTS: dict[str, Any] = {
    "normalize": None, "beta1": 0.9, "beta2": 0.98, "eps": 1e-8,
    "rank": 1, "granularity": "channel", "scale": 1.0, "refresh_every": 200, "limit_before_correction": False,
    "momentum": 0.0, "nesterov": False, "bits": None, "stochastic": False, "momentum_rank": None,
    "shape": None, "size": None, "rms": 0.2, "iterations": 5, "weight_decay": 0.0, "lr": 1e-3,
}  # fmt: skip


class Sketch(torch.optim.Optimizer):
    """An optimizer with a rule for each group. Weights of a group that have the same shape are stepped as one stack."""

    def __init__(self, groups: Iterable[dict[str, Any]]):
        groups = [dict(group) for group in groups]
        for group in groups:
            if unknown := group.keys() - DEFAULTS.keys() - {"params"}:
                raise ValueError(f"unknown options {sorted(unknown)}; a sketch has {sorted(DEFAULTS)}")
        super().__init__(groups, DEFAULTS)
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        assert closure is None
        self.steps += 1
        for group in self.param_groups:
            for shape in dict.fromkeys(weight.shape for weight in group["params"]):
                weights = [weight for weight in group["params"] if weight.shape == shape]
                state = self.state[weights[0]]
                grad_NOI = torch.stack([weight.grad for weight in weights]).float()
                update_NOI = direction(grad_NOI, state, group, self.steps)
                stacked_NOI = torch.stack(list(weights)).float()
                stacked_NOI.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update_NOI, alpha=group["lr"])
                torch._foreach_copy_(list(weights), list(rounded(stacked_NOI, weights[0].dtype).unbind()))

    def state_bytes(self) -> int:
        """Bytes that the state would take if it were packed: values of `bits` bits, and a bf16 scale for each block."""
        total = 0.0
        for group in self.param_groups:
            for weight in group["params"]:
                for name, tensor in self.state.get(weight, {}).items():
                    narrow = name == "momentum" and group["bits"] is not None
                    total += tensor.numel() * (group["bits"] / 8 + 2 / BLOCK if narrow else tensor.element_size())
        return round(total)


def direction(grad: Tensor, state: dict[str, Tensor], group: dict[str, Any], step: int) -> Tensor:
    """The update of a stack of matrices, to be multiplied by the learning rate."""
    gain = 1.0
    if group["normalize"] == "factored":
        grad = factored(grad, state, group["beta2"], step)
    elif group["normalize"] == "apollo":
        gain = apollo_gain(grad, state, group, step)
    update = with_momentum(grad, state, group, step) if group["momentum"] else grad
    if group["normalize"] == "apollo":
        update = limited(update * gain, state)
        if group["limit_before_correction"]:
            update = update * (math.sqrt(1 - group["beta2"] ** step) / (1 - group["beta1"] ** step))
    if group["shape"] == "orthogonal":
        update = orthogonal(update, group["iterations"])
    elif group["shape"] == "rows":
        update = update / (update.norm(dim=-1, keepdim=True) + TINY)
    if group["size"] is None:
        return update
    rms = update.square().mean(dim=(-2, -1), keepdim=True).sqrt()
    divisor = {"fixed": 1.0, "rms": rms + TINY, "clip": rms.clamp(min=1.0)}[group["size"]]
    return update * (group["rms"] / divisor)


def factored(grad: Tensor, state: dict[str, Tensor], beta2: float, step: int) -> Tensor:
    """grad / sqrt(v), v the outer product of the running means of its squares along rows and columns."""
    square = grad.square()
    if not state:
        state["rows"], state["columns"] = torch.zeros_like(square.mean(-1)), torch.zeros_like(square.mean(-2))
    rows = state["rows"].lerp_(square.mean(-1), 1 - beta2)
    columns = state["columns"].lerp_(square.mean(-2), 1 - beta2)
    share = columns / (rows.mean(-1, keepdim=True) + TINY)
    second = rows[..., :, None] * share[..., None, :] / (1 - beta2**step)
    return grad / (second.sqrt() + 1e-12)


def apollo_gain(grad: Tensor, state: dict[str, Tensor], group: dict[str, Any], step: int) -> Tensor:
    """|step| / |low| of the projected moments: a factor for each channel, or one for each matrix."""
    tall = grad.shape[-2] >= grad.shape[-1]
    grad_SC = grad.mT if tall else grad
    side, rank = grad_SC.shape[-2], min(group["rank"], grad_SC.shape[-2])
    generator = torch.Generator(grad.device).manual_seed((step - 1) // group["refresh_every"])
    shape = (len(grad), rank, side)
    low_RC = torch.randn(shape, generator=generator, device=grad.device) / math.sqrt(rank) @ grad_SC
    if not state:
        state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(low_RC), torch.zeros_like(low_RC)
    mean = state["exp_avg"].lerp_(low_RC, 1 - group["beta1"])
    second = state["exp_avg_sq"].lerp_(low_RC.square(), 1 - group["beta2"])
    correction1, correction2 = 1 - group["beta1"] ** step, 1 - group["beta2"] ** step
    if group["limit_before_correction"]:
        correction1 = correction2 = 1.0
    step_RC = mean / correction1 / ((second / correction2).sqrt() + group["eps"])
    over = (-2,) if group["granularity"] == "channel" else (-2, -1)
    gain = group["scale"] * step_RC.norm(dim=over, keepdim=True) / (low_RC.norm(dim=over, keepdim=True) + TINY)
    return gain.mT if tall and group["granularity"] == "channel" else gain


def limited(update: Tensor, state: dict[str, Tensor], limit: float = 1.01) -> Tensor:
    """The norm-growth limiter."""
    norm = update.norm(dim=(-2, -1), keepdim=True)
    ceiling = limit * state["norm"] if "norm" in state else norm
    state["norm"] = torch.minimum(norm, ceiling)
    return update * (state["norm"] / (norm + TINY))


def with_momentum(value: Tensor, state: dict[str, Tensor], group: dict[str, Any], step: int) -> Tensor:
    """The running average of `value`, or Nesterov's look ahead of it; what is kept of it is compressed."""
    decay = group["momentum"]
    if group["momentum_rank"] is not None:
        last = state["left"] @ state["right"].mT if "left" in state else torch.zeros_like(value)
        average = last.lerp(value, 1 - decay)
        state["left"], state["right"] = low_rank(average, state.get("right"), group["momentum_rank"])
    else:
        average = state.get("momentum", torch.zeros_like(value)).lerp(value, 1 - decay)
        state["momentum"] = quantized(average, group["bits"], group["stochastic"])
    return value.lerp(average, decay) if group["nesterov"] else average / (1 - decay**step)


def low_rank(matrix: Tensor, right: Tensor | None, rank: int) -> tuple[Tensor, Tensor]:
    """Factors of an approximation: one power iteration from the last one's right factor."""
    if right is None:
        right = torch.randn(len(matrix), matrix.shape[-1], rank, device=matrix.device)
    left = torch.linalg.qr(matrix @ right)[0]
    return left.bfloat16().float(), (matrix.mT @ left).bfloat16().float()


def quantized(value: Tensor, bits: int | None, stochastic: bool) -> Tensor:
    """`value` as decoded from its codes, with a scale for each block of a row, or for 1 bit each row and column."""
    if bits is None:
        return value
    if bits == 1:
        rows, columns = value.abs().mean(-1, keepdim=True), value.abs().mean(-2, keepdim=True)
        return torch.where(value > 0, 1.0, -1.0) * rows * columns / (rows.mean(-2, keepdim=True) + TINY)
    blocks = value.reshape(-1, math.gcd(value.shape[-1], BLOCK))
    scale = blocks.abs().amax(-1, keepdim=True) + TINY
    share = blocks / scale
    if bits == 8:
        share = (torch.floor(share * 127 + torch.rand_like(share)) if stochastic else (share * 127).round()) / 127
    else:
        table = torch.tensor(NF4, device=value.device)
        if stochastic:
            above = torch.bucketize(share, table).clamp(1, len(NF4) - 1)
            low, high = table[above - 1], table[above]
            share = torch.where(torch.rand_like(share) * (high - low) < share - low, high, low)
        else:
            share = table[torch.bucketize(share, (table[1:] + table[:-1]) / 2)]
    return (share * scale).reshape(value.shape)


def orthogonal(matrix: Tensor, iterations: int) -> Tensor:
    """Newton-Schulz towards the nearest matrix with orthonormal rows or columns, times sqrt(larger side)."""
    a, b, c = NEWTON_SCHULZ
    tall = matrix.shape[-2] > matrix.shape[-1]
    wide = (matrix.mT if tall else matrix).to(torch.bfloat16 if matrix.is_cuda else torch.float32)
    wide = wide / (wide.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(iterations):
        gram = wide @ wide.mT
        wide = a * wide + (b * gram + c * gram @ gram) @ wide
    return (wide.mT if tall else wide).float() * math.sqrt(max(matrix.shape[-2:]))


def rounded(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Stochastically to bf16."""
    if dtype != torch.bfloat16:
        return value.to(dtype)
    noise = torch.randint(1 << 16, value.shape, device=value.device, dtype=torch.int32)
    return ((value.view(torch.int32) + noise) & -65536).view(torch.float32).to(dtype)
