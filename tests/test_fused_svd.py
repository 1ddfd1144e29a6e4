"""Bases that state keeps, between the host that makes them of gradients and the kernels that project by them."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from apollo_optim.fused import launches
from apollo_optim.fused.batches import tile_table
from apollo_optim.fused.matrix import PIECES
from apollo_optim.kernels import columns as at
from apollo_optim.kernels.project import stored_kernel
from apollo_optim.stepping import plain as plain_step
from family import Member
from runs import bits, gradient, snapshot
from twins import RULES, assert_same_run, each_kernel, on_both, started, twins

# Beyond the last channel the kernels divide zero by zero, to no effect, but numpy reports it.
pytestmark = [pytest.mark.usefixtures("kernels"), pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")]

SHAPES = {"wide": (24, 40), "experts": (2, 9, 24), "vector": (5,)}


def spoiled_at(*steps: int) -> Callable[[str, int, Tensor], Tensor]:
    """Gradients of which the experts' has a NaN at these steps."""

    def made(name: str, step: int, like: Tensor) -> Tensor:
        grad = gradient(name, step, like)
        if name == "experts" and step in steps:
            grad[1, 2, 3] = math.nan
        return grad

    return made


@each_kernel(["mini-svd", "apollo-4-svd"], half=[])
def test_a_bad_gradient_where_a_basis_is_due_leaves_its_weight_and_state_as_they_were(
    member: Member, device: str, dtype: torch.dtype
):
    """The next gradient begins the basis, and counts as the step that this would have been, as in plain PyTorch."""
    spoiled = spoiled_at(0, 3)
    fused, plain = twins(member, device, dtype, shapes=SHAPES)
    for step in range(5):
        before = [fused.named["experts"].detach().clone(), *map(torch.clone, fused.state("experts").values())]
        fused.step(step, spoiled)
        plain.step(step, spoiled)
        after = [fused.named["experts"], *fused.state("experts").values()]
        if step == 3:
            assert [bits(tensor) for tensor in after] == [bits(tensor) for tensor in before]
    assert (int(fused.state("experts")["step"]), int(fused.state("wide")["step"])) == (3, 5)
    assert fused.optimizer.skipped() == plain.optimizer.skipped() == 2
    assert_same_run(fused, plain)


def zero_at_first(name: str, step: int, like: Tensor) -> Tensor:
    return gradient(name, step, like) * (step > 0)


@each_kernel(["mini-svd", "apollo-4-svd"], half=[])
def test_a_zero_gradient_begins_no_basis(member: Member, device: str, dtype: torch.dtype):
    fused, plain = twins(member, device, dtype, shapes=SHAPES)
    for step in range(3):
        fused.step(step, zero_at_first)
        plain.step(step, zero_at_first)
        assert (int(fused.state("wide")["step"]), int(fused.state("vector")["step"])) == (step, step + 1)
    assert fused.optimizer.skipped() == 0
    assert_same_run(fused, plain)


@on_both
def test_8_bit_moments_are_left_as_they_were_too(device: str):
    run = started(RULES["apollo-4-svd"], device, shapes=SHAPES, state_dtype="int8").steps(2)
    before = {name: bits(value) for name, value in run.state("experts").items()}
    run.step(2, spoiled_at(2))
    assert {name: bits(value) for name, value in run.state("experts").items()} == before
    assert run.optimizer.skipped() == 1


@pytest.mark.parametrize("device", ["cpu"])
def test_bases_are_made_where_they_are_due_and_copied_at_every_step(device: str, monkeypatch: pytest.MonkeyPatch):
    decomposed, copied = [], []
    svd_basis, kernel = plain_step.svd_basis, launches.stored_kernel

    class Counted:
        arg_names = kernel.arg_names

        def __getitem__(self, grid: Any) -> Callable[..., None]:
            copied.append(grid)
            return kernel[grid]

    def counted(grad_SC: Tensor, rank: int) -> Tensor:
        decomposed.append(grad_SC)
        return svd_basis(grad_SC, rank)

    monkeypatch.setattr(plain_step, "svd_basis", counted)
    monkeypatch.setattr(launches, "stored_kernel", Counted())
    run = started(RULES["apollo-4-svd"], device, shapes=SHAPES)
    run.optimizer.param_groups[0]["refresh_every"] = 3
    counts = []
    for step in range(5):
        run.step(step)
        counts.append((len(decomposed), len(copied)))
    # Of two weights that are projected; in one launch.
    assert counts == [(2, 1), (2, 2), (2, 3), (4, 4), (4, 5)]


@on_both
def test_a_basis_that_was_written_to_is_projected_by(device: str):
    fused, plain = twins(RULES["apollo-4-svd"], device, torch.float32, shapes={"wide": (24, 40)})
    other = torch.linalg.qr(torch.randn(24, 4, generator=torch.Generator().manual_seed(0)))[0].T
    for run in (fused, plain):
        run.steps(1).state("wide")["basis"].copy_(other)
        run.step(1)
    assert_same_run(fused, plain)


@each_kernel(["mini-svd", "apollo-4-svd"], half=[])
def test_squares_that_overflow_together_leave_a_weight_its_basis(member: Member, device: str, dtype: torch.dtype):
    """No channel's do by themselves."""
    run = started(member, device, dtype, shapes={"wide": (24, 40)}).steps(2)
    before = [bits(run.named["wide"]), *map(bits, run.state("wide").values())]
    run.step(2, lambda name, step, like: torch.full_like(like, 9e17))
    assert [bits(run.named["wide"]), *map(bits, run.state("wide").values())] == before
    assert run.optimizer.skipped() == 1


@pytest.mark.parametrize("device", ["cpu"])
@pytest.mark.parametrize("name", ["mini-svd", "apollo-4-svd", "apollo-20-svd"])
def test_a_basis_wider_than_the_gradient_loses_nothing(name: str, device: str):
    """In float16, which the interpreter computes as a GPU does."""
    fused, plain = twins(RULES[name], device, torch.float16, shapes={"wide": (37, 53), "experts": (2, 9, 24)})
    assert_same_run(fused.steps(3), plain.steps(3))


@on_both
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("narrow", list(PIECES), ids=str)
def test_the_pieces_of_a_basis_add_up_to_it(narrow: torch.dtype, stored: torch.dtype, device: str):
    """Singular vectors of a side of 2^14 are this small. What lies around a basis is left alone."""
    rank, side, offset = 3, 411, 16
    generator = torch.Generator().manual_seed(0)
    kept = (torch.randn(rank, side, generator=generator) * 2**-7).to(device, stored)
    pieces = PIECES[narrow] if stored == torch.float32 else 1
    plane = -(-rank * side // 16) * 16
    row = {at.RANK: rank, at.SIDE: side, at.BASIS: offset, at.STORED_BASIS: kept.data_ptr()}
    meta = torch.zeros(1, at.MATRIX_WIDTH.value, dtype=torch.int64)
    for column, value in row.items():
        meta[0, column.value] = value
    tiles = tile_table([(0, -(-rank * side // 256))], torch.device(device))
    scratch = torch.full((offset + pieces * plane + 16,), torch.nan, device=device, dtype=narrow)
    types = launches.TRITON_TYPES
    stored_kernel[(len(tiles),)](tiles, meta.to(device), scratch, B=types[stored], PIECES=pieces, BLOCK=256)
    planes = scratch[offset : offset + pieces * plane].view(pieces, plane)[:, : rank * side].double()
    added = planes.sum(0).view(rank, side) / at.STORED_SCALE.value
    # Two float16 hold 22 bits, as long as the second is above their least, 2^-24.
    rtol, atol = (2**-22, 2**-25 / at.STORED_SCALE.value) if (narrow, pieces) == (torch.float16, 2) else (0, 0)
    torch.testing.assert_close(added, kept.double(), rtol=rtol, atol=atol)
    assert int(scratch.isnan().sum()) == 32 + pieces * (plane - rank * side)


@on_both
def test_a_basis_that_was_loaded_is_projected_by(device: str):
    """Between two refreshes, by kernels that had copied another."""
    one, other = (started(RULES["apollo-4-svd"], device, shapes=SHAPES) for _ in range(2))
    one.steps(1)
    other.steps(1, lambda name, step, like: gradient(name, 7, like))
    other.load_(one)
    for run in (one, other):
        run.step(1)
    assert snapshot(other.optimizer)[:2] == snapshot(one.optimizer)[:2]


@pytest.mark.parametrize("device", ["cpu"])
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "kernels"])
def test_a_basis_that_no_option_asks_for_any_longer_is_refused(fused: bool, device: str):
    """Which of the two projections was meant?"""
    run = started(RULES["apollo-4-svd"], device, shapes={"wide": (24, 40)}, fused=fused).steps(2)
    run.optimizer.param_groups[0]["projection"] = "gaussian"
    with pytest.raises(ValueError, match=r"asks for no basis, its state has \(4, 24\).* cannot change once"):
        run.step(2)
