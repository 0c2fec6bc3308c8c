"""A method of another package: found, checked, and refused as uncertified until the check has passed."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from tests.support import forks

ROOT = Path(__file__).parents[1]
# `sordino check` with the fewest trials that it allows.
SHORT_SEARCH = """
from functools import partial
from sordino import checks
checks.check, checks.check_model = (partial(f, trials=checks.LEAST_TRIALS) for f in (checks.check, checks.check_model))
from sordino.cli import main
exit(main())
"""


@pytest.fixture
def outside(tmp_path):
    """Run the command line where the example package is installed; its state directory is empty at first."""
    spec = importlib.util.spec_from_file_location("sordino_example", ROOT / "tests" / "plugin" / "sordino_example.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    place = module.install(tmp_path / "packages")
    state = {"SORDINO_STATE": str(tmp_path / "state")}

    def sordino(*words):
        code = SHORT_SEARCH if words[0] == "check" else "from sordino.cli import main; exit(main())"
        return forks.run(code, *words, folder=tmp_path, path=[place], env=state)

    sordino.folder = tmp_path
    return sordino


def listed(sordino, kind="method"):
    done = sordino("methods", "--json")
    assert done.returncode == 0, done.stderr
    assert "'dp-broken' of sordino-example 1.0 cannot be imported (AttributeError" in done.stderr
    return {row["name"]: row for row in json.loads(done.stdout) if row["package"] and row["kind"] == kind}


def test_an_external_method_is_found_checked_and_refused_until_then(outside):
    rows = listed(outside)
    assert set(rows) == {"dp-halved", "dp-overclaims"}
    assert rows["dp-halved"]["certified"] == {"record": [], "person": []}
    assert not rows["dp-halved"]["checked"]
    assert rows["dp-halved"]["options"] == {"clip": 1.0, "lr": 0.5}

    run = ("run", "--method", "dp-halved", "--set", "rounds=2", "--out")
    refused = outside(*run, "refused")
    assert refused.returncode == 2
    assert "no passed check is on record here: run `sordino check dp-halved` first" in refused.stderr

    checked = outside("check", "dp-halved")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert listed(outside)["dp-halved"]["certified"]["record"] == [
        "secure-aggregation",
        "trusted-server",
        "untrusted-server",
    ]
    done = outside(*run, "mine")
    assert done.returncode == 0, done.stderr
    cert = json.loads((outside.folder / "mine" / "public" / "certificate.json").read_text())
    assert cert["certified"]
    assert any("sordino-example 1.0 (sha256 " in fact for fact in cert["assumes"])

    code = outside.folder / "packages" / "sordino_example.py"  # another content of the same version: checked anew
    code.write_text(code.read_text() + "\n# changed\n")
    assert not listed(outside)["dp-halved"]["checked"]
    assert outside(*run, "again").returncode == 2


def test_a_failed_check_leaves_no_record(outside):
    failed = outside("check", "dp-overclaims")
    assert failed.returncode == 1
    assert not list((outside.folder / "state").rglob("*.json"))
    assert not listed(outside)["dp-overclaims"]["checked"]


@pytest.mark.soak  # the external method above takes the same way
def test_an_external_model_is_found_checked_and_refused_until_then(outside):
    rows = listed(outside, "model")
    assert set(rows) == {"narrow", "mixing"}
    assert rows["narrow"]["options"] == {"width": 4}
    run = ("run", "--method", "dp-fedgd", "--set", "model=narrow", "--set", "width=3", "--set", "rounds=2", "--out")
    refused = outside(*run, "refused")
    assert refused.returncode == 2
    assert "no passed check is on record here: run `sordino check narrow` first" in refused.stderr

    checked = outside("check", "narrow")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert listed(outside, "model")["narrow"]["checked"]
    done = outside(*run, "mine")
    assert done.returncode == 0, done.stderr
    cert = json.loads((outside.folder / "mine" / "public" / "certificate.json").read_text())
    assert cert["certified"]
    assert any("The model narrow comes from the package sordino-example 1.0" in fact for fact in cert["assumes"])
    assert outside("verify", "mine").returncode == 0


def test_a_model_that_mixes_records_fails_the_check(outside):
    failed = outside("check", "mixing")
    assert failed.returncode in (1, 2)
    assert not list((outside.folder / "state").rglob("*.json"))
    assert not listed(outside, "model")["mixing"]["checked"]


def test_an_error_in_a_rule_from_outside_names_the_method_and_the_line(outside):
    code = outside.folder / "packages" / "sordino_example.py"
    text = code.read_text()
    code.write_text(text.replace("(-lr / (1 + t) * g, state)", "({}['gone'], state)"))
    line = next(k for k, line in enumerate(code.read_text().splitlines(), 1) if "{}['gone']" in line)
    for words in (("run", "--method", "dp-halved", "--set", "uncertified=true"), ("check", "dp-halved")):
        failed = outside(*words)
        assert failed.returncode == 2
        assert "Traceback" not in failed.stderr
        assert f"method dp-halved: halved.<locals>.<lambda> failed at line {line} of {code}" in failed.stderr
        assert "(KeyError: 'gone'); mend it there." in failed.stderr


def test_an_error_elsewhere_is_not_blamed_on_code_from_outside():
    from sordino import plugins

    with pytest.raises(KeyError) as raised:
        {}["ours"]
    assert plugins.fault_of(raised.value) == ""


def test_an_external_transport_is_used(outside):
    done = outside("federate", "coordinate", "study", "--transport", "example", "--port", "8123")
    assert done.returncode == 2
    assert "example transport, port 8123" in done.stderr
    unknown = outside("federate", "coordinate", "study", "--transport", "exampel")
    assert unknown.returncode == 2
    assert "'exampel' is unknown. Did you mean 'example'?" in unknown.stderr


OWN = """
from torch import nn


def build(features: int, classes: int, *, width: int = 4):
    return nn.Sequential(nn.Linear(features, width), nn.Tanh(), nn.Linear(width, classes))


def picture(features: int, classes: int):
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, classes)), (1, 8, 8)


def shapeless(features: int, classes: int):
    return picture(features, classes)[0]


def normed(features: int, classes: int):
    return nn.Sequential(nn.Linear(features, 4), nn.BatchNorm1d(4), nn.Linear(4, classes))


class OwnLSTM(nn.LSTM):
    pass


class Recurrent(nn.Module):
    def __init__(self, features, classes):
        super().__init__()
        self.memory, self.out = OwnLSTM(features, 4, batch_first=True), nn.Linear(4, classes)

    def forward(self, x):
        return self.out(self.memory(x)[0][:, -1])


def recurrent(features: int, classes: int):
    return Recurrent(features, classes), (1, features)


class Mixing(nn.Module):
    def __init__(self, features, classes):
        super().__init__()
        self.layer = nn.Linear(features, classes)

    def forward(self, x):
        return self.layer(x + x.mean(0))


def mixing(features: int, classes: int):
    return Mixing(features, classes), (features,)


def narrow(features: int, classes: int):
    return nn.Linear(5, classes)


def named_otherwise(features, outputs):
    return nn.Linear(features, outputs)


def text(features: int, classes: int):
    return "a network"


def stepwise(*, unit="record", clip: float = 1.0):
    raise NotImplementedError


from sordino.methods import MethodEntry
ENTRY = MethodEntry(stepwise, "example", "no paper")
def without_arguments():
    return nn.Linear(64, 3)


number = 3
module = nn.Linear(64, 3)
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A folder with the user's own code, in which commands run; nothing of it stays known."""
    from sordino import plugins

    monkeypatch.setattr(plugins, "_allowed", {})
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("SORDINO_STATE", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_nets.py").write_text(OWN)
    yield tmp_path
    sys.modules.pop("own_nets", None)


def sordino(*words):
    from sordino.cli import main

    return main(list(words))


def test_own_code_is_trained_by_its_name_once_it_was_checked(own, capsys, monkeypatch):
    import torch

    from sordino import plugins
    from sordino.errors import SordinoError
    from sordino.models import registry
    from sordino.training.artifacts import load_model

    run = ("run", "--model", "own_nets:build", "--method", "dp-fedgd", "--rounds", "1", "--set", "width=3", "--out")
    assert sordino(*run, "refused") == 2
    assert "code of the user's own, of which no passed check is on record here" in capsys.readouterr().err
    assert sordino(*run, "uncertified", "--set", "uncertified=true") == 0
    assert not json.loads((own / "uncertified" / "public" / "certificate.json").read_text())["certified"]

    plugins.remember(plugins.allow("own_nets:build"), ok=True)  # what a passed check leaves
    assert sordino(*run, "mine") == 0
    cert = json.loads((own / "mine" / "public" / "certificate.json").read_text())
    assert cert["certified"]
    assert any("own_nets:build is code of the user's own (own_nets, sha256 " in fact for fact in cert["assumes"])

    assert sordino(*run, "half", "--set", "dtype=bfloat16") == 0
    assert load_model(own / "half" / "public" / "model.safetensors").model.autocast is torch.bfloat16

    plugins._allowed.clear()  # another process, to which the user did not name the code
    monkeypatch.chdir("/")
    assert registry.entry("own_nets:build").options["width"].default == 4
    plugins._allowed.clear()
    (own / "own_nets.py").write_text(OWN + "# changed\n")
    with pytest.raises(SordinoError, match="no passed check is on record here"):
        registry.entry("own_nets:build")


@pytest.mark.soak  # the search takes seconds
def test_the_check_of_own_code_is_put_on_record(own):
    from sordino import plugins

    assert sordino("check", "own_nets:build", "--shape", "3,3") == 0
    run = ("run", "--model", "own_nets:build", "--method", "dp-fedgd", "--rounds", "1", "--out", "mine")
    assert sordino(*run) == 0
    assert sordino("verify", "mine") == 0
    plugins._allowed.clear()
    assert plugins.own_model("own_nets:build") is not None
    assert plugins.own_model("own_nets:picture") is None


def test_a_file_cannot_name_code(own, capsys):
    (own / "spec.toml").write_text('model = "own_nets:build"\nmethod = "dp-fedgd"\nuncertified = true\n')
    assert sordino("run", "spec.toml", "--out", "theirs") == 2
    assert "is somebody's own code" in capsys.readouterr().err
    assert "own_nets" not in sys.modules


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("normed", r"batch norm \(\d+\) mixes examples"),
        ("recurrent", r"single examples of memory \(OwnLSTM\) cannot be computed"),
        ("mixing", "its output for one row depends on the other rows"),
        ("shapeless", r"returns the pair \(module, \(1, 28, 28\)\)"),
        ("narrow", "reads rows of 5 numbers, but these have 64; build it from its first argument"),
        ("text", "builds a str; return a torch.nn.Module, or a pair"),
        ("number", "is a int; name a function that builds a module"),
        ("named_otherwise", "is called with `features` and `classes`.*'outputs' has none. Rename it"),
        ("absent", "^model: 'own_nets:absent' cannot be imported .* check the names of module and function"),
        ("module", "is a Linear; name a function that builds a module"),
        ("without_arguments", "cannot be built .*It is called with features and classes"),
    ],
)
def test_own_code_is_refused_as_in_python(own, function, message):
    from sordino import plugins
    from sordino.errors import SordinoError
    from sordino.models import registry

    plugins.allow(f"own_nets:{function}")
    with pytest.raises(SordinoError, match=message):
        registry.build(f"own_nets:{function}", 64, 3)


@pytest.mark.parametrize(
    "words", [("run", "--method", "own_nets:stepwise"), ("check", "own_nets:stepwise"), ("check", "own_nets:ENTRY")]
)
def test_a_method_that_is_named_by_module_and_function_is_told_how_to_be_registered(own, words, capsys):
    assert sordino(*words) == 2
    told = capsys.readouterr().err
    assert f"method: '{words[-1]}' is a module and a function, which --model takes and --method does not" in told
    assert f'[project.entry-points."sordino.methods"] and the line dp-mine = "{words[-1]}"' in told


def test_own_code_starts_from_the_public_seed(own):
    import torch

    from sordino import plugins
    from sordino.models import registry

    plugins.allow("own_nets:picture")
    first, same, other = (registry.build("own_nets:picture", 64, 3, seed=seed).init() for seed in (1, 1, 2))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


@pytest.mark.parametrize(
    ("name", "message"),
    [("own nets:build", "must be a module and a function"), ("nowhere:build", "there is no module 'nowhere'")],
)
def test_names_of_code_are_checked(own, name, message):
    from sordino import plugins
    from sordino.errors import SordinoError

    with pytest.raises(SordinoError, match=message):
        plugins.allow(name)
