"""Survival: the forms of its target, what it learns, and what it refuses."""

import math

import numpy as np
import pandas as pd
import pytest
from sklearn.exceptions import NotFittedError
from sklearn.utils.estimator_checks import parametrize_with_checks

import sordino
from sordino import FederatedCox, SordinoError
from sordino.training import survival

GENEROUS = 1e4
EDGES = (0, 1, 2, 3, 4)


class OneColumn(FederatedCox):
    """scikit-learn's checks know no survival: the times of everybody, who all have the event."""

    def fit(self, X, y=None, groups=None, persons=None):
        return super().fit(X, y if y is None else events(y), groups, persons)

    def score(self, X, y=None):
        return super().score(X, events(y))


def events(y):
    time = np.abs(np.asarray(y))
    return np.stack([time, np.ones(len(time))], 1)


@parametrize_with_checks([OneColumn(epsilon=GENEROUS, edges=EDGES, rounds=10)])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_scikit_learn_agrees(estimator, check):
    check(estimator)


def patients(n=3000, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.uniform(-1, 1, (n, 2))
    event, last_seen = rng.exponential(3 * np.exp(-1.5 * x[:, 0])), rng.uniform(0, 6, n)
    return x, np.minimum(event, last_seen), event < last_seen


def target(time, event):
    return np.stack([time, event], 1)


def fast(**settings):
    return FederatedCox(**{"epsilon": 8.0, "rounds": 20, "edges": EDGES, "random_state": 0, **settings})


def test_risks_are_ranked_and_certified():
    x, time, event = patients()
    model = fast(random_state=None, epsilon=4.0).fit(x, target(time, event), groups=np.arange(len(x)) % 4)
    new, *truth = patients(seed=1)
    assert model.score(new, target(*truth)) > 0.68
    cert = model.certificate_
    assert (cert["certified"], cert["clients"]) == (True, 4)
    assert "The edges of time, 0, 1, 2, 3, 4, are public." in cert["assumes"]
    assert sordino.verify(cert).problems == []
    assert model.coef_.shape == (2,)
    assert model.intercept_.shape == (4,)
    assert model.coef_[0] > 0, "a higher first feature has the event earlier"


def test_survival_falls_with_time_and_with_risk():
    x, time, event = patients()
    model = fast(epsilon=GENEROUS).fit(x, target(time, event))
    share, risk = model.predict_survival_function(x), model.predict(x)
    assert share.shape == (len(x), 4)
    assert model.edges_.tolist() == [1, 2, 3, 4]
    assert ((share > 0) & (share < 1)).all()
    assert (np.diff(share, axis=1) < 0).all()
    assert (np.diff(share[np.argsort(risk)], axis=0) <= 1e-12).all()
    observed = survival.kaplan_meier(time, event).at(np.array(EDGES[1:]) - 1e-9)
    assert np.allclose(share.mean(0), observed, atol=0.03)


def test_the_noised_life_table_is_kept():
    x, time, event = patients()
    model = fast(epsilon=GENEROUS).fit(x, target(time, event))
    observed = survival.kaplan_meier(time, event).at(np.array(EDGES[1:]) - 1e-9)
    assert np.allclose([row["survival"] for row in model.life_table_], observed, atol=0.02)
    assert [row["end"] for row in model.life_table_] == list(EDGES[1:])
    other = fast(method="dp-fedadam", options={"lr": 0.1}).fit(x, target(time, event))
    assert not hasattr(other, "life_table_")


def test_all_forms_of_a_target_mean_the_same():
    x, time, event = patients(200)
    sksurv = np.array(list(zip(event, time, strict=True)), [("dead", bool), ("days", float)])
    turned = np.array(list(zip(time, event, strict=True)), [("t", float), ("e", bool)])
    frame = pd.DataFrame({"event": event, "id": 0, "time": time})
    forms = [target(time, event), target(time, event).tolist(), sksurv, turned, frame, frame[["time", "event"]]]
    first, *others = [fast().fit(x, y) for y in forms]
    assert all((each.coef_ == first.coef_).all() for each in others)
    assert len({each.score(x, y) for each, y in zip([first, *others], forms, strict=True)}) == 1


def test_who_is_there_at_the_last_edge_is_last_seen_then():
    x, time, event = patients(200)
    late = fast(edges=(0, 1, 2)).fit(x, target(time, event))
    cut = fast(edges=(0, 1, 2)).fit(x, target(np.minimum(time, 2), event & (time < 2)))
    assert (late.coef_ == cut.coef_).all()


def test_persons_are_protected():
    x, time, event = patients(200)
    cert = fast(random_state=None, clients=2).fit(x, target(time, event), persons=np.arange(200) // 2).certificate_
    assert (cert["unit"], cert["certified"]) == ("person", True)


def test_scores_warn_where_risks_are_turned_round():
    x, time, event = patients()
    model = fast(epsilon=GENEROUS).fit(x, target(time, event))
    with pytest.warns(UserWarning, match=r"no better than a constant guess: its concordance is 0\.2"):
        model.score(-x, target(time, event))
    few = slice(0, 8)
    with pytest.warns(UserWarning, match=r"do not show that the model is better than equal risks: its concordance is"):
        model.score(x[few] * np.where(np.arange(8) % 2, 1, -1)[:, None], target(time[few], event[few]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"edges": None}, r"^edges: public edges of time are needed"),
        ({"edges": 365}, r"^edges: 365 must be numbers"),
        ({"edges": ("0", "one")}, r"^edges: .* must be numbers"),
        ({"edges": (1, 2)}, r"^edges: \(1, 2\) must begin with 0 and rise"),
        ({"edges": (0, 2, 2)}, r"^edges: .* rise"),
        ({"edges": (0,)}, r"^edges: .* 2 to 101"),
        ({"edges": (0, math.inf)}, r"^edges: .* finite"),
        ({"edges": tuple(range(200))}, r"^edges: .* 2 to 101"),
        ({"model": "poisson"}, r"^model: poisson does not learn a survival"),
        ({"method": "dp-fedfc"}, r"^method: dp-fedfc"),
    ],
)
def test_bad_parameters_are_named(settings, message):
    x, time, event = patients(20)
    with pytest.raises(SordinoError, match=message):
        fast(**settings).fit(x, target(time, event))


@pytest.mark.parametrize(
    ("y", "message"),
    [
        (np.ones(20), r"^y: shape \(20,\); survival needs two columns"),
        (np.ones((20, 3)), r"^y: shape \(20, 3\)"),
        (np.ones((20, 2)) * [-1, 1], r"^y: 20 times are missing, infinite or below 0"),
        (np.ones((20, 2)) * [math.nan, 1], r"^y: 20 times are missing"),
        (np.ones((20, 2)) * [1, 7], r"^y: 20 events are neither 1 nor 0; the first column is the time"),
        (np.ones((20, 2)) * [1, math.nan], r"^y: 20 events are neither"),
        ([["soon", "yes"]] * 20, r"^y: times and events must be numbers"),
        (np.zeros(20, [("t", float), ("u", float)]), r"^y: a structured array needs .* it has t, u"),
        (pd.DataFrame({"a": [1], "b": [1], "c": [1]}), r"^y: a frame needs the columns time and event; it has a, b, c"),
    ],
)
def test_bad_targets_are_named(y, message):
    with pytest.raises(SordinoError, match=message):
        fast().fit(patients(20)[0], y)


def test_other_mistakes():
    x, time, event = patients(20)
    with pytest.raises(ValueError, match="inconsistent numbers of samples"):
        fast().fit(x[:10], target(time, event))
    with pytest.raises(NotFittedError):
        fast().predict(x)
