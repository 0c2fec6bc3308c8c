"""The regressor: quantities and counts within public ranges."""

import math
import warnings

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV
from sklearn.utils.estimator_checks import parametrize_with_checks

import sordino
from sordino import FederatedRegressor, SordinoError, UnpaidSearchWarning

GENEROUS = 1e4  # so little noise that what is left of a check is about manners
EXCUSED = {
    GENEROUS: {},
    1.0: {"check_regressors_train": "at epsilon 1, 200 records of ten features do not give an R² of 0.5"},
}


@parametrize_with_checks(
    [FederatedRegressor(epsilon=GENEROUS, target_range=(-3, 3))],
    expected_failed_checks=lambda estimator: EXCUSED[estimator.epsilon],
    xfail_strict=True,
)
@pytest.mark.filterwarnings("ignore::sordino.estimators.UnpaidSearchWarning")
def test_scikit_learn_agrees(estimator, check):
    check(estimator)


@parametrize_with_checks(
    [FederatedRegressor(epsilon=1.0, target_range=(-3, 3))],
    expected_failed_checks=lambda estimator: EXCUSED[estimator.epsilon],
    xfail_strict=True,
)
@pytest.mark.filterwarnings("ignore::sordino.estimators.UnpaidSearchWarning")
@pytest.mark.soak
def test_scikit_learn_agrees_under_noise(estimator, check):
    check(estimator)


def line(n=2000, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.uniform(-1, 1, (n, 3))
    return x, 20 + x @ [6.0, -3.0, 1.0] + rng.normal(0, 1, n)


def counts(n=3000, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.uniform(-1, 1, (n, 2))
    return x, rng.poisson(np.exp(1 + x @ [0.8, -0.4]))


def fast(**settings):
    return FederatedRegressor(**{"epsilon": 8.0, "rounds": 20, "target_range": (0, 40), "random_state": 0, **settings})


def test_quantities_are_learnt_and_certified():
    x, y = line()
    model = fast(random_state=None).fit(x, y, groups=np.arange(len(y)) % 3)
    new, truth = line(seed=1)
    assert model.score(new, truth) > 0.75
    cert = model.certificate_
    assert (cert["certified"], cert["clients"]) == (True, 3)
    assert cert["epsilon"] == pytest.approx(8)
    assert "The range of the target, 0 … 40, is public; targets are clamped to it." in cert["assumes"]
    assert not any("schema" in fact for fact in cert["assumes"])
    assert sordino.verify(cert).problems == []


def test_predictions_follow_from_the_coefficients():
    x, y = line()
    model = fast(normalize="none", method="dp-fedgd", options={"lr": 0.5}, rounds=40).fit(x, y)
    inside = np.clip(x @ model.coef_ + model.intercept_, 0, 40)
    assert np.allclose(model.predict(x), inside, atol=1e-5)
    rates = FederatedRegressor(task="count", target_range=(0, 30), epsilon=8.0, rounds=20, random_state=0)
    z, k = counts()
    rates.set_params(normalize="none", method="dp-fedadam", options={"lr": 0.1}).fit(z, k)
    assert np.allclose(rates.predict(z), np.clip(np.exp(z @ rates.coef_ + rates.intercept_), 0, 30), rtol=1e-5)


def test_predictions_and_targets_stay_in_the_public_range():
    x, y = line()
    narrow = fast(target_range=(19, 21), epsilon=GENEROUS)
    model = narrow.fit(x, y)
    assert model.predict(10 * x).min() >= 19
    assert model.predict(10 * x).max() <= 21
    outlier = y.copy()
    outlier[np.argmax(y)] = 1e9
    again = clone(narrow).fit(x, outlier)
    assert (again.coef_ == model.coef_).all(), "beyond the range a target has no more influence"


def test_counts_have_rates():
    x, y = counts()
    model = fast(task="count", target_range=(0, 30), random_state=None, rounds=70).fit(x, y)
    new, truth = counts(seed=1)
    assert model.score(new, truth) > 0.25
    assert model.predict(new).mean() == pytest.approx(truth.mean(), rel=0.25)
    assert model.certificate_["certified"]


def test_networks_learn_no_quantities():
    with pytest.raises(SordinoError, match=r"^model: mlp"):
        fast(model="mlp", method="dp-fedadam").fit(*line(50))


def test_scores_warn_where_a_mean_does_as_well():
    x, y = line()
    model = fast(epsilon=GENEROUS).fit(x, y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert model.score(x, y) > 0.8
    with pytest.warns(UserWarning, match=r"no better than a constant guess: its R² is -"):
        model.score(x, 40 - y)
    weight = np.where(y > 20, 1.0, 0.0)
    assert model.score(x, y, sample_weight=weight) == pytest.approx(model.score(x[y > 20], y[y > 20]))


def test_a_search_warns():
    x, y = line(200)
    search = GridSearchCV(fast(rounds=8), {"epsilon": [1e3, GENEROUS]}, cv=2)
    with pytest.warns(UnpaidSearchWarning, match="copies of one FederatedRegressor"):
        search.fit(x, y)


def test_a_fit_without_noise_finds_the_least_squares():
    x, y = line()
    model = fast(
        epsilon=math.inf, normalize="none", method="dp-fedgd", rounds=300, options={"lr": 1.0, "clip": 100.0}
    ).fit(x, y)
    exact = np.linalg.lstsq(np.c_[x, np.ones(len(x))], y, rcond=None)[0]
    assert np.allclose([*model.coef_, model.intercept_], exact, atol=1e-3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target_range": None}, r"^target_range: the public least and largest target are needed"),
        ({"target_range": None, "task": "count"}, r"^target_range: .* target_range=\(0, 50\)"),
        ({"target_range": 4}, r"^target_range: 4 must be two numbers"),
        ({"target_range": ("low", "high")}, r"^target_range: .* must be two numbers"),
        ({"target_range": (3, 3)}, r"^target_range: \(3, 3\) must be two finite numbers, the lower one first"),
        ({"target_range": (0, math.inf)}, r"^target_range: .* finite"),
        ({"target_range": (0, math.nan)}, r"^target_range: .* finite"),
        ({"target_range": (1, 9), "task": "count"}, r"^target_range: .* must be 0 and a whole number"),
        ({"target_range": (0, 9.5), "task": "count"}, r"^target_range: .* must be 0 and a whole number"),
        ({"task": "counts"}, r"^task: 'counts' is unknown. Did you mean 'count'"),
        ({"task": "count"}, r"^y: 20 targets are not counts"),
        ({"model": "softmax"}, r"^model: softmax does not fit"),
        ({"unit": "client"}, r"^groups: at client level"),
    ],
)
def test_bad_parameters_are_named(settings, message):
    with pytest.raises(SordinoError, match=message):
        fast(**settings).fit(*line(20))


def test_words_are_no_quantities():
    x, _ = line(20)
    with pytest.raises(SordinoError, match=r"^y: the targets are not numbers; for classes use FederatedClassifier"):
        fast().fit(x, ["yes", "no"] * 10)
