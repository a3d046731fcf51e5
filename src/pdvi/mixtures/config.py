"""The numbers behind `tl.domains` and the mixtures; docs/how-domains-decides.md has an ablation of each."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from pdvi._base.checks import whole


@dataclass(frozen=True)
class Config:
    """Numbers that steer a fit; ``dataclasses.replace(Config(), ...)`` makes another one."""

    # one fit
    max_epochs: int = 100  # of one fit
    tol: float = 1e-4  # nats per row: a fit has converged when an epoch gains less, twice in a row
    n_patches: int = 8  # pieces that a tissue is cut into; fewer where a piece would have less than 32 spots
    kmeans_runs: int = 8  # of a start, the best is taken

    # the views of a tissue
    budget: int = 120_000  # rows times views: all five up to 24,000 rows, three of 40,000
    n_components: int = 8  # features of a view of few domains; of K domains at least K - 1
    n_types: int = 20  # expression states in a hierarchical view

    # large tissues
    group_above: int = 80_000  # rows: above, views are fitted to groups of neighboring rows
    group_size: int = 8  # fewer than any view averages

    # another slide labeled by a fitted one
    max_distance: float = 3.0  # times as far from the domains as the fitted spots: a warning
    min_explained: float = 0.5  # a warning if domains explain less than this fraction of what they explained there

    # how many domains
    held_out_neighbors: int = 15  # averaged within one half of the spots
    held_out_gain: float = 0.6  # fraction of the largest gain in the held-out score that is enough

    def __post_init__(self) -> None:
        whole("group_size", self.group_size, least=2)  # groups of one row would be grouped for ever

    def n_views(self, n_rows: int) -> int:
        """Return how many views the budget allows: at least one, and three of a large tissue's groups."""
        if n_rows > self.group_above:
            return max(1, min(3, self.budget * self.group_size // n_rows))
        return max(1, self.budget // n_rows)

    def runs(self, n_rows: int) -> int:
        """Return how often k-means is run from a start: less often on many rows."""
        return max(1, min(self.kmeans_runs, self.budget // (3 * n_rows)))

    def patches(self, n_rows: int) -> int:
        """Return the number of patches for so many rows."""
        return max(1, min(self.n_patches, n_rows // 32))

    def as_params(self) -> dict[str, int | float]:
        """Return all fields as a flat dict of numbers, as a file can hold it."""
        return asdict(self)


CONFIG = Config()
