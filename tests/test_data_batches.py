"""What a step trains on depends on its place in the run, and on nothing else."""

import itertools
import math
import threading
import time

import numpy as np
import pytest
import torch

from apollo_optim.train.data.batches import Windows, prefetched, shuffled
from apollo_optim.train.data.shards import TokenSet


def token_set(*lengths: int) -> TokenSet:
    """Shards that hold 0, 1, 2, ... together."""
    shards = np.split(np.arange(sum(lengths), dtype=np.uint16), np.cumsum(lengths)[:-1])
    return TokenSet(shards, [str(length) for length in lengths], sum(lengths) - 1)


@pytest.mark.parametrize("lengths", [(60,), (5, 1, 7, 2, 45), (59, 1), (1, 59)])
@pytest.mark.parametrize("length", [1, 7, 13, 60])
def test_windows_cross_the_borders_of_files(lengths, length):
    tokens = token_set(*lengths)
    assert tokens.sequences(length) == 60 // length
    windows = tokens.windows(np.arange(60 // length), length)
    assert windows.dtype == torch.int64
    assert windows.flatten().tolist() == list(range(60 // length * length))
    last = np.array([60 // length - 1])
    assert torch.equal(tokens.windows(last, length), windows[-1:])


def test_a_window_beyond_the_end_is_an_error():
    with pytest.raises(IndexError, match="windows 8 to 8 of 8"):
        token_set(60).windows(np.array([8]), 7)


@pytest.mark.parametrize("tokens", [0, 1, 5, 6, 30, 60])
def test_a_set_parts_into_its_beginning_and_the_rest(tokens):
    beginning, rest = token_set(5, 1, 7, 47).parted(tokens)
    assert (len(beginning), len(rest)) == (tokens, 60 - tokens)
    together = [*beginning.windows(np.arange(tokens), 1), *rest.windows(np.arange(60 - tokens), 1)]
    assert [int(each) for each in together] == list(range(60))


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 17, 100, 997, 4096])
def test_an_epoch_holds_everything_once(count):
    for epoch in range(3):
        order = shuffled(np.arange(epoch * count, (epoch + 1) * count), count, seed=1)
        assert sorted(order.tolist()) == list(range(count))


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = {tuple(shuffled(np.arange(50) + 50 * epoch, 50, seed).tolist()) for epoch in range(9) for seed in range(9)}
    assert len(orders) == 81


@pytest.mark.parametrize("count", [2, 3, 4])
def test_every_order_is_equally_likely(count):
    # Chi squared of the orders of 12,000 epochs; the bounds are its 99.99% points for 1, 5 and 23 degrees of freedom.
    orders = shuffled(np.arange(12_000 * count), count, seed=4).reshape(12_000, count)
    _, seen = np.unique(orders, axis=0, return_counts=True)
    expected = 12_000 / math.factorial(count)
    assert len(seen) == math.factorial(count)
    assert ((seen - expected) ** 2 / expected).sum() < {2: 15.2, 3: 25.8, 4: 57.1}[count]


def test_neighbours_in_the_corpus_are_not_neighbours_in_the_order():
    # In a random order of n things, on average 2 of the n - 1 pairs are neighbours, with a variance of about 2:
    # 20 epochs give 40, and 8 standard deviations are 51.
    steps = [np.diff(shuffled(np.arange(1000) + 1000 * epoch, 1000, seed=3)) for epoch in range(20)]
    assert sum((abs(step) == 1).sum() for step in steps) < 91


def test_the_order_of_a_huge_corpus_needs_no_memory_of_its_size():
    count = 10**11 + 7
    order = shuffled(np.arange(count - 500, count + 500), count, seed=2)
    assert ((order >= 0) & (order < count)).all()
    assert len(set(order[:500].tolist())) == len(set(order[500:].tolist())) == 500


def test_rows_depend_on_their_number_alone():
    windows = Windows(token_set(40, 3, 60), sequence=3, seed=5)
    whole = windows.rows(0, 80)  # more than three epochs
    assert whole.shape == (80, 4)
    assert torch.equal(torch.cat([windows.rows(n, 1) for n in range(80)]), whole)
    assert torch.equal(Windows(token_set(40, 3, 60), sequence=3, seed=5).rows(33, 20), whole[33:53])
    for epoch in range(3):
        assert sorted(whole[25 * epoch : 25 * epoch + 25, 0].tolist()) == list(range(0, 100, 4))


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_ranks_share_the_rows_of_a_step(ranks):
    windows = Windows(token_set(103), sequence=3, seed=5)
    shares = [windows.rows(40 + rank * 10 // ranks, 10 // ranks) for rank in range(ranks)]
    assert torch.equal(torch.cat(shares), windows.rows(40, 10))


def test_rows_come_faster_than_any_model_takes_them():
    # 2 million tokens a second keep an H200 busy with a model of 60M; this takes about a fiftieth of that time here.
    shards = [np.zeros(10**6, dtype=np.uint16) for _ in range(20)]
    windows = Windows(TokenSet(shards, [""] * 20, 0), sequence=255, seed=0)
    began = time.process_time()
    for step in range(10):
        windows.rows(512 * step, 512)
    assert 10 * 512 * 256 / (time.process_time() - began) > 2_000_000


def test_prefetched_batches_come_in_order():
    windows = Windows(token_set(103), sequence=3, seed=5)
    got = list(prefetched(lambda step: (windows.rows(step * 3, 3),), range(4, 11)))
    assert torch.equal(torch.cat([rows for (rows,) in got]), windows.rows(12, 21))


def one(step: int) -> tuple[torch.Tensor]:
    return (torch.tensor(step),)


def test_prefetching_is_so_far_ahead_and_no_further():
    asked: list[int] = []

    def load(step: int) -> tuple[torch.Tensor]:
        asked.append(step)
        return one(step)

    batches = prefetched(load, itertools.count(), ahead=3)
    assert [int(next(batches)[0]) for _ in range(5)] == [0, 1, 2, 3, 4]
    batches.close()
    assert len(asked) <= 5 + 3


def test_closing_ends_the_thread():
    before = set(threading.enumerate())
    batches = prefetched(one, itertools.count())
    next(batches)
    assert [thread.name for thread in set(threading.enumerate()) - before] == ["batches_0"]
    batches.close()
    assert set(threading.enumerate()) == before


def test_what_goes_wrong_in_the_thread_is_raised_at_its_place():
    def load(step: int) -> tuple[torch.Tensor]:
        if step == 2:
            raise OSError("the disk is gone")
        return one(step)

    batches = prefetched(load, itertools.count())
    assert [int(next(batches)[0]) for _ in range(2)] == [0, 1]
    with pytest.raises(OSError, match="the disk is gone"):
        next(batches)


@pytest.mark.cuda
def test_prefetched_batches_are_pinned_if_asked_for():
    (batch,) = next(prefetched(one, itertools.count(), pin=True))
    assert batch.is_pinned()
