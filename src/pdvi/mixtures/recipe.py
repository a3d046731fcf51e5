"""Every heuristic of the mixtures and of `tl.domains`, with its number, why, and what it was measured on.

docs/how-domains-decides.md tells in which order they act. "Slides" are the five labelled ones of benchmarks/slides.py,
"the tissue" the simulated one of benchmarks/mixture_speed.py (147,456 spots, 23 domains). Where it says "a choice",
no measurement is kept.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Recipe:
    """Hold the numbers that steer a fit; ``dataclasses.replace(RECIPE, ...)`` makes another one."""

    # The start: k-means, and the settings it suggests.
    kmeans_rows: int = 20_000  # that k-means looks at: all of the tissue's would cost more than its fit
    # and that of a view with all its runs, for each cluster: averages of neighbours are much alike. Domains of slides
    # were as good, and as stable over 24 seeds, as from all rows, in a quarter less time. With two runs (154,000 cells,
    # six seeds) all 19,300 groups gave an ARI of 0.974, 6,900 of them 0.970, in the same time.
    kmeans_view_rows: int = 300
    kmeans_runs: int = 8  # of a view's start, the best is taken: seeds agree then (osmFISH: deviation 0.03 to 0.003)
    kmeans_effort: int = 40_000  # rows times runs: with more rows fewer runs; a choice
    kmeans_tol: float = 1e-3  # of its centres, over the variance: a fit goes on from there (inertia 0.01 % higher)
    whitening_rows: int = 20_000  # a full covariance of some dozen features is known well from so many; a choice
    floor: float = 1e-6  # least variance, over the mean one: constant features must not divide by 0; a choice

    # Several starts, of which the best fit is kept.
    most_starts: int = 6  # each with its own noise: a slide's domains depend less on the seed; the number is a choice
    starts_rows: int = 120_000  # rows times starts: about as long for every size up to that; a choice
    warm_up_epochs: int = 10  # with fixed noise all starts run so long, then the best alone; a choice
    anneal_epochs: int = 10  # one temperature each, where annealing is asked for; a choice

    # How rows are cut into shards.
    rows_per_shard: int = 500  # of a plain mixture, the paper's mini-batches
    most_shards: int = 100  # more would only be shorter steps; a choice
    rows_per_patch: int = 32  # of a tissue; a choice
    most_patches: int = 32  # about as many as the paper has (30)
    shards_per_batch: int = 100  # one shard a step up to so many, a hundredth of them beyond, as in `pdvi.fit`

    # A small tissue is one shard, and all its starts are one compiled program.
    one_program_rows: int = 20_000  # up to so many rows: a sweep takes milliseconds, calls would take as long
    known_program_rows: int = 400_000  # the same from known probabilities: patches are for exploring, or for memory

    # Damping of parallel sweeps, such that the objective never rises.
    damping_dense_rows: int = 50  # below, the eigenvalue comes from the dense matrix: iterations want more rows
    damping_rows: int = 20_000  # above, it is measured patch by patch: a few times faster on the tissue
    damping_patches: int = 8  # of which so many are looked at, those with the most heavily coupled rows: within 5 % of
    # what all patches say on eight graphs (random, jittered, clumped and real places)
    damping_tol: float = 0.02  # of the eigenvalue's iteration, and
    damping_spare: float = 1.05  # what is added since it is not exact
    damping_patch_spare: float = 1.1  # the same for patches, which see a part of it: enough on 24,000 random places

    # Groups of rows that stand for a large tissue.
    group_above: int = 80_000  # rows; a choice: smaller tissues take seconds anyway
    group_size: int = 8  # fewer than any view averages (15): what they blur the views have blurred already

    # The fit, and what is re-estimated after it.
    max_epochs: int = 100  # of one fit in all
    tol: float = 1e-6  # of `pdvi.fit`; with re-estimation the rounds' own rules end most fits
    first_epochs: int = 15  # before the first re-estimation: enough to explore (3) and to settle; a choice
    first_logs: int = 3  # log points until then: one costs as much as an epoch
    known_epochs: int = 6  # the same from known probabilities, where there is nothing to explore; a choice
    rounds: int = 20  # of re-estimation at most; on the slides 2 to 8 are made
    round_epochs: int = 3  # between two re-estimations; odd, so that labels that go to and fro show
    least_gain: float = 1e-4  # of the ELBO per row and round: with less the rounds end; a choice
    steady_gain: float = 5e-3  # or with less than this,
    steady_labels: float = 5e-3  # and less than this share of the labels changed; a choice

    # Unused components put to use.
    unused_share: float = 0.05  # of an equal share of the rows: a component with less is unused; a choice
    reseed_epochs: int = 8  # of a trial, if it is a brief one: its start has labels, and most stay; a choice
    exchange_trials: int = 2  # where components in use may be given up too; a choice
    exchanges: int = 8  # trials of a plain mixture, each re-estimated: as many as helped on benchmarks/exchange.py
    smoothings: int = 3  # averages of residuals over the graph: with ten neighbours some thirty rows count
    least_split_rows: int = 4  # in a component that may be split; a choice

    # Refinement spot by spot, on simulated clouds at 154,000 real coordinates. Weights stay equal there: with learned
    # ones and a weak coupling all spots ended in one domain.
    refine_neighbors: int = 24  # many weak edges gave better borders than eight strong ones,
    refine_coupling: float = 0.4  # each with this part of beta
    # Kurtosis over that of a normal cloud is 1.00 in simulated clouds, 1.06 to 1.52 on the slides and on two simulated
    # tissues with several cell types in a domain. All these are what the limit was set on.
    kurtosis_slack: float = 0.03
    cloud_rows: int = 75_000  # that are looked at for it; the kurtosis is then known to 0.001, and so are the domains
    # that a slide keeps for others; a choice
    # Domains torn into cell types predict neighbours worse by 0.4 and more; averages know a little of the spot itself,
    # which lets their labels look better than they are by 0.01.
    surprise_slack: float = 0.1
    # Borders move, but domains hang together: so many times as many neighbours of another domain as before. In 31 tries
    # on simulated tissues it was 0.4 to 1.3 where the ARI changed by -0.02 to +0.17, and 1.9 to 17 where it fell by
    # 0.03 to 0.66.
    apart_slack: float = 1.5

    # Views of a tissue, see `pdvi.mixtures.views`.
    view_components: int = 8  # components that a view of few domains has at least; a choice
    view_types: int = 20  # cell types in a view of types; 12 to 30 gave much the same on the slides
    view_starts: int = 1  # of each view of averages, a second gained nothing; then from what all agree on (on the
    # slides as good as from what each other has found),
    view_same: float = 0.95  # unless that is the same by so much (ARI)
    views_rows: int = 120_000  # rows times views: all eight up to 15,000 rows, three of 40,000; a choice
    group_views: int = 3  # that are looked at on groups: the fewest of which most can agree against one

    # Another slide labelled by a fitted one.
    annotate_far: float = 3.0  # times as far from the domains as the fitted spots: a warning; and
    annotate_explained: float = 0.5  # if they explain less than this share of what they explained there; choices

    # How many domains.
    held_out_neighbors: int = 15  # averaged within a half: about the disc that 30 of all spots lie in
    # of the most that can be gained; over 17 slides, parts of slides and simulated tissues errors added up to 14 with
    # 0.5 as with 0.6, and to 24 for the most stable of those within a standard error of the highest score
    held_out_gain: float = 0.6
    stability_slack: float = 0.02  # agreement between seeds that counts as equal; a choice

    def starts(self, n_rows: int, n_views: int = 1) -> int:
        """Return the number of starts for so many rows: fewer of each of several views."""
        most = self.most_starts if n_views == 1 else self.view_starts
        return max(1, min(most, self.starts_rows // n_rows))

    def runs(self, n_rows: int) -> int:
        """Return how often k-means of so many rows is run for one start of a view."""
        return max(1, min(self.kmeans_runs, self.kmeans_effort // n_rows))

    def views(self, n_rows: int) -> int:
        """Return the number of views for so many rows (of which a large tissue has fewer, in groups)."""
        if n_rows <= self.group_above:
            return max(1, self.views_rows // n_rows)
        return max(1, min(self.group_views, self.views_rows * self.group_size // n_rows))

    def patches(self, n_rows: int) -> int:
        """Return the number of patches that so many rows of a tissue are cut into."""
        return max(1, min(self.most_patches, n_rows // self.rows_per_patch))

    def shards(self, n_rows: int) -> int:
        """Return the number of shards that so many rows without places are cut into."""
        return max(1, min(self.most_shards, n_rows // self.rows_per_shard))

    def as_params(self) -> dict[str, int | float]:
        """Return all fields as a flat dict of numbers, as a file can hold it."""
        return asdict(self)


RECIPE = Recipe()
