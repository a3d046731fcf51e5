"""The nearest rows in space: against all distances, among duplicates, and looked up once."""

import numpy as np
import pytest

from pdvi import graphs
from pdvi.shards import nearest
from pdvi.shards.nearest import asked_once, nearest_rows, other_rows


@pytest.fixture
def places():
    return np.random.default_rng(0).normal(size=(60, 2))


def by_distance(places):
    return np.argsort(((places[:, None] - places) ** 2).sum(-1), axis=1, kind="stable")


@pytest.mark.parametrize("k", [1, 7, 60, 99])
def test_the_nearest_come_first_and_the_row_itself_is_one_of_them(places, k):
    np.testing.assert_array_equal(nearest_rows(places, k), by_distance(places)[:, :k])


@pytest.mark.parametrize("k", [1, 6, 59, 80])
def test_other_rows_leave_out_the_row_itself(places, k):
    np.testing.assert_array_equal(other_rows(places, k), by_distance(places)[:, 1 : k + 1])


def test_among_duplicates_no_row_is_its_own_neighbour():
    found = other_rows(np.zeros((12, 2)), 3)
    assert found.shape == (12, 3)
    assert not (found == np.arange(12)[:, None]).any()


def test_all_who_ask_within_share_one_look(places, monkeypatch):
    looks = []
    looked_up = nearest._looked_up
    monkeypatch.setattr(nearest, "_looked_up", lambda places, k: looks.append(k) or looked_up(places, k))
    alone = [nearest_rows(places, 7), other_rows(places, 30), graphs.nearest(places, 5).toarray()]
    assert looks == [7, 31, 6]
    looks.clear()
    with asked_once(31):
        shared = [nearest_rows(places, 7), other_rows(places, 30), graphs.nearest(places, 5).toarray()]
        assert looks == [31]
        nearest_rows(places + 1.0, 3)  # other places
        nearest_rows(places, 40)  # more than was expected
        assert looks == [31, 31, 40]
    for one, other in zip(alone, shared):
        np.testing.assert_array_equal(one, other)
    nearest_rows(places, 7)
    assert looks[-1] == 7  # nothing is remembered outside


def test_places_that_change_in_between_are_looked_up_again(places):
    with asked_once(5):
        nearest_rows(places, 5)
        places[0] += 100.0
        np.testing.assert_array_equal(nearest_rows(places, 5), by_distance(places)[:, :5])


def test_a_graph_by_sample_joins_no_two_samples(places):
    samples = np.arange(60) % 3
    graph = graphs.by_sample(samples, lambda rows: graphs.nearest(places[rows], 4, mutual=False))
    i, j = graph.nonzero()
    assert (samples[i] == samples[j]).all()
    one = np.flatnonzero(samples == 1)
    np.testing.assert_array_equal(graph[one][:, one].toarray(), graphs.nearest(places[one], 4, mutual=False).toarray())
