"""Units of unequal size in strips: nothing is lost, nothing is counted twice, shards are balanced."""

import numpy as np
import pytest

from pdvi.shards.grouping import BUDGET, shards_for
from pdvi.shards.ragged import best_width, strips


@pytest.mark.parametrize("width", [None, 1, 3, 50])
@pytest.mark.parametrize("n_shards", [1, 4, 11])
def test_every_entry_lies_in_its_unit_once(n_shards, width):
    lengths = np.random.default_rng(0).integers(0, 30, 11)
    where = strips(lengths, n_shards, width)
    values = np.arange(lengths.sum()) + 1.0
    owner = np.repeat(np.arange(11), lengths)
    found = where.entries[where.entry_mask]
    np.testing.assert_array_equal(np.sort(found), np.arange(lengths.sum()))
    unit_there = np.take_along_axis(where.units, where.owner, axis=1)[..., None] * np.ones(where.entries.shape, int)
    np.testing.assert_array_equal(unit_there[where.entry_mask], owner[found])
    sums = np.zeros(where.units.shape)
    np.add.at(sums, (np.arange(n_shards)[:, None], where.owner), where.spread(values).sum(-1))
    np.testing.assert_allclose(where.gathered(sums), np.bincount(owner, values, minlength=11))
    assert (where.unit_mask.sum(1) >= 1).all()


@pytest.mark.parametrize("lengths", [[1000, 1, 1, 1], [1, 1, 1, 1000], [0, 0, 0, 0], [5] * 40])
def test_no_shard_is_empty_and_the_order_is_kept(lengths):
    where = strips(lengths, 4)
    assert (where.unit_mask.sum(1) >= 1).all()
    np.testing.assert_array_equal(where.units[where.unit_mask], np.arange(len(lengths)))


def test_one_long_unit_does_not_widen_all():
    lengths = np.full(1_000, 10)
    assert best_width(lengths) == 10
    lengths[3] = 5_000
    assert strips(lengths, 5).entries.size < 3 * lengths.sum()


def test_shards_are_about_equal():
    lengths = np.random.default_rng(1).integers(1, 100, 2_000)
    filled = strips(lengths, 10).entry_mask.sum((1, 2))
    assert filled.max() < 1.1 * filled.min()


def test_many_globals_make_few_shards():
    assert shards_for(10_000, 100, most=20) == 20
    assert shards_for(10_000, 10**7, most=20) == 4
    assert shards_for(10_000, 10**10, most=20) == 1
    assert shards_for(30, 10, most=20, least_rows=10) == 3
    assert 3 * 4 * 10**7 * shards_for(10_000, 10**7, most=20) <= BUDGET
