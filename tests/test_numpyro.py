"""NumPyro models as problems: against NumPyro's own potential energy, closed forms, and what is refused."""

import math
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pdvi
from pdvi.bridge.draws import both, global_draws, local_draws, number_of_draws

numpyro = pytest.importorskip("numpyro")
import numpyro.distributions as dist  # noqa: E402
from numpyro import handlers  # noqa: E402
from numpyro.infer.util import potential_energy  # noqa: E402

rng = np.random.default_rng(0)


# ---------------------------------------------------------------------------------------------------- models


def regression(x, y=None):
    """No locals, a vector and a positive global."""
    slope = numpyro.sample("slope", dist.Normal(0, 2).expand([x.shape[1]]).to_event(1))
    sigma = numpyro.sample("sigma", dist.HalfCauchy(1.0))
    with numpyro.plate("data", len(x)):
        numpyro.sample("y", dist.Normal(x @ slope, sigma), obs=y)


def mixed_logistic(x, y=None):
    """A local each, observations in a nested plate, the rows on the first axis."""
    b = numpyro.sample("b", dist.Normal(0, 2).expand([x.shape[-1]]).to_event(1))
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    numpyro.deterministic("variance", tau**2)
    with numpyro.plate("data", x.shape[0], dim=-2):
        u = numpyro.sample("u", dist.Normal(0, tau))
        with numpyro.plate("obs", x.shape[1], dim=-1):
            numpyro.sample("y", dist.Bernoulli(logits=u + x @ b), obs=y)


def compositions(counts, concentration, scale=2.0):
    """Simplices as globals and locals, the plate last, as NumPyro nests by itself; a constant array and a number."""
    base = numpyro.sample("base", dist.Dirichlet(concentration))
    with numpyro.plate("data", counts.shape[1]):
        share = numpyro.sample("share", dist.Dirichlet(1.0 + scale * base))
        rate = numpyro.sample("rate", dist.Gamma(2.0, 1.0))
        numpyro.deterministic("expected", rate[:, None] * share)
        with numpyro.plate("kind", counts.shape[0]):
            numpyro.sample("counts", dist.Poisson(rate * share.T), obs=counts)


def ragged_groups(x, y, mask=None):
    """Locals of a group, and locals of its entries; ``mask`` for NumPyro, which has no lists of unequal length."""
    mu = numpyro.sample("mu", dist.Normal(0, 3))
    with numpyro.plate("data", len(y), dim=-2):
        u = numpyro.sample("u", dist.Normal(mu, 1))
        with numpyro.plate("obs", y.shape[1], dim=-1), handlers.mask(mask=True if mask is None else mask):
            e = numpyro.sample("e", dist.Normal(0, 0.5))
            numpyro.sample("y", dist.StudentT(4, u + x + e, 1.0), obs=y)


X = rng.standard_normal((11, 3))
GROUPED = rng.standard_normal((11, 4, 2))
LENGTHS = rng.integers(1, 6, 11)
LISTS = {name: [rng.standard_normal(size) for size in LENGTHS] for name in ("x", "y")}
CASES = {
    "regression": (regression, {"x": X, "y": rng.standard_normal(11)}, {}),
    "mixed logistic": (mixed_logistic, {"x": GROUPED, "y": rng.integers(0, 2, (11, 4))}, {}),
    "compositions": (
        compositions,
        {"counts": rng.poisson(2.0, (3, 11)), "concentration": np.ones(3), "scale": 3.0},
        {"axes": {"counts": 1}},
    ),
    "ragged": (ragged_groups, LISTS, {}),
}


def reference_arguments(name):
    """What NumPyro is called with: rows as the user has them, lists padded, and their mask."""
    if name != "ragged":
        return CASES[name][1]
    there = np.arange(LENGTHS.max()) < LENGTHS[:, None]
    filled = {}
    for key, groups in LISTS.items():
        filled[key] = np.zeros(there.shape)
        filled[key][there] = np.concatenate(groups)
    return {**filled, "mask": there}


def unpacked(problem, z, z_local):
    """Draws by site with rows in the user's order, made without the bridge's own functions."""
    density, shards = problem.model.density, problem.shards
    found, at = {}, 0
    for site in density.globals_:
        size = math.prod(site.shape)
        found[site.name] = z[at : at + size].reshape(site.shape)
        at += size
    flat = np.zeros((11, z_local.shape[-1]))
    for b, j in np.ndindex(*shards["weight"].shape):
        if shards["weight"][b, j]:
            flat[shards["row"][b, j]] = z_local[b, j]
    at = 0
    for site in density.locals_:
        axis = site.axis(density.plate)
        shape = tuple(size for k, size in enumerate(site.shape) if k != axis)
        size = math.prod(shape)
        found[site.name] = np.moveaxis(flat[:, at : at + size].reshape(11, *shape), 0, axis)
        at += size
    return found


@pytest.mark.parametrize("n_shards", [1, 3])
@pytest.mark.parametrize("name", CASES)
def test_shards_add_up_to_numpyros_potential_energy(x64, name, n_shards):
    """Eleven rows in three shards: the last is padded. Means and sds are any numbers."""
    model, data, options = CASES[name]
    problem = pdvi.from_numpyro(model, data, n_shards=n_shards, draws=4, **options)
    at = np.random.default_rng(1)
    lam, local = problem.init(jax.random.key(0))
    lam = lam + 0.3 * at.standard_normal(lam.shape)
    local = jax.tree.map(lambda leaf: leaf + 0.3 * at.standard_normal(leaf.shape), local)
    losses = jax.jit(jax.vmap(lambda phi, shard: problem.loss(phi, lam, shard)))(local, problem.shards)
    globals_ = problem.unravel(lam)
    entropy = np.sum(globals_["log_sd"] + 0.5 * np.log(2 * np.pi * np.e))
    if local:
        there = np.asarray(problem.shards["weight"])[..., None] * np.ones(local["mean"].shape[-1])
        if name == "ragged":  # a group's own local, then one for every entry
            there[..., 1:] *= np.asarray(problem.shards["mask"])
        entropy += np.sum(there * (local["log_sd"] + 0.5 * np.log(2 * np.pi * np.e)))
    arguments = reference_arguments(name)
    drawn = []
    for m in range(4):
        z = np.asarray(globals_["mean"] + np.exp(globals_["log_sd"]) * problem.model.draws[m])
        z_local = np.zeros((*problem.shards["weight"].shape, 0))
        if local:
            z_local = np.asarray(local["mean"] + np.exp(local["log_sd"]) * problem.shards["noise"][:, m])
        drawn.append(unpacked(problem, z, z_local))
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *drawn)
    energies = jax.jit(jax.vmap(lambda at: potential_energy(model, (), arguments, at)))(stacked)
    np.testing.assert_allclose(losses.sum(), energies.mean() - entropy, rtol=1e-10)


# ---------------------------------------------------------------------------------------------------- draws


def test_draws_have_the_moments_of_a_normal():
    half = global_draws(np.random.default_rng(0), 8, 5)
    z, local = both(half), both(local_draws(np.random.default_rng(1), half, 7, 3))
    assert z.shape == (16, 5)
    assert local.shape == (16, 7, 3)
    together = np.concatenate([np.broadcast_to(z[:, None], (16, 7, 5)), local], axis=2)
    np.testing.assert_allclose(together.mean(0), 0, atol=1e-12)
    second = np.einsum("mri,mrj->rij", together, together) / 16
    np.testing.assert_allclose(second, np.broadcast_to(np.eye(8), second.shape), atol=1e-12)


@pytest.mark.parametrize(("n_global", "n_local"), [(5, 1), (6, 2), (2, 1)])
def test_fourth_moments_of_locals_are_those_of_a_normal(n_global, n_local):
    half = global_draws(np.random.default_rng(0), 16, n_global)
    local = both(local_draws(np.random.default_rng(1), half, 2_000, n_local))
    np.testing.assert_allclose((local**2).mean(0), 1)
    np.testing.assert_allclose((local**4).mean(), 3, atol=0.15)  # vectors of a given length: 3 * 16 / 18 = 2.67


@pytest.mark.parametrize(
    ("n_global", "n_local", "rows", "draws"),
    [(5, 1, 1_000, 32), (5, 1, 10**6, 32), (40, 1, 100, 82), (6, 2, 1_000, 64), (6, 2, 80_000, 128), (500, 9, 10, 128)],
)
def test_rows_with_several_locals_have_more_draws(n_global, n_local, rows, draws):
    assert number_of_draws(n_global, n_local, rows) == draws


def random_slopes(x, y=None):
    b = numpyro.sample("b", dist.Normal(0, 2).expand([2]).to_event(1))
    tau = numpyro.sample("tau", dist.HalfNormal(1.0).expand([2]).to_event(1))
    with numpyro.plate("data", x.shape[0], dim=-2):
        u = numpyro.sample("u", dist.Normal(0, tau[0]))
        v = numpyro.sample("v", dist.Normal(0, tau[1]))
        with numpyro.plate("obs", x.shape[1], dim=-1):
            numpyro.sample("y", dist.Poisson(jnp.exp(b[0] + u + (b[1] + v) * x)), obs=y)


@pytest.mark.slow
def test_twice_the_draws_change_nothing_that_matters_with_random_slopes():
    """What a bias is worth grows with the root of the rows: it is judged as for 5,000 groups."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((300, 10))
    u, v = rng.standard_normal((2, 300, 1))
    data = {"x": x, "y": rng.poisson(np.exp(-0.3 + 0.4 * u + (0.5 + 0.3 * v) * x))}
    how = ({}, {"draws": 128, "seed": 1})
    fits = [pdvi.fit(pdvi.from_numpyro(random_slopes, data, **one), pdvi.P2DVI()) for one in how]
    means, sds = ([fit.global_params[name] for fit in fits] for name in ("mean", "log_sd"))
    assert (np.abs(means[0] - means[1]) < 0.2 * np.exp(sds[1]) / np.sqrt(5_000 / 300)).all()  # with 32 draws 0.28


def test_too_few_draws_are_standardised():
    z = both(global_draws(np.random.default_rng(0), 3, 5))
    np.testing.assert_allclose((z**2).mean(0), 1)
    with pytest.raises(ValueError, match="`draws` must be even"):
        pdvi.from_numpyro(regression, CASES["regression"][1], draws=5)


# ---------------------------------------------------------------------------------------------------- closed forms


def normal_means(y=None):
    mu = numpyro.sample("mu", dist.Normal(0, 10))
    numpyro.deterministic("twice", 2 * mu)
    with numpyro.plate("data", len(y)):
        z = numpyro.sample("z", dist.Normal(mu, 1))
        numpyro.deterministic("shifted", z + 1)
        numpyro.sample("y", dist.Normal(z, 1), obs=y)


@pytest.fixture(scope="module")
def conjugate():
    """y_i ~ N(z_i, 1), z_i ~ N(mu, 1), mu ~ N(0, 100): all that is asked has a closed form."""
    with jax.enable_x64(True):
        y = 3 + np.random.default_rng(0).standard_normal(50)
        problem = pdvi.from_numpyro(normal_means, {"y": y}, n_shards=3)
        yield y, problem, pdvi.fit(problem, pdvi.P2DVI(), tol=1e-10)


def test_a_conjugate_fit_is_the_closed_form(conjugate):
    y, _, result = conjugate
    assert result.converged
    precision = len(y) / 2 + 1e-2
    mean = y.sum() / 2 / precision
    np.testing.assert_allclose(result.global_params["mean"], [mean], rtol=1e-5)
    np.testing.assert_allclose(result.global_params["log_sd"], [-0.5 * np.log(len(y) + 1e-2)], rtol=1e-5)
    idata = result.to_arviz(draws=2_000, include_locals=True)
    assert idata.attrs["covariance"] == "linear-response"
    draws = idata.posterior["mu"].values[0]
    # of 2,000 draws the mean is known to 1/45 and the standard deviation to 1/63 of itself
    assert abs(draws.mean() - mean) < 4 * draws.std() / np.sqrt(2_000)
    np.testing.assert_allclose(draws.std(), precision**-0.5, rtol=4 / 63)
    np.testing.assert_allclose(idata.posterior["twice"], 2 * idata.posterior["mu"])
    np.testing.assert_allclose(idata.posterior["shifted"], idata.posterior["z"] + 1)
    # rows are the user's: the posterior mean of z_i is (y_i + mu) / 2
    z = idata.posterior["z"].values[0]
    np.testing.assert_allclose(z.mean(0), (y + mean) / 2, atol=5 / np.sqrt(2_000))
    np.testing.assert_allclose(z.var(0), 0.5 + 0.25 / precision, rtol=0.2)
    expected = -0.25 * (y - draws[:, None]) ** 2 - 0.5 * np.log(4 * np.pi)
    np.testing.assert_allclose(idata.log_likelihood["y"].values[0], expected, atol=1e-6)
    # the exact posterior is normal, so p / q is the same number everywhere
    assert idata.sample_stats["log_ratio"].values.std() < 1e-4
    np.testing.assert_allclose(idata.observed_data["y"], y)


def test_mean_field_draws_have_the_sd_of_q(conjugate):
    _, _, result = conjugate
    idata = result.to_arviz(draws=2_000, covariance="mean-field", log_likelihood=False)
    assert not {"log_likelihood", "posterior_predictive"} & set(idata.groups())
    np.testing.assert_allclose(
        idata.posterior["mu"].values.std(), np.exp(result.global_params["log_sd"][0]), rtol=4 / 63
    )


def test_draws_of_data_have_its_spread(conjugate):
    y, _, result = conjugate
    idata = result.to_arviz(draws=1_000, predictive=True)
    drawn = idata.posterior_predictive["y"].values[0]
    assert drawn.shape == (1_000, 50)
    # given its own local: y_i ~ N(z_i, 1), with z_i's posterior variance of about a half
    np.testing.assert_allclose(drawn.var(0).mean(), 1.5, rtol=0.1)
    np.testing.assert_allclose(drawn.mean(0), (y + y.mean()) / 2, atol=0.25)


def test_doubling_the_draws_changes_nothing_where_all_is_quadratic(conjugate):
    _, problem, result = conjugate
    report = pdvi.check_draws(problem, result)
    assert list(report.index) == ["mu", "z"]
    assert (report["shift"] < 1e-3).all()
    np.testing.assert_allclose(report["sd_ratio"], 1, atol=1e-3)


def test_a_loaded_result_asks_for_its_problem(conjugate, tmp_path):
    _, problem, result = conjugate
    result.save(tmp_path / "run.zarr")
    for again in (pdvi.load_result(tmp_path / "run.zarr"), pickle.loads(pickle.dumps(result))):
        with pytest.raises(ValueError, match=r"give.*to_arviz\(problem\)"):
            again.to_arviz()
        same = again.to_arviz(problem, draws=10)
        np.testing.assert_array_equal(same.posterior["mu"], result.to_arviz(draws=10).posterior["mu"])
    other = pdvi.from_numpyro(normal_means, {"y": np.zeros(50)}, n_shards=3)
    with pytest.raises(ValueError, match="must be the one that was fitted"):
        result.to_arviz(other)


def test_other_models_give_their_parameters_as_one_draw():
    problem = pdvi.datasets.quadratic(n=100, dim_local=2, dim_global=3, seed=0)
    result = pdvi.fit(problem, pdvi.P2DVI(), max_epochs=2)
    with pytest.raises(ValueError, match=r"to_arviz\(problem\)"):
        result.to_arviz()
    idata = result.to_arviz(problem)
    np.testing.assert_array_equal(idata.posterior["lam"].values[0, 0], result.global_params["lam"])
    np.testing.assert_array_equal(idata.sample_stats["objective"], result.trace["objective"])


# ---------------------------------------------------------------------------------------------------- ArviZ


@pytest.mark.slow
def test_the_snippet_of_the_contract_and_what_arviz_makes_of_it():
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        import arviz as az
    at = np.random.default_rng(0)
    x = at.standard_normal((200, 2))
    y = x @ [1.0, -2.0] + 0.5 * at.standard_normal(200)
    model = regression
    problem = pdvi.from_numpyro(model, {"x": x, "y": y}, plate="data")
    result = pdvi.fit(problem, pdvi.P2DVI())
    idata = result.to_arviz()
    summary = az.summary(idata, kind="stats")
    assert list(summary.index) == ["slope[0]", "slope[1]", "sigma"]
    exact = np.linalg.lstsq(x, y, rcond=None)[0]
    np.testing.assert_allclose(summary["mean"][:2], exact, atol=0.02)
    assert idata.attrs["khat"] < 0.7
    loo = az.loo(idata, pointwise=True)
    assert (loo.pareto_k.values < 0.7).all()
    assert loo.elpd_loo == pytest.approx(-0.5 * 200 * np.log(2 * np.pi * np.e * 0.25), rel=0.1)
    assert idata.sample_stats.sizes["log_point"] == len(result.trace)
    assert pdvi.check_draws(problem, result)["shift"].max() < 0.1


# ---------------------------------------------------------------------------------------------------- refusals

Y = rng.standard_normal(30)


def discrete(y):
    p = numpyro.sample("p", dist.Beta(1, 1))
    with numpyro.plate("data", len(y)):
        z = numpyro.sample("z", dist.Bernoulli(p))
        numpyro.sample("y", dist.Normal(z, 1), obs=y)


def chained(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("data", len(y)):
        z = numpyro.sample("z", dist.Normal(mu, 1))
        numpyro.sample("y", dist.Normal(z + jnp.roll(z, 1), 1), obs=y)


def centred(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("data", len(y)):
        numpyro.sample("y", dist.Normal(mu, 1), obs=y - y.mean())


def outside(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("data", len(y)):
        z = numpyro.sample("z", dist.Normal(mu, 1))
    numpyro.sample("y", dist.Normal(z, 1).to_event(1), obs=y)


def subsampled(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("data", len(y), subsample_size=5):
        numpyro.sample("y", dist.Normal(mu, 1), obs=numpyro.subsample(y, 0))


def another_plate(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.Normal(mu, 1), obs=y)


def inside_another(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("groups", 2, dim=-2), numpyro.plate("data", len(y), dim=-1):
        numpyro.sample("y", dist.Normal(mu, 1), obs=jnp.stack([y, y]))


def hard_coded(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("data", 30):
        numpyro.sample("y", dist.Normal(mu, 1), obs=y)


def hard_coded_and_broadcast(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("data", 30):
        numpyro.factor("f", -((mu - y.sum()) ** 2))


def vector_outside(y):
    z = numpyro.sample("z", dist.Normal(0, 1).expand([len(y)]).to_event(1))
    with numpyro.plate("data", len(y)):
        numpyro.sample("y", dist.Normal(z, 1), obs=y)


def with_param(y):
    mu = numpyro.param("mu", 0.0)
    with numpyro.plate("data", len(y)):
        numpyro.sample("y", dist.Normal(mu, 1), obs=y)


def looks_at_numbers(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1).expand([int(y.max()) + 1]).to_event(1))
    with numpyro.plate("data", len(y)):
        numpyro.sample("y", dist.Normal(mu[0], 1), obs=y)


def no_globals(y):
    with numpyro.plate("data", len(y)):
        z = numpyro.sample("z", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(z, 1), obs=y)


def outside_its_support(y):
    rate = numpyro.sample("rate", dist.Gamma(1, 1))
    with numpyro.plate("data", len(y)):
        numpyro.sample("y", dist.Gamma(2.0, rate), obs=y)


@pytest.mark.filterwarnings("ignore:.*subsample_size")
@pytest.mark.parametrize(
    ("model", "message"),
    [
        (discrete, "'z' is discrete. Sum it out"),
        (chained, "'y' the log density of a row changes with unknowns of other rows"),
        (centred, r"'y' the log density of a row changes with data of other rows; compute what is of all rows"),
        (outside, r"'y' is outside of 'data' and its log density changes .* put it inside"),
        (subsampled, "must not subsample: plate 'data' has subsample_size=5 of 30; leave it out"),
        (another_plate, r"'data' not in the plates of the model \(it has \['rows'\]\)"),
        (inside_another, "'y' is in 'data' inside 'groups'; give plate='groups', or exchange"),
        (hard_coded, r"with some of the rows.*take the size from the data, as in numpyro.plate\(name, len\(y\)\)"),
        (hard_coded_and_broadcast, "plate 'data' has size 30 for data of 16 rows; take the size from the data"),
        (vector_outside, r"'z' has shape \(30,\) for 30 rows and \(16,\) for 16; sample it within"),
        (with_param, "'mu' is a numpyro.param; make it a numpyro.sample"),
        (looks_at_numbers, "must not look at the numbers in `data`"),
        (no_globals, "must have unknowns outside the plate 'data'"),
        (outside_its_support, "must have a finite log density near the start: that of site 'y' is not"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_what_cannot_be_fitted_is_refused_with_the_remedy(model, message):
    with pytest.raises(ValueError, match=message):
        pdvi.from_numpyro(model, {"y": Y})


def test_bad_data_is_named():
    with pytest.raises(ValueError, match="of the same sizes in all its lists"):
        pdvi.from_numpyro(ragged_groups, {**LISTS, "x": LISTS["x"][::-1]})
    with pytest.raises(ValueError, match="one plate inside 'rows' for the entries of a group"):
        pdvi.from_numpyro(another_plate, {"y": LISTS["y"]}, plate="rows")
    with pytest.raises(ValueError, match="`axes` must name the axis of 'y' that has the 30 rows"):
        pdvi.from_numpyro(hard_coded, {"y": Y}, axes={"y": 1})
    with pytest.raises(TypeError, match="`data` must be a dict"):
        pdvi.from_numpyro(regression, [X])


# ---------------------------------------------------------------------------------------------------- against NUTS


@pytest.mark.slow
def test_linear_response_has_the_standard_deviations_of_nuts():
    """Mean-field ones are less than half of them for the scale of the random effects."""
    from numpyro.infer import MCMC, NUTS

    at = np.random.default_rng(0)
    x = at.standard_normal((300, 6, 2))
    logits = 0.8 * at.standard_normal((300, 1)) + x @ [1.0, -0.5]
    data = {"x": x, "y": (at.uniform(size=logits.shape) < 1 / (1 + np.exp(-logits))).astype(int)}
    problem = pdvi.from_numpyro(mixed_logistic, data)
    result = pdvi.fit(problem, pdvi.P2DVI())
    chain = MCMC(NUTS(mixed_logistic), num_warmup=500, num_samples=2_000, progress_bar=False)
    chain.run(jax.random.key(0), **data)
    exact = chain.get_samples()
    found, field = (
        result.to_arviz(draws=2_000, covariance=kind, log_likelihood=False).posterior
        for kind in ("linear-response", "mean-field")
    )
    for name in ("b", "tau"):
        sd = np.asarray(exact[name]).std(0)
        np.testing.assert_allclose(found[name].values[0].mean(0), np.asarray(exact[name]).mean(0), atol=0.5 * sd.max())
        np.testing.assert_allclose(found[name].values[0].std(0), sd, rtol=0.25)
    assert field["tau"].values.std() < 0.7 * np.asarray(exact["tau"]).std()
