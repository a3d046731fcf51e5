import numpy as np
import pytest

from pdvi import graphs

RNG = np.random.default_rng(0)
XY = RNG.random((200, 2))
X = RNG.standard_normal((200, 5))


def distances():
    return np.linalg.norm(XY[:, None] - XY[None], axis=-1)


def test_nearest_neighbours_by_brute_force():
    order = np.argsort(distances() + 1e9 * np.eye(200), axis=1)[:, :6]
    directed = np.zeros((200, 200), bool)
    directed[np.arange(200)[:, None], order] = True
    np.testing.assert_array_equal(graphs.nearest(XY, 6).toarray() > 0, directed & directed.T)
    np.testing.assert_array_equal(graphs.nearest(XY, 6, mutual=False).toarray() > 0, directed | directed.T)


def test_duplicate_points_have_no_loops():
    graph = graphs.nearest(np.zeros((9, 2)), 3, mutual=False)
    assert graph.diagonal().sum() == 0
    assert (graph.sum(1) >= 3).all()


def test_radius_by_brute_force():
    np.testing.assert_array_equal(graphs.within(XY, 0.1).toarray() > 0, (distances() <= 0.1) & ~np.eye(200, dtype=bool))


def test_weights_are_the_papers_formula():
    graph = graphs.nearest(XY, 5)
    flow = RNG.standard_normal((200, 2))
    flow[:50] = 0
    found = graphs.weights(graph, X, XY, flow, tau=0.7).toarray()
    i, j = np.argwhere(graph.toarray() > 0)[7]

    def one_way(a, b):
        cosine = X[a] @ X[b] / np.linalg.norm(X[a]) / np.linalg.norm(X[b])
        step = XY[b] - XY[a]
        length = np.linalg.norm(flow[a])
        along = abs(flow[a] @ step) / length / np.linalg.norm(step) if length else 0.0
        return along + 0.7 * (cosine + 1)

    for i, j in np.argwhere(graph.toarray() > 0)[:200:7]:
        assert found[i, j] == pytest.approx(0.5 * (one_way(i, j) + one_way(j, i)), rel=1e-5)
    np.testing.assert_allclose(found, found.T, rtol=1e-6)
    assert ((found > 0) <= (graph.toarray() > 0)).all()


def test_the_flow_runs_along_layers():
    """Horizontal layers: labels do not change along x."""
    points = RNG.random((3_000, 2))
    labels = np.floor(points[:, 1] * 5).astype(int)
    flow = graphs.flow_direction(points, labels, n_neighbors=100)
    moving = np.linalg.norm(flow, axis=1) > 0
    assert moving.mean() > 0.5
    assert np.median(np.abs(flow[moving, 0])) > 0.98
    still = graphs.flow_direction(points, np.zeros(3_000, int))
    assert (still == 0).all()


def test_the_flow_graph_is_a_rectangle():
    flow = np.tile([1.0, 0.0], (200, 1))
    graph = graphs.along_flow(XY, flow, length=0.2, width=0.05).toarray() > 0
    step = np.abs(XY[:, None] - XY[None])
    expected = (step[..., 0] <= 0.2) & (step[..., 1] <= 0.05) & ~np.eye(200, dtype=bool)
    np.testing.assert_array_equal(graph, expected)
    disc = graphs.along_flow(XY, np.zeros((200, 2)), length=0.2, width=0.05).toarray() > 0
    np.testing.assert_array_equal(disc, (distances() <= 0.05) & ~np.eye(200, dtype=bool))


@pytest.mark.parametrize("k", [0, 200])
def test_impossible_neighbours_are_named(k):
    with pytest.raises(ValueError, match=rf"`k` must be between 1 and the number of spots less one \(199\), got {k}"):
        graphs.nearest(XY, k)
