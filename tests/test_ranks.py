"""The processes that tests of several ranks run on, and what they do where one of them fails."""

import os
import time

import pytest
import torch
import torch.distributed as dist

import ranks as module
from ranks import Ranks


def rank_and(number: int) -> int:
    return dist.get_rank() + number


def failing_on_the_last() -> None:
    if dist.get_rank() == 1:
        raise ValueError("no more")
    dist.all_reduce(torch.zeros(1))


def dying_on_the_last() -> None:
    if dist.get_rank() == 1:
        os._exit(9)


def test_a_rank_that_dies_is_named_and_the_next_question_goes_to_others():
    two = Ranks(2)
    with pytest.raises(AssertionError, match=r"rank 1:\nhas died"):
        two.run(dying_on_the_last)
    assert two.run(rank_and, 5) == [5, 6]
    two.close()


def test_a_rank_that_fails_ends_the_others_that_wait_for_it(monkeypatch):
    """Soon, and not after `TIMEOUT`; the next question goes to new ones."""
    monkeypatch.setattr(module, "AFTER_AN_ERROR", 0.5)
    monkeypatch.setattr(module, "TIMEOUT", 60)
    two, began = Ranks(2), time.monotonic()
    with pytest.raises(AssertionError, match=r"rank 1:\n(.*\n)*ValueError: no more\n\nrank 0 does not answer"):
        two.run(failing_on_the_last)
    assert time.monotonic() - began < 40
    assert two.run(rank_and, 5) == [5, 6]
    two.close()
