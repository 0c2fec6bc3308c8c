"""Methods, models and transports of other packages, found by entry points, and what is on record about them.

A package adds them without a change in this one:

    [project.entry-points."sordino.methods"]
    dp-mine = "my_package.mine:ENTRY"     # a `sordino.methods.MethodEntry`, or its factory alone: record level only

    [project.entry-points."sordino.models"]
    my-net = "my_package.nets:ENTRY"      # a `sordino.models.registry.ModelEntry`, or its factory alone

    [project.entry-points."sordino.transports"]
    my-link = "my_package.link"           # a module with `coordinate` and `join`: see `sordino.federation.transports`

A model may also be code of the user's own that no package brings: `sordino run --model mypackage.mymodule:build`.

`sordino methods` lists methods and models, and `sordino check NAME` tries to break them. A transport carries signed
messages and is trusted with nothing, so there is nothing to check.

**Uncertified until checked.** The tests of this package hold every method and model here to its claims; nobody did so
for others. A method or model from outside therefore proves nothing until `sordino check NAME` has passed on this
machine. The outcome is kept in the user's state directory (`state()`), for exactly this name, distribution, version and
content of its files, and for exactly these sources of Sordino. After any change of either, the check must pass again.
Until then a run with it is refused unless the user sets `uncertified = true`, and its certificate says "not certified".
Once the check has passed, the certificate names the distribution, its version and the hash among its assumptions.

**Code of one's own** is imported only if the user names it on the command line (`allow`), or if a passed check of
exactly these files is on record here. A spec, a run's folder or terms that somebody else wrote import nothing.

The record protects its owner from a mistake, not others from its owner: whoever can write the directory can write a
record, as whoever can install a package can change this one. So an auditor's `sordino verify` uses the auditor's own
record. The check uses the default options. A package that is installed runs with all rights of its user.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import sys
import traceback
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sordino.core import Method
from sordino.errors import SordinoError
from sordino.evidence.signing import code_sha256, sha256
from sordino.files import write

if TYPE_CHECKING:  # slow to import, and only needed where a name is not Sordino's own
    from importlib.metadata import EntryPoint

METHODS = "sordino.methods"
MODELS = "sordino.models"
TRANSPORTS = "sordino.transports"
OWN_MODEL = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*:[A-Za-z_][A-Za-z0-9_]*")  # module:function
_allowed: dict[str, Plugin] = {}  # code of the user's own that this process may import, by name
_loaded: dict[str, Plugin] = {}  # what this process imported, by name
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class Plugin(NamedTuple):
    """One entry point, and the distribution that brings it."""

    name: str
    group: str
    package: str
    version: str
    point: EntryPoint

    @property
    def about(self) -> str:
        return f"{self.package} {self.version}".strip()

    @property
    def own(self) -> bool:
        """Whether it is the user's own code, named by module and function."""
        return ":" in self.name

    def load(self) -> Any:
        """What the entry point names. Whatever its import raises becomes one line that names the package."""
        try:
            loaded = self.point.load()
            _loaded[self.name] = self
            return loaded
        except Exception as error:
            what, remedy = f"{self.group}: '{self.name}' of {self.about}", "update or uninstall the package"
            if self.own:
                what = f"model: '{self.name}'"
                remedy = "check the names of module and function, as in mynets:build for build in mynets.py"
            raise SordinoError(f"{what} cannot be imported ({type(error).__name__}: {error}); {remedy}.") from error

    def sha256(self) -> str:
        """A hash of the names and contents of all files in the package (or of the one module) of the entry point."""
        spec = find_spec(self.point.module.partition(".")[0])
        if spec is None or not (spec.origin or spec.submodule_search_locations):
            raise SordinoError(f"{self.group}: '{self.name}' of {self.about} has no files; install the package again.")
        roots = [Path(place) for place in spec.submodule_search_locations or ()]
        files = [(path, path.relative_to(root).as_posix()) for root in roots for path in sorted(root.rglob("*"))]
        files = files or [(Path(str(spec.origin)), "")]
        digest = hashlib.sha256()
        for path, name in files:
            if path.is_file() and "__pycache__" not in path.parts:
                digest.update(f"{name} {sha256(path)}\n".encode())
        return digest.hexdigest()

    def facts(self) -> dict[str, str]:
        """What a passed check is valid for."""
        return {
            "name": self.name,
            "group": self.group,
            "package": self.package,
            "version": self.version,
            "sha256": self.sha256(),
            "sordino_sha256": code_sha256(),
        }


@functools.cache
def found(group: str) -> dict[str, Plugin]:
    """Every entry point of a group, by name.

    Raises:
      SordinoError: a name is malformed, or two packages use the same one.
    """
    from importlib.metadata import entry_points

    plugins: dict[str, Plugin] = {}
    for point in entry_points(group=group):
        package, version = (point.dist.name, point.dist.version) if point.dist else ("an unknown package", "")
        if not _NAME.fullmatch(point.name):
            raise SordinoError(f"{group}: '{point.name}' of {package} must consist of letters, digits, '.', '_', '-'.")
        other = plugins.get(point.name)
        if other and (other.package, other.point.value) != (package, point.value):
            raise SordinoError(
                f"{group}: both {other.about} and {package} {version} bring '{point.name}'; uninstall one of them."
            )
        plugins[point.name] = Plugin(point.name, group, package, version, point)
    return plugins


def allow(name: str) -> Plugin:
    """Let this process import a model of the user's own: for names that the user typed, and for nothing else.

    Args:
      name: module and function, as in "mypackage.mymodule:build". The module is looked for in the current folder too.

    Returns:
      The model's entry.

    Raises:
      SordinoError: the name has another form, or there is no such module.
    """
    if not OWN_MODEL.fullmatch(name):
        raise SordinoError(f"model: '{name}' must be a module and a function, as in mypackage.mymodule:build.")
    _allowed[name] = _of_code(name, str(Path.cwd()))
    return _allowed[name]


def own_model(name: str) -> Plugin | None:
    """A model of the user's own: one that was allowed, or one whose passed check is on record here; else None."""
    if not OWN_MODEL.fullmatch(name):
        return None
    if name not in _allowed:
        try:
            known = json.loads(_record_of(MODELS, name).read_text(encoding="utf-8"))
            plugin = _of_code(name, str(known["folder"]))
        except (OSError, ValueError, KeyError, TypeError, SordinoError):
            return None
        if not passed(plugin):
            return None
        _allowed[name] = plugin
    return _allowed[name]


def _of_code(name: str, folder: str) -> Plugin:
    """The entry of code in a folder, which goes to the end of the path of imports. Imports nothing of it."""
    from importlib.metadata import EntryPoint, packages_distributions, version

    top = name.partition(":")[0].partition(".")[0]
    if folder not in sys.path:
        sys.path.append(folder)
    spec = find_spec(top)
    if spec is None:
        raise SordinoError(f"model: there is no module '{top}' here or among the installed packages; check '{name}'.")
    packages = packages_distributions().get(top, [])
    return Plugin(
        name, MODELS, *((packages[0], version(packages[0])) if packages else (top, "")), EntryPoint(name, name, MODELS)
    )


def not_registered(name: str) -> str:
    """What to do with a method that is named by module and function."""
    return (
        f"method: '{name}' is a module and a function, which --model takes and --method does not. A method needs an "
        'entry point: write [project.entry-points."sordino.methods"] and the line '
        f'dp-mine = "{name}" into the pyproject.toml of a package, with the name that your Method has for dp-mine; run '
        "pip install -e . there, and then sordino check dp-mine (docs/how-to/own-package.md)."
    )


def fault_of(error: BaseException) -> str:
    """Which method or model from outside raised an error, and where; empty if no code of theirs was running.

    Args:
      error: what was raised and caught; its traceback is read.

    Returns:
      Name, function, file, line and error, as a sentence.
    """
    by_module: dict[str, list[str]] = {}
    for plugin in _loaded.values():
        kind = plugin.group.removeprefix("sordino.").removesuffix("s")
        by_module.setdefault(plugin.point.module.partition(".")[0], []).append(f"{kind} {plugin.name}")
    for frame, line in reversed([*traceback.walk_tb(error.__traceback__)]):
        if names := by_module.get(str(frame.f_globals.get("__name__")).partition(".")[0], []):
            code = frame.f_code
            return (
                f"{' or '.join(names)}: {code.co_qualname} failed at line {line} of {code.co_filename} "
                f"({type(error).__name__}: {error}); mend it there."
            )
    return ""


def state() -> Path:
    """Where passed checks are kept: $SORDINO_STATE, or $XDG_STATE_HOME/sordino, or ~/.local/state/sordino."""
    if own := os.environ.get("SORDINO_STATE"):
        return Path(own)
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "sordino"


def _record(plugin: Plugin) -> Path:
    return _record_of(plugin.group, plugin.name)


def _record_of(group: str, name: str) -> Path:
    return state() / "checks" / group / f"{name.replace(':', '@')}.json"


def passed(plugin: Plugin) -> bool:
    """Whether a passed check of exactly these files is on record."""
    try:
        known = json.loads(_record(plugin).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(known, dict) and all(known.get(key) == value for key, value in plugin.facts().items())


def remember(plugin: Plugin, *, ok: bool) -> Path:
    """Put the outcome of a check on record: a failed one removes what an earlier one left."""
    path = _record(plugin)
    if not ok:
        path.unlink(missing_ok=True)
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    document = plugin.facts() | {"time": datetime.now(UTC).isoformat(timespec="seconds")}
    document |= {"folder": _folder_of(plugin)} if plugin.own else {}
    write(path, (json.dumps(document, indent=2) + "\n").encode())
    return path


def _folder_of(plugin: Plugin) -> str:
    """Where the code of a user's own model is imported from."""
    spec = find_spec(plugin.point.module.partition(".")[0])
    place = next(iter(spec.submodule_search_locations or ()), spec.origin) if spec else None
    return str(Path(str(place)).resolve().parent)


def judged(method: Method, plugin: Plugin) -> Method:
    """The method with the guarantees that it may claim where it is, or uses, the plugin: all of its own after a passed
    check, else none."""
    if passed(plugin):
        return method._replace(assumes=(*method.assumes, assumption(plugin)))
    return method._replace(proves=frozenset(), caveat=unchecked(plugin))


def assumption(plugin: Plugin) -> str:
    if plugin.own:
        return (
            f"The model {plugin.name} is code of the user's own ({plugin.about}, sha256 {plugin.sha256()}). It passed "
            "`sordino check`, which tries whether it keeps records apart; that it does so is its author's claim."
        )
    kind = plugin.group.removeprefix("sordino.").removesuffix("s")
    return (
        f"The {kind} {plugin.name} comes from the package {plugin.about} (sha256 {plugin.sha256()}). It passed "
        "`sordino check`; its proofs are the package's own."
    )


def unchecked(plugin: Plugin) -> str:
    origin = "is code of the user's own" if plugin.own else f"comes from the package {plugin.about}"
    return (
        f"{plugin.name} {origin}, of which no passed check is on record here: run `sordino check {plugin.name}` first."
    )
