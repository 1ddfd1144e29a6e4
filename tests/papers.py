"""The oracle: every algorithm as its paper states it, one matrix at a time. Imports nothing of ours.

    AdamW             Loshchilov & Hutter, 2019, algorithm 2
    row-wise AdamW    Zhang et al., 2024 (Adam-mini), algorithm 1, with a block for each row as for its embeddings
    Adafactor         Shazeer & Stern, 2018, algorithm 4, its step size and decay rate constant, eps as Adam's
    structured AdamW  Zhu et al., 2025 (APOLLO), section 3.2: s_j = |N_j| / |G_j|, and the norm-growth limiter
    APOLLO, -Mini     the same, algorithm 1
    GaLore            Zhao et al., 2024, algorithm 2
    Fira              Chen et al., 2024, algorithm 1
    Flora             Hao et al., 2024, algorithm 2, over Adafactor (Shazeer & Stern, 2018, algorithm 2)
    Artemis           Jordan et al., 2024 (Muon), with the step size of Liu et al., 2025 (0.2 sqrt(n)), and momentum in
                      the NF4 of Dettmers et al., 2023 (QLoRA): ours, put together of these three

Symbols are the papers': G is m x n with m <= n, P the r x m basis, R = P G, M and V the moments, and the normalised
step is N = M / (sqrt(V) + eps). Where the papers say nothing: t counts from 1; the basis is renewed at t = 1, T + 1,
2T + 1, ... and the moments are kept; weights decay before they step; 0 / 0 is 0 in a ratio of norms.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.linalg import vector_norm as norm


@dataclass(frozen=True, kw_only=True)
class Deviations:
    """Where we do otherwise than the papers, each with its switch."""

    bias_correction: bool = True
    """Moments divided by 1 - beta^t, where a paper leaves that out (APOLLO, and the momentum of Flora)."""
    identity_basis: bool = True
    """P = I where the rank reaches m."""
    forgiving_limiter: bool = True
    """A previous update of zero, or one that eps made small, limits nothing; a zero update is not remembered."""
    capped_scale: bool = True
    """APOLLO-Mini's scale is at most sqrt(m / r)."""
    needs_directions: bool = True
    """Of an SVD, P has only rows for directions in which G is more than rounding. A G of zeros renews no P, and before
    there is one it is not counted."""


OURS = Deviations()
PAPER = Deviations(
    bias_correction=False, identity_basis=False, forgiving_limiter=False, capped_scale=False, needs_directions=False
)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The numbers of a run."""

    rank: int = 1
    basis: Callable[[int, Tensor], Tensor] | None = None
    """P from the number of the renewal, counted from 0, and the gradient it meets."""
    of_gradient: bool = False
    """Whether P is made of that gradient."""
    refresh_every: int = 200
    scale: float = 1.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    growth_limit: float | None = 1.01
    deviations: Deviations = field(default_factory=Deviations)


def leading_singular_vectors(G: Tensor, rank: int, least: float = 0.0) -> Tensor:
    """P^T of GaLore: the left singular vectors of G, as rows, each with its largest entry positive.

    Zeros where the singular value is not above `least` of the first.
    """
    U, sigma, _ = torch.linalg.svd(G)
    rows = [row if row[row.abs().argmax()] > 0 else -row for row in U[:, :rank].T]
    return torch.stack([row * float(size > least * sigma[0]) for row, size in zip(rows, sigma, strict=False)])


def norm_ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Quotient of norms, 0 / 0 = 0."""
    return torch.where(denominator == 0, 0.0, numerator / denominator)


def scaling_factor(N: Tensor, R: Tensor, granularity: str) -> Tensor:
    """s_j = |N[:, j]| / |R[:, j]|, or s = |N| / |R| (APOLLO, algorithm 1, step 3)."""
    if granularity == "channel":
        return norm_ratio(norm(N, dim=0), norm(R, dim=0))
    return norm_ratio(norm(N), norm(R))


class Adam:
    """M, V, and N = M / (sqrt(V) + eps)."""

    def __init__(self, settings: Settings, corrected: bool):
        self.beta1, self.beta2 = settings.betas
        self.eps = settings.eps
        self.corrected = corrected
        self.t = 0
        self.M = self.V = torch.zeros((), dtype=torch.float64)

    def normalized(self, G: Tensor) -> Tensor:
        self.t += 1
        self.M = self.beta1 * self.M + (1 - self.beta1) * G
        self.V = self.beta2 * self.V + (1 - self.beta2) * G**2
        if not self.corrected:
            return self.M / (self.V.sqrt() + self.eps)
        M_hat = self.M / (1 - self.beta1**self.t)
        return M_hat / (self.V_hat.sqrt() + self.eps)

    @property
    def V_hat(self) -> Tensor:
        return self.V / (1 - self.beta2**self.t)


class Subspace:
    """P, renewed every T steps."""

    def __init__(self, settings: Settings):
        self.settings = settings
        self.t = 0
        self.P: Tensor | None = None

    def basis(self, G: Tensor) -> Tensor:
        """The P of this step."""
        self.t += 1
        m = G.shape[0]
        if self.settings.deviations.identity_basis and self.settings.rank >= m:
            return torch.eye(m, dtype=G.dtype)
        keeps = self.settings.deviations.needs_directions and self.settings.of_gradient and not G.any()
        if (self.t - 1) % self.settings.refresh_every == 0 and not keeps:
            self.P = self.settings.basis((self.t - 1) // self.settings.refresh_every, G)
        return self.P


class Limiter:
    """If |U_t| / |U_{t-1}| > gamma then U_t <- U_t / |U_t| * gamma |U_{t-1}| (APOLLO, section 3.2)."""

    def __init__(self, settings: Settings):
        self.gamma = settings.growth_limit
        self.forgiving = settings.deviations.forgiving_limiter
        self.last: float | None = None

    def limited(self, U: Tensor, adam: Adam) -> Tensor:
        if self.gamma is None:
            return U
        size = float(norm(U))
        if self.forgiving and size == 0:
            return U
        nothing_before = self.last is None or (self.forgiving and self.last == 0)
        if not nothing_before and size > self.gamma * self.last:
            U = U / size * (self.gamma * self.last)
            size = self.gamma * self.last
        self.last = size
        if self.forgiving and nothing_before:
            self.last = size / min(1.0, self.first_step(adam))
        if self.forgiving and float(adam.V_hat.mean().sqrt()) < adam.eps:
            self.last = 0.0
        return U

    @staticmethod
    def first_step(adam: Adam) -> float:
        """|N| per element where the gradient of step t is the first that is not zero: M_hat / sqrt(V_hat) at G = 1."""
        M_hat = (1 - adam.beta1) / (1 - adam.beta1**adam.t)
        V_hat = (1 - adam.beta2) / (1 - adam.beta2**adam.t)
        return M_hat / math.sqrt(V_hat)


class AdamW:
    def __init__(self, settings: Settings):
        self.adam = Adam(settings, corrected=True)

    def update(self, G: Tensor) -> Tensor:
        return self.adam.normalized(G)


class RowwiseAdamW:
    """Adam-mini on a matrix whose blocks are its rows; at beta1 = 0 without momentum. G as the weight is stored."""

    def __init__(self, settings: Settings):
        self.beta1, self.beta2 = settings.betas
        self.eps = settings.eps
        self.t = 0
        self.M = self.v = torch.zeros((), dtype=torch.float64)

    def update(self, G: Tensor) -> Tensor:
        self.t += 1
        self.M = self.beta1 * self.M + (1 - self.beta1) * G
        self.v = self.beta2 * self.v + (1 - self.beta2) * torch.stack([(row**2).mean() for row in G])
        M_hat, v_hat = self.M / (1 - self.beta1**self.t), self.v / (1 - self.beta2**self.t)
        return torch.stack([row / (torch.sqrt(v) + self.eps) for row, v in zip(M_hat, v_hat, strict=True)])


class Adafactor:
    """G / (sqrt(V) + eps) with V the outer product of row and column sums, of root mean square at most d = 1.

    At beta1 = 0 without momentum, as its paper's algorithm 4 has it. `kept` is what is left of a momentum that is kept.
    """

    def __init__(self, settings: Settings, kept: Callable[[Tensor], Tensor] = lambda M: M):
        self.kept = kept
        self.beta1, self.beta2 = settings.betas
        self.eps = settings.eps
        self.t = 0
        self.M = self.R = self.C = torch.zeros((), dtype=torch.float64)

    def update(self, G: Tensor) -> Tensor:
        self.t += 1
        self.R = self.beta2 * self.R + (1 - self.beta2) * (G**2).sum(1)
        self.C = self.beta2 * self.C + (1 - self.beta2) * (G**2).sum(0)
        V = torch.outer(self.R, self.C) / self.R.sum() if self.R.sum() > 0 else torch.zeros_like(G)
        U = G / ((V / (1 - self.beta2**self.t)).sqrt() + self.eps)
        U = U / max(1.0, float((U**2).mean().sqrt()))
        M = self.beta1 * self.M + (1 - self.beta1) * U
        self.M = self.kept(M)
        return M / (1 - self.beta1**self.t)


class StructuredAdamW:
    def __init__(self, settings: Settings, granularity: str):
        self.scale, self.granularity = settings.scale, granularity
        self.adam = Adam(settings, settings.deviations.bias_correction)
        self.limiter = Limiter(settings)

    def update(self, G: Tensor) -> Tensor:
        N = self.adam.normalized(G)
        s = scaling_factor(N, G, self.granularity)
        return self.limiter.limited(self.scale * G * s, self.adam)


class APOLLO:
    def __init__(self, settings: Settings, granularity: str = "channel"):
        self.settings, self.granularity = settings, granularity
        self.subspace = Subspace(settings)
        self.adam = Adam(settings, settings.deviations.bias_correction)
        self.limiter = Limiter(settings)

    def alpha(self, G: Tensor) -> float:
        return self.settings.scale

    def update(self, G: Tensor) -> Tensor:
        P = self.subspace.basis(G)
        R = P @ G
        N = self.adam.normalized(R)
        s = scaling_factor(N, R, self.granularity)
        return self.limiter.limited(self.alpha(G) * G * s, self.adam)


class APOLLOMini(APOLLO):
    def __init__(self, settings: Settings):
        super().__init__(settings, granularity="tensor")

    def alpha(self, G: Tensor) -> float:
        if not self.settings.deviations.capped_scale:
            return self.settings.scale
        m = G.shape[0]
        return min(self.settings.scale, math.sqrt(m / min(self.settings.rank, m)))


class GaLore:
    def __init__(self, settings: Settings):
        self.scale = settings.scale
        self.subspace = Subspace(settings)
        self.adam = Adam(settings, corrected=True)

    def update(self, G: Tensor) -> Tensor:
        P = self.subspace.basis(G)
        N = self.adam.normalized(P @ G)
        return self.scale * (P.T @ N)


class Fira:
    def __init__(self, settings: Settings):
        self.scale = settings.scale
        self.subspace = Subspace(settings)
        self.adam = Adam(settings, corrected=True)
        self.limiter = Limiter(settings)

    def update(self, G: Tensor) -> Tensor:
        P = self.subspace.basis(G)
        R = P @ G
        N = self.adam.normalized(R)
        phi = scaling_factor(N, R, "channel")
        S = phi * (G - P.T @ R)
        return self.scale * (P.T @ N + self.limiter.limited(S, self.adam))


class Flora:
    def __init__(self, settings: Settings):
        self.settings = settings
        self.beta1, self.beta2 = settings.betas
        self.subspace = Subspace(settings)
        self.t = 0
        self.A: Tensor | None = None
        self.M = self.row_sums = self.column_sums = torch.zeros((), dtype=torch.float64)

    def update(self, G: Tensor) -> Tensor:
        self.t += 1
        A = self.subspace.basis(G)
        if self.A is not None and A is not self.A:
            self.M = A @ self.A.T @ self.M
        self.A = A
        self.M = self.beta1 * self.M + (1 - self.beta1) * (A @ self.preconditioned(G))
        M = self.M / (1 - self.beta1**self.t) if self.settings.deviations.bias_correction else self.M
        return self.settings.scale * (A.T @ M)

    def preconditioned(self, G: Tensor) -> Tensor:
        """Adafactor: G / (sqrt(V) + eps) with V the outer product of row and column sums over the sum of all."""
        self.row_sums = self.beta2 * self.row_sums + (1 - self.beta2) * (G**2).sum(1)
        self.column_sums = self.beta2 * self.column_sums + (1 - self.beta2) * (G**2).sum(0)
        total = self.row_sums.sum()
        V = torch.outer(self.row_sums, self.column_sums) / total if total > 0 else torch.zeros_like(G)
        return G / ((V / (1 - self.beta2**self.t)).sqrt() + self.settings.eps)


NF4 = torch.tensor(
    [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
        0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ],
    dtype=torch.float64,
)  # fmt: skip
"""QLoRA, appendix E."""


def nf4(row: Tensor) -> Tensor:
    """A row as blockwise quantization gives it back: c times the nearest of NF4 to X / c, c = absmax(X) in float32."""
    pieces = []
    for X in row.split(128):
        c = X.abs().max().float().double()
        nearest = (X / c - NF4[:, None]).abs().argmin(dim=0)
        pieces.append(c * NF4[nearest] if c > 0 else torch.zeros_like(X))
    return torch.cat(pieces)


def newton_schulz(G: Tensor) -> Tensor:
    """Muon's iteration, but that G of any size is first divided by its norm alone, without 1e-7; 0 / 0 is 0."""
    a, b, c = 3.4445, -4.7750, 2.0315
    X = G / norm(G) if G.any() else G
    for _ in range(5):
        A = X @ X.T
        X = a * X + (b * A + c * A @ A) @ X
    return X


class Artemis:
    """Muon's Nesterov momentum as an average, which its iteration cannot tell from a sum, kept by `kept`."""

    def __init__(self, settings: Settings, kept: Callable[[Tensor], Tensor]):
        self.beta, self.scale, self.kept = settings.betas[0], settings.scale, kept
        self.M = torch.zeros((), dtype=torch.float64)

    def update(self, G: Tensor) -> Tensor:
        M = self.beta * self.M + (1 - self.beta) * G
        self.M = self.kept(M)
        return self.scale * math.sqrt(G.shape[1]) * newton_schulz(self.beta * M + (1 - self.beta) * G)


class ArtemisMini:
    """The same with a momentum of rank R, as PowerSGD (Vogels et al., 2019, algorithm 1) keeps a matrix.

    One power iteration a step from the last factor L. M is n x m here, so that Q lies along the larger side. A row of L
    that is zero begins anew at one of every n/R rows of M, and a direction that the others make up but for what float32
    would round is left out.
    """

    def __init__(self, settings: Settings):
        self.settings, self.beta = settings, settings.betas[0]
        self.Q = self.L = None

    def update(self, G: Tensor) -> Tensor:
        m, n = G.shape
        R = self.settings.rank
        if self.Q is None:
            self.Q, self.L = G.new_zeros(n, R), G.new_zeros(R, m)
        M = self.beta * self.Q @ self.L + (1 - self.beta) * G.T
        starts = [row if row.any() else M[i * n // R] for i, row in enumerate(self.L)]
        self.Q = torch.stack(gram_schmidt([M @ start for start in starts], LEAST * math.sqrt(n)), dim=1)
        self.L = self.Q.T @ M
        return self.settings.scale * math.sqrt(n) * newton_schulz(self.beta * M.T + (1 - self.beta) * G)


def gram_schmidt(vectors: list[Tensor], least: float) -> list[Tensor]:
    """Orthonormal vectors, each from one of these less what lies along those before; zero where that is nothing."""
    made: list[Tensor] = []
    for vector in vectors:
        rest = vector / norm(vector) if vector.any() else vector
        for _ in range(2):  # the second time for what rounding left
            for other in made:
                rest = rest - (other @ rest) * other
        made.append(rest / norm(rest) if norm(rest) > least else torch.zeros_like(rest))
    return made


LEAST = 4 * torch.finfo(torch.float32).eps


class Weight:
    """A weight of any shape and the rule that steps each matrix in it.

    Three dimensions are matrices [E, rows, columns]; more are one matrix [out, rest]. G has the smaller side first;
    of a square weight, the columns.
    """

    def __init__(
        self,
        value: Tensor,
        rule: Callable[[int], object],
        lr: float,
        weight_decay: float = 0.0,
        awaits: bool = False,
    ):
        self.value = value.clone()
        self.awaits = awaits
        """Whether steps count from the first gradient that is not zero: `needs_directions`, of an SVD."""
        self.lr, self.weight_decay = lr, weight_decay
        self.rules = [rule(number) for number in range(len(self.matrices(value)))]

    @staticmethod
    def matrices(tensor: Tensor) -> list[Tensor]:
        matrices = list(tensor) if tensor.dim() == 3 else [tensor.flatten(1)]
        return [matrix.T if matrix.shape[0] >= matrix.shape[1] else matrix for matrix in matrices]

    def step(self, gradient: Tensor) -> None:
        if self.awaits and not gradient.any():
            self.value -= self.lr * self.weight_decay * self.value
            return
        self.awaits = False
        for W, G, rule in zip(self.matrices(self.value), self.matrices(gradient), self.rules, strict=True):
            update = rule.update(G)
            W -= self.lr * self.weight_decay * W
            W -= self.lr * update
