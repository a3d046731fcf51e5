from itertools import pairwise

import numpy as np
import pytest

import pdvi
from pdvi.run.sampling import Fixed, Reshuffled, Uniform, batches

SIZES = [(12, 3), (12, 12), (12, 1), (13, 5), (7, 6), (1, 1)]


@pytest.mark.parametrize(("n", "size"), SIZES)
@pytest.mark.parametrize("sampling", [Reshuffled(), Fixed()], ids=["reshuffled", "fixed"])
def test_an_epoch_visits_every_shard_and_no_more_than_it_must(sampling, n, size):
    for epoch in range(5):
        drawn = sampling.epoch(0, epoch, n, size)
        assert drawn.shape == (-(-n // size), size)
        assert set(drawn.ravel()[:n]) == set(range(n))  # each of the first n visits is another shard
        assert all(len(set(batch)) == size for batch in drawn)


def test_reshuffled_orders_differ_between_epochs_and_seeds():
    drawn = [Reshuffled().epoch(seed, epoch, 20, 4) for seed, epoch in ((0, 0), (0, 1), (1, 0))]
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert not np.array_equal(drawn[a], drawn[b])


@pytest.mark.parametrize(("n", "size"), SIZES)
def test_uniform_draws_without_replacement_within_a_step(n, size):
    for epoch in range(20):
        drawn = Uniform().epoch(0, epoch, n, size)
        assert drawn.shape == (-(-n // size), size)
        assert all(len(set(batch)) == size for batch in drawn)
        assert drawn.min() >= 0
        assert drawn.max() < n


def test_uniform_visits_all_shards_equally_often_on_average():
    """2,000 steps of 3 out of 10: 600 visits each, standard deviation sqrt(2000 * 0.3 * 0.7) = 20.5."""
    drawn = batches(Uniform(), 0, 0, 2000, 10, 3)
    counts = np.bincount(drawn.ravel(), minlength=10)
    assert counts.sum() == 6000
    assert np.abs(counts - 600).max() < 4 * 20.5
    # independent steps: a shard returns in the next step as often as in any
    again = np.mean([len(np.intersect1d(a, b)) for a, b in pairwise(drawn)])
    assert again == pytest.approx(0.9, abs=0.06)  # 3 * 3/10, standard deviation 0.015


def test_fixed_keeps_its_order_in_every_epoch():
    order = (3, 1, 4, 0, 2)
    for epoch in (0, 1, 9):
        assert Fixed(order).epoch(epoch, epoch, 5, 2).tolist() == [[3, 1], [4, 0], [2, 3]]
    assert Fixed().epoch(0, 0, 4, 2).tolist() == [[0, 1], [2, 3]]


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 1, 2, 2), (1, 2, 3, 4), (0, 1, 2, 3, 4), ()])
def test_fixed_rejects_an_order_that_is_none(order):
    message = rf"`order` must hold each of the 4 shards once, got {len(order)} entries"
    with pytest.raises(ValueError, match=message):
        Fixed(order).epoch(0, 0, 4, 2)


@pytest.mark.parametrize("sampling", [Reshuffled(), Uniform(), Fixed()], ids=lambda s: type(s).__name__)
@pytest.mark.parametrize(("start", "stop"), [(0, 3), (1, 2), (2, 7), (3, 6), (5, 12), (11, 12)])
def test_draws_depend_on_seed_and_step_alone(sampling, start, stop):
    whole = batches(sampling, 7, 0, 12, 8, 3)  # three steps per epoch
    part = batches(sampling, 7, start, stop, 8, 3)
    assert part.dtype == np.int32
    np.testing.assert_array_equal(part, whole[start:stop])


def test_a_run_visits_the_shards_it_is_told_to(x64):
    """One step of a fixed order: the shards in it, and only they, have left their start."""
    problem = pdvi.datasets.quadratic(n=12, condition=20, heterogeneity=0.8, linear=0.3)
    order = tuple(np.random.default_rng(0).permutation(12).tolist())
    states = []
    pdvi.fit(
        problem,
        pdvi.PDVI(eta=0.3),
        batch_size=3,
        max_steps=1,
        sampling=Fixed(order),
        callbacks=[lambda progress: states.append(progress.state)],
    )
    moved = np.flatnonzero(np.abs(np.asarray(states[-1].own.dual)).max(1))
    assert moved.tolist() == sorted(order[:3])
