"""Which rows shards read of each other, who keeps which shards, and which version of a row is seen."""

import numpy as np
import pytest

from pdvi.executors.crew import runs
from pdvi.executors.exchange import Exchange, Exports, Moment, Moved

N_ROWS = 4
HALO = np.array([[4, 5, 5], [3, 8, 3], [7, 2, 7]])  # three shards of four rows; the last entries fill up
VALUES = np.arange(24.0).reshape(3, N_ROWS, 2)


def published(exchange, shards, values, stamp):
    exports = Exports(HALO, N_ROWS)
    exchange.publish({b: values[b][exports.rows(b)] for b in shards}, stamp)


def alone():
    exchange = Exchange(Exports(HALO, N_ROWS), 1.0)
    published(exchange, range(3), VALUES, 1)
    return exchange


def test_a_halo_has_the_rows_that_are_named_in_their_order():
    halos, moved = alone().halos([0, 1, 2], Moment(1, 2))
    flat = VALUES.reshape(-1, 2)
    for b in range(3):
        np.testing.assert_array_equal(halos[b], flat[HALO[b]])
    assert moved == Moved(0, 6 * 2 * 8)  # each row once, of two numbers


def test_rows_of_the_step_before_are_seen_until_the_next():
    exchange = alone()
    exchange.halos([0], Moment(1, 2))
    published(exchange, [1], VALUES + 100, 2)
    np.testing.assert_array_equal(exchange.halos([0], Moment(1, 2))[0][0], VALUES[1][[0, 1, 1]])
    halos, moved = exchange.halos([0], Moment(2, 3))
    np.testing.assert_array_equal(halos[0], VALUES[1][[0, 1, 1]] + 100)
    assert moved.within == 2 * 2 * 8
    assert exchange.halos([0], Moment(3, 4))[1].within == 0  # nothing is newer


def test_what_a_reader_has_is_not_offered_again():
    exchange = alone()
    assert exchange.offered({(0, 1): 1}, as_of=5) == {}
    stamp, rows = exchange.offered({(2, 1): -1}, as_of=5)[2, 1]
    assert stamp == 1
    np.testing.assert_array_equal(rows, VALUES[1][[3]])


def grid_halo(side):
    """Cells of a grid, each reading the row of its four neighbours; one row per shard."""
    number = np.arange(side * side).reshape(side, side)
    found = []
    for i in range(side):
        for j in range(side):
            near = [(i - 1, j), (i + 1, j), (i, j - 1), (i, j + 1)]
            found.append([number[a, b] for a, b in near if 0 <= a < side and 0 <= b < side])
    return np.array([line + [line[0]] * (4 - len(line)) for line in found])


def touching(side):
    """By shard: those whose rows it reads."""
    exports = Exports(grid_halo(side), 1)
    return [exports.sources(b) for b in range(side * side)]


def test_shards_that_touch_go_to_the_same_worker():
    touch = touching(8)
    assert touch[9] == {1, 8, 10, 17}
    given = runs(range(64), dict.fromkeys("abcd", 0))
    assert [len(own) for own in given.values()] == [16] * 4
    where = {b: address for address, own in given.items() for b in own}
    within = np.mean([where[b] == where[c] for b in range(64) for c in touch[b]])
    assert within > 0.75


@pytest.mark.parametrize("lost", ["a", "b", "c"])
def test_orphans_are_shared_equally_and_join_their_neighbours(lost):
    touch = touching(6)
    owned = {"a": list(range(12)), "b": list(range(12, 24)), "c": list(range(24, 36))}
    orphans = owned.pop(lost)
    given = runs(orphans, {address: len(own) for address, own in owned.items()})
    assert sorted(b for own in given.values() for b in own) == orphans
    assert {len(own) for own in given.values()} == {6}
    whole = {address: set(own) | set(given[address]) for address, own in owned.items()}
    assert all(any(c in whole[address] for c in touch[b]) for address, own in given.items() for b in own)


def test_those_who_have_fewer_get_more():
    assert runs(range(7), {"a": 0, "b": 0}) == {"a": [0, 1, 2, 3], "b": [4, 5, 6]}
    assert runs([4, 5, 6], {"a": 1, "b": 4, "c": 2}) == {"a": [4, 5], "c": [6]}
