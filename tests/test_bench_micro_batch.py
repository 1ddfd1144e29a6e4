"""The script that looks for the largest micro-batch finds it in few attempts."""

import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))
import micro_batch


class Device:
    """Passes that take memory by a rule, of a device that has 1000 of it."""

    def __init__(self, rule):
        self.rule, self.tried, self.memory = rule, [], self

    def attempt(self, size):
        self.tried.append(size)
        return 2.0 * size if self.rule(size) <= 1000 else None

    def highest(self):
        return self.rule(self.tried[-1])


@pytest.mark.parametrize(
    ("rule", "tried"),
    [
        (lambda size: 100 + 10 * size, [9, 18, 88]),
        # Fuller than its peak says: it does not fit, and a little less does.
        (lambda size: 100 + (10 if size < 80 else 10.4) * size, [9, 18, 88, 82]),
        # The small ones grow faster than the large: 52 is where the last two lead.
        (lambda size: 200 + 20 * min(size, 30) + 2 * max(0, size - 30), [9, 18, 39, 52]),
    ],
)
def test_the_largest_micro_batch_is_computed_and_then_seen_to_fit(rule, tried):
    device = Device(rule)
    found, taken, peaks = micro_batch.largest(device, (9, 18), 1000)
    assert device.tried == tried
    assert found == tried[-1]
    assert taken == 2.0 * found
    assert peaks[found] == rule(found)


def test_a_device_without_room_for_one_sequence_is_an_error():
    device = Device(lambda size: 10**6 * size)
    with pytest.raises(torch.OutOfMemoryError, match="not even one sequence"):
        micro_batch.largest(device, (9, 18), 1000)
