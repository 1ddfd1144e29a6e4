"""The loss of a language model: cross-entropy, whichever way it is computed, in the memory it promises."""

import pytest
import torch
from torch.nn import functional

from apollo_optim.train.losses import IGNORED, softmax_loss_, token_loss
from small_training import OWN_KINDS, Watch, text


def drawn(*shape, seed, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("kind", OWN_KINDS)
@pytest.mark.parametrize("chunk", [1, 7, 33, 1000])
@pytest.mark.parametrize("ignored", [0, 9, 32])
def test_token_loss_is_cross_entropy_with_its_gradients(kind, chunk, ignored):
    labels = text(3, 11, 29)
    labels.view(-1)[torch.randperm(33, generator=torch.Generator().manual_seed(1))[:ignored]] = IGNORED
    ours = [drawn(3, 11, 16, seed=2).requires_grad_(), drawn(29, 16, seed=3).requires_grad_()]
    theirs = [tensor.detach().clone().requires_grad_() for tensor in ours]
    loss = token_loss(*ours, labels, kind, chunk)
    expected = functional.cross_entropy((theirs[0] @ theirs[1].T).flatten(0, 1), labels.flatten())
    (3 * loss).backward()
    (3 * expected).backward()
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-13)
    for own, their in zip(ours, theirs, strict=True):
        # Sums of 33 terms of order one, taken in another order.
        torch.testing.assert_close(own.grad, their.grad, rtol=0, atol=1e-13)


@pytest.mark.parametrize("kind", OWN_KINDS)
def test_a_batch_without_labels_costs_nothing(kind):
    hidden, head = drawn(5, 8, seed=0).requires_grad_(), drawn(12, 8, seed=1).requires_grad_()
    loss = token_loss(hidden, head, torch.full((5,), IGNORED), kind)
    loss.backward()
    assert loss == 0
    assert not hidden.grad.any()
    assert not head.grad.any()


@pytest.mark.parametrize("chunk", [4, 9])
@pytest.mark.parametrize("frozen", ["hidden", "head"])
def test_chunked_loss_gives_no_gradient_to_what_needs_none(frozen, chunk):
    tensors = {"hidden": drawn(9, 8, seed=0).requires_grad_(), "head": drawn(12, 8, seed=1).requires_grad_()}
    labels = text(1, 9, 12)[0]
    token_loss(tensors["hidden"], tensors["head"], labels, "chunked", chunk).backward()
    whole = {name: tensor.grad.clone() for name, tensor in tensors.items()}
    for tensor in tensors.values():
        tensor.grad = None
    tensors[frozen].requires_grad_(False)
    token_loss(tensors["hidden"], tensors["head"], labels, "chunked", chunk).backward()
    assert tensors[frozen].grad is None
    (other,) = tensors.keys() - {frozen}
    assert torch.equal(tensors[other].grad, whole[other])


@pytest.mark.parametrize("kind", OWN_KINDS)
def test_bf16_logits_are_summed_in_float32(kind):
    hidden, head = (drawn(*shape, seed=4, dtype=torch.bfloat16) for shape in ((40, 16), (500, 16)))
    labels = text(1, 40, 500)[0]
    logits = (hidden @ head.T).double()
    expected = functional.cross_entropy(logits, labels)
    loss = token_loss(hidden, head, labels, kind, 16)
    assert loss.dtype == torch.float32
    # A float32 sum over 500 exponentials: in bf16 the error would be of order 1e-2.
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("vocabulary", [5, 64, 1000])
@pytest.mark.usefixtures("kernels")
def test_the_kernel_has_its_twins_loss_and_gradient(monkeypatch, device, vocabulary):
    from apollo_optim.train import fused_loss

    monkeypatch.setattr(fused_loss, "BLOCK", 256)  # the longest row is several blocks, one of them not full
    logits = 5 * drawn(7, vocabulary + 3, seed=6, dtype=torch.float32).to(device)
    ours, theirs = logits.clone()[:, :vocabulary], logits.clone()[:, :vocabulary]
    labels = text(1, 7, vocabulary)[0].to(device)
    labels[2], labels[3], labels[4] = IGNORED, 0, vocabulary - 1
    for gradient in (False, True):
        ours_before = ours.clone()
        loss, expected = (
            f(t, labels, IGNORED, gradient) for f, t in ((fused_loss.softmax_loss_, ours), (softmax_loss_, theirs))
        )
        torch.testing.assert_close(loss, expected, rtol=2e-6, atol=2e-6)  # exponentials of a few ulp, summed
        torch.testing.assert_close(ours, theirs if gradient else ours_before, rtol=2e-6, atol=2e-7)
    assert not ours[2].any()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("label", [-1, 5, 2**40])
@pytest.mark.usefixtures("kernels")
def test_the_kernel_touches_no_other_row_for_a_label_that_none_has(device, label):
    from apollo_optim.train import fused_loss

    logits = drawn(4, 5, seed=6, dtype=torch.float32).to(device)
    expected = logits.clone()
    labels = torch.tensor([0, label, 2, 3], device=device)
    loss = fused_loss.softmax_loss_(logits, labels, IGNORED, True)
    others = [0, 2, 3]
    expected_loss = softmax_loss_(expected[others], labels[others], IGNORED, False)
    torch.testing.assert_close(loss[others], expected_loss, rtol=2e-6, atol=2e-6)
    assert loss[1].isnan()
    assert logits[1].isnan().all()
    # A softmax less one at the label: five float32 numbers of at most one, which add up to nothing.
    torch.testing.assert_close(logits[others].sum(1), torch.zeros(3, device=device), rtol=0, atol=1e-6)


@pytest.mark.cuda
def test_the_chunked_loss_on_a_gpu_is_cross_entropy_of_bf16_logits():
    hidden, head = (drawn(*s, seed=7, dtype=torch.bfloat16).cuda().requires_grad_() for s in ((300, 64), (32000, 64)))
    labels = text(1, 300, 32000)[0].cuda()
    labels[::7] = IGNORED
    grads = {}
    for kind in OWN_KINDS:
        loss = token_loss(hidden, head, labels, kind, 128)
        loss.backward()
        grads[kind] = loss.detach(), hidden.grad, head.grad
        hidden.grad = head.grad = None
    torch.testing.assert_close(grads["chunked"][0], grads["plain"][0], rtol=1e-6, atol=0)
    for ours, theirs in zip(grads["chunked"][1:], grads["plain"][1:], strict=True):
        # Both narrow the gradient of the logits and then the products to bf16: 2 ** -8 of the largest, twice.
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2 * 2**-8 * theirs.abs().max().item())


@pytest.mark.parametrize("kind", OWN_KINDS)
@pytest.mark.parametrize("chunk", [4, 100])
def test_a_wide_model_under_autocast(kind, chunk):
    """Hidden states come out narrow, the head is wide, and each has a gradient of its own dtype."""
    hidden, head = drawn(9, 8, seed=0, dtype=torch.float32), drawn(12, 8, seed=1, dtype=torch.float32)
    labels = text(1, 9, 12)[0]
    narrow, wide = hidden.bfloat16().requires_grad_(), head.clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = token_loss(narrow, wide, labels, kind, chunk)
    loss.backward()
    assert (narrow.grad.dtype, wide.grad.dtype) == (torch.bfloat16, torch.float32)
    expected = functional.cross_entropy((hidden.bfloat16() @ head.bfloat16().T).float(), labels)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)


def largest_tensor(kind):
    hidden, head = drawn(256, 8, seed=0).requires_grad_(), drawn(64, 8, seed=1).requires_grad_()
    sizes = []
    with Watch(lambda tensor: sizes.append(tensor.numel())):
        token_loss(hidden, head, text(1, 256, 64)[0], kind, 32).backward()
    return max(sizes)


def test_all_logits_never_exist_at_once_in_a_chunked_loss():
    assert largest_tensor("plain") == 256 * 64
    assert largest_tensor("chunked") == max(32 * 64, 256 * 8)


def gradients_made(chunk):
    """The dtypes of the tensors as large as the head that the loss of 32 tokens makes where everything is bf16."""
    hidden, head = (drawn(n, 8, seed=n, dtype=torch.bfloat16).requires_grad_() for n in (32, 640))
    made = {}

    def note(tensor):
        # Not the tensor itself: autograd copies a gradient that somebody else holds.
        if tensor.numel() == head.numel() and tensor.data_ptr() != head.data_ptr():
            made[tensor.data_ptr()] = tensor.dtype

    with Watch(note):
        token_loss(hidden, head, text(1, 32, 640)[0], "chunked", chunk).backward()
    return list(made.values())


def test_the_heads_gradient_is_made_once_and_never_wide_where_there_is_one_chunk(monkeypatch):
    monkeypatch.setattr("apollo_optim.train.losses.PIECE", 64)
    assert torch.float32 in gradients_made(chunk=31)
    assert gradients_made(chunk=32) == [torch.bfloat16]


@pytest.mark.parametrize("chunk", [4, 9])
def test_a_chunked_loss_gives_the_same_gradients_again(chunk):
    hidden, head = drawn(9, 8, seed=0).requires_grad_(), drawn(12, 8, seed=1).requires_grad_()
    loss = token_loss(hidden, head, text(1, 9, 12)[0], "chunked", chunk)
    first, second = (torch.autograd.grad(loss, (hidden, head), retain_graph=True) for _ in range(2))
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


@pytest.mark.parametrize("kind", OWN_KINDS)
@pytest.mark.parametrize("count", [3, 5])
def test_other_than_one_label_for_each_state_is_refused(kind, count):
    labels = torch.zeros(count, dtype=torch.long)
    with pytest.raises(ValueError, match=rf"labels must be one for each of the 4 hidden states, got {count}"):
        token_loss(drawn(4, 8, seed=0), drawn(6, 8, seed=1), labels, kind, 2)


def test_a_chunked_loss_refuses_a_second_derivative():
    hidden, head = drawn(4, 8, seed=0).requires_grad_(), drawn(6, 8, seed=1)
    loss = token_loss(hidden.square(), head, text(1, 4, 6)[0], "chunked", 2)
    with pytest.raises(RuntimeError, match='no second derivative: use loss "plain"'):
        torch.autograd.grad(loss, hidden, create_graph=True)


def test_a_chunk_of_nothing_is_refused():
    with pytest.raises(ValueError, match=r"chunk must be an integer >= 1, got 0"):
        token_loss(drawn(2, 4, seed=0), drawn(3, 4, seed=1), torch.tensor([0, 1]), "chunked", 0)
