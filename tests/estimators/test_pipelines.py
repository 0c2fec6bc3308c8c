"""Steps in front of an estimator that are fitted to the same records: found, told, and not certified."""

import warnings

import numpy as np
import pandas as pd
import pytest
from sklearn.base import BaseEstimator, TransformerMixin, clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.compose import ColumnTransformer, TransformedTargetRegressor, make_column_selector, make_column_transformer
from sklearn.decomposition import PCA
from sklearn.ensemble import BaggingClassifier
from sklearn.frozen import FrozenEstimator
from sklearn.impute import SimpleImputer
from sklearn.kernel_approximation import RBFSampler
from sklearn.model_selection import GridSearchCV, cross_validate
from sklearn.pipeline import FeatureUnion, Pipeline, make_pipeline, make_union
from sklearn.preprocessing import (
    FunctionTransformer,
    MinMaxScaler,
    Normalizer,
    OneHotEncoder,
    OrdinalEncoder,
    PolynomialFeatures,
    StandardScaler,
)

import sordino
from sordino import FederatedClassifier, FederatedRegressor, SordinoError, UnpaidStepWarning, certificate_of
from sordino.estimators.pipelines import PREPARED, fitted_steps


def records(n=60):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(n, 3))
    return x, (x[:, 0] > 0).astype(int)


def fast(**settings):
    return FederatedClassifier(**{"method": "dp-fedgd", "epsilon": 50.0, "rounds": 2, "clients": 3, **settings})


def fit(pipe, *data):
    """The certificate of the last step, and whether the fit warned."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pipe.fit(*(data or records()))
    told = [each for each in caught if each.category is UnpaidStepWarning]
    return pipe[-1].certificate_, bool(told)


class Halves(TransformerMixin, BaseEstimator):
    """Works on each record alone, and says so by a tag."""

    def fit(self, X, y=None):
        return self

    def transform(self, X):
        return np.asarray(X) / 2

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.requires_fit = False
        return tags


class Silent(Halves):
    """The same without the tag."""

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.requires_fit = True
        return tags


LEVELS = [[0.0, 1.0]] * 3
FITTED = {
    "scaler": (StandardScaler(), "step standardscaler (StandardScaler) was"),
    "minmax": (MinMaxScaler(), "MinMaxScaler"),
    "pca": (PCA(2), "PCA"),
    "imputer": (SimpleImputer(), "SimpleImputer"),
    "nested": (make_pipeline(Normalizer(), StandardScaler()), "pipeline/standardscaler (StandardScaler)"),
    "union": (make_union(Normalizer(), PCA(1)), "featureunion/pca (PCA)"),
    "columns": (ColumnTransformer([("a", "passthrough", [0]), ("b", StandardScaler(), [1])]), "columntransformer/b"),
    "remainder": (ColumnTransformer([("a", Normalizer(), [0])], remainder=StandardScaler()), "remainder (StandardSc"),
    "chosen": (ColumnTransformer([("a", Normalizer(), lambda x: [0, 1])]), "columns chosen by a function"),
    "levels": (OneHotEncoder(handle_unknown="ignore", sparse_output=False), "OneHotEncoder"),
    "rare levels": (OneHotEncoder(categories=LEVELS, min_frequency=2, handle_unknown="ignore"), "OneHotEncoder"),
    "kernel": (RBFSampler(gamma="scale"), "RBFSampler"),
    "unknown": (Silent(), "Silent"),
}
FREE = {
    "norm": Normalizer(),
    "function": FunctionTransformer(np.tanh),
    "tagged": Halves(),
    "powers": PolynomialFeatures(2),
    "kernel": RBFSampler(gamma=0.5, random_state=0),
    "nothing": "passthrough",
    "nested": make_pipeline(Normalizer(), FunctionTransformer(np.tanh)),
    "union": FeatureUnion([("a", Normalizer()), ("b", "passthrough"), ("c", "drop")]),
    "columns": ColumnTransformer([("a", Normalizer(), [0, 1])], remainder="passthrough"),
    "frozen": FrozenEstimator(StandardScaler().fit(np.eye(3))),
    "levels": OneHotEncoder(categories=LEVELS, handle_unknown="ignore", sparse_output=False),
    "order": OrdinalEncoder(categories=LEVELS, handle_unknown="use_encoded_value", unknown_value=-1),
}


@pytest.mark.parametrize("step", FITTED)
def test_a_fitted_step_is_told_and_not_certified(step):
    transformer, name = FITTED[step]
    if step == "rare levels":  # it yields sparse data, which the estimator refuses
        assert fitted_steps(transformer) == [name]
        return
    cert, warned = fit(make_pipeline(transformer, fast()))
    assert warned
    assert not cert["certified"]
    (reason,) = cert["reasons"]
    assert reason.startswith("not proved: the step")
    assert name in reason
    assert "no budget pays" in reason
    assert PREPARED not in cert["assumes"], "the certificate must not say the opposite"


@pytest.mark.parametrize("step", FREE)
def test_a_step_that_works_on_each_record_alone_is_fine(step):
    cert, warned = fit(make_pipeline(FREE[step], fast()))
    assert not warned
    assert (cert["certified"], cert["reasons"]) == (True, [])
    assert PREPARED in cert["assumes"]


def test_the_statement_says_it():
    pipe = make_pipeline(StandardScaler(), fast())
    fit(pipe)
    text = pipe[-1].statement_
    assert "standardscaler (StandardScaler)" in text
    assert "Certified: ε" not in text
    assert PREPARED not in text
    assert sordino.verify(pipe[-1].certificate_).problems == []


def test_several_steps_are_listed():
    cert, _ = fit(make_pipeline(StandardScaler(), PCA(2), fast()))
    assert "the steps standardscaler (StandardScaler), pca (PCA) were fitted" in cert["reasons"][0]


def test_a_pipeline_inside_a_pipeline_is_seen_from_within():
    inner = make_pipeline(Normalizer(), fast())
    outer = make_pipeline(StandardScaler(), inner)
    with pytest.warns(UnpaidStepWarning, match="StandardScaler"):
        outer.fit(*records())
    assert not inner[-1].certificate_["certified"]


def test_an_estimator_alone_or_beside_a_pipeline_is_certified():
    x, y = records()
    model = fast()
    make_pipeline(StandardScaler(), model)  # it stands in a pipeline, which does not fit it
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert model.fit(x, y).certificate_["certified"]
        assert clone(model).fit(x, y).certificate_["certified"]


@pytest.mark.filterwarnings("ignore")
def test_searches_and_cross_validation_keep_it():
    x, y = records()
    pipe = make_pipeline(StandardScaler(), fast())
    search = GridSearchCV(pipe, {"federatedclassifier__epsilon": [20.0, 50.0]}, cv=2).fit(x, y)
    assert not search.best_estimator_[-1].certificate_["certified"]
    assert not certificate_of(search)["certified"]
    for fitted in cross_validate(pipe, x, y, cv=2, return_estimator=True)["estimator"]:
        assert not fitted[-1].certificate_["certified"]
    fine = GridSearchCV(make_pipeline(Normalizer(), fast()), {"federatedclassifier__epsilon": [20.0, 50.0]}, cv=2)
    assert certificate_of(fine.fit(x, y))["certified"]


@pytest.mark.filterwarnings("ignore")
def test_models_around_the_estimator_do_not_hide_the_step():
    pipe = make_pipeline(StandardScaler(), CalibratedClassifierCV(fast(), cv=2)).fit(*records())
    assert not any(each.estimator.certificate_["certified"] for each in pipe[-1].calibrated_classifiers_), (
        "the pipeline is a caller further up"
    )
    bagged = make_pipeline(StandardScaler(), BaggingClassifier(fast(), 2)).fit(*records())
    assert not any(each.certificate_["certified"] for each in bagged[-1].estimators_)


def test_a_target_that_is_scaled_by_its_records():
    x, y = records()
    settings = {"method": "dp-fedgd", "rounds": 2, "target_range": (-3, 3), "epsilon": 50.0}
    model = TransformedTargetRegressor(FederatedRegressor(**settings), transformer=StandardScaler())
    with pytest.warns(UnpaidStepWarning, match="of the target, StandardScaler"):
        model.fit(x, y)
    assert not model.regressor_.certificate_["certified"]
    by_hand = TransformedTargetRegressor(FederatedRegressor(**settings), func=np.log1p, inverse_func=np.expm1).fit(x, y)
    assert by_hand.regressor_.certificate_["certified"]


def test_a_ledger_does_not_pay_for_it(tmp_path):
    pipe = make_pipeline(StandardScaler(), fast(ledger=tmp_path / "mine.db"))
    with pytest.raises(SordinoError, match=r"^ledger: the run is not certified"), pytest.warns(UnpaidStepWarning):
        pipe.fit(*records())


def test_a_scaler_in_front_of_a_schema_counts_too():
    x, y = records()
    frame = pd.DataFrame(x, columns=list("abc"))
    schema = {
        "target": {"column": "y", "levels": ["0", "1"]},
        "columns": {name: {"type": "number", "range": [-3, 3]} for name in "abc"},
    }
    scaler = make_column_transformer(
        (StandardScaler(), make_column_selector(dtype_include=float)), verbose_feature_names_out=False
    ).set_output(transform="pandas")
    cert, warned = fit(make_pipeline(scaler, fast(schema=schema)), frame, y)
    assert warned
    assert not cert["certified"]


# ------------------------------------------------------------------------------------------------ from the outside


def test_certificate_of_reads_the_pipeline_itself():
    x, y = records()
    scaler = StandardScaler().fit(x)
    model = fast().fit(scaler.transform(x), y)  # scaled by hand: the estimator cannot know
    assert model.certificate_["certified"]
    assert certificate_of(model) == model.certificate_
    whole = certificate_of(Pipeline([("scale", scaler), ("model", model)]))
    assert not whole["certified"]
    assert "scale (StandardScaler)" in whole["reasons"][0]
    assert PREPARED not in whole["assumes"]
    assert model.certificate_["certified"], "the certificate of the model itself is not changed"


def test_certificate_of_adds_nothing_twice():
    pipe = make_pipeline(StandardScaler(), fast())
    cert, _ = fit(pipe)
    assert certificate_of(pipe) == cert


@pytest.mark.parametrize("wrong", [StandardScaler(), make_pipeline(StandardScaler()), fast(), "model"])
def test_certificate_of_needs_a_fitted_estimator(wrong):
    with pytest.raises(SordinoError, match=r"^certificate_of: .* holds no certificate"):
        certificate_of(wrong)
