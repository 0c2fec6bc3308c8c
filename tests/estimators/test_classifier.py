"""The classifier: scikit-learn's manners, the promise of each fit, and what is not paid for."""

import json
import math
import pickle
import warnings

import numpy as np
import pytest
import sklearn
from scipy.sparse import csr_matrix
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, GroupKFold, KFold, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils.estimator_checks import parametrize_with_checks

import sordino
from sordino import FederatedClassifier, OverspentError, SordinoError, UnpaidSearchWarning
from sordino.evidence.ledger import Ledger
from sordino.privacy.accounting import gaussian
from sordino.training.spec import Spec
from tests.support import forks

GENEROUS = 1e4  # so little noise that what is left of a check is about manners


@parametrize_with_checks([FederatedClassifier()], expected_failed_checks=lambda estimator: {}, xfail_strict=True)
@pytest.mark.filterwarnings("ignore::sordino.estimators.UnpaidSearchWarning")
def test_scikit_learn_agrees(estimator, check):
    check(estimator)


@pytest.mark.soak
@parametrize_with_checks([FederatedClassifier(epsilon=GENEROUS)], xfail_strict=True)
@pytest.mark.filterwarnings("ignore::sordino.estimators.UnpaidSearchWarning")
def test_scikit_learn_agrees_where_there_is_hardly_any_noise(estimator, check):
    check(estimator)


@pytest.fixture(scope="module")
def digits():
    data = sordino.load("digits")
    site = np.random.default_rng(0).choice(["north", "south", "west"], len(data.y_train))
    return data.x_train, data.y_train, data.x_test, data.y_test, site


def blobs(n=300, classes=2, seed=0):
    rng = np.random.default_rng(seed)
    y = np.arange(n) % classes
    angle = 2 * math.pi * y / classes
    x = 2 * np.stack([np.cos(angle), np.sin(angle)], 1) + 0.3 * rng.standard_normal((n, 2))
    return x, y


def fast(**settings):
    return FederatedClassifier(**{"method": "dp-fedsofim", "epsilon": 50.0, "rounds": 5, "random_state": 0, **settings})


# ------------------------------------------------------------------------------------------------------- the promise


def test_digits_are_learned_and_certified(digits):
    x, y, x_test, y_test, site = digits
    model = FederatedClassifier(epsilon=8.0, trust="secure-aggregation").fit(x, y, groups=site)
    assert model.score(x_test, y_test) > 0.8
    cert = model.certificate_
    assert cert["certified"]
    assert 8 * (1 - 1e-9) <= cert["epsilon"] <= 8
    assert (cert["clients"], cert["client_names"]) == (3, ["north", "south", "west"])
    assert cert["records"] == len(y)
    verdict = sordino.verify(json.loads(json.dumps(cert)))
    assert verdict.problems == []
    assert verdict.recomputed == pytest.approx(8, rel=0.005)
    assert "Certified: ε = 8" in model.statement_
    assert [line["round"] for line in model.history_] == list(range(1, 71))
    spent = [line["epsilon"] for line in model.history_]
    assert spent == sorted(spent)
    assert spent[-1] == pytest.approx(8)


def test_noise_follows_epsilon():
    x, y = blobs()
    noise = [fast(epsilon=epsilon).fit(x, y).certificate_["noise"] for epsilon in (0.5, 5.0)]
    assert noise[0] / noise[1] == pytest.approx(gaussian.mu(5.0, 1e-5) / gaussian.mu(0.5, 1e-5))
    assert fast(epsilon=math.inf).fit(x, y).history_[-1]["epsilon"] is None


def test_a_seed_makes_a_fit_reproducible_and_not_private():
    x, y = blobs()
    a, b, other = (fast(random_state=seed).fit(x, y) for seed in (3, np.int64(3), 4))
    assert (a.coef_ == b.coef_).all()
    assert (a.coef_ != other.coef_).any()
    assert not a.certificate_["certified"]
    assert "seeded: not private" in a.statement_


def test_without_a_seed_no_two_fits_are_alike():
    x, y = blobs()
    a, b = (fast(random_state=None).fit(x, y) for _ in range(2))
    assert (a.coef_ != b.coef_).all()
    assert a.certificate_["certified"]


def test_certificates_say_what_the_features_rest_on():
    assert any(
        line.startswith("Features were prepared without") for line in fast().fit(*blobs()).certificate_["assumes"]
    )


def test_whole_clients(digits):
    x, y, *_ = digits
    user = np.arange(len(y)) % 200
    model = fast(unit="client", trust="secure-aggregation").fit(x, y, groups=user)
    cert = model.certificate_
    assert (cert["unit"], cert["clients"], cert["records"]) == ("client", 200, None)
    assert cert["client_names"] == [], "who took part is part of what is hidden"
    assert sordino.verify(cert).problems == []
    with pytest.raises(SordinoError, match=r"^groups: at client level"):
        fast(unit="client").fit(x, y)


def test_clients_without_groups_are_simulated():
    x, y = blobs(7)
    assert fast().fit(x, y).certificate_["clients"] == 7
    assert fast(clients=3).fit(x, y).certificate_["clients"] == 3
    assert fast().fit(x, y, groups=[0, 1, 0, 1, 0, 1, 1]).certificate_["clients"] == 2
    with pytest.raises(SordinoError, match="clients: 3 cannot be set, because groups names the clients"):
        fast(clients=3).fit(x, y, groups=[0, 1, 0, 1, 0, 1, 1])


def test_normalisation_is_the_same_in_training_and_use():
    x, y = blobs()
    model = fast(normalize="l2").fit(x, y)
    assert np.allclose(model.decision_function(x), model.decision_function(1000 * x), atol=1e-4)
    assert np.allclose(model.coef_, fast(normalize="l2").fit(1000 * x, y).coef_, atol=1e-4)
    assert not np.allclose(model.coef_, fast().fit(1000 * x, y).coef_, atol=1e-4)


def test_options_reach_the_run():
    x, y = blobs()
    cert = fast(options={"clip": 3.0, "participation": "fixed:4"}).fit(x, y).certificate_
    assert cert["clip"] == 3
    assert cert["cohort"] == 4
    assert fast(options={"dtype": "float64"}).fit(x, y).score(x, y) > 0.9


def test_defaults_are_those_of_a_run():
    ours = FederatedClassifier().get_params()
    assert all(ours[key] == getattr(Spec, key) for key in ("method", "delta", "unit", "adjacency", "trust", "divisor"))


# -------------------------------------------------------------------------------------------------------- the labels


@pytest.mark.parametrize(("labels", "shape"), [(["no", "yes"], (1, 2)), ("abcdefghij", (10, 2))])
def test_words_as_classes(labels, shape):
    x, y = blobs(1000, classes=len(labels))
    words = np.array(list(labels))[y]
    model = fast(epsilon=GENEROUS, rounds=40, options={"lr": 8.0}).fit(x, words)
    assert model.classes_.tolist() == sorted(labels)
    assert model.coef_.shape == shape
    assert model.score(x, words) > 0.9
    assert set(model.predict(x)) <= set(labels)
    proba, decision = model.predict_proba(x), model.decision_function(x)
    assert proba.shape == (1000, len(labels))
    assert np.allclose(proba.sum(1), 1)
    assert (model.classes_[proba.argmax(1)] == model.predict(x)).all()
    assert decision.shape == ((1000,) if len(labels) == 2 else (1000, 10))


def test_two_classes_are_what_the_library_trains():
    """The difference of logits keeps the probabilities of the run itself."""
    x, y = blobs()
    model = fast(options={"clip": 2.0}).fit(x, y)
    records = sordino.Records.of(
        x.astype(np.float32), y, sordino.split(sordino.Dataset("", x, y, x, y, None, ("0", "1")), "iid", 10)
    )
    plan = sordino.Plan(sordino.build("dp-fedsofim", clip=2.0), 5, records.sizes, sordino.Privacy(50.0))
    linear = sordino.Linear(2, 2)
    *_, last = sordino.simulate.run(plan, linear, records, sordino.source(0))
    assert np.allclose(model.predict_proba(x), linear.scores(last.model, x), atol=1e-6)


def test_classes_may_be_declared():
    x, y = blobs(classes=3)
    model = fast(classes=[3, 2, 1, 0]).fit(x, y)
    assert model.classes_.tolist() == [0, 1, 2, 3]
    assert model.predict_proba(x).shape == (300, 4)
    assert fast(classes=[0, 1]).fit(x, np.zeros(300, int)).classes_.tolist() == [0, 1]
    with pytest.raises(SordinoError, match=r"^classes: label '2' of y"):
        fast(classes=[0, 1]).fit(x, y)


# ------------------------------------------------------------------------------------------------ the bigger machines


def test_groups_pass_through_a_pipeline():
    x, y = blobs()
    site = np.arange(300) % 4
    pipe = make_pipeline(FunctionTransformer(lambda x: x / 2), fast())
    pipe.fit(x, y, federatedclassifier__groups=site)
    assert pipe[-1].certificate_["clients"] == 4
    with sklearn.config_context(enable_metadata_routing=True):
        routed = make_pipeline(FunctionTransformer(lambda x: x / 2), fast().set_fit_request(groups=True))
        assert routed.fit(x, y, groups=site)[-1].certificate_["clients"] == 4
    assert (routed[-1].coef_ == pipe[-1].coef_).all()


def warned(action):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        action()
    assert all(each.category is UnpaidSearchWarning for each in caught), [str(each.message) for each in caught]
    return len(caught)


def test_a_search_is_not_paid_for_and_says_so_once():
    x, y = blobs()
    model = fast()
    search = GridSearchCV(model, {"epsilon": np.array([1.0, 50.0]), "rounds": np.array([2, 3])}, cv=2)
    assert warned(lambda: search.fit(x, y)) == 1
    assert warned(lambda: search.fit(x, y)) == 1, "once a search"
    assert any("one of several fits" in line for line in search.best_estimator_.certificate_["assumes"])
    pipe = GridSearchCV(make_pipeline(fast()), {"federatedclassifier__epsilon": [1.0, 5.0]}, cv=2)
    assert warned(lambda: pipe.fit(x, y)) == 1
    assert warned(lambda: cross_val_score(fast(), x, y, cv=3)) == 1


def test_a_single_fit_does_not_cry_wolf():
    x, y = blobs()
    model = fast()
    assert warned(lambda: model.fit(x, y)) == 0
    assert warned(lambda: model.fit(x, y)) == 0
    assert warned(lambda: clone(model).fit(x, y)) == 0
    assert not any("one of several fits" in line for line in model.certificate_["assumes"])


def test_groups_reach_every_fit_of_a_search():
    x, y = blobs()
    site = np.arange(300) % 6
    with sklearn.config_context(enable_metadata_routing=True):
        model = fast().set_fit_request(groups=True)
        for cv, clients in ((GroupKFold(3), 6), (KFold(3), 6)):
            search = GridSearchCV(model, {"epsilon": [10.0, 50.0]}, cv=cv)
            with pytest.warns(UnpaidSearchWarning, match="covers that fit alone"):
                search.fit(x, y, groups=site)
            assert search.best_estimator_.certificate_["clients"] == clients


def test_a_fitted_model_can_be_stored():
    x, y = blobs()
    model = fast().fit(x, y)
    restored = pickle.loads(pickle.dumps(model))
    assert (restored.predict_proba(x) == model.predict_proba(x)).all()
    assert restored.certificate_ == model.certificate_


# --------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "dp-fedsofin"}, r"^method: .* Did you mean 'dp-fedsofim'"),
        ({"epsilon": 0.0}, r"^epsilon: "),
        ({"epsilon": "much"}, r"^epsilon: "),
        ({"delta": 0.5}, r"^delta: "),
        ({"rounds": 0}, r"^rounds: "),
        ({"rounds": 2.5}, r"^rounds: "),
        ({"clients": 0}, r"^clients: "),
        ({"clients": 1000}, r"^clients: 1000 must be at most the number of records, "),
        ({"epsilon": "2"}, r"^epsilon: '2' is a text; give a number"),
        ({"rounds": "5"}, r"^rounds: '5' is a text; give a number"),
        ({"unit": "person"}, r"^person: unit = person needs"),
        ({"unit": "household"}, r"^unit: "),
        ({"adjacency": "near"}, r"^adjacency: "),
        ({"trust": "nobody"}, r"^trust: "),
        ({"divisor": "mean"}, r"^divisor: "),
        ({"normalize": "standardize"}, r"^normalize: .* private data"),
        ({"options": ["lr"]}, r"^options: "),
        ({"options": {"lrr": 1.0}}, r"^lrr: .* Did you mean 'lr'"),
        ({"options": {"epsilon": 1.0}}, r"^options: 'epsilon' .* parameter of the estimator"),
        ({"options": {"label": "y"}}, r"^options: 'label' .* no meaning here"),
        ({"options": {"class_weights": [1.0]}}, r"^class_weights: "),
        ({"random_state": -1}, r"^random_state: "),
        ({"random_state": np.random.RandomState(0)}, r"^random_state: "),
    ],
)
def test_bad_parameters_are_named_when_fitting(settings, message):
    with pytest.raises(SordinoError, match=message):
        fast(**settings).fit(*blobs(20))


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (np.zeros(3), r"^groups: shape \(3,\) for 20 records"),
        (np.zeros((20, 2)), r"^groups: shape"),
        ([None, *"ab" * 9, "a"], r"^groups: 1 entries are missing"),
        ([math.nan, *range(19)], r"^groups: 1 entries are missing"),
    ],
)
def test_bad_groups_are_named(groups, message):
    with pytest.raises(SordinoError, match=message):
        fast().fit(*blobs(20), groups=groups)


def test_bad_data_is_refused():
    x, y = blobs(20)
    with pytest.raises(TypeError, match="dense data is required"):
        fast().fit(csr_matrix(x), y)
    with pytest.raises(ValueError, match="too large for dtype"):
        fast().fit(np.where(x == x.max(), 1e39, x), y)
    with pytest.raises(SordinoError, match=r"^y: all records have one class"):
        fast().fit(x, np.zeros(20))
    with pytest.raises(NotFittedError):
        fast().predict(x)


# -------------------------------------------------------------------------------------------------- an optional extra


def test_the_library_does_not_import_scikit_learn_and_where_it_is_absent_the_remedy_is_named(tmp_path):
    assert "FederatedClassifier" in dir(sordino)
    code = "import sys; sys.modules['sklearn'] = None; import sordino; print('Federated' in str(dir(sordino)))\n"
    done = forks.run(code + "from sordino import *\nsordino.FederatedClassifier", folder=tmp_path)
    assert done.stdout.split() == ["False"]
    assert "ImportError: FederatedClassifier needs scikit-learn: pip install 'sordino[sklearn]'" in done.stderr
    with pytest.raises(AttributeError, match="no attribute 'FederatedOracle'"):
        sordino.FederatedOracle  # noqa: B018


def test_a_useless_model_is_called_one():
    """On the records that it is scored on; nothing is compared on the training records."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 2))
    y = (x.sum(1) > 0).astype(int)
    good = FederatedClassifier(epsilon=8.0, rounds=10, random_state=0).fit(x, y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert good.score(x, y) > 0.8
        assert good.score(x[:1], y[:1]) in (0.0, 1.0)  # one class: nothing to compare with
    with pytest.warns(UserWarning, match="no better than a constant guess: its log loss is"):
        good.score(x, 1 - y)
    with pytest.warns(UserWarning, match=r"records that were passed to score, .* do not publish them if"):
        good.score(x, 1 - y)
    with pytest.warns(UserWarning, match="no better than a constant guess: its accuracy is"):
        good.score(x, 1 - y, sample_weight=np.ones(400))
    many = fast(rounds=20).fit(*blobs(300, classes=3))
    with pytest.warns(UserWarning, match="no better than a constant guess: its accuracy is"):
        many.score(blobs(300, classes=3)[0], (blobs(300, classes=3)[1] + 1) % 3)


def test_a_rare_class_is_no_reason_to_warn():
    """Nobody has a risk above one half, so accuracy is that of the common class; but the risks are right."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4000, 2))
    y = (rng.random(4000) < 1 / (1 + np.exp(3 - x[:, 0]))).astype(int)
    model = FederatedClassifier(epsilon=GENEROUS, rounds=30, random_state=0).fit(x, y)
    assert model.score(x[y == 0], y[y == 0]) > 0.99
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert model.score(x, y) == pytest.approx(1 - y.mean(), abs=0.01)


def test_fits_on_the_same_data_share_a_ledger(tmp_path):
    """Two fits of epsilon 2 cost 2.95 together; a third is refused, other data are not counted."""
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(200, 3)), rng.integers(0, 2, 200)
    book = tmp_path / "mine.db"
    words = {"epsilon": 2.0, "rounds": 3, "clients": 2, "method": "dp-fedgd", "ledger": book, "limit": 3.2}
    FederatedClassifier(**words).fit(X, y)
    FederatedClassifier(**words).fit(X, y)
    third = FederatedClassifier(**words)
    with pytest.raises(OverspentError, match=r"a run of ε = 1\.03 still fits"):
        third.fit(X, y)
    assert not hasattr(third, "coef_")
    FederatedClassifier(**words).fit(X + 1, y)
    FederatedClassifier(**words).fit(X, 1 - y)
    with Ledger(book) as ledger:
        spent = sorted(ledger.spent_epsilon(who, 1e-5) for who in ledger.people())
    assert spent == pytest.approx([2, 2, 2.95], abs=0.01)
    with pytest.raises(SordinoError, match="not certified"):
        FederatedClassifier(**words, random_state=1).fit(X, y)
    with pytest.raises(SordinoError, match="pass ledger="):
        FederatedClassifier(limit=1.0).fit(X, y)


def test_the_account_does_not_depend_on_types_or_the_order_of_columns(tmp_path):
    """One record or one column less is another account, as the docs say."""
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(60, 3)).astype(np.float32), rng.integers(0, 2, 60)
    words = {"epsilon": 1.0, "rounds": 1, "clients": 2, "method": "dp-fedgd"}

    def accounts(name, *fits):
        for x, labels, options in fits:
            FederatedClassifier(**words, options=options, ledger=tmp_path / name).fit(x, labels)
        with Ledger(tmp_path / name) as ledger:
            return [len({row.plan for row in ledger.rows() if row.who == who}) for who in ledger.people()]

    same = [(X, y, {}), (X, y, {"dtype": "float64"}), (X.astype(float), y, {"dtype": "float64"})]
    same += [(X, labels, {}) for labels in (y.astype(str), y.astype(float), y.astype(bool))]
    same += [(X[:, ::-1].copy(), y, {})]
    assert accounts("same.db", *same) == [len(same)]
    other = [(X, y, {}), (X + 1, y, {}), (X[1:], y[1:], {}), (X[:, 1:], y, {}), (X, np.where(y, "yes", "no"), {})]
    assert accounts("other.db", *other) == [1] * len(other)


def test_a_search_cannot_use_a_ledger(tmp_path):
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(200, 3)), rng.integers(0, 2, 200)
    model = FederatedClassifier(rounds=3, clients=2, method="dp-fedgd", ledger=tmp_path / "mine.db")
    copies = [clone(model), clone(model)]  # as a search makes them
    copies[0].fit(X[:100], y[:100])
    with pytest.warns(UnpaidSearchWarning), pytest.raises(SordinoError, match="set ledger=None in a search"):
        copies[1].fit(X[100:], y[100:])
    with Ledger(tmp_path / "mine.db") as ledger:
        assert len(ledger.people()) == 1
