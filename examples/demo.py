"""Train a small language model on this Python's own sources, with AdamW and with APOLLO, and compare.

    python examples/demo.py

Nothing is downloaded: the text is the standard library, read byte by byte; whole files are held out for validation.
Every optimizer starts from the same weights and sees the same batches in the same order.
"""

import math
import multiprocessing
import sysconfig
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from apollo_optim import APOLLO, APOLLOMini

VOCABULARY, CONTEXT, WIDTH, HEADS, LAYERS, INNER = 256, 128, 128, 4, 4, 344
STEPS, WARMUP, BATCH, VALIDATION_BATCHES = 200, 20, 8, 40
TEXT_BYTES = 4_000_000


class Block(nn.Module):
    """Attention and a gated MLP, each on a normalised residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(WIDTH, INNER, bias=False), nn.Linear(WIDTH, INNER, bias=False)
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = (part(h).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        x = x + self.o(functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(functional.silu(self.gate(h)) * self.up(h))


class Model(nn.Module):
    """A causal transformer over bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.lm_head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        for weight in self.parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        """Mean loss of predicting each byte of `text` [batch, length + 1] from those before it."""
        x = self.tokens(text[:, :-1]) + self.positions.weight[: text.shape[1] - 1]
        logits = self.lm_head(self.norm(self.blocks(x)))
        return functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())


def standard_library() -> tuple[Tensor, Tensor]:
    """Training and validation text as bytes; every tenth file is held out."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    held_out = b"".join(file.read_bytes() for file in files[::10])
    training = b"".join(file.read_bytes() for number, file in enumerate(files) if number % 10 != 0)
    return _as_bytes(training), _as_bytes(held_out)


def _as_bytes(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text[:TEXT_BYTES]), dtype=torch.uint8).long()


def batches(text: Tensor, count: int, seed: int) -> list[Tensor]:
    """Random windows of the text, the same for every optimizer."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - CONTEXT - 1, (count, BATCH, 1), generator=generator)
    return list(text[starts + torch.arange(CONTEXT + 1)])


def schedule(step: int) -> float:
    """Linear warm-up, then a cosine down to a tenth."""
    if step < WARMUP:
        return (step + 1) / WARMUP
    return 0.55 + 0.45 * math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP))


@dataclass(frozen=True)
class Result:
    loss: float
    state_bytes: int
    seconds: float


def train(build: Callable[[nn.Module], torch.optim.Optimizer]) -> Result:
    """Validation loss (nats per byte), bytes of optimizer state, and seconds, after STEPS steps."""
    training, validation = standard_library()
    torch.manual_seed(0)
    model = Model()
    optimizer = build(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    started = time.perf_counter()
    for batch in batches(training, STEPS, seed=1):
        loss = model(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    seconds = time.perf_counter() - started
    with torch.no_grad():
        held_out = torch.stack([model(batch) for batch in batches(validation, VALIDATION_BATCHES, seed=2)]).mean()
    tensors = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return Result(held_out.item(), sum(t.numel() * t.element_size() for t in tensors), seconds)


# The best of a few learning rates each (docs/log.md). Mini's is below APOLLO's because its scale is made for wider
# weights: at 128 it makes up for the whole of sqrt(S), at the paper's 512 and more for half of it or less.
RUNS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "AdamW, lr 0.001": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0),
    "APOLLO, lr 0.01": lambda model: APOLLO(model, lr=1e-2),
    "APOLLO-Mini, lr 0.005": lambda model: APOLLOMini(model, lr=5e-3),
}


def run(name: str) -> Result:
    torch.set_num_threads(1)
    return train(RUNS[name])


def main() -> None:
    parameters = sum(weight.numel() for weight in Model().parameters())
    print(f"{parameters:,} parameters, {STEPS} steps of {BATCH * CONTEXT:,} bytes of Python", flush=True)
    print(f"{'optimizer':22} {'validation loss':>15} {'state bytes':>12} {'seconds':>8}", flush=True)
    # Two processes of one thread each: operations this small gain nothing from a second thread.
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        for name, result in zip(RUNS, pool.map(run, RUNS), strict=True):
            print(f"{name:22} {result.loss:15.3f} {result.state_bytes:12,} {result.seconds:8.1f}", flush=True)


if __name__ == "__main__":
    main()
