"""Artemis: what its products make of a matrix, what 4 bits keep of a momentum, and weights at the edges of both."""

import io
import math
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import papers
from apollo_optim import APOLLO, Artemis, ArtemisMini, optimizer_memory
from apollo_optim.core import orthogonal, projection
from apollo_optim.core.orthogonal import orthogonalized, product_dtype, products_at_once, symmetric_product
from apollo_optim.core.projection import _orthonormal_rows
from apollo_optim.quant import Int8Weight
from apollo_optim.quant.blocks import BLOCK, NF4, code_levels, packed, packed_shape, scale_shape, unpacked, widened
from apollo_optim.quant.rounding import Quantized
from apollo_optim.stepping import spectral
from family import Member, partly_slow
from runs import gradient as made_gradient
from runs import run, snapshot, weights
from twins import Run, on_both, started, twins

SHAPES = pytest.mark.parametrize("shape", [(1, 1), (1, 7), (7, 1), (5, 129), (129, 5), (24, 24)], ids=str)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@SHAPES
def test_singular_values_come_near_one_and_their_vectors_stay(shape: tuple[int, int]):
    matrix = normal(*shape)
    result = orthogonalized(matrix.unsqueeze(0))[0]
    u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
    inside = u.mT @ result @ vh.mT
    values = inside.diagonal()
    # What Muon's polynomial makes of anything from 0.002 of the norm on; these matrices have no smaller values.
    assert ((values > 0.68) & (values < 1.21)).all()
    torch.testing.assert_close(inside, torch.diag(values), rtol=0, atol=1e-11)


@pytest.mark.parametrize("size", [1e-45, 1e-38, 1e-20, 1.0, 3e38])
def test_no_gradient_is_too_small_or_too_large(size: float):
    matrices = torch.stack([torch.full((3, 5), size), torch.zeros(3, 5)])
    result = orthogonalized(matrices)
    torch.testing.assert_close(result[0], orthogonalized(torch.ones(1, 3, 5))[0])
    assert not result[1].any()


def test_missing_directions_stay_missing():
    """Of rank 2: the update is of rank 2, too."""
    matrix = normal(9, 2) @ normal(2, 14, seed=1)
    values = torch.linalg.svdvals(orthogonalized(matrix.unsqueeze(0))[0])
    assert (values[:2] > 0.68).all()
    # Each of five rounds multiplies what rounding leaves there by at most 3.4445.
    assert (values[2:] < 3.4445**5 * 1e-15).all()


@pytest.mark.parametrize("shape", [(5, 9), (9, 5), (9, 9)], ids=str)
def test_as_many_products_of_the_smaller_side_are_there_as_a_batch_has_room_for(shape: tuple[int, int]):
    made: list[weakref.ref[Tensor]] = []
    alive = []

    def counted(*factors: object) -> Tensor:
        result = symmetric_product(*factors)
        made.append(weakref.ref(result))
        alive.append(sum(each() is not None for each in made))
        return result

    orthogonalized(normal(1, *shape), counted)
    assert max(alive) == products_at_once(*shape)


@pytest.mark.parametrize(("shape", "most"), [((96, 96), 0.015), ((64, 172), 0.025)], ids=str)
def test_products_that_are_rounded_to_bfloat16_leave_one_or_two_percent(shape: tuple[int, int], most: float):
    """Rounds of a square matrix begin with the matrix itself, and leave less than runs of several rounds."""

    def rounded(*factors: object) -> Tensor:
        return symmetric_product(*factors).bfloat16().double()

    matrix = normal(1, *shape)
    exact = orthogonalized(matrix)
    off = torch.linalg.vector_norm(orthogonalized(matrix, rounded) - exact) / torch.linalg.vector_norm(exact)
    assert off < most


def test_products_are_in_bfloat16_on_a_gpu_only():
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert product_dtype(torch.float32, cuda) == torch.bfloat16
    assert product_dtype(torch.float64, cuda) == torch.float64
    assert product_dtype(torch.float32, cpu) == torch.float32
    assert product_dtype(torch.float32, torch.device("meta")) == torch.bfloat16  # what is planned is a GPU's


def test_codes_are_quantiles_of_a_normal_distribution():
    """QLoRA, equation 4: 8 above and 7 below a zero, evenly spread in probability, the largest being 1."""
    end = 0.5 * (1 - 1 / 32 + 1 - 1 / 30)
    above, below = (torch.special.ndtri(torch.linspace(end, 0.5, n, dtype=torch.float64)[:-1]) for n in (9, 8))
    quantiles = torch.cat([-below, torch.zeros(1), above.flip(0)]) / above.max()
    # The published numbers were computed in float32.
    torch.testing.assert_close(torch.tensor(NF4, dtype=torch.float64), quantiles, rtol=0, atol=1e-6)
    assert torch.equal(torch.tensor(NF4, dtype=torch.float64), papers.NF4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (2, 128), (2, 3, 129), (4, 300)], ids=str)
def test_rows_of_any_length_are_packed_to_the_nearest_code(shape: tuple[int, ...], dtype: torch.dtype):
    value = normal(*shape).exp().mul(normal(*shape, seed=1)).to(dtype)
    blocks = packed(value)
    assert (blocks.codes.shape, blocks.codes.dtype) == (packed_shape(shape), torch.uint8)
    assert (blocks.scale.shape, blocks.scale.dtype) == (scale_shape(shape), torch.float32)
    expected = torch.stack([papers.nf4(row) for row in value.double().view(-1, shape[-1])]).view(shape)
    torch.testing.assert_close(unpacked(blocks, shape[-1], dtype), expected.to(dtype))


def test_what_was_packed_is_packed_to_the_same_bytes():
    blocks = packed(normal(5, 301, dtype=torch.float32))
    again = packed(unpacked(blocks, 301, torch.float32))
    assert torch.equal(blocks.codes, again.codes)
    assert torch.equal(blocks.scale, again.scale)


@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-38, 3e38])
def test_blocks_of_any_size_are_finite_and_zero_stays_zero(size: float):
    value = torch.full((2, 200), size)
    value[1] = 0
    blocks = packed(value)
    assert torch.equal(unpacked(blocks, 200, torch.float32), value)
    assert (blocks.codes[1] == NF4.index(0.0) * 0x11).all()


def test_new_state_is_a_momentum_of_zero():
    blocks = Quantized(torch.zeros(3, 4, dtype=torch.uint8), torch.zeros(3, 1))
    assert not unpacked(blocks, 7, torch.float32).any()


@pytest.mark.parametrize("optimizer", [Artemis, ArtemisMini])
@SHAPES
def test_an_update_has_the_size_of_its_scale_whatever_the_shape(optimizer: type, shape: tuple[int, int]):
    weight = nn.Parameter(torch.zeros(shape, dtype=torch.float64))
    weight.grad = normal(*shape)
    optimizer([weight], lr=1.0, scale=0.3).step()
    assert 0.3 * 0.68 < float(weight.detach().square().mean().sqrt()) < 0.3 * 1.21


def test_without_a_decay_both_follow_the_gradient_and_keep_nothing():
    ends = []
    for build in (ArtemisMini, Artemis):
        named = weights({"wide": (9, 40), "experts": (3, 10, 24)})
        optimizer = build(list(named.items()), betas=(0.0, 0.98))
        run(optimizer, named, range(3))
        assert all(state.keys() == {"step", "seed"} for state in optimizer.state.values())
        ends.append(snapshot(optimizer).weights)
    assert ends[0] == ends[1]


def test_a_weight_goes_on_along_its_momentum_while_gradients_are_zero():
    """At full length, as Muon does: orthogonalised, a momentum that fades is as long as it was."""
    weight = nn.Parameter(torch.zeros(9, 40))
    optimizer = Artemis([weight], lr=0.1)
    ends = []
    for gradient in (torch.zeros(9, 40), normal(9, 40, dtype=torch.float32), torch.zeros(9, 40), torch.zeros(9, 40)):
        weight.grad = gradient
        optimizer.step()
        ends.append(weight.detach().clone())
    assert not ends[0].any()  # nothing to follow yet
    torch.testing.assert_close(ends[3] - ends[2], ends[2] - ends[1], rtol=0, atol=1e-5)
    assert float((ends[2] - ends[1]).square().mean().sqrt()) > 0.1 * 0.2 * 0.68


def test_weights_in_one_stack_are_stepped_as_by_themselves(monkeypatch: pytest.MonkeyPatch):
    """On a GPU weights of one shape are stacked; here, as if this were one, and with a bad gradient among them."""
    for dtype in (torch.float64, torch.bfloat16):
        ends = []
        for stacked in (False, True):
            named = weights({f"w{n}": (6, 150) for n in range(5)} | {"other": (3, 4, 9)}, dtype)
            optimizer = Artemis(list(named.items()), lr=0.01, weight_decay=0.1)
            if stacked:
                monkeypatch.setattr(spectral, "stacks_of", two_by_two)
            for step in range(3):
                run_with_a_bad_gradient(optimizer, named, step)
            monkeypatch.undo()
            refused = optimizer.state[named["w1"]]
            codes = [refused[name].clone() for name in ("exp_avg", "exp_avg_scale")]
            ends.append(([weight.detach().clone() for weight in named.values()], optimizer.skipped(), codes))
        (alone, skipped, kept), (together, skipped_together, kept_together) = ends
        assert skipped == skipped_together == 1
        assert all(map(torch.equal, kept, kept_together))
        for one, other in zip(alone, together, strict=True):
            # A batched product may add up in another order; of bfloat16 a draw then goes the other way now and then.
            tolerance = 1e-13 if dtype == torch.float64 else 2**-7
            torch.testing.assert_close(other, one, rtol=tolerance, atol=tolerance)
            assert float((other == one).double().mean()) > (0.0 if dtype == torch.float64 else 0.99)


def two_by_two(jobs):
    """Stacks of two weights of one shape."""
    jobs = list(jobs)
    shapes = dict.fromkeys(job.weight.shape for job in jobs)
    alike = [[job for job in jobs if job.weight.shape == shape] for shape in shapes]
    return [spectral.Stack(each[first : first + 2]) for each in alike for first in range(0, len(each), 2)]


def run_with_a_bad_gradient(optimizer: Artemis, named: dict[str, nn.Parameter], step: int) -> None:
    for number, weight in enumerate(named.values()):
        weight.grad = normal(*weight.shape, seed=10 * step + number, dtype=weight.dtype)
    if step == 2:  # the last: on the CPU it is not counted, and later draws would differ
        named["w1"].grad.view(-1)[3] = math.nan
    optimizer.step()


def test_large_weights_are_stepped_a_few_rows_at_a_time(monkeypatch: pytest.MonkeyPatch):
    ends = []
    for piece in (2**22, 300):
        monkeypatch.setattr(spectral, "PIECE", piece)
        named = weights({"wide": (9, 140), "experts": (3, 10, 24)}, torch.bfloat16)
        optimizer = Artemis(list(named.items()))
        run(optimizer, named, range(3))
        ends.append(snapshot(optimizer)[:2])
    assert ends[0] == ends[1]


def test_a_run_resumes_bit_for_bit_from_plain_tensors():
    shapes = {"wide": (9, 41), "norm": (5,)}
    named, others = weights(shapes), weights(shapes)
    whole, resumed = Artemis(list(named.items())), Artemis(list(others.items()))
    run(whole, named, range(4))
    stream = io.BytesIO()
    torch.save(whole.state_dict(), stream)
    stream.seek(0)
    resumed.load_state_dict(torch.load(stream, weights_only=True))
    for weight, other in zip(named.values(), others.values(), strict=True):
        other.data.copy_(weight.data)
    for optimizer, each in ((whole, named), (resumed, others)):
        run(optimizer, each, range(4, 6))
    assert snapshot(whole) == snapshot(resumed)
    assert resumed.state[others["wide"]]["exp_avg"].dtype == torch.uint8


def test_a_momentum_in_4_bits_is_not_one_of_low_rank():
    named = weights({"wide": (9, 40)})
    optimizer = Artemis(list(named.items()))
    run(optimizer, named, range(1))
    with pytest.raises(ValueError, match=r"wide \(9, 40\): projection is identity in the checkpoint, power here"):
        ArtemisMini(list(named.items())).load_state_dict(optimizer.state_dict())


def test_four_bits_are_refused_where_there_is_a_second_moment():
    with pytest.raises(
        ValueError,
        match=r"state_dtype='nf4' is for the momentum of Artemis and FactoredAdamW.*, got granularity='channel'",
    ):
        APOLLO([nn.Parameter(torch.ones(4, 4))], state_dtype="nf4")


def test_a_projection_of_what_is_orthogonalised_is_refused():
    message = "granularity='spectral' needs projection='identity' or 'power', got 'gaussian'"
    with pytest.raises(ValueError, match=message):
        APOLLO([nn.Parameter(torch.ones(4, 4))], granularity="spectral")


def test_a_residual_is_refused_where_nothing_is_left_out():
    with pytest.raises(ValueError, match="granularity='spectral' needs residual=False, got True"):
        Artemis([{"params": [nn.Parameter(torch.ones(4, 4))], "residual": True}])


def test_a_power_iteration_is_refused_where_nothing_is_orthogonalised():
    message = "projection='power' is for the momentum of ArtemisMini, got granularity='channel'"
    with pytest.raises(ValueError, match=message):
        APOLLO([nn.Parameter(torch.ones(4, 4))], projection="power")


def test_four_bits_are_refused_where_the_momentum_is_of_low_rank():
    with pytest.raises(
        ValueError,
        match=r"state_dtype='nf4' is for the momentum of Artemis and FactoredAdamW.*, got .*projection='power'",
    ):
        ArtemisMini([nn.Parameter(torch.ones(4, 4))], state_dtype="nf4")


def test_a_vocabulary_is_left_to_adamw():
    embedding, layer = (nn.Parameter(torch.empty(shape, device="meta")) for shape in ((50257, 64), (64, 64)))
    with pytest.warns(UserWarning, match="looks like an embedding or a head"):
        optimizer = Artemis([embedding, layer])
    for weight in (embedding, layer):
        weight.grad = torch.empty_like(weight)
    optimizer.step()
    assert "exp_avg_sq" in optimizer.state[embedding]
    assert "exp_avg_sq" not in optimizer.state[layer]


def test_seven_percent_of_adamw_for_the_layers_of_a_large_model():
    shapes = [(4096, 4096)] * 4 + [(11008, 4096)] * 2 + [(4096, 11008)]
    share = optimizer_memory(shapes, Artemis) / optimizer_memory(shapes, APOLLO, rank=None)
    assert share == pytest.approx((1 / 2 + 4 / 128) / 8, rel=1e-4)
    low_rank = sum(64 * (rows + columns) * torch.bfloat16.itemsize for rows, columns in shapes)
    assert optimizer_memory(shapes, ArtemisMini) == low_rank + 7 * (4 + 8)
    assert low_rank < 0.01 * optimizer_memory(shapes, APOLLO, rank=None)


def momentum_of(state: dict[str, Tensor]) -> Tensor:
    """The momentum of a wide weight."""
    return (state["basis"].mT @ state["exp_avg"]).mT


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("long", "count"), [(9, 9), (70, 12), (300, 256)])
def test_rows_are_orthonormal_or_zero(long: int, count: int, dtype: torch.dtype):
    """Of independent columns, of almost parallel ones, and where some are zero or made up of others."""
    free, half = normal(2, long, count), count // 2
    steep = torch.linalg.qr(free).Q * torch.logspace(0, -3, count) @ normal(2, count, count, seed=1)
    mixed = torch.cat([free[..., :half], free[..., :half] @ normal(2, half, count - half, seed=1)], dim=-1)
    hollow = torch.where(torch.arange(count) == half, 0.0, free)
    for columns, missing in ((free, 0), (steep, 0), (mixed, count - half), (hollow, 1)):
        rows = _orthonormal_rows(columns.mT.to(dtype))
        there = rows.any(dim=-1)
        assert (~there).sum(dim=-1).tolist() == [missing] * 2
        error = long * torch.finfo(dtype).eps  # of as many products as are added up
        torch.testing.assert_close(rows @ rows.mT, torch.diag_embed(there.to(dtype)), rtol=0, atol=error)
        unit = columns / columns.norm(dim=-2, keepdim=True).clamp_min(1e-30)
        left = unit - rows.double().mT @ (rows.double() @ unit)
        assert float(left.abs().max()) < error


@pytest.mark.parametrize("own", [1e-3, 1e-4, 3e-5])
def test_rows_that_the_others_nearly_make_up_are_orthonormal_or_zero(own: float):
    """Each is hardly above what is left out, so that together they are worse than float64 can tell apart."""
    shares = normal(5, 32, 32).tril(-1) + own * torch.eye(32)
    shares[:, 0, 0] = 1
    rows = _orthonormal_rows(shares @ torch.linalg.qr(normal(5, 200, 32, seed=1)).Q.mT)
    there = rows.any(dim=-1)
    assert there[:, :2].all()
    torch.testing.assert_close(rows @ rows.mT, torch.diag_embed(there.double()), rtol=0, atol=200 * 2**-52)


@pytest.mark.parametrize("shape", [(9, 40), (40, 9), (2, 9, 40)], ids=str)
def test_the_basis_of_a_momentum_lies_along_the_larger_side(shape: tuple[int, ...]):
    weight = nn.Parameter(torch.zeros(shape))
    optimizer = ArtemisMini([weight], rank=2)
    weight.grad = normal(*shape, dtype=torch.float32)
    optimizer.step()
    state = optimizer.state[weight]
    assert state["basis"].shape == (*shape[:-2], 2, 40)
    assert state["exp_avg"].shape == (*shape[:-2], 2, 9)


def test_the_basis_of_a_square_momentum_lies_along_the_rows():
    """A gradient with one row has one direction there."""
    weight = nn.Parameter(torch.zeros(9, 9))
    optimizer = ArtemisMini([weight], rank=2)
    weight.grad = torch.zeros(9, 9)
    weight.grad[4] = torch.arange(9)
    optimizer.step()
    assert optimizer.state[weight]["basis"].abs().nonzero().tolist() == [[1, 4]]


def test_a_momentum_of_low_rank_is_kept_whole():
    """As many directions as it has are enough, from the first step on: nothing is left out, and nothing made up."""
    weight = nn.Parameter(torch.zeros(20, 60, dtype=torch.float64))
    optimizer = ArtemisMini([weight], rank=3, state_dtype=torch.float32)
    left, expected = normal(20, 2), torch.zeros(20, 60, dtype=torch.float64)
    for number in range(6):
        weight.grad = left @ normal(2, 60, seed=number)
        optimizer.step()
        expected = 0.9 * expected + 0.1 * weight.grad
        state = optimizer.state[weight]
        assert (momentum_of(state) - expected).abs().max() < 1e-12
        assert [bool(row.any()) for row in state["basis"]] == [True, True, False]


def test_a_direction_that_appears_later_is_found():
    weight = nn.Parameter(torch.zeros(20, 60, dtype=torch.float64))
    optimizer = ArtemisMini([weight], rank=2, state_dtype=torch.float32)
    first, second = (torch.outer(normal(20, 1, seed=seed)[:, 0], normal(60, 1, seed=seed)[:, 0]) for seed in (1, 2))
    for gradient in [first] * 3 + [second] * 30:
        weight.grad = gradient
        optimizer.step()
    share = torch.linalg.vector_norm(momentum_of(optimizer.state[weight]) - second) / torch.linalg.vector_norm(second)
    assert share < 0.1


def test_a_power_iteration_follows_the_leading_directions_of_gradients_with_noise():
    """To within what the best momentum of that rank would leave out, and a tenth more."""
    weight = nn.Parameter(torch.zeros(30, 80, dtype=torch.float64))
    optimizer = ArtemisMini([weight], rank=4, state_dtype=torch.float32)
    signal = normal(30, 4) @ normal(4, 80, seed=1)
    whole = torch.zeros(30, 80, dtype=torch.float64)
    for number in range(40):
        weight.grad = signal + normal(30, 80, seed=number)
        optimizer.step()
        whole = 0.9 * whole + 0.1 * weight.grad
    left_out = torch.linalg.vector_norm(momentum_of(optimizer.state[weight]) - whole)
    assert left_out < 1.1 * torch.linalg.svdvals(whole)[4:].norm()


# By kernels: in Triton's interpreter on the CPU, and compiled on a GPU.

KERNEL_SHAPES = {"wide": (9, 150), "alike": (9, 150), "tall": (32, 17), "experts": (2, 9, 24)}
"""Rows that are no whole vectors in a matrix that is none, and in one that is (tall)."""
HALVES = {"halves": (3, 6, 8)}
"""Experts of three vectors of 16, whose codes are of one and a half."""


@pytest.fixture(params=[False, True], ids=["pointers", "descriptors"])
def reads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How kernels read factors; those without whole vectors by pointers, whatever is said."""
    from apollo_optim.fused import products

    monkeypatch.setattr(products, "reads_by_descriptors", lambda device: request.param)


@pytest.mark.usefixtures("kernels", "reads")
@on_both
@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("shape", [(2, 37, 53), (1, 72, 32), (3, 16, 40), (1, 1, 1)], ids=str)
def test_a_symmetric_product_is_whole(shape: tuple[int, int, int], transposed: bool, device: str):
    from apollo_optim.fused.products import symmetric_product

    count, side, contracted = shape
    x = normal(count, contracted, side).mT if transposed else normal(*shape)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    # Rounded once, of factors that are exact in the dtype.
    unit = 2**-23 if device == "cpu" else 2**-8
    x = x.to(dtype)
    gram = x.double() @ x.double().mT
    torch.testing.assert_close(
        symmetric_product(x.to(device), x.to(device)).cpu().double(),
        gram, rtol=unit, atol=4 * 2**-24 * float(contracted * x.double().square().amax()),
    )  # fmt: skip


@pytest.mark.usefixtures("kernels", "reads")
@on_both
@pytest.mark.parametrize("shape", [(2, 37), (1, 72), (3, 16), (1, 1)], ids=str)
def test_a_polynomial_of_a_symmetric_matrix_is_rounded_once(shape: tuple[int, int], device: str):
    from apollo_optim.fused.products import symmetric_product

    count, side = shape
    dtype, unit = (torch.float32, 2**-23) if device == "cpu" else (torch.bfloat16, 2**-8)
    x = normal(count, side, side)
    x = (x + x.mT).to(dtype)
    exact = x.double()
    expected = 3.0 * torch.eye(side, dtype=torch.float64) - 2.0 * exact + 0.5 * exact @ exact
    result = symmetric_product(x.to(device), x.to(device), (3.0, -2.0, 0.5)).cpu()
    size = side * exact.square().amax()
    torch.testing.assert_close(result.double(), expected, rtol=unit, atol=4 * 2**-24 * float(size))
    plain = orthogonal.symmetric_product(exact, exact, (3.0, -2.0, 0.5))
    torch.testing.assert_close(plain, expected, rtol=0, atol=1e-13 * float(size))


@pytest.mark.usefixtures("kernels")
@on_both
@pytest.mark.parametrize("rank", [1, 5, 64, 100, 130])
def test_an_inverse_factor_leaves_out_the_same_rows(rank: int, device: str):
    """Whatever the size of a row; of the others it is the inverse of their Cholesky factor."""
    from apollo_optim.fused.products import inverse_factor

    rows = normal(3, rank, 4 * rank) * torch.logspace(-20, 20, rank).unsqueeze(-1)
    rows[:, 1::7] = 3 * rows[:, : rank - 1 : 7]
    gram = rows @ rows.mT
    expected = projection.inverse_factor(gram, 1e-9)
    there = torch.ones(rank, dtype=torch.bool)
    there[1::7] = False
    assert torch.equal(expected.any(dim=-1), there.expand(3, -1))
    factor = torch.linalg.cholesky(gram[:, there][:, :, there])
    # In units of the rows: a Gram matrix of this many random ones, four times as long, is not far from 1.
    size = torch.linalg.vector_norm(rows, dim=-1)
    torch.testing.assert_close(
        expected[:, there][:, :, there] * size[:, None, there], torch.linalg.inv(factor) * size[:, None, there],
        rtol=0, atol=1e-12,
    )  # fmt: skip
    found = inverse_factor(gram.to(device), 1e-9).cpu()
    torch.testing.assert_close(found * size.unsqueeze(-2), expected * size.unsqueeze(-2), rtol=0, atol=1e-13)


def test_a_factor_of_one_size_is_launched_apart_on_each_device(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("triton")
    from apollo_optim.fused import products

    launched = []  # by what holds the compiled kernel, which is loaded on one device
    monkeypatch.setattr(products.CompiledLaunch, "__call__", lambda self, *_: launched.append(self))
    for device in ("cpu", "meta", "cpu"):
        products.inverse_factor(torch.ones(2, 3, 3, dtype=torch.float64, device=device), 1e-9)
    assert launched[0] is launched[2]
    assert launched[0] is not launched[1]


@pytest.mark.usefixtures("kernels", "reads")
@on_both
def test_what_lies_above_the_diagonal_is_not_computed(device: str):
    """Of factors whose product is not symmetric: below it is that product, above it the same again."""
    from apollo_optim.fused.products import product_tile, symmetric_product

    wide = product_tile(torch.device(device)).side
    dtype, unit = (torch.float32, 2**-23) if device == "cpu" else (torch.bfloat16, 2**-8)
    a, b = (normal(1, 400, 16, seed=seed, dtype=dtype).to(device) for seed in (1, 2))
    result, product = symmetric_product(a, b), a.double() @ b.double().mT
    below = slice(wide, None), slice(0, wide)
    torch.testing.assert_close(result[0][below].double(), product[0][below], rtol=unit, atol=1e-4)
    assert torch.equal(result[0].mT[below], result[0][below])


@pytest.mark.usefixtures("kernels")
@on_both
@pytest.mark.parametrize(
    "options", [{}, {"betas": (0.0, 0.98)}, {"maximize": True}, {"capturable": True}], ids=lambda o: " ".join(o)
)
def test_kernels_step_artemis_as_plain_pytorch_does(options: dict[str, object], device: str):
    """Weights of one shape together, tall and wide ones, experts, and beside them what AdamW steps."""
    few = {"wide": (9, 150), "vector": (5,)}
    shapes = few if options else KERNEL_SHAPES | HALVES | few
    fused, plain = twins(Member("", Artemis), device, shapes=shapes, **options)
    exact = started(Member("", Artemis), "cpu", torch.float64, shapes=shapes, fused=False, **options)
    for each in (fused, plain, exact):
        each.steps(2)

    def apart(one: Run, other: Run, name: str) -> float:
        ends = [each.named[name].detach().cpu().double() for each in (one, other)]
        moved = exact.named[name].detach() - exact.start[name]
        return float(torch.linalg.vector_norm(ends[0] - ends[1]) / torch.linalg.vector_norm(moved))

    for name in plain.named:
        if device == "cpu":
            assert apart(fused, plain, name) < 1e-5, name
        else:  # both round every product to bfloat16, which is several percent of a small matrix
            assert apart(fused, exact, name) < max(0.02, 1.5 * apart(plain, exact, name)), name
        for key, value in plain.state(name).items():
            if key == "exp_avg" and value.dtype == torch.uint8:
                assert torch.equal(fused.state(name)[key], value)
            else:
                torch.testing.assert_close(fused.state(name)[key], value, rtol=1e-6, atol=0)


def near_middles(rows: int) -> Tensor:
    """Blocks of any size, of numbers that lie a few places from the middle between two codes, if not on it."""
    made = torch.Generator().manual_seed(0)
    exponent = torch.randint(-149, 40, (rows, 1), generator=made)
    scale = torch.ldexp(1 + torch.rand(rows, 1, generator=made, dtype=torch.float64), exponent).float()
    chosen = torch.randint(0, 15, (rows, BLOCK), generator=made)
    value = code_levels(torch.float32, torch.device("cpu"))[1][chosen] * scale
    for _ in range(3):
        towards = torch.randint(-1, 2, value.shape, generator=made)
        value = torch.where(towards == 0, value, value.nextafter(towards * scale))
    value[:, :2] = torch.cat([-scale, scale], dim=1)
    return value


@pytest.mark.usefixtures("kernels")
@on_both
def test_kernels_find_the_codes_that_plain_pytorch_does_wherever_a_middle_is_near(device: str):
    value = near_middles(400)
    weight = nn.Parameter(torch.zeros_like(value, device=device))
    optimizer = Artemis([weight], betas=(0.5, 0.98), fused=True)
    weight.grad = 2 * value.to(device)  # half of which becomes the momentum
    optimizer.step()
    kept, expected = optimizer.state[weight], packed(value)
    assert torch.equal(kept["exp_avg_scale"].cpu(), expected.scale)
    assert torch.equal(kept["exp_avg"].cpu(), expected.codes)


@pytest.mark.usefixtures("kernels")
@on_both
def test_kernels_read_gradients_and_momentum_wherever_they_begin(device: str):
    def moved(tensor: Tensor) -> Tensor:
        """The same numbers, one element after the beginning of a vector."""
        return tensor.new_empty(tensor.numel() + 1)[1:].view_as(tensor).copy_(tensor)

    ends = []
    for moves in (None, "grad", "exp_avg"):
        weight = nn.Parameter(normal(8, 32, dtype=torch.float32).to(device))
        optimizer = Artemis([("w", weight)], lr=0.1, fused=True)
        for step in range(3):
            grad = normal(8, 32, seed=step, dtype=torch.float32).to(device)
            weight.grad = moved(grad) if moves == "grad" and step else grad
            optimizer.step()
            if moves == "exp_avg":
                optimizer.state[weight]["exp_avg"] = moved(optimizer.state[weight]["exp_avg"])
        ends.append(weight.detach())
    assert torch.equal(ends[0], ends[1])
    assert torch.equal(ends[0], ends[2])


@pytest.mark.usefixtures("kernels")
@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # numpy reports what is made of a NaN
@on_both
def test_kernels_leave_a_weight_whose_gradient_is_not_finite(device: str):
    """An expert takes the others of its weight along. A block of the momentum stays as it was, and finite."""
    run = started(Member("", Artemis), device, shapes=KERNEL_SHAPES).steps(1)
    before = {name: weight.detach().clone() for name, weight in run.named.items()}
    codes = run.state("alike")["exp_avg"].clone()

    def bad(name: str, step: int, like: Tensor) -> Tensor:
        made = made_gradient(name, step, like)
        if name in ("alike", "experts"):
            made.view(-1)[7] = math.nan if name == "alike" else math.inf
        return made

    run.step(1, bad)
    assert run.optimizer.skipped() == 2
    for name, weight in run.named.items():
        assert torch.equal(weight.detach(), before[name]) == (name in ("alike", "experts")), name
        assert bool(run.state(name)["exp_avg_scale"].isfinite().all())
    same = run.state("alike")["exp_avg"] == codes
    assert bool(same[0, : BLOCK // 2].all())
    assert not bool(same[0, BLOCK // 2 :].all())
    run.step(2)
    assert all(bool(weight.isfinite().all()) for weight in run.named.values())


@pytest.mark.usefixtures("kernels")
@on_both
@pytest.mark.parametrize("fused", [True, False], ids=["kernels", "plain"])
@pytest.mark.parametrize(
    ("size", "beta"), [(0.0, 0.9), (2.0**-141, 0.0), (2.0**-67, 0.9), (2.0**50, 0.9)], ids=lambda each: f"{each:.0e}"
)
@pytest.mark.parametrize("optimizer", [Artemis, ArtemisMini])
def test_gradients_of_any_size_move_a_weight_alike(optimizer: type, size: float, beta: float, fused: bool, device: str):
    """To the bit, by powers of two. Larger ones, whose squares float32 cannot hold, are refused as everywhere.

    Below the smallest normal number float32 has few bits: enough for these gradients, but not for their momentum.
    """
    moves = []
    for scale in (1.0, size):
        options = {"weight_decay": 0.0, "betas": (beta, 0.98), "fused": fused}
        run = started(Member("", optimizer), device, shapes={"wide": (9, 150)}, **options)
        for step in range(2 if optimizer is ArtemisMini else 1):
            run.step(step, lambda name, n, like, scale=scale: (made_gradient(name, n, like) * 2**8).round() * scale)
        moves.append(run.named["wide"].detach() - run.start["wide"])
    assert bool(moves[0].any())
    assert torch.equal(moves[1], moves[0] if size else torch.zeros_like(moves[0]))


@pytest.mark.usefixtures("kernels")
@on_both
def test_kernels_step_int8_weights_by_orthogonalised_momentum(device: str):
    """As float32 weights of the same values, but for a code up or down, as often the one as the other."""
    start = Int8Weight.of(normal(24, 256, dtype=torch.float32).to(device), 128)
    ends = {}
    for kind, fused in (("int8", True), ("wide", True), ("plain", False)):
        weight = nn.Parameter(start.dequantize() if kind == "wide" else start.clone())
        optimizer = Artemis([("w", weight)], lr=0.1, fused=fused)
        weight.grad = normal(24, 256, seed=1, dtype=torch.float32).to(device)
        optimizer.step()
        ends[kind] = weight.detach(), optimizer.state[weight]["exp_avg"]
    (stepped, codes), (wide, _), (plain, plain_codes) = ends.values()
    assert torch.equal(codes, plain_codes)
    off = (stepped.dequantize() - wide) / stepped.scale.repeat_interleave(128, dim=1)
    assert float(off.abs().max()) < 1 + 1e-4
    # Rounding that is right on average is off by less than half a code at the root mean square.
    assert abs(float(off.mean())) < 5 * 0.5 / math.sqrt(off.numel())
    if device == "cpu":  # on a GPU products of another order are percents apart, and draws part where the values do
        assert float((stepped.codes != plain.codes).double().mean()) < 0.01


def test_kernels_asked_for_in_vain_are_an_error(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    weight = nn.Parameter(torch.zeros(9, 40))
    weight.grad = torch.ones(9, 40)
    reason = "there is no kernel for granularity='spectral' with state_dtype=torch.float32, only with 'nf4'"
    with pytest.raises(RuntimeError, match=reason):
        Artemis([weight], fused=True, state_dtype=torch.float32).step()


@pytest.mark.usefixtures("kernels")
@on_both
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="bf16"),
        pytest.param({"state_dtype": torch.float32, "maximize": True}, id="fp32", marks=pytest.mark.slow),
        pytest.param({"state_dtype": torch.int8}, id="int8", marks=pytest.mark.slow),
    ],
)
def test_kernels_step_a_momentum_of_low_rank_as_plain_pytorch_does(options: dict[str, object], device: str):
    """Of experts too, of groups with decays and ranks of their own, and of a gradient that is not finite."""
    shapes = {
        "wide": (5, 40),
        "alike": (5, 40),
        "tall": (12, 7),
        "experts": (2, 5, 9),
        "other": (5, 40),
        "more": (5, 40),
    }
    runs = [
        low_rank_run(shapes, place, dtype, fused=fused, **options)
        for fused, place, dtype in (
            (True, device, torch.float32),
            (False, device, torch.float32),
            (False, "cpu", torch.float64),
        )
    ]
    least = 2e-5 if device == "cpu" else 0.02  # products are in bfloat16 there
    for name, start in weights(shapes, torch.float64).items():
        fused, plain, exact = (ends[name][0] - start.detach() for ends in runs)
        off = torch.linalg.vector_norm(plain - exact)
        assert torch.linalg.vector_norm(fused - exact) < max(least * torch.linalg.vector_norm(exact), 1.5 * off), name
        fused, plain, exact = (ends[name][1] for ends in runs)
        # A number in 8 bits that is rounded the other way is off by a 127th of its block's largest.
        assert torch.linalg.vector_norm(fused - plain) < 0.02 * torch.linalg.vector_norm(exact), name


@pytest.mark.usefixtures("kernels")
@on_both
@pytest.mark.parametrize(
    "state_dtype", partly_slow([torch.bfloat16, torch.float32, torch.int8], quick=[torch.int8]), ids=str
)
def test_kernels_keep_a_momentum_of_low_rank_to_the_bit(
    state_dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
):
    """Of the same numbers; experts too, rows of several blocks, and a second gradient that is not finite."""
    shapes = {"wide": (5, 140), "alike": (5, 140), "square": (132, 132), "experts": (2, 5, 9)}

    def found(step: int, length: int) -> Tensor:
        return normal(3, length, seed=step).exp() * normal(3, length, seed=2 + step)

    def bad(name: str, step: int, like: Tensor) -> Tensor:
        made = made_gradient(name, step, like)
        if name == "alike":
            made[3, 7] = math.nan
        return made

    states = []
    for fused in (True, False):
        run = started(Member("", ArtemisMini), device, shapes=shapes, rank=3, state_dtype=state_dtype, fused=fused)
        for step, gradient in enumerate((made_gradient, bad)):

            def same(old: projection.LowRank, *_: object, step: int = step) -> projection.LowRank:
                new = (found(step, each.shape[-1]).float().to(device).expand(each.shape) for each in old)
                return projection.LowRank(*(each.contiguous() for each in new))

            monkeypatch.setattr(spectral, "power_iteration", same)
            run.step(step, gradient)
        states.append({name: run.state(name) for name in shapes})
    expected = found(0, 140).float().to(device, torch.bfloat16)
    assert state_dtype != torch.bfloat16 or torch.equal(states[0]["alike"]["basis"], expected)
    for name, state in states[0].items():
        for key in {"basis", "exp_avg", "exp_avg_scale"} & state.keys():
            assert torch.equal(state[key], states[1][name][key]), (name, key)


def low_rank_run(shapes: dict[str, tuple[int, ...]], device: str, dtype: torch.dtype, **options: Any) -> dict[str, Any]:
    """Each weight and its momentum, in float64, after three steps of ArtemisMini."""
    named = {name: nn.Parameter(made.detach().to(device)) for name, made in weights(shapes, dtype).items()}
    most = [(name, weight) for name, weight in named.items() if name not in ("other", "more")]
    other = {"params": [("other", named["other"])], "betas": (0.5, 0.98), "lr": 0.02}
    more = {"params": [("more", named["more"])], "rank": 3}
    optimizer = ArtemisMini([{"params": most}, other, more], lr=0.01, rank=2, **options)
    for step in range(3):
        for name, weight in named.items():
            weight.grad = made_gradient(name, step, weight)
        if step == 1:
            named["alike"].grad[3, 7] = math.nan
        optimizer.step()
    assert optimizer.skipped() == 1
    ends = {}
    for name, weight in named.items():
        state = optimizer.state[weight]
        low = state["exp_avg"]
        if "exp_avg_scale" in state:
            low = widened(low, state["exp_avg_scale"], torch.float64)
        momentum = state["basis"].double().mT @ low.double()
        ends[name] = weight.detach().double().cpu(), momentum.cpu()
    return ends


@pytest.mark.usefixtures("kernels")
@on_both
def test_kernels_multiply_together_what_a_bound_on_scratch_allows(device: str, monkeypatch: pytest.MonkeyPatch):
    """Weights in batches, and experts of one weight one after the other: to no effect but on the order of sums."""
    shapes = {"one": (9, 40), "two": (9, 40), "experts": (2, 9, 24)}
    ends = []
    for most, batches in ((2**30, 2), (1, 3)):
        monkeypatch.setattr("apollo_optim.fused.batches.SPECTRAL_BYTES", most)
        run = started(Member("", Artemis), device, shapes=shapes).steps(1)
        plan = run.optimizer._plans.whole
        assert plan is not None
        assert [len(fused.tables.batches) for fused in plan.fused] == [batches]
        ends.append({name: weight.detach() for name, weight in run.named.items()})
    for name, weight in ends[0].items():
        torch.testing.assert_close(ends[1][name], weight, rtol=0, atol=1e-6 if device == "cpu" else 1e-4)


class Held(TorchDispatchMode):
    """Bytes of the tensors that are made within it, now and at most."""

    now = most = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        before = {storage._cdata for storage in storages((args, kwargs))}
        result = operation(*args, **(kwargs or {}))
        for storage in storages(result):
            if storage._cdata not in before:  # no view, and nothing that is written in place
                weakref.finalize(storage, self._add, -storage.nbytes())
                self._add(storage.nbytes())
        return result

    def _add(self, size: int) -> None:
        self.now += size
        self.most = max(self.most, self.now)


def storages(values: object) -> list[torch.UntypedStorage]:
    return [value.untyped_storage() for value in tree_leaves(values) if isinstance(value, Tensor)]


def test_following_a_momentum_takes_no_more_memory_than_a_batch_counts():
    """Told without numbers, as on a GPU but for its kernel; and hardly less, of the kinds that take most."""
    from apollo_optim.fused.batches import FOLLOWED_BYTES

    found = []
    for shape, count, dtype in [((256, 256), 1, "bfloat16"), ((256, 256), 3, "bfloat16"), ((256, 688), 1, "int8")]:
        params = [nn.Parameter(torch.empty(shape, dtype=torch.bfloat16, device="meta")) for _ in range(count)]
        for weight in params:
            weight.grad = torch.empty_like(weight)
        optimizer = ArtemisMini(params, rank=8, state_dtype=dtype)
        jobs = optimizer._weight_steps(optimizer.param_groups, optimizer._weights())
        stack = spectral.Stack(jobs, factor=lambda gram, least: torch.empty_like(gram))
        directions = torch.empty(count, *shape, dtype=torch.bfloat16, device="meta")
        with Held() as held:
            stack.look_ahead_at_low_rank_(directions, 1)
        found.append(held.most / (count * 8 * sum(shape)))
    assert 0.85 * FOLLOWED_BYTES < max(found) <= FOLLOWED_BYTES


def squares(count: int, side: int) -> list[nn.Parameter]:
    made = [nn.Parameter(torch.zeros(side, side, device="cuda", dtype=torch.bfloat16)) for _ in range(count)]
    for weight in made:
        weight.grad = torch.randn_like(weight)
    return made


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("build", "options"), [(Artemis, {}), (ArtemisMini, {}), (ArtemisMini, {"rank": 128})], ids=str
)
def test_a_step_takes_no_more_memory_than_its_bound(
    build: type, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    """Four matrices of 1024 x 1024 in bfloat16 to each of twelve weights, by six at a time."""
    monkeypatch.setattr("apollo_optim.fused.batches.SPECTRAL_BYTES", 50 * 2**20)
    optimizer = build(squares(12, 1024), **options)
    optimizer.step()
    optimizer.step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    optimizer.step()
    torch.cuda.synchronize()
    assert 12 * 2**20 < torch.cuda.max_memory_allocated() - before <= 51 * 2**20


@pytest.mark.cuda
@pytest.mark.parametrize("optimizer", [Artemis, ArtemisMini])
def test_a_step_of_artemis_does_not_wait_for_the_device(optimizer: type):
    built = optimizer(squares(3, 256))
    for _ in range(3):
        built.step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(2):
            built.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.cuda
def test_a_graph_holds_a_step_of_artemis():
    ends = []
    for graphed in (False, True):
        params = squares(2, 256)
        for number, weight in enumerate(params):
            weight.grad = normal(256, 256, seed=number, dtype=torch.bfloat16).cuda()
        built = Artemis(params, capturable=True)
        for _ in range(3):
            built.step()
        step = built.step
        if graphed:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                built.step()
            step = graph.replay
        for _ in range(2):
            step()
        ends.append([weight.detach().clone() for weight in params])
    for one, other in zip(*ends, strict=True):
        assert torch.equal(one, other)


@pytest.mark.cuda
def test_a_recorded_step_of_artemis_is_the_step_that_was_recorded(monkeypatch: pytest.MonkeyPatch):
    """Of square matrices, too, whose products end in other memory than they begin in."""
    ends = []
    for kept_bytes in (2**25, -1):
        monkeypatch.setattr("apollo_optim.fused.step.KEPT_BYTES", kept_bytes)
        params = [*squares(2, 256), nn.Parameter(torch.zeros(96, 256, device="cuda", dtype=torch.bfloat16))]
        optimizer = Artemis(params)
        for step in range(6):
            for number, weight in enumerate(params):
                weight.grad = normal(*weight.shape, seed=3 * step + number, dtype=torch.bfloat16).cuda()
            optimizer.step()
        (stepped,) = optimizer._plans.whole.fused
        assert bool(stepped._recordings) == (kept_bytes > 0)
        ends.append([weight.detach().clone() for weight in params])
    for one, other in zip(*ends, strict=True):
        assert torch.equal(one, other)
