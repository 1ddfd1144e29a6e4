"""The check of bench/losses.py: what it lets through is cross-entropy, up to rounding."""

import sys
from pathlib import Path

import pytest
from torch.nn import functional

from small_training import OWN_KINDS

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))


@pytest.fixture
def given():
    import losses

    return losses.inputs(300, 64, 1000, "cpu")


def test_the_reference_is_cross_entropy_with_its_gradients(monkeypatch, given):
    import losses

    monkeypatch.setattr(losses, "REFERENCE_CHUNK", 128)
    wide = [tensor.detach().double().requires_grad_() for tensor in given[:2]]
    loss = functional.cross_entropy(wide[0] @ wide[1].T, given[2])
    loss.backward()
    for found, expected in zip(losses.reference(*given), (loss.detach(), *(each.grad for each in wide)), strict=True):
        # Sums of at most 1000 terms in float32, each addition rounded by 2^-24 at most.
        assert (found - expected).abs().max() < 1000 * 2**-24 * expected.abs().max()


@pytest.mark.parametrize("kind", OWN_KINDS)
def test_our_own_losses_pass_and_a_wrong_gradient_does_not(kind, given):
    import losses

    loss, hidden, head = losses.both_passes(kind, given)
    expected = losses.reference(*given)
    assert losses.checked_errors(kind, (loss, hidden, head), expected).keys() == {
        "loss_error", "hidden_error", "head_error",
    }  # fmt: skip
    with pytest.raises(AssertionError, match=f"{kind}: head is off by"):
        losses.checked_errors(kind, (loss, hidden, head * 1.02), expected)
