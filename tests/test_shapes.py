"""A weight of any shape and layout is stepped, and the shape it is seen in decides nothing else."""

import warnings

import pytest
import torch
from torch import nn

from apollo_optim import APOLLO, ArtemisMini, param_groups
from family import DISTINCT, FAMILY, partly_slow
from runs import bits, built, gradient, run, state_bytes_of

every_optimizer = pytest.mark.parametrize("member", partly_slow(FAMILY, quick=DISTINCT), ids=str)

# Two ways to the same numbers, in float64: roundings of 1e-16 in sums of at most 300 terms, a dozen times over.
CLOSE = {"rtol": 1e-11, "atol": 1e-12}

SHAPES = [
    (),
    (1,),
    (7,),
    (1, 1),
    (1, 9),
    (9, 1),
    (2, 3),
    (3, 2),
    (5, 5),
    (5, 300),
    (300, 5),
    (37, 61),
    (1, 1, 1),
    (3, 1, 8),
    (1, 9, 17),
    (4, 17, 9),
    (6, 2, 3, 3),
    (40, 1, 3, 3),
    (4, 2, 3, 2, 2),
    (2, 2, 2, 2, 2, 2),
]


def stepped(member, start: torch.Tensor, gradients, name="weight", **options) -> torch.Tensor:
    """Where a weight ends that begins at `start` and takes these gradients."""
    weight = nn.Parameter(start.clone(memory_format=torch.preserve_format))
    optimizer = built(member, {name: weight}, **options)
    for each in gradients:
        weight.grad = each
        optimizer.step()
    return weight.detach()


def start_and_gradients(*shape: int, steps: int = 5, dtype: torch.dtype = torch.float64):
    like = torch.empty(shape, dtype=dtype)
    return gradient("start", 99, like), [gradient("weight", step, like) for step in range(steps)]


@every_optimizer
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_any_shape_moves_against_its_gradient(member, dtype):
    for shape in SHAPES:
        start, gradients = start_and_gradients(*shape, steps=1, dtype=dtype)
        end = stepped(member, start, gradients, lr=0.1, weight_decay=0.0)
        assert end.shape == start.shape, shape
        assert end.isfinite().all(), shape
        # Every rule's first step is a positive map of the gradient, so it descends.
        assert ((end - start).double() * gradients[0].double()).sum() < 0, shape


# But for 4-bit momentum, whose blocks go along the rows of the weight.
@pytest.mark.parametrize("member", [member for member in FAMILY if not member.in_4_bits], ids=str)
@pytest.mark.parametrize("shape", [(9, 40), (37, 61), (5, 300), (2, 3), (1, 9)], ids=str)
def test_a_transposed_weight_takes_the_transposed_steps(member, shape):
    start, gradients = start_and_gradients(*shape)
    wide = stepped(member, start, gradients)
    tall = stepped(member, start.mT.contiguous(), [each.mT.contiguous() for each in gradients])
    torch.testing.assert_close(tall.mT, wide, **CLOSE)


LAYOUTS = {
    "transposed": lambda tensor: tensor.mT.contiguous().mT,
    "strided": lambda tensor: torch.stack([tensor, tensor], dim=-1)[..., 0],
    "channels last": lambda tensor: tensor.contiguous(memory_format=torch.channels_last),
}


@every_optimizer
@pytest.mark.parametrize(
    ("layout", "shape"),
    [
        *[(layout, shape) for layout in ("transposed", "strided") for shape in [(9, 40), (40, 9), (3, 10, 24)]],
        *[(layout, (8, 4, 3, 3)) for layout in LAYOUTS],
        ("transposed", (1, 6, 4)),
    ],
    ids=str,
)
def test_memory_layout_of_weight_and_gradient_changes_nothing(member, layout, shape):
    start, gradients = start_and_gradients(*shape)
    plain = stepped(member, start, gradients)
    laid_out = LAYOUTS[layout](start)
    assert not laid_out.is_contiguous()
    torch.testing.assert_close(stepped(member, laid_out, gradients), plain, **CLOSE)
    torch.testing.assert_close(stepped(member, start, [LAYOUTS[layout](each) for each in gradients]), plain, **CLOSE)


@every_optimizer
def test_rounding_follows_positions_and_not_memory(member):
    # The draw belongs to an element's place in the weight. Layouts differ by float32 roundings, 2**-22 of a value,
    # which crosses a draw between neighbouring bfloat16 numbers, 2**-8 apart, once in 2**14: 0.1 of 360 elements in
    # five steps. With draws by memory order half of all elements would differ.
    start, gradients = start_and_gradients(9, 40, dtype=torch.bfloat16)
    plain = stepped(member, start, gradients)
    transposed = stepped(member, LAYOUTS["transposed"](start), gradients)
    assert (plain != transposed).double().mean() <= 0.02


@every_optimizer
def test_an_expanded_gradient_is_read_as_the_whole_one(member):
    start, _ = start_and_gradients(9, 40)
    row = gradient("row", 0, torch.empty(1, 40, dtype=torch.float64))
    expanded = stepped(member, start, [row.expand(9, 40)] * 3)
    torch.testing.assert_close(expanded, stepped(member, start, [row.expand(9, 40).contiguous()] * 3), **CLOSE)


# The shapes of convolutions.


@every_optimizer
@pytest.mark.parametrize("shape", [(8, 4, 3, 3), (40, 1, 3, 3), (6, 4, 2, 2, 2)], ids=str)
def test_a_convolution_steps_as_its_weight_flattened_to_outputs_by_rest(member, shape):
    start, gradients = start_and_gradients(*shape)
    conv = stepped(member, start, gradients)
    flat = stepped(member, start.flatten(1), [each.flatten(1) for each in gradients])
    torch.testing.assert_close(conv.flatten(1), flat, **CLOSE)


@pytest.mark.parametrize("member", [member for member in FAMILY if not member.group], ids=str)
@pytest.mark.parametrize(
    "layer",
    [nn.Conv1d(10, 20, 3), nn.Conv2d(5, 12, 3), nn.Conv3d(3, 8, 2), nn.ConvTranspose1d(10, 20, 3)],
    ids=lambda layer: type(layer).__name__,
)
def test_a_convolution_layer_is_flattened_by_module(member, layer):
    layer = type(layer)(layer.in_channels, layer.out_channels, layer.kernel_size, bias=False).double()
    start, gradients = start_and_gradients(*layer.weight.shape)
    with torch.no_grad():
        layer.weight.copy_(start)
    rank = member.options.get("rank", 1 if member.name.startswith("mini") else 0.25)
    optimizer = member.build(param_groups(layer, rank=rank, weight_decay=0.1), lr=0.01)
    for each in gradients:
        layer.weight.grad = each
        optimizer.step()
    flat = nn.Parameter(start.flatten(1))
    twin = member.build([{"params": [("weight", flat)], "rank": rank, "weight_decay": 0.1}], lr=0.01)
    for each in gradients:
        flat.grad = each.flatten(1)
        twin.step()
    torch.testing.assert_close(layer.weight.detach().flatten(1), flat.detach(), **CLOSE)


# Three dimensions are experts.


@every_optimizer
@pytest.mark.parametrize("shape", [(3, 10, 24), (3, 24, 10), (4, 1, 9)], ids=str)
def test_experts_step_as_weights_of_their_own(member, shape):
    # Where numbers are drawn, each expert has its own; those of the first are a lone weight's of the same name.
    start, gradients = start_and_gradients(*shape)
    together = stepped(member, start, gradients)
    random = BASES[member.name] in ("gaussian", "svd_lowrank") and 1 not in shape[1:]
    for expert in range(1 if random else shape[0]):
        alone = stepped(member, start[expert], [each[expert] for each in gradients])
        torch.testing.assert_close(together[expert], alone, **CLOSE)


BASES = {m.name: m.build([nn.Parameter(torch.zeros(1))]).param_groups[0]["projection"] for m in FAMILY}


@pytest.mark.parametrize(
    "member", [m for m in FAMILY if BASES[m.name] == "gaussian" and m.options.get("rank", 1)], ids=str
)
def test_every_expert_has_a_basis_of_its_own(member):
    start, gradients = start_and_gradients(1, 10, 24, steps=1)
    together = stepped(member, start.expand(4, 10, 24), [gradients[0].expand(4, 10, 24)])
    assert len({bits(expert) for expert in together}) == 4


@pytest.mark.parametrize("member", [m for m in FAMILY if m.limits_growth and m.name != "adamw"], ids=str)
def test_every_expert_has_a_limiter_of_its_own(member):
    weight = nn.Parameter(torch.zeros(4, 10, 24))
    optimizer = built(member, {"weight": weight})
    run(optimizer, {"weight": weight}, range(3))
    last_norm = optimizer.state[weight]["last_norm"]
    assert last_norm.shape == (4,)
    assert last_norm.unique().numel() == 4


@every_optimizer
def test_an_expert_that_no_token_reaches_stays_where_it_is(member):
    start, gradients = start_and_gradients(3, 10, 24)
    for each in gradients:
        each[1] = 0
    end = stepped(member, start, gradients, weight_decay=0.0)
    assert torch.equal(end[1], start[1])
    assert not torch.equal(end[0], start[0])


# What is not there costs nothing.


@every_optimizer
@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0), (3, 0, 4), (2, 0, 3, 3)], ids=str)
def test_an_empty_weight_is_passed_over(member, shape):
    empty, full = nn.Parameter(torch.zeros(shape)), nn.Parameter(torch.ones(9, 40))
    optimizer = built(member, {"empty": empty, "full": full})
    run(optimizer, {"empty": empty, "full": full}, range(2))
    assert set(optimizer.state) == {full}
    assert empty.shape == shape


@every_optimizer
def test_frozen_weights_and_weights_without_gradients_cost_no_state(member):
    model = nn.ModuleDict({"used": nn.Linear(9, 40), "frozen": nn.Linear(9, 40), "unused": nn.Linear(9, 40)})
    model["frozen"].requires_grad_(False)
    optimizer = built(member, dict(model.named_parameters()))
    before = {name: bits(weight) for name, weight in model.named_parameters()}
    for _ in range(3):
        model["frozen"](torch.ones(2, 9)).sum()
        model["used"](torch.randn(2, 9)).square().sum().backward()
        optimizer.step()
    moved = {name for name, weight in model.named_parameters() if bits(weight) != before[name]}
    assert moved == {"used.weight", "used.bias"}
    assert set(optimizer.state) == set(model["used"].parameters())


@every_optimizer
def test_a_weight_that_is_unfrozen_later_begins_then(member):
    late, early = nn.Parameter(torch.ones(9, 40), requires_grad=False), nn.Parameter(torch.ones(9, 40))
    optimizer = built(member, {"late": late, "early": early})
    run(optimizer, {"early": early}, range(4))
    late.requires_grad_(True)
    run(optimizer, {"early": early, "late": late}, range(4, 6))
    alone = stepped(member, torch.ones(9, 40), [gradient("late", step, late) for step in (4, 5)], name="late")
    assert bits(late) == bits(alone)


@every_optimizer
def test_a_tied_weight_is_stepped_once(member):
    model = nn.Sequential(nn.Linear(12, 12, bias=False), nn.Linear(12, 12, bias=False))
    model[1].weight = model[0].weight
    optimizer = member.build(model, lr=0.01)
    model(torch.ones(2, 12)).sum().backward()
    optimizer.step()
    assert [len(group["params"]) for group in optimizer.param_groups] == [1]
    assert optimizer.state[model[0].weight]["step"] == 1


@pytest.mark.parametrize("member", [member for member in FAMILY if not member.group], ids=str)
@pytest.mark.parametrize("shape", [(1, 9), (9, 1), (3, 3), (2, 7), (2, 3, 5)], ids=str)
def test_a_rank_that_reaches_the_smaller_side_means_no_random_basis(member, shape):
    start, gradients = start_and_gradients(*shape)
    ends = []
    for seed in (0, 1):
        weight = nn.Parameter(start.clone())
        optimizer = member.build([{"params": [weight], "rank": 3, "refresh_every": 2}], seed=seed)
        for each in gradients:
            weight.grad = each
            optimizer.step()
        assert "basis" not in optimizer.state[weight] or member.optimizer is ArtemisMini  # of its momentum
        ends.append(bits(weight))
    assert ends[0] == ends[1]


# Embeddings in disguise.

LIKE_EMBEDDINGS = [(8192, 1024), (1024, 8192), (50257, 16), (32000, 4096), (50304, 8192), (128256, 16384)]
MLPS = [(11008, 4096), (14336, 4096), (28672, 8192), (5632, 2048)]
UNLIKE_EMBEDDINGS = [(8191, 512), (8192, 1025), (4096, 11008), (8192 * 8,), (2, 4096, 64), (11008, 32), *MLPS]


@pytest.mark.parametrize("shape", LIKE_EMBEDDINGS, ids=str)
def test_a_bare_tensor_that_looks_like_an_embedding_draws_a_warning(shape):
    weight = nn.Parameter(torch.empty(shape, device="meta"))
    with pytest.warns(UserWarning, match=r"^parameter 0 .* looks like an embedding .*rank=None"):
        APOLLO([weight])
    with pytest.warns(UserWarning, match=r"^tok\.weight "):
        APOLLO([("tok.weight", weight)])


@pytest.mark.parametrize(
    "member", [m for m in FAMILY if m.name in ("apollo", "mini", "galore", "fira", "flora")], ids=str
)
def test_and_is_left_to_adamw_beside_what_is_projected(member):
    words, matrix = nn.Parameter(torch.zeros(30000, 5)), nn.Parameter(torch.zeros(40, 9))
    with pytest.warns(UserWarning, match="it is left to AdamW"):
        optimizer = member.build([words, matrix])
    for weight in (words, matrix):
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert optimizer.state[words].keys() == {"step", "seed", "exp_avg", "exp_avg_sq"}
    assert optimizer.state[words]["exp_avg"].shape == words.shape
    assert optimizer.state[matrix]["exp_avg"].shape == (1 if member.name == "mini" else 4, 40)
    # A run of before, in which it was projected, goes on as it was.
    old = member.build([{"params": [words, matrix], "vocabulary": ()}])
    old.step()
    optimizer.load_state_dict(old.state_dict())
    optimizer.step()
    assert optimizer.state[words]["exp_avg"].shape != words.shape


@pytest.mark.parametrize("shape", [(57344, 8192), (49152, 12288), (14336, 64)], ids=str)
def test_what_every_layer_has_is_no_vocabulary(shape):
    """Gate and up in one, layers of the largest models, adapters: as long as a vocabulary, but in every layer."""
    layers = [nn.Parameter(torch.empty(shape, device="meta")) for _ in range(3)]
    words = [nn.Parameter(torch.empty(128256, 8192, device="meta")) for _ in range(2)]
    with pytest.warns(UserWarning, match=r"^parameter [01] \(128256, 8192\) looks like an embedding") as caught:
        optimizer = APOLLO([*words, *layers])
    assert len(caught) == 2
    assert optimizer.param_groups[0]["vocabulary"] == (128256,)


def test_groups_are_judged_together_however_the_layers_are_shared_out():
    """As for learning rates that differ by layer; a group that is added later meets those that were there."""
    layers = [nn.Parameter(torch.empty(8192, 64, device="meta")) for _ in range(4)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = APOLLO([{"params": [layer], "lr": 0.1 / number} for number, layer in enumerate(layers[:3], 1)])
        optimizer.add_param_group({"params": layers[3:]})
    assert [group["vocabulary"] for group in optimizer.param_groups] == [()] * 4
    with pytest.warns(UserWarning, match=r"looks like an embedding") as caught:
        optimizer = APOLLO([{"params": [layer]} for layer in layers[:2]])
    assert len(caught) == 2
    assert [group["vocabulary"] for group in optimizer.param_groups] == [(8192,)] * 2


@pytest.mark.parametrize("shape", UNLIKE_EMBEDDINGS, ids=str)
def test_other_proportions_draw_none(shape):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        APOLLO([nn.Parameter(torch.empty(shape, device="meta"))])


@pytest.mark.parametrize("member", [member for member in FAMILY if not member.group], ids=str)
def test_a_rank_given_to_the_group_is_deliberate(member):
    weight = nn.Parameter(torch.empty(50257, 16, device="meta"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for rank in (None, 4):
            optimizer = member.build([{"params": [weight], "rank": rank}])
            assert optimizer.param_groups[0]["vocabulary"] == ()


def test_the_warning_points_at_the_line_that_builds_the_optimizer():
    with pytest.warns(UserWarning, match="looks like an embedding") as caught:
        APOLLO([nn.Parameter(torch.empty(50257, 16, device="meta"))])
    assert caught[0].filename == __file__


@every_optimizer
def test_state_is_as_small_as_the_rule_says(member):
    # The numbers of the paper's Table 1 and the scalars, for a weight of sides 9 and 40 at rank 4 (or 1, or 9).
    weight = nn.Parameter(torch.ones(9, 40))
    optimizer = built(member, {"weight": weight})
    run(optimizer, {"weight": weight}, [0])
    rank = {"mini": 1, "mini-svd": 1}.get(
        member.name, 9 if BASES[member.name] == "identity" or member.options.get("rank", 1) is None else 4
    )
    factored = member.name.startswith("flora") or member.name in ("adafactor", "factored-adamw")
    moments = rank * 40 + 9 + 40 if factored else 2 * rank * 40
    basis = rank * 9 if member.uses_svd else 0
    limiter = 1 if member.limits_growth and member.name != "adamw" else 0
    # Half a byte each and a scale for a row of one block; the momentum alone; its two factors; rows and columns.
    in_4_bits = 9 * 20 / 4 + 9
    own = {"artemis": in_4_bits, "artemis-wide": 9 * 40, "artemis-mini": rank * (9 + 40)}
    moments = (own | {"factored-adamw": in_4_bits + 9 + 40}).get(member.name, moments)
    assert state_bytes_of(optimizer) == 4 * (moments + basis + limiter + 1) + 8
