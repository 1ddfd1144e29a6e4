"""Losses by the kernels of other packages: cross-entropy all the same, and refused where they cannot be had."""

import importlib.util
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional

pytest.importorskip("triton")

import triton
import triton.language as tl

from apollo_optim import APOLLO, step_in_backward
from apollo_optim.cli import main
from apollo_optim.quant import Int8Weight
from apollo_optim.train.config import Run
from apollo_optim.train.losses import IGNORED, PACKAGES, Objective, cce_sums_are_wide, token_loss
from apollo_optim.train.model import Model, built_model
from apollo_optim.train.pretrain import PretrainOptions
from small_training import TINY, VOCABULARY, text

ON_CPU = {"liger": torch.float32, "cce": torch.float16}
"""Triton's interpreter gets bf16 wrong, and cut-cross-entropy has no gradient in float32."""

KINDS = pytest.mark.parametrize("kind", PACKAGES)
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])


@triton.jit
def log1p(x):
    return tl.log(1.0 + x)


@pytest.fixture
def dtype(kind, device, kernels, monkeypatch):
    """What the package computes in on the device: it is the real one, and on the CPU its kernels are interpreted."""
    package = PACKAGES[kind]
    pytest.importorskip(package.replace("-", "_"), reason=f"needs {package}")
    if device == "cpu" and kind == "cce":
        monkeypatch.setattr("cut_cross_entropy.tl_utils.tl_log1p", log1p)  # which the interpreter does not know
        # It runs one block after another, so that any release adds up right.
        monkeypatch.setattr("apollo_optim.train.losses.check_installed", lambda kind: None)
    if device == "cuda" and kind == "cce" and not cce_sums_are_wide():
        pytest.skip("release 25.1.1 of cut-cross-entropy loses parts of sums on a GPU: this runs with a later one")
    return ON_CPU[kind] if device == "cpu" else torch.bfloat16


def drawn(*shape, seed, like, scale=1.0):
    device, dtype = like
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale
    return numbers.to(device, dtype).requires_grad_()


def problem(device, dtype):
    """Hidden states, a head and labels; logits are below 8."""
    like = device, dtype
    hidden, head = drawn(3, 11, 40, seed=2, like=like), drawn(150, 40, seed=3, like=like, scale=0.2)
    return hidden, head, text(3, 11, 150).to(device)


def assert_close(found, expected, dtype):
    """Logits below 8, their gradients and the results are rounded by half an eps of themselves each."""
    atol = 8 * torch.finfo(dtype).eps * expected.abs().max().item()
    torch.testing.assert_close(found.double(), expected.double(), rtol=0, atol=atol)


@KINDS
@DEVICES
@pytest.mark.parametrize("ignored", [0, 9])
def test_the_loss_is_cross_entropy_with_its_gradients(kind, device, dtype, ignored):
    hidden, head, labels = problem(device, dtype)
    labels.view(-1)[torch.randperm(33, generator=torch.Generator().manual_seed(1))[:ignored]] = IGNORED
    wide = [tensor.detach().double().requires_grad_() for tensor in (hidden, head)]
    expected = functional.cross_entropy((wide[0] @ wide[1].T).flatten(0, 1), labels.flatten())
    loss = token_loss(hidden, head, labels, kind)
    (3 * loss).backward()
    (3 * expected).backward()
    assert loss.dtype == torch.float32
    assert_close(loss, expected, dtype)
    for own, their in zip((hidden, head), wide, strict=True):
        assert own.grad.dtype == dtype
        assert_close(own.grad, their.grad, dtype)


@KINDS
@DEVICES
def test_a_batch_without_labels_costs_nothing(kind, device, dtype):
    hidden, head, labels = problem(device, dtype)
    loss = token_loss(hidden, head, torch.full_like(labels, IGNORED), kind)
    loss.backward()
    assert loss == 0
    assert not hidden.grad.any()
    assert not head.grad.any()


@KINDS
@DEVICES
@pytest.mark.parametrize("frozen", ["hidden", "head"])
def test_what_needs_no_gradient_gets_none_and_the_other_its_own(kind, device, dtype, frozen):
    hidden, head, labels = problem(device, dtype)
    tensors = {"hidden": hidden, "head": head}
    whole = dict(zip(tensors, torch.autograd.grad(token_loss(hidden, head, labels, kind), (hidden, head)), strict=True))
    tensors[frozen].requires_grad_(False)
    token_loss(hidden, head, labels, kind).backward()
    assert tensors[frozen].grad is None
    (other,) = tensors.keys() - {frozen}
    assert_close(tensors[other].grad, whole[other], dtype)


@KINDS
@DEVICES
def test_an_int8_head_has_the_gradient_of_a_wide_one(kind, device, dtype):
    hidden, head, labels = problem(device, dtype)
    narrow = nn.Parameter(Int8Weight.of(head, 16))
    wide = narrow.dequantize().requires_grad_()
    grads = [torch.autograd.grad(token_loss(hidden, each, labels, kind), (hidden, each)) for each in (narrow, wide)]
    for found, expected in zip(*grads, strict=True):
        assert type(found) is torch.Tensor
        assert_close(found, expected, dtype)


@KINDS
@DEVICES
def test_a_wide_model_under_autocast(kind, device, dtype):
    narrow = torch.float16 if device == "cpu" else torch.bfloat16
    hidden, head, labels = problem(device, torch.float32)
    with torch.autocast(device, dtype=narrow):
        loss = token_loss(hidden, head, labels, kind)
    loss.backward()
    expected = functional.cross_entropy((hidden @ head.T).flatten(0, 1), labels.flatten())
    assert_close(loss, expected, narrow)
    assert hidden.grad.dtype == head.grad.dtype == torch.float32


@KINDS
@DEVICES
def test_a_traced_model_has_the_plain_loss_and_its_gradients(kind, device, dtype):
    model = built_model(Model(model=TINY, dtype="fp32"), VOCABULARY, device, 0).to(dtype)
    tokens = text(2, 13, VOCABULARY).to(device)
    results = []
    for each in (Objective(model), torch.compile(Objective(model, kind), backend="aot_eager")):
        loss = each(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        results.append({"loss": loss, **{name: weight.grad for name, weight in model.named_parameters()}})
        model.zero_grad()
    torch._dynamo.reset()
    for name, expected in results[0].items():
        assert_close(results[1][name], expected, dtype)


@KINDS
@DEVICES
def test_weights_stepped_in_backward_are_those_of_an_ordinary_step(kind, device, dtype):
    tokens = text(2, 13, VOCABULARY).to(device)
    results = []
    for in_backward in (False, True):
        model = built_model(Model(model=TINY, dtype="fp32"), VOCABULARY, device, 0).to(dtype)
        optimizer = APOLLO(model, lr=1e-2, rank=4)
        if in_backward:
            step_in_backward(model, optimizer)
        Objective(model, kind)(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()
        results.append([weight.detach() for weight in model.parameters()])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)  # sums of cut-cross-entropy take another order every time


def test_cut_cross_entropy_sums_in_float32_where_it_can(monkeypatch):
    given = {}

    def linear_cross_entropy(e, c, targets, accum_e_fp32=False, accum_c_fp32=False, **options):
        given.update(options, accum_e_fp32=accum_e_fp32, accum_c_fp32=accum_c_fp32)
        return functional.cross_entropy(e @ c.T, targets, ignore_index=options["ignore_index"], reduction="sum")

    later = SimpleNamespace(linear_cross_entropy=linear_cross_entropy)
    monkeypatch.setitem(sys.modules, "cut_cross_entropy", later)
    hidden, head, labels = problem("cpu", torch.float32)
    torch.testing.assert_close(token_loss(hidden, head, labels, "cce"), token_loss(hidden, head, labels))
    assert given == {
        "ignore_index": IGNORED, "reduction": "sum", "shift": False, "filter_eps": None,
        "accum_e_fp32": True, "accum_c_fp32": True,
    }  # fmt: skip


# What is refused, before anything is built


@pytest.fixture
def nothing_installed(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)


@pytest.fixture
def all_installed(monkeypatch):
    monkeypatch.setattr("apollo_optim.train.losses.loss_installed", lambda kind: True)
    monkeypatch.setattr("apollo_optim.train.losses.cce_sums_are_wide", lambda: True)


@pytest.mark.parametrize(
    ("kind", "advice"),
    [
        ("liger", "needs liger-kernel, which is not installed: pip install liger-kernel, or use --loss chunked or"),
        ("cce", "needs a cut-cross-entropy later than .*: install one from github.com/apple/ml-cross-entropy, or use"),
    ],
)
@pytest.mark.usefixtures("nothing_installed")
def test_a_loss_whose_package_is_missing_is_refused(kind, advice):
    message = f"--loss {kind} {advice}"
    with pytest.raises(ValueError, match=message):
        Model(loss=kind).check()
    with pytest.raises(ValueError, match=message):
        Objective(nn.Module(), kind)


def test_a_cut_cross_entropy_that_loses_parts_of_gradients_is_refused(monkeypatch):
    monkeypatch.setattr("apollo_optim.train.losses.loss_installed", lambda kind: True)
    released = SimpleNamespace(linear_cross_entropy=lambda e, c, targets, filter_eps=None: None)
    monkeypatch.setitem(sys.modules, "cut_cross_entropy", released)
    with pytest.raises(ValueError, match=r"--loss cce needs a cut-cross-entropy later than its release 25\.1\.1, "):
        Model(loss="cce").check()
    later = SimpleNamespace(linear_cross_entropy=lambda e, c, targets, accum_e_fp32=False: None)
    monkeypatch.setitem(sys.modules, "cut_cross_entropy", later)
    Model(loss="cce").check()


@KINDS
@pytest.mark.usefixtures("all_installed")
def test_a_loss_that_needs_a_gpu_is_refused_on_a_cpu(tmp_path, capsys, kind):
    assert main(["pretrain", "--out", str(tmp_path / "run"), "--device", "cpu", "--loss", kind]) == 2
    message = f"--loss {kind} needs a GPU, and this run is on a CPU: use --loss chunked or plain"
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("model", "run", "message"),
    [
        (
            {"dtype": "fp32"},
            {},
            r"--loss cce needs --dtype bf16, got fp32: use that, or --loss chunked, liger or plain",
        ),
        ({}, {"deterministic": True}, r"--deterministic does not go with --loss cce, .*: use --loss chunked, liger or"),
    ],
)
@pytest.mark.usefixtures("all_installed")
def test_what_cut_cross_entropy_cannot_do_is_refused(monkeypatch, model, run, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def options(loss):
        return PretrainOptions(model=Model(loss=loss, **model), run=Run(device="cuda", **run))

    with pytest.raises(ValueError, match=message):
        options("cce").check(world=1)
    options("liger").check(world=1)
