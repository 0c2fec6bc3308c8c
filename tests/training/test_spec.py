import pytest

from sordino.errors import SordinoError
from sordino.settings import parse_setting
from sordino.training.resolved import resolve
from sordino.training.spec import Spec, keys


def test_a_resolved_spec_says_everything_and_reads_back_as_it_was(tmp_path):
    spec = Spec.of(
        {"method": "dp-fedadam", "lr": 0.1, "clients": 4, "client_epsilon": {"2": 0.5}, "class_weights": [1, 2]}
    )
    spec = resolve(spec).spec
    assert resolve(spec).spec == spec, "nothing is left to decide"
    assert spec.options["tau"] == 0.01, "defaults are written out"
    path = tmp_path / "spec.toml"
    path.write_text(spec.toml())
    assert Spec.read(path) == spec
    assert Spec.read(path).sha256() == spec.sha256()
    assert Spec.of({**spec.values(), "lr": 0.2}).sha256() != spec.sha256()


def test_infinite_epsilon_survives_toml(tmp_path):
    path = tmp_path / "spec.toml"
    path.write_text(resolve(Spec.of({"epsilon": "inf"})).spec.toml())
    assert Spec.read(path).epsilon == float("inf")


def test_every_key_can_be_set():
    for key, value in resolve(Spec()).spec.values().items():
        assert Spec.of({key: value}).values()[key] == value
    assert {"clip", "lr", "rho", "epsilon", "divisor"} <= set(keys("dp-fedsofim"))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"epsilonn": 1}, r"epsilonn: .*Did you mean 'epsilon'"),
        ({"method": "dp-fedgd", "learning_rate": 1}, r"learning_rate: .* or of model auto\. Did you mean 'lr'\?$"),
        ({"learningrate": 1}, r"learningrate: .* Did you mean 'lr'\? It is an option of dp-fedgd.*: set method\.$"),
        ({"stepsize": 1}, r"stepsize: .* Did you mean 'lr'\? It is an option of dp-fedgd.*: set method\.$"),
        ({"trust_model": 1}, r"trust_model: .* Did you mean 'trust'\?$"),
        ({"patience": 1}, r"patience: neither a key of a run nor an option .* model auto\. Options of auto: "),
        ({"secure": 1}, r"secure: .* Options of auto: "),
        ({"method": "dp-fedgd", "momentumm": 1}, r"Did you mean 'momentum'\? It is an option of .*: set method\.$"),
        ({"method": "dp-fedgd", "zzz": 1}, r"zzz: .* Options of dp-fedgd: clip, lr, tail, quantile\."),
        ({"method": "dp-fedgd", "rho": 1.0}, r"rho: not an option of dp-fedgd\. It is one of dp-fedsofim"),
        ({"method": "dp-fedsophim"}, r"method: .*Did you mean 'dp-fedsofim'"),
        ({"rounds": 2.5}, r"rounds: 2.5 must be a whole number"),
        ({"rounds": True}, r"rounds: True must be a whole number"),
        ({"method": "dp-fedgd", "lr": "fast"}, r"lr: 'fast' must be a number"),
        ({"method": "dp-fedgd", "lr": "nan"}, r"lr: nan"),
        ({"method": "dp-fedsofim", "bias_correction": 1}, r"bias_correction: 1 must be true or false"),
        ({"model": "softmx"}, r"model: .*Did you mean 'softmax'"),
        ({"dtype": "float16"}, r"dtype: "),
        ({"class_weights": 3}, r"class_weights: 3 must be a list"),
        ({"client_epsilon": 3}, r"client_epsilon: 3 must be a table"),
    ],
)
def test_a_wrong_key_or_value_is_named(values, message):
    with pytest.raises(SordinoError, match=message):
        Spec.of(values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"unit": "household"}, "unit: 'household' is unknown"),
        ({"adjacency": "addremove"}, "adjacency: .*Did you mean 'add-remove'"),
        ({"divisor": "mean"}, "divisor: .*client-mean"),
        ({"participation": "fixed:11"}, "participation: fixed:11 asks for 11 clients"),
        ({"participation": "poisson"}, "participation: .*has no number"),
        ({"clip": -1.0}, "clip: -1.0 must be"),
        ({"method": "dp-fedsofim", "rho": 0.0}, "rho: 0.0 must be above 0"),
        ({"client_epsilon": {"x": 1.0}}, "client_epsilon: must map"),
        ({"client_epsilon": {"3": 9.0}}, "never laxer"),
        ({"client_epsilon": {"44": 1.0}}, "client 44 does not exist"),
    ],
)
def test_a_plan_names_what_is_wrong_with_it(values, message):
    with pytest.raises(SordinoError, match=message):
        resolve(Spec.of(values)).plan((5,) * 10)


def test_settings_are_read_as_toml_or_as_words():
    assert parse_setting("lr=0.5") == ("lr", 0.5)
    assert parse_setting("divisor=client-mean") == ("divisor", "client-mean")
    assert parse_setting("class_weights=[1, 2]") == ("class_weights", [1, 2])
    assert parse_setting("bias_correction=true") == ("bias_correction", True)
    with pytest.raises(SordinoError, match="must have the form key=value"):
        parse_setting("lr")


def test_a_file_that_is_not_toml_is_named(tmp_path):
    with pytest.raises(SordinoError, match="there is no file"):
        Spec.read(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("lr = = 3")
    with pytest.raises(SordinoError, match="is not TOML"):
        Spec.read(tmp_path / "bad.toml")
