"""Methods, models and transports of other packages, found by entry points, and what is on record about them.

A package adds them without a change in this one:

    [project.entry-points."sordino.methods"]
    dp-mine = "my_package.mine:ENTRY"     # a `sordino.methods.MethodEntry`, or its factory alone: record level only

    [project.entry-points."sordino.models"]
    my-net = "my_package.nets:ENTRY"      # a `sordino.models.registry.ModelEntry`, or its factory alone

    [project.entry-points."sordino.transports"]
    my-link = "my_package.link"           # a module with `coordinate` and `join`: see `sordino.federation.transports`

`sordino methods` lists methods and models, and `sordino check NAME` tries to break them. A transport carries signed
messages and is trusted with nothing, so there is nothing to check.

**Uncertified until checked.** The tests of this package hold every method and model here to its claims; nobody did so
for others. A method or model from outside therefore proves nothing until `sordino check NAME` has passed on this
machine. The outcome is kept in the user's state directory (`state()`), for exactly this name, distribution, version and
content of its files, and for exactly these sources of Sordino. After any change of either, the check must pass again.
Until then a run with it is refused unless the user sets `uncertified = true`, and its certificate says "not certified".
Once the check has passed, the certificate names the distribution, its version and the hash among its assumptions.

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
from datetime import UTC, datetime
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from sordino.core import Method
from sordino.errors import SordinoError
from sordino.files import write
from sordino.privacy.evidence.signing import code_sha256, sha256

METHODS = "sordino.methods"
MODELS = "sordino.models"
TRANSPORTS = "sordino.transports"
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
        return f"{self.package} {self.version}"

    def load(self) -> Any:
        """What the entry point names. Whatever its import raises becomes one line that names the package."""
        try:
            return self.point.load()
        except Exception as error:
            raise SordinoError(
                f"{self.group}: '{self.name}' of {self.about} cannot be imported ({type(error).__name__}: {error}); "
                "update or uninstall the package."
            ) from error

    def sha256(self) -> str:
        """Of names and contents of every file in the package (or of the one module) that the entry point is in."""
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


def state() -> Path:
    """Where passed checks are kept: $SORDINO_STATE, or $XDG_STATE_HOME/sordino, or ~/.local/state/sordino."""
    if own := os.environ.get("SORDINO_STATE"):
        return Path(own)
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "sordino"


def _record(plugin: Plugin) -> Path:
    return state() / "checks" / plugin.group / f"{plugin.name}.json"


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
    write(path, (json.dumps(document, indent=2) + "\n").encode())
    return path


def judged(method: Method, plugin: Plugin) -> Method:
    """The method with the guarantees that it may claim where it is, or uses, the plugin: all of its own after a passed
    check, else none."""
    if passed(plugin):
        return method._replace(assumes=(*method.assumes, assumption(plugin)))
    return method._replace(proves=frozenset(), caveat=unchecked(plugin))


def assumption(plugin: Plugin) -> str:
    kind = plugin.group.removeprefix("sordino.").removesuffix("s")
    return (
        f"The {kind} {plugin.name} comes from the package {plugin.about} (sha256 {plugin.sha256()}). It passed "
        "`sordino check`; its proofs are the package's own."
    )


def unchecked(plugin: Plugin) -> str:
    return (
        f"{plugin.name} comes from the package {plugin.about}, of which no passed check is on record here: run "
        f"`sordino check {plugin.name}` first."
    )
