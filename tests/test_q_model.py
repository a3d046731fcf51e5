"""Models written with `pdvi.q`: known optima, padding, partitions, two ragged axes, both precisions."""

# ruff: noqa: RUF012 (families are declared in the class, as users do)

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special, stats

import pdvi
from pdvi import q
from pdvi.q.model import row_sizes, row_total
from pdvi.shards.stacking import take

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))


def total(problem, globals_, local):
    """F at a point."""
    return float(problem.evaluate(problem.ravel(globals_), local)[0].sum())


class NormalMean(q.Model):
    """y ~ N(mu, 1/tau), mu ~ N(0, 10^2), tau ~ Gamma(2, 1)."""

    globals_ = {"mu": q.Normal(), "tau": q.Gamma()}

    def log_prior(self, g):
        return q.normal_lpdf(g["mu"], 0, 10), q.gamma_lpdf(g["tau"], 2, 1)

    def log_likelihood(self, g, local, shard):
        return q.normal_lpdf(shard["y"], g["mu"], precision=g["tau"])


@pytest.mark.slow
def test_a_normal_mean_with_gamma_noise_has_the_fixed_point_of_coordinate_ascent(x64):
    y = 3 + 0.5 * np.random.default_rng(0).standard_normal(60)
    model = NormalMean()
    problem = pdvi.Problem(model, [{"y": part} for part in np.split(y, [7, 20, 41])])
    result = pdvi.fit(problem, pdvi.P2DVI(), max_epochs=60, tol=1e-10)
    assert result.converged
    shape, rate = 2 + len(y) / 2, 1.0
    for _ in range(200):
        precision = len(y) * shape / rate + 0.01
        mean = shape / rate * y.sum() / precision
        rate = 1 + 0.5 * (np.sum((y - mean) ** 2) + len(y) / precision)
    found = model.posterior(result)
    np.testing.assert_allclose(found["mu"].mean, mean, rtol=1e-5)
    np.testing.assert_allclose(found["mu"].variance, 1 / precision, rtol=1e-3)
    np.testing.assert_allclose([found["tau"].concentration, found["tau"].rate], [shape, rate], rtol=1e-3)


class Rates(q.Model):
    """Groups y ~ Bin(n, p), p ~ Beta(2, 3), and one coin that all shards toss: conjugate, so -ELBO is -log evidence."""

    globals_ = {"coin": q.Beta()}
    locals_ = {"p": q.Beta()}

    def log_prior(self, g):
        return q.beta_lpdf(g["coin"], 1, 1)

    def log_local_prior(self, g, local):
        return q.beta_lpdf(local["p"], 2, 3)

    def log_likelihood(self, g, local, shard):
        return q.binomial_lpmf(shard["y"], shard["n"], local["p"]) + q.binomial_lpmf(shard["heads"], 1, g["coin"])

    def lower_bound(self):
        return 0.0


@pytest.mark.slow
def test_conjugate_groups_reach_the_evidence(x64):
    rng = np.random.default_rng(1)
    n = rng.integers(1, 30, 40)
    y, heads = rng.binomial(n, rng.beta(2, 3, 40)), rng.integers(0, 2, 40)
    shards = [{"y": y[a:b], "n": n[a:b], "heads": heads[a:b]} for a, b in [(0, 3), (3, 15), (15, 16), (16, 40)]]
    model = Rates()
    problem = pdvi.Problem(model, shards)
    result = pdvi.fit(problem, pdvi.P2DVI(), max_epochs=60)
    assert result.converged
    evidence = stats.betabinom(n, 2, 3).logpmf(y).sum() + special.betaln(1 + heads.sum(), 41 - heads.sum())
    np.testing.assert_allclose(result.objective, -evidence, atol=1e-3)
    p = model.local_posterior(result)["p"][np.asarray(problem.shards["mask"]) > 0]
    np.testing.assert_allclose([p.a, p.b], [2 + y, 3 + n - y], rtol=1e-2)


class Schools(q.Model):
    """Pupils in classes in schools, all of unequal number: y ~ N(level + school + room, 1/tau)."""

    globals_ = {"level": q.Normal(), "tau": q.Gamma(), "log_spread": np.zeros(2)}
    locals_ = ({"school": q.Normal()}, {"room": q.Normal()})

    def log_prior(self, g):
        return q.normal_lpdf(g["level"], 0, 100), q.gamma_lpdf(g["tau"], 2, 1), -0.5 * g["log_spread"] ** 2

    def log_local_prior(self, g, local):
        spread = jnp.exp(g["log_spread"])
        return q.normal_lpdf(local["school"], 0, spread[0]), q.normal_lpdf(local["room"], 0, spread[1])

    def log_likelihood(self, g, local, shard):
        mean = q.independent_sum(g["level"], local["school"][:, None], local["room"])
        return q.normal_lpdf(shard["y"], mean[..., None], precision=g["tau"])


def pupils(seed=0, n_schools=9):
    rng = np.random.default_rng(seed)
    classes = [(s, r) for s in range(n_schools) for r in range(rng.integers(1, 5))]
    school, room = np.repeat(classes, rng.integers(1, 9, len(classes)), axis=0).T
    effect = 3 * rng.standard_normal(n_schools)[school] + rng.standard_normal((n_schools, 5))[school, room]
    y = 20 + effect + 0.3 * rng.standard_normal(len(school))
    shuffled = rng.permutation(len(y))
    return y[shuffled], school[shuffled], room[shuffled]


@pytest.mark.slow
def test_two_ragged_axes_are_padded_and_masked(x64):
    """Against sums over a long table, without padding and without shards; and whatever the number of shards."""
    y, school, room = pupils()
    pairs, pair = np.unique(np.stack([school, room]), axis=1, return_inverse=True)
    rng = np.random.default_rng(2)
    m, s, v, w = (rng.standard_normal(size) for size in (9, 9, pairs.shape[1], pairs.shape[1]))
    level, tau, spread = q.Normal(18.0, 0.4), q.Gamma(3.0, 0.5), np.array([0.8, 0.1])

    mean, var = 18 + m[school] + v[pair], 0.16 + np.exp(2 * s)[school] + np.exp(2 * w)[pair]
    fit = stats.norm(mean, 1).logpdf(y).sum() + 0.5 * np.sum((y - mean) ** 2)
    fit += 0.5 * len(y) * float(tau.mean_log) - 0.5 * float(tau.mean) * np.sum((y - mean) ** 2 + var)
    kl_school = q.Normal(m, np.exp(s)).kl(q.Normal(0, np.exp(0.8))).sum()
    kl_room = q.Normal(v, np.exp(w)).kl(q.Normal(0, np.exp(0.1))).sum()
    once = level.kl(q.Normal(0, 100)) + tau.kl(q.Gamma(2, 1)) + 0.5 * np.sum(spread**2)
    wanted = -fit + float(kl_school + kl_room + once)

    globals_ = {
        **{f"level.{name}": part for name, part in level.unconstrained().items()},
        **{f"tau.{name}": part for name, part in tau.unconstrained().items()},
        "log_spread": spread,
    }
    for n_shards in (1, 4):
        shards = pdvi.partition.nested({"y": y}, [school, room], n_shards=n_shards)
        problem = pdvi.Problem(Schools(), shards)
        local = jax.tree.map(np.array, problem.init(jax.random.key(0))[1])
        for name, values, mask in [("school", (m, s), "mask"), ("room", (v, w), "mask2")]:
            local[f"{name}.location"][shards[mask] > 0] = values[0]
            local[f"{name}.log_sd"][shards[mask] > 0] = values[1]
        assert total(problem, globals_, jax.tree.map(jnp.asarray, local)) == pytest.approx(wanted, rel=1e-12)


@pytest.mark.slow
def test_a_model_with_two_ragged_axes_is_solved():
    y, school, room = pupils(1, 40)
    model = Schools()
    problem = pdvi.Problem(model, pdvi.partition.nested({"y": y}, [school, room], n_shards=20))
    result = pdvi.fit(problem, pdvi.P2DVI(), max_epochs=60)
    assert result.converged
    found = model.posterior(result)
    assert float(found["tau"].mean) ** -0.5 == pytest.approx(0.3, rel=0.1)
    np.testing.assert_allclose(np.exp(found["log_spread"]), [3, 1], rtol=0.3)


def test_nested_keeps_every_row_in_its_group():
    y, school, room = pupils()
    shards = pdvi.partition.nested({"y": y, "school": school, "room": room}, [school, room], n_shards=4)
    assert shards["y"].shape == shards["mask3"].shape
    real = shards["mask3"] > 0
    np.testing.assert_array_equal(np.sort(shards["y"][real]), np.sort(y))
    for name, first in [("school", np.s_[:, :, :1, :1]), ("room", np.s_[:, :, :, :1])]:
        np.testing.assert_array_equal(shards[name][real], np.broadcast_to(shards[name][first], real.shape)[real])
    np.testing.assert_array_equal(shards["school"][:, :, 0, 0][shards["mask"] > 0], np.unique(school))
    np.testing.assert_array_equal(shards["mask"].sum(1), [2, 2, 2, 3])
    alone = pdvi.partition.nested({"y": y}, school)
    assert alone["mask"].shape == (9, 1)
    np.testing.assert_array_equal(alone["mask2"].sum((1, 2)), np.bincount(school))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (({"y": np.zeros(3)}, np.zeros(4)), r"`columns` and `by` must be arrays with one row for each observation"),
        (({"y": np.zeros(0)}, np.zeros(0)), r"one row for each observation"),
    ],
)
def test_tables_that_do_not_fit_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        pdvi.partition.nested(*arguments)


def test_more_shards_than_groups_are_refused():
    with pytest.raises(ValueError, match=r"`n_shards` must be between 1 and the number of groups \(2\), got 3"):
        pdvi.partition.nested({"y": np.zeros(4)}, np.array([0, 1, 0, 1]), n_shards=3)


class MixedLogistic(q.Model):
    """As `users_models.MixedModel`, in a few lines."""

    globals_ = {"beta": q.Normal(np.zeros(6), 1.0), "log_tau": np.zeros(1)}
    locals_ = {"u": q.Normal(np.zeros(1), 1.0)}

    def log_prior(self, g):
        return q.normal_lpdf(g["beta"], 0, 10), -0.5 * g["log_tau"] ** 2

    def log_local_prior(self, g, local):
        return q.normal_lpdf(local["u"], 0, jnp.exp(g["log_tau"]))

    def log_likelihood(self, g, local, shard):
        eta = q.independent_sum(g["beta"].linear(shard["x"]), local["u"].linear(shard["z"]))
        return q.bernoulli_logit_lpmf(shard["y"], eta)


def by_hand(seed=0):
    from users_models import mixed_logistic

    case = mixed_logistic(seed)
    return case.problem(), {name: value for name, value in case.shards.items() if name != "fraction"}


@pytest.mark.slow
def test_the_objective_is_that_of_the_three_methods_written_by_hand(x64):
    hand, data = by_hand()
    layer = pdvi.Problem(MixedLogistic(), data)
    rng = np.random.default_rng(0)
    b, s, t = rng.standard_normal(6), 0.3 * rng.standard_normal(6), rng.standard_normal(1)
    u, w = jnp.asarray(rng.standard_normal((2, 100, 5, 1)))
    written = total(hand, {"beta": b, "beta_log_sd": s, "log_tau": t}, {"mean": u, "log_sd": w})
    made = total(layer, {"beta.location": b, "beta.log_sd": s, "log_tau": t}, {"u.location": u, "u.log_sd": w})
    assert made == pytest.approx(written, rel=1e-13)


@pytest.mark.slow
def test_p2dvi_solves_what_the_layer_makes():
    hand, data = by_hand()
    result = pdvi.fit(pdvi.Problem(MixedLogistic(), data), pdvi.P2DVI(), seed=0, max_epochs=60)
    assert result.converged
    again = pdvi.fit(hand, pdvi.P2DVI(), seed=0, max_epochs=60)
    assert result.objective == pytest.approx(again.objective, abs=0.05)


@pytest.mark.slow
def test_padding_changes_nothing(x64):
    """The same rows in equal shards without a mask, in unequal ones with it, and in one."""
    rng = np.random.default_rng(3)
    n, heads = rng.integers(1, 9, 12), rng.integers(0, 2, 12)
    y = rng.binomial(n, 0.4)
    logit, log_total = rng.standard_normal((2, 12))
    values = []
    for cuts in ([4, 8], [1, 7], [2, 3, 11]):
        parts = np.split(np.arange(12), cuts)
        problem = pdvi.Problem(Rates(), [{"y": y[rows], "n": n[rows], "heads": heads[rows]} for rows in parts])
        assert ("mask" in problem.shards) == (len({len(rows) for rows in parts}) > 1)
        np.testing.assert_allclose(problem.shards["fraction"], [len(rows) / 12 for rows in parts])
        local = {name: np.full(problem.shards["y"].shape, 0.7) for name in ("p.logit_mean", "p.log_total")}
        for b, rows in enumerate(parts):
            local["p.logit_mean"][b, : len(rows)], local["p.log_total"][b, : len(rows)] = logit[rows], log_total[rows]
        globals_ = {"coin.logit_mean": 0.3, "coin.log_total": 1.1}
        losses, gradient = problem.evaluate(problem.ravel(globals_), jax.tree.map(jnp.asarray, local))
        values.append([float(losses.sum()), *gradient.tolist()])
    np.testing.assert_allclose(values, np.broadcast_to(values[0], np.shape(values)), rtol=1e-12)


def test_the_fraction_is_made_for_models_of_three_methods_too(x64):
    class Mean:
        def init_global(self, key):
            return {"mean": jnp.zeros(())}

        def init_local(self, key, shard):
            return {}

        def loss(self, local, globals_, shard):
            rows = shard.get("mask", 1.0) * (shard["y"] - globals_["mean"]) ** 2
            return 0.5 * rows.sum() + 0.5 * shard["fraction"] * globals_["mean"] ** 2

    y = np.arange(10.0)
    for shards in ({"y": y.reshape(5, 2)}, [{"y": y[:3]}, {"y": y[3:]}]):
        lam = jnp.full(1, 2.0)
        losses, gradient = pdvi.Problem(Mean(), shards).evaluate(lam, {})
        assert float(losses.sum()) == pytest.approx(0.5 * np.sum((y - 2) ** 2) + 2)
        assert float(gradient[0]) == pytest.approx(np.sum(2 - y) + 2)
    given = {"y": y.reshape(5, 2), "fraction": np.array([1.0, 0, 0, 0, 0])}
    np.testing.assert_array_equal(pdvi.Problem(Mean(), given).shards["fraction"], [1, 0, 0, 0, 0])


class Clusters(q.Model):
    """A mixture of normals, with a start that is drawn."""

    globals_ = {"centre": q.Normal(np.zeros((3, 2)), 0.5), "share": q.Dirichlet(np.full(3, 1.3))}
    locals_ = {"z": q.Categorical(np.array([0.5, 0.3, 0.2]))}

    def start(self, key):
        return {**self.globals_, "centre": q.Normal(q.standard_normal(key, (3, 2)), 0.5)}

    def log_prior(self, g):
        return q.normal_lpdf(g["centre"], 0, 5), q.dirichlet_lpdf(g["share"], 1)

    def log_local_prior(self, g, local):
        return q.categorical_lpmf(local["z"], g["share"])

    def log_likelihood(self, g, local, shard):
        return local["z"].expect(q.normal_lpdf(shard["y"][:, None], g["centre"]).sum(-1))


def clusters(seed=0):
    rng = np.random.default_rng(seed)
    centre = np.array([[-4.0, 0.0], [4.0, 0.0], [0.0, 6.0]])
    return {"y": (centre[rng.integers(3, size=(20, 30))] + rng.standard_normal((20, 30, 2)))}


def test_a_seed_starts_at_one_place_in_both_precisions():
    starts = []
    for wide in (False, True):
        with jax.enable_x64(wide):
            for problem in (pdvi.Problem(Clusters(), clusters()), pdvi.datasets.tanh_regression(4)):
                lam, local = problem.init(jax.random.key(7))
                working = jnp.float64 if wide else jnp.float32
                assert {leaf.dtype for leaf in jax.tree.leaves((lam, local))} == {jnp.dtype(working)}
                starts.append(jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), (lam, local)))
    for single, double in zip(starts[:2], starts[2:]):
        assert jax.tree.all(jax.tree.map(np.array_equal, single, double))


@pytest.mark.slow
def test_a_mixture_finds_its_clusters():
    model = Clusters()
    result = pdvi.fit(pdvi.Problem(model, clusters()), pdvi.P2DVI(), max_epochs=60, seed=0)
    found = np.asarray(model.posterior(result)["centre"].mean)
    np.testing.assert_allclose(found[np.argsort(found[:, 0])], [[-4, 0], [0, 6], [4, 0]], atol=0.4)  # -4, 0, 4 apart


@pytest.mark.parametrize(
    ("change", "shards", "message"),
    [
        (
            {"log_likelihood": lambda self, g, local, shard: q.binomial_lpmf(shard["y"], shard["n"], local["p"]).sum()},
            [{"y": np.ones(2), "n": np.ones(2)}, {"y": np.ones(3), "n": np.ones(3)}],
            r"`log_likelihood` must return a term for each row, of shape \(3,\).*got \[\(\)\]; leave the sum",
        ),
        (
            {"log_local_prior": q.Model.log_local_prior},
            {name: np.ones((2, 3)) for name in ("y", "n", "heads")},
            r"has `locals_` and so needs a method `log_local_prior",
        ),
        ({}, {"y": np.ones((2, 3)), "n": np.ones((2, 4))}, r"must begin with its rows.*override `sizes`"),
    ],
)
def test_what_a_model_lacks_is_named(change, shards, message):
    kind = type("Changed", (Rates,), change)
    with pytest.raises((ValueError, NotImplementedError), match=message):
        pdvi.Problem(kind(), shards)


def test_sums_over_rows_within_rows_are_refused():
    class Summed(Schools):
        def log_likelihood(self, g, local, shard):
            return super().log_likelihood(g, local, shard).sum((1, 2))

    y, school, room = pupils()
    with pytest.raises(ValueError, match=r"a term for each row, of shape \(1, \d, \d\).*since rows were padded"):
        pdvi.Problem(Summed(), pdvi.partition.nested({"y": y}, [school, room]))


def test_terms_of_several_levels_are_each_masked():
    shard = {"mask": np.array([1.0, 0.0]), "mask2": np.array([[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]]), "fraction": 0.5}
    terms = (np.array([3.0, 5.0]), np.full((2, 3), 7.0), np.full((2, 3, 2), 11.0))
    assert float(row_total("terms", terms, shard)) == 3 + 7 + 22
    assert row_sizes(shard, 2) == (2, 3)


@pytest.mark.slow
def test_a_visited_shard_keeps_its_padding_where_it_started():
    """Padded rows have no slope, so no solver moves them."""
    problem = pdvi.Problem(Rates(), [{"y": np.ones(k), "n": np.full(k, 3.0), "heads": np.zeros(k)} for k in (1, 4)])
    result = pdvi.fit(problem, pdvi.P2DVI(), max_epochs=3, tol=0)
    start = problem.init(jax.random.key(0))[1]
    for name, values in result.local_params.items():
        np.testing.assert_array_equal(take(values, 0)[1:], take(start[name], 0)[1:])
        assert not np.array_equal(take(values, 0)[:1], take(start[name], 0)[:1])
