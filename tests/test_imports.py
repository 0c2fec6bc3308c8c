"""Imports point one way, and the library itself needs little."""

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

from sordino.cli import main

SRC = Path(__file__).parents[1] / "src" / "sordino"
# Each layer may import those before it, and itself.
LAYERS = [
    *(
        "version",
        "errors",
        "lazy",
        "files",
        "foreign",
        "settings",
        "core",
        "tree",
        "wire",
        "privacy",
        "evidence",
        "plugins",
        "secagg",
        "rules",
    ),
    *(
        "models",
        "data",
        "methods",
        "engines",
        "checks",
        "training",
        "studies",
        "federation",
        "operations",
        "estimators",
        "cli",
        "__main__",
    ),
]
APART = {("models", "privacy"), ("data", "privacy"), ("privacy", "models"), ("privacy", "data"), ("data", "models")}


def layer(module: str) -> str:
    return module.split(".")[1] if "." in module else "__init__"


@functools.cache
def nodes(source: str) -> list[ast.AST]:
    """The imports of a source file; the tests below read the same files again and again."""
    return [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import | ast.ImportFrom)]


def arrows(path: Path, source: str | None = None):
    """(line, module of sordino that it imports)."""
    for node in nodes(source or path.read_text()):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "sordino":
            for alias in node.names if node.module == "sordino" else [None]:
                yield node.lineno, node.module if alias is None else f"sordino.{alias.name}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "sordino":
                    yield node.lineno, alias.name


def backward(path: Path, source: str | None = None):
    here = path.relative_to(SRC).parts[0].removesuffix(".py")
    for line, module in arrows(path, source):
        there = layer(module)
        if there not in LAYERS or LAYERS.index(there) > LAYERS.index(here) or (here, there) in APART:
            yield f"{path.relative_to(SRC)}:{line} imports {module}"


FILES = sorted(path for path in SRC.rglob("*.py") if path != SRC / "__init__.py")


def test_every_module_belongs_to_a_layer():
    assert {path.relative_to(SRC).parts[0].removesuffix(".py") for path in FILES} == set(LAYERS)


def test_imports_point_one_way():
    assert [arrow for path in FILES for arrow in backward(path)] == []


def test_an_arrow_that_points_back_is_found():
    assert list(backward(SRC / "core.py", "from sordino.privacy.accounting import gaussian"))
    assert list(backward(SRC / "privacy" / "plan.py", "import sordino.engines.simulate"))
    assert list(backward(SRC / "privacy" / "plan.py", "from sordino.models.linear import Linear"))
    assert list(backward(SRC / "methods" / "fedgd.py", "def f():\n    from sordino import cli"))
    assert not list(backward(SRC / "methods" / "fedgd.py", "from sordino.rules import scale"))


def circles(sources: dict[str, str]) -> list[list[str]]:
    """Groups of modules that import each other, directly or through others. sources: module name -> source code.

    Imports inside functions and under TYPE_CHECKING count too. `from sordino import files` imports the module
    `sordino.files`; any other name of a package is an import of the package itself.
    """
    direct = {}
    for module, source in sources.items():
        direct[module] = set()
        for node in nodes(source):
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{module}: a relative import"
                parts = (f"{node.module}.{alias.name}" for alias in node.names)
                direct[module] |= {part if part in sources else node.module for part in parts}
            else:
                direct[module] |= {alias.name for alias in node.names}
        direct[module] &= sources.keys()
    reachable = {}
    for module in direct:
        reachable[module], waiting = set(), [module]
        while waiting:
            new = direct[waiting.pop()] - reachable[module]
            reachable[module] |= new
            waiting.extend(new)
    groups = {tuple(sorted({m for m in reachable[module] if module in reachable[m]})) for module in direct}
    return sorted(list(group) for group in groups if group)


def module_name(path: Path, root: Path) -> str:
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def sources_of_the_package() -> dict[str, str]:
    root = SRC.parents[1]
    paths = [(path, SRC.parent) for path in SRC.rglob("*.py")]
    paths += [(path, root) for path in (root / "papers").rglob("*.py")]
    return {module_name(path, top): path.read_text() for path, top in paths}


def test_no_module_imports_itself_through_others():
    assert circles(sources_of_the_package()) == []


@pytest.mark.parametrize(
    ("module", "line", "others"),
    [
        ("sordino.errors", "from sordino.core import Method", {"sordino.core"}),
        ("sordino.version", "import sordino", {"sordino"}),
        ("sordino.files", "def f():\n    from sordino import secagg", {"sordino.secagg.keys"}),
        ("sordino.privacy.plan", "from sordino.privacy import spending", {"sordino.privacy.spending"}),
    ],
)
def test_an_added_circle_is_found(module, line, others):
    sources = sources_of_the_package()
    sources[module] += "\n" + line
    assert any({module, *others} <= set(group) for group in circles(sources))


def test_no_room_holds_more_than_15_percent_of_all_lines():
    """A room is a folder of the package with all that lies in it, or `papers`."""
    rooms: dict[str, int] = {}
    for name, text in sources_of_the_package().items():
        room = name.removeprefix("sordino.").partition(".")[0]
        rooms[room] = rooms.get(room, 0) + len(text.splitlines())
    largest = max(rooms, key=rooms.__getitem__)
    assert rooms[largest] <= 0.15 * sum(rooms.values()), largest


def test_the_library_needs_torch_numpy_and_scipy_alone_and_torch_when_a_name_needs_it():
    """With everything else that the commands use made unavailable, a private round still runs, given a seed."""
    code = """
import sys
for name in "cryptography dp_accounting pyarrow rich safetensors tomli_w matplotlib sklearn pandas".split():
    sys.modules[name] = None
import numpy as np, sordino
sordino.Plan, sordino.build, sordino.gaussian
assert "torch" not in sys.modules
sordino.Linear
assert "torch" in sys.modules
data = sordino.load("digits")
records = sordino.Records.of(data.x_train, data.y_train, sordino.split(data, "iid", 3))
plan = sordino.Plan(sordino.build("dp-fedsofim"), 2, records.sizes, sordino.Privacy(2.0))
*_, last = sordino.simulate.run(plan, sordino.Linear(64, 10), records, sordino.source(1))
print(sordino.certificate(plan, sordino.source(1), version=sordino.__version__)["epsilon"])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == pytest.approx(2.0)


# ------------------------------------------------------------------------------------------------- what stays light


def imports(code: str, *words: str, env: dict[str, str] | None = None) -> set[str]:
    """The modules that a fresh interpreter has imported after `code`, whose output is thrown away."""
    ending = "print('\\n'.join(sorted(sys.modules)), file=sys.stderr)"
    code = f"import contextlib, io, sys\nwith contextlib.redirect_stdout(io.StringIO()):\n    {code}\n{ending}"
    command = [sys.executable, "-c", code, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr
    found = set(done.stderr.split())
    assert "sordino" in found, "the list of modules is not the interpreter's"
    return found


@functools.cache  # two tests look at some commands
def imported_by(*words: str) -> set[str]:
    """The modules that a command imports."""
    return imports(MAIN, *words)


MAIN = "from sordino.cli import main; status = main(sys.argv[1:]); assert status == 0, status"


def test_importing_the_library_imports_nothing_heavy():
    assert not imports("import sordino; dir(sordino)") & {"torch", "numpy", "scipy", "rich"}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The directory of a finished run: what verify and ledger read."""
    out = tmp_path_factory.mktemp("light") / "run"
    assert main(["run", "--method", "dp-fedgd", "--set", "rounds=2", "--out", str(out)]) == 0
    return out


@pytest.mark.parametrize(
    "words",
    [
        ["methods"],
        ["methods", "--json"],
        ["privacy", "--epsilon", "1", "--rounds", "70", "--clients", "20"],
        ["privacy", "--noise", "1", "--rounds", "200", "--records", "1000", "--batch", "16"],
        ["verify", "RUN"],
        ["ledger", "show", "RUN"],
        ["ledger", "export", "RUN"],
    ],
    ids=" ".join,
)
def test_light_commands_import_nothing_heavy(words, finished):
    heavy = {"torch", "sklearn", "pyarrow", "dp_accounting", "scipy.optimize", "scipy.stats", "scipy.signal", "ssl"}
    assert not imported_by(*(word.replace("RUN", str(finished)) for word in words)) & heavy


@pytest.mark.parametrize(
    "words",
    [
        ["methods"],
        ["privacy", "--epsilon", "1", "--rounds", "70", "--clients", "20", "--records", "2500"],
        ["privacy", "--epsilon", "8", "--delta", "1e-12", "--unit", "client", "--trust", "secure-aggregation"],
        ["privacy", "--noise", "62.4", "--rounds", "70", "--clients", "20", "--adjacency", "add-remove"],
        ["verify", "RUN"],
        ["ledger", "show", "RUN"],
    ],
    ids=" ".join,
)
def test_accounts_of_gaussian_noise_import_neither_scipy_nor_what_is_slow_in_numpy(words, finished):
    """Each command starts within half a second, and scipy.special alone would take half of that."""
    slow = {"torch", "scipy", "numpy.ma"}
    assert not imported_by(*(word.replace("RUN", str(finished)) for word in words)) & slow


@pytest.mark.parametrize("mechanism", ["banded", "inverse-root"])
def test_the_account_of_a_stream_imports_no_signal_processing(mechanism):
    """It would take a second, twice as long as the account itself."""
    code = (
        "import sordino as so; from sordino.privacy import calibration; "
        f"noise = so.build('dp-ftrl', mechanism='{mechanism}'); "
        "calibration.query_noises(so.Plan(noise, 200, (50,) * 4, so.Privacy(), participation='cyclic:2'))"
    )
    assert not imports(code) & {"scipy.signal", "scipy.optimize", "scipy.stats"}


def test_own_names_need_no_entry_points():
    code = "import sordino.plugins; from sordino.methods import build; build('dp-fedgd')"
    assert "importlib.metadata" not in imports(code)


def test_help_does_without_torch_and_scipy():
    code = "from sordino.cli import main\n    with contextlib.suppress(SystemExit): main(['--help'])"
    assert not imports(code) & {"torch", "scipy", "rich"}


def test_type_checkers_and_the_interpreter_find_the_same_names():
    import sordino

    tree = ast.parse((SRC / "__init__.py").read_text())
    guarded = next(node for node in tree.body if isinstance(node, ast.If))
    declared = {alias.name: node.module for node in guarded.body for alias in node.names}
    assert declared == sordino._MODULE
    assert set(sordino.__all__) == set(declared) - set(sordino._SKLEARN)
    for name in sordino.__all__:
        assert getattr(sordino, name) is not None
    assert set(sordino.__all__) <= set(dir(sordino))
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = sordino.nothing
