import numpy as np
import pytest
import scipy.sparse as sp

from pdvi.shards.neighbours import neighbour_tables
from pdvi.shards.partition import along_space, grid, layout, median_cuts

RNG = np.random.default_rng(0)
XY = RNG.random((1_003, 2)) * [3, 1]


@pytest.mark.parametrize("n_patches", [1, 2, 7, 32, 1_003])
def test_median_cuts_are_balanced_to_one_row(n_patches):
    sizes = np.bincount(median_cuts(XY, n_patches), minlength=n_patches)
    assert sizes.sum() == len(XY)
    assert sizes.max() - sizes.min() <= 1


def test_median_cuts_are_compact():
    """A patch's extent is far below the tissue's: it is a piece of space, not a random subset."""
    patch = median_cuts(XY, 16)
    extents = [np.ptp(XY[patch == b], axis=0).max() for b in range(16)]
    assert np.mean(extents) < 1.0


def test_duplicate_coordinates_are_cut_too():
    sizes = np.bincount(median_cuts(np.zeros((10, 2)), 4))
    assert sizes.tolist() == [2, 3, 2, 3]


def test_grid_numbers_the_occupied_cells():
    patch = grid(XY, 3, 2)
    assert set(patch) == set(range(6))
    first = XY[patch == 0]
    assert first[:, 0].max() <= XY[:, 0].min() + np.ptp(XY[:, 0]) / 3 + 1e-12
    apart = np.concatenate([XY, XY + np.array([100, 0])])
    assert set(grid(apart, 10, 1)) == {0, 1}


@pytest.mark.parametrize("n_patches", [0, 2_000])
def test_too_many_patches_are_named(n_patches):
    with pytest.raises(
        ValueError, match=rf"`n_patches` must be between 1 and the number of rows \(1003\), got {n_patches}"
    ):
        median_cuts(XY, n_patches)


def test_layout_and_back():
    where = layout(RNG.integers(0, 5, 100))
    values = RNG.standard_normal((100, 3))
    np.testing.assert_array_equal(where.unshard(where.shard(values)), values)
    np.testing.assert_allclose(where.fraction.sum(), 1)
    assert where.mask.sum() == 100


def test_rows_are_ordered_along_space():
    order = along_space(XY)
    assert sorted(order) == list(range(len(XY)))
    steps = np.linalg.norm(np.diff(XY[order], axis=0), axis=1)
    shuffled = np.linalg.norm(np.diff(XY, axis=0), axis=1)
    assert np.median(steps) < 0.25 * np.median(shuffled)


@pytest.mark.parametrize("halo", [True, False])
def test_the_neighbour_table_is_the_graph(x64, halo):
    """Applying table and halo to any vector is the product with the (cut) graph."""
    dense = RNG.random((60, 60)) * (RNG.random((60, 60)) < 0.1)
    graph = sp.csr_array(np.triu(dense, 1) + np.triu(dense, 1).T)
    patch = RNG.integers(0, 4, 60)
    where = layout(patch)
    tables = list(neighbour_tables(graph, where, halo=halo))
    assert len({table.table.shape for table in tables} | {table.weight.shape for table in tables}) == 1
    values = RNG.standard_normal(60)
    stacked = where.shard(values) * where.mask
    out = np.zeros_like(stacked)
    for b, (table, weight, ghosts) in enumerate(tables):
        rows = np.concatenate([stacked[b], stacked.ravel()[ghosts]])
        out[b] = (weight * rows[table]).sum(0)
    kept = graph.toarray() if halo else graph.toarray() * (patch[:, None] == patch)
    np.testing.assert_allclose(where.unshard(out), kept @ values, rtol=1e-12)
    assert all((len(ghosts) > 0) == halo for *_, ghosts in tables)
