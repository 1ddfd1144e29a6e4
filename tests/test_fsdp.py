"""A real model under FSDP2, tensor parallelism and accelerate trains as it does in one process."""

import itertools
import os
from contextlib import nullcontext
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from apollo_optim import param_groups, step_in_backward
from apollo_optim.in_backward.clipping import PREVIOUS_NORM, PreviousNormClip
from apollo_optim.quant import Int8Weight, dequantize_weights_, quantize_weights_
from family import BY_NAME, Member, partly_slow
from layouts import Case, Run
from ranks import device_mesh, of_the_first
from runs import gradient

pytest.importorskip("transformers")

STEPS, BATCH, LENGTH, VOCABULARY = 3, 8, 12, 64
# In float64, so that only what is wrong can be seen, and not the order of sums.
TOLERANCE = 1e-10


def llama() -> nn.Module:
    """A tiny LLaMA, the same in every process."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=24,
        intermediate_size=44,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=False,
        attn_implementation="eager",
    )
    return LlamaForCausalLM(config).double()


def batch(step: int) -> Tensor:
    return torch.randint(VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(step))


def train(
    model: nn.Module, optimizer: Any, replica: int = 0, replicas: int = 1, steps: int = STEPS
) -> dict[str, Tensor]:
    """All weights after a few steps on this replica's share of each batch."""
    for step in range(steps):
        tokens = batch(step).chunk(replicas)[replica]
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: whole(weight) for name, weight in model.named_parameters()}


def whole(weight: Tensor) -> Tensor:
    return (weight.full_tensor() if isinstance(weight, DTensor) else weight).detach().clone()


@cache
def of_one_process(member: str, clip: float | None = None, **options: Any) -> dict[str, Tensor]:
    """All weights of one process that sees every batch whole; clipped, it steps in backward."""

    def work() -> dict[str, Tensor]:
        model = llama()
        optimizer = build(BY_NAME[member], model, **options)
        if clip is not None:
            step_in_backward(model, optimizer, clip_norm=clip)
        return train(model, optimizer)

    return of_the_first(work)


def apart(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """How far weights are from others."""
    assert found.keys() == expected.keys()
    return max(float((found[name] - weight).abs().max()) for name, weight in expected.items())


def sharded(model: Any, shape: tuple[int, ...], **options: Any) -> nn.Module:
    """The model with every layer sharded over a mesh; of two axes, the first has copies."""
    mesh = device_mesh(copies=shape[0], shard=shape[1]) if len(shape) == 2 else device_mesh(shard=shape[0])
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def build(member: Member, model: nn.Module, **options: Any) -> Any:
    """The optimizer over a model, with bases that are renewed at the first and the third step."""
    groups = [group | {"refresh_every": 2} for group in param_groups(model, rank=4)]
    return member.build(groups, lr=0.01, **options)


def under_fsdp(member: Member, shape: tuple[int, ...], offload: bool) -> float:
    """The error after training with every layer sharded over a mesh."""
    options = {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if offload else {}
    model = sharded(llama(), shape, **options)
    found = train(model, build(member, model), dist.get_rank(), dist.get_world_size())
    return apart(found, of_one_process(member.name))


@pytest.mark.parametrize("name", partly_slow(["apollo", "mini", "galore", "flora"], quick=["apollo", "galore"]))
def test_fsdp_trains_as_one_process_does(ranks, name):
    assert max(ranks.run(under_fsdp, BY_NAME[name], (4,), False)) < TOLERANCE


@pytest.mark.parametrize("name", partly_slow(["apollo", "mini", "galore", "flora"], quick=["mini"]))
def test_fsdp_of_two_copies_trains_as_one_process_does(ranks, name):
    assert max(ranks.run(under_fsdp, BY_NAME[name], (2, 2), False)) < TOLERANCE


def test_fsdp_with_offloaded_weights_trains_as_one_process_does(ranks):
    assert max(ranks.run(under_fsdp, BY_NAME["apollo"], (4,), True)) < TOLERANCE


def in_backward(member: Member, shape: tuple[int, ...], clip: float | None = None) -> tuple[dict[str, Tensor], int]:
    """All weights, and how many gradients were left when backward had stepped them."""
    model = sharded(llama(), shape)
    optimizer = build(member, model)
    step_in_backward(model, optimizer, clip_norm=clip)
    left = []
    optimizer.register_step_pre_hook(lambda *_: left.extend(w for w in model.parameters() if w.grad is not None))
    return train(model, optimizer, dist.get_rank(), dist.get_world_size()), len(left)


def beside_ordinary(member: Member, shape: tuple[int, ...]) -> tuple[float, bool, int]:
    """(error against one process, whether the ordinary sharded step is the same where it can be, gradients left)"""
    found, left = in_backward(member, shape)
    same = True
    if shape != (4,):  # over four ranks the order of a sum depends on what it is sent with, over two it does not
        model = sharded(llama(), shape)
        ordinary = train(model, build(member, model), dist.get_rank(), dist.get_world_size())
        same = all(torch.equal(found[name], weight) for name, weight in ordinary.items())
    return apart(found, of_one_process(member.name)), same, left


@pytest.mark.parametrize(
    ("name", "shape"),
    partly_slow(
        [
            ("apollo", (4,)),
            ("mini", (2, 2)),
            ("galore", (4,)),
            ("artemis", (4,)),
            ("factored-adamw", (4,)),
            ("flora", (2, 2)),
        ],
        quick=[("apollo", (4,)), ("mini", (2, 2))],
    ),
)
def test_fsdp_in_backward_is_the_ordinary_sharded_step(ranks, name, shape):
    for error, same, left in ranks.run(beside_ordinary, BY_NAME[name], shape):
        assert error < TOLERANCE
        assert same
        assert left == 0


def clipped(shape: tuple[int, ...], clip: float) -> tuple[float, float]:
    """(error against one process that clips, and against one that does not)"""
    found, _ = in_backward(BY_NAME["mini"], shape, clip)
    return apart(found, of_one_process("mini", clip)), apart(found, of_one_process("mini"))


@pytest.mark.parametrize("shape", [pytest.param((4,), marks=pytest.mark.slow), (2, 2)])
def test_fsdp_in_backward_clips_by_the_norm_of_all_ranks(ranks, shape):
    for error, without in ranks.run(clipped, shape, 0.01):
        assert error < TOLERANCE < without


def norm_to_clip_by() -> tuple[float, float]:
    """The norm that clipping in backward finds of two weights, spread over both axes of a mesh, and the one expected.

    One of them has a NaN on one rank, so that no part of it counts.
    """
    run = Run(BY_NAME["mini"], [Case("fsdp and columns", name, torch.float32) for name in ("wide", "even")])
    clip = PreviousNormClip(run.optimizer, 1.0)
    grads = {case.name: gradient(case.name, 0, torch.empty(case.shape)) for case in run.weights}
    expected = float(grads["even"].norm())
    grads["wide"][-1, -1] = torch.nan
    for case, weight in run.weights.items():
        weight.grad = case.placed(grads[case.name])
        clip.clip_(weight)
    clip.advance()
    return float(run.optimizer.param_groups[0][PREVIOUS_NORM]), expected


def test_the_norm_to_clip_by_is_of_all_parts_of_weights_that_are_finite_everywhere(ranks):
    for found, expected in ranks.run(norm_to_clip_by):
        assert found == pytest.approx(expected, rel=1e-6)


def in_8_bits(shape: tuple[int, ...], inside: bool) -> float:
    """The error against one process, with moments of which every block crosses ranks."""
    model = sharded(llama(), shape)
    optimizer = build(BY_NAME["apollo"], model, state_dtype=torch.int8)
    if inside:
        step_in_backward(model, optimizer)
    found = train(model, optimizer, dist.get_rank(), dist.get_world_size())
    return apart(found, of_one_process("apollo", state_dtype=torch.int8))


@pytest.mark.parametrize(
    ("shape", "inside"),
    [pytest.param((4,), False, id="4 ranks", marks=pytest.mark.slow), pytest.param((2, 2), True, id="2, in backward")],
)
def test_fsdp_with_8_bit_state_trains_as_one_process_does(ranks, shape, inside):
    assert max(ranks.run(in_8_bits, shape, inside)) < TOLERANCE


def accumulated_in_backward() -> bool:
    """Whether two micro-batches a step are the ordinary mode's, when FSDP adds up what each rank has."""
    found = []
    for inside in (False, True):
        model = sharded(llama(), (2, 2))
        optimizer = build(BY_NAME["apollo"], model)
        handle = step_in_backward(model, optimizer) if inside else None
        for step in range(2):
            for part in range(2):
                tokens = batch(2 * step + part).chunk(4)[dist.get_rank()]
                waits = handle.accumulate() if handle is not None and part == 0 else nullcontext()
                with waits:
                    model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append([whole(weight) for weight in model.parameters()])
    return all(map(torch.equal, *found))


def test_fsdp_in_backward_accumulates(ranks):
    assert all(ranks.run(accumulated_in_backward))


def refused_in_backward() -> list[str]:
    """What is said of a group of ranks beside FSDP."""
    model = sharded(llama(), (4,))
    with pytest.raises(ValueError, match="is sharded") as refused:
        step_in_backward(model, build(BY_NAME["mini"], model), group="world")
    return [str(refused.value)]


def test_in_backward_averages_no_gradients_that_fsdp_has_averaged(ranks):
    for (message,) in ranks.run(refused_in_backward):
        assert message.endswith("leave group out, got group='world'")


def int8_llama() -> nn.Module:
    """A LLaMA in int8, in groups that do not divide its rows, of which four ranks hold different numbers."""
    return quantize_weights_(llama().float(), group_size=16)


def int8_codes(model: nn.Module) -> dict[str, Tensor]:
    """All codes of a model, whole."""
    return {name: whole(tensor) for name, tensor in model.state_dict().items() if name.endswith(".codes")}


def under_fsdp_in_int8(member: Member, shape: tuple[int, ...], inside: bool, **options: Any) -> tuple[float, float]:
    """(share of codes that are another process's who trains alone, share that training has changed)"""

    def trained(model: nn.Module, replica: int, replicas: int) -> dict[str, Tensor]:
        optimizer = build(member, model, **options)
        if inside:
            step_in_backward(model, optimizer)
        # Two, before a code that was rounded otherwise has changed the gradients of others.
        train(model, optimizer, replica, replicas, steps=2)
        return int8_codes(model)

    model, before = sharded(int8_llama(), shape), int8_codes(int8_llama())
    found = trained(model, dist.get_rank(), dist.get_world_size())
    assert all(isinstance(weight.to_local(), Int8Weight) for weight in model.parameters() if weight.dim() == 2)
    expected = of_the_first(lambda: trained(int8_llama(), 0, 1))
    assert found.keys() == expected.keys() == before.keys()

    def share(those: dict[str, Tensor], others: dict[str, Tensor]) -> float:
        return float(torch.cat([(those[name] == other).flatten() for name, other in others.items()]).float().mean())

    return share(found, expected), 1 - share(before, expected)


@pytest.mark.parametrize(
    ("name", "shape", "inside"),
    partly_slow(
        [
            (name, shape, inside)
            for name in ("apollo", "mini", "galore", "flora", "artemis")
            for shape in ((4,), (2, 2))
            for inside in (False, True)
        ],
        quick=[("apollo", (4,), False), ("mini", (2, 2), True)],
    ),
)
def test_fsdp_of_int8_weights_trains_as_one_process_does(ranks, name, shape, inside):
    for same, changed in ranks.run(under_fsdp_in_int8, BY_NAME[name], shape, inside):
        # A gradient's last bit may round a weight to the next code; other draws would do so with a third of them.
        assert same > 0.995
        assert changed > 0.3


def int8_of_ranks_restored() -> None:
    """Codes and scales go through whole checkpoints, and from a wide one; what does not fit is said."""
    model = sharded(int8_llama(), (4,))
    train(model, build(BY_NAME["apollo"], model), dist.get_rank(), dist.get_world_size(), steps=1)
    expected = int8_codes(model)
    full = StateDictOptions(full_state_dict=True)
    saved = get_model_state_dict(model, options=full)
    assert all(type(tensor) is Tensor for tensor in saved.values())
    again = sharded(int8_llama(), (4,))
    set_model_state_dict(again, saved, options=full)
    assert all(torch.equal(codes, expected[name]) for name, codes in int8_codes(again).items())
    tokens = batch(0)
    assert torch.equal(again(input_ids=tokens).logits, model(input_ids=tokens).logits)

    parts = sharded(int8_llama(), (4,))
    parts.load_state_dict(model.state_dict())
    assert all(torch.equal(codes, expected[name]) for name, codes in int8_codes(parts).items())
    wide = sharded(llama().float(), (4,)).state_dict()
    parts.load_state_dict(wide)
    start = int8_codes(int8_llama())
    assert all(torch.equal(codes, start[name]) for name, codes in int8_codes(parts).items())
    with pytest.raises(ValueError, match=r"is int8 and sharded: make the model's weights wide before"):
        dequantize_weights_(model)
    with pytest.raises(ValueError, match="DTensor; expected an ordinary parameter: quantize first"):
        quantize_weights_(sharded(llama().float(), (4,)))
    with pytest.raises(ValueError, match=r"int8 weights are sharded by FSDP2 .* only, and c10d.scatter_"):
        distribute_tensor(int8_llama().lm_head.weight, device_mesh(shard=4), [Shard(0)])
    with pytest.raises(RuntimeError, match="SGD cannot step an int8 weight"):
        torch.optim.SGD(model.parameters(), lr=0.1).step()


def test_int8_weights_of_several_ranks_are_saved_and_loaded(ranks):
    ranks.run(int8_of_ranks_restored)


def layers_on(device: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))).to(device)


def trained_in_both_ways(device: str, backend: str, int8: bool) -> bool:
    """Whether a model that one process shards by itself is stepped the same in backward."""
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh, found = init_device_mesh(device, (1,)), []
        for inside in (False, True):
            model = layers_on(device)
            if int8:
                quantize_weights_(model)
            for layer in model:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
            optimizer = build(BY_NAME["apollo"], model)
            if inside:
                step_in_backward(model, optimizer, clip_norm=1e9)
            for step in range(STEPS):
                torch.manual_seed(step)
                model(torch.randn(64, 256).to(device)).square().mean().backward()
                assert not inside or all(weight.grad is None for weight in model.parameters())
                optimizer.step()
                optimizer.zero_grad()
            found.append([whole(weight) for weight in model.parameters()])
        started = list(layers_on(device).parameters())
        return all(map(torch.equal, *found)) and not any(map(torch.equal, found[0], started))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("int8", [False, True], ids=["wide", "int8"])
def test_one_process_that_shards_steps_in_backward(int8):
    assert trained_in_both_ways("cpu", "gloo", int8)


def test_memory_of_sharded_gradients_waits_for_the_stream_that_steps_them(monkeypatch):
    """FSDP2 announces gradients on the stream that reduces them. No DTensor says that another one reads it."""
    streams, waited = itertools.count(), []
    monkeypatch.setattr("apollo_optim.in_backward.buckets.raw_stream", lambda _: next(streams))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(wait_stream=lambda _: None))
    monkeypatch.setattr(torch.cuda, "get_stream_from_external", lambda *_: None)
    monkeypatch.setattr(Tensor, "record_stream", lambda grad, _: waited.append(type(grad)))
    assert trained_in_both_ways("cpu", "gloo", int8=False)
    assert set(waited) == {Tensor}


@pytest.mark.cuda
@pytest.mark.parametrize("int8", [False, True], ids=["wide", "int8"])
def test_a_gpu_that_shards_steps_in_backward(int8):
    assert trained_in_both_ways("cuda", "nccl", int8)


def under_tensor_parallelism(member: Member) -> float:
    """The error with the feed-forward layers split over two ranks, and everything sharded over two more."""
    mesh = device_mesh(shard=2, tensor=2)
    model = llama()
    plan = {"gate_proj": ColwiseParallel(), "up_proj": ColwiseParallel(), "down_proj": RowwiseParallel()}
    for layer in model.model.layers:
        parallelize_module(layer.mlp, mesh["tensor"], plan)
        fully_shard(layer, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    found = train(model, build(member, model), mesh.get_local_rank("shard"), 2)
    return apart(found, of_one_process(member.name))


@pytest.mark.parametrize("name", partly_slow(["apollo", "mini", "fira", "structured-channel"], quick=["apollo"]))
def test_fsdp_beside_tensor_parallelism_trains_as_one_process_does(ranks, name):
    assert max(ranks.run(under_tensor_parallelism, BY_NAME[name])) < TOLERANCE


def under_accelerate(member: Member) -> float:
    """The error after training through accelerate, which shards after the optimizer is built and swaps its weights."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    rank, size = dist.get_rank(), dist.get_world_size()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    accelerator = Accelerator(cpu=True)
    # It turns FSDP on where there are accelerators only; what it then does to model and optimizer needs none.
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        cpu_ram_efficient_loading=False,
    )
    model = llama()
    model, optimizer = accelerator._prepare_fsdp2(model, build(member, model))
    assert all(isinstance(weight, DTensor) for weight in model.parameters())
    return apart(train(model, optimizer, rank, size), of_one_process(member.name))


@pytest.mark.parametrize("name", partly_slow(["apollo", "mini"], quick=["apollo"]))
def test_accelerate_trains_as_one_process_does(ranks, name):
    pytest.importorskip("accelerate")
    assert max(ranks.run(under_accelerate, BY_NAME[name])) < TOLERANCE
