"""A study as a standard Flower app, for a SuperLink and SuperNodes that somebody already runs.

    sordino federate app study        # writes study/app
    flwr run study/app

Both halves use Flower's public interface alone (`flwr.app`, `flwr.serverapp`, `flwr.clientapp`) and carry the same
messages as `coordinate` and `join`: the coordinator and the sites are those of `sordino.federation`.

The app holds no data, no ledger and no limit. The operator of a site names them to the SuperNode, which a server cannot
change:

    --node-config 'sordino-socket="/run/sordino/north.sock"'   # `sordino federate serve` answers there
    --node-config 'sordino-site="/srv/north/site.toml"'        # or: the app's process reads the site's files itself

With a socket, the user whose SuperNode runs the app needs no right to read the site's files: whatever app is sent, it
can exchange messages with the site and nothing else. With a path, the process of the app can read what it names, so the
operator must trust whoever may start runs at the SuperLink.

In Flower's simulation there is no such setting. The environment then names a folder of sites (`$SORDINO_SITES`), and
the virtual node with partition k is the k-th of them by name.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sordino import files
from sordino.errors import SordinoError
from sordino.federation import door
from sordino.federation.flower import FIRST_PUBLIC, logs, require_public
from sordino.federation.flower.reply import answer
from sordino.federation.flower.transport import GridTransport
from sordino.settings import read_toml

if TYPE_CHECKING:
    from flwr.app import Context, Message
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp

SITE, SOCKET = "sordino-site", "sordino-socket"  # keys of a SuperNode's --node-config
PARTITION = "partition-id"  # of a virtual node in a simulation
SITES, SITE_FILE = "SORDINO_SITES", "SORDINO_SITE_FILE"  # in the environment of a SuperNode
COORDINATOR = "SORDINO_FOLDER"  # in the environment of the SuperLink: the coordinator's folder, in place of the app's
FOLDER = "folder"  # key of the run's configuration: where the coordinator's files go, at the SuperLink
PACKAGE = "sordino_study"  # of the app
CLOCK_SLACK = 60.0  # seconds by which the clocks of site and server may differ

PYPROJECT = """\
[project]
name = "sordino-study"
version = "1.0.0"
description = "A federated study with differential privacy."
license = "Apache-2.0"
dependencies = []  # flwr >= {first} and sordino, which the operators of link and sites install themselves

[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[tool.hatch.build.targets.wheel]
packages = ["."]

[tool.flwr.app]
publisher = "sordino"

[tool.flwr.app.components]
serverapp = "{package}.server:app"
clientapp = "{package}.client:app"

# What is trained, and how private it is: `flwr run . --run-config 'epsilon=4.0 rounds=10'` changes it for one run.
[tool.flwr.app.config]
{folder} = ""  # for the coordinator's files, at the SuperLink; empty: ~/sordino/flower-RUN
"""
SERVER = """\
from pathlib import Path

from sordino.federation.flower.app import server_app

app = server_app(Path(__file__).parent)
"""
CLIENT = """\
from sordino.federation.flower.app import client_app

app = client_app()  # the installed package answers; the data, the ledger and the limit are the site's own
"""
README = """\
# A study as a Flower app

Sites: {names}. `pyproject.toml` says what is trained and how private it is.

At each site, once:

    pip install 'sordino[flower-app]'
    sordino federate keys NAME SITE_FOLDER --data FILE {described} --limit 8
    sordino federate serve SITE_FOLDER/site.toml --socket /run/sordino/NAME.sock      # as the owner of the data
    flower-supernode … --node-config 'sordino-socket="/run/sordino/NAME.sock"'        # as another user

Then `flwr run .` with the SuperLink of these SuperNodes. The model is in `{folder}` at the SuperLink, and the
certificate of each site in its SITE_FOLDER/runs/.
"""


# ---------------------------------------------------------------------------------------------------------- the app


def client_app() -> ClientApp:
    """The app of a site: it hands each message to the site that the SuperNode's operator named.

    Raises:
      SordinoError: Flower is missing or too old.
    """
    require_public()
    from flwr.clientapp import ClientApp

    app = ClientApp()

    @app.query()
    def query(message: Message, context: Context) -> Message:
        return answer(lambda request: handler(context)(request), message, CLOCK_SLACK)

    return app


def handler(context: Context) -> Callable[[bytes], bytes]:
    """What makes the replies of this node.

    Raises:
      SordinoError: nobody named a site.
    """
    own = context.node_config
    if own.get(SOCKET):
        return partial(door.ask, Path(str(own[SOCKET])).expanduser())
    if own.get(SITE):
        path = Path(str(own[SITE])).expanduser()
    elif PARTITION in own and os.environ.get(SITES):
        path = _virtual(os.environ[SITES])[int(own[PARTITION])]
    elif os.environ.get(SITE_FILE):
        path = Path(os.environ[SITE_FILE])
    else:
        raise SordinoError(
            f"{SOCKET}: the SuperNode names no site; start it with --node-config "
            f"'{SOCKET}=\"/run/sordino/NAME.sock\"', where `sordino federate serve` answers."
        )
    from sordino.federation import handler  # loads the libraries for numbers, which a socket does not need

    return partial(handler.answer, path / "site.toml" if path.is_dir() else path)


@lru_cache(1)
def _virtual(folder: str) -> list[Path]:
    return sorted(path for path in Path(folder).iterdir() if (path / "site.toml").is_file())


def server_app(bundle: Path) -> ServerApp:
    """The app of the server: the coordinator of the study that the app's folder describes.

    Args:
      bundle: the folder of the app's package, with federation.toml.

    Raises:
      SordinoError: Flower is missing or too old.
    """
    require_public()
    from flwr.serverapp import ServerApp

    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        from sordino.federation.coordinator import serve

        logs()
        named = os.environ.get(COORDINATOR)
        folder = Path(named) if named else prepare(bundle, context.run_config, context.run_id)
        serve(GridTransport(grid, together=SITES in os.environ), folder)

    return app


def prepare(bundle: Path, config: Mapping[str, Any], run: int) -> Path:
    """The coordinator's folder of a run. One that exists is continued, if it describes the same study.

    Args:
      bundle: the folder of the app's package.
      config: the run's configuration: keys of spec.toml, and `folder`.
      run: the run's number at the SuperLink.

    Raises:
      SordinoError: the folder belongs to another study, or its run is over.
    """
    import tomli_w

    place = Path(str(config.get(FOLDER) or f"~/sordino/flower-{run}")).expanduser()
    more = read_toml(bundle / "spec.toml") if (bundle / "spec.toml").exists() else {}
    spec = {key: value for key, value in config.items() if key != FOLDER} | more
    about = read_toml(bundle / "federation.toml", "federation.toml")
    if about.get("test") and not Path(about["test"]).exists():
        del about["test"]  # the records of whoever made the app are not here
    texts = {"spec.toml": tomli_w.dumps(spec), "federation.toml": tomli_w.dumps(about)}
    texts |= {path.name: path.read_text(encoding="utf-8") for path in bundle.glob("*.toml") if path.name not in texts}
    if (place / "run" / "certificate.json").exists():
        raise SordinoError(f"{FOLDER}: the run in '{place}' is over; choose another folder.")
    for name, text in texts.items():
        if (place / name).exists() and (place / name).read_text(encoding="utf-8") != text:
            raise SordinoError(f"{FOLDER}: '{place}' belongs to another study ({name} differs); choose another folder.")
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name, text in texts.items():
        files.write(place / name, text.encode())
    return place


# --------------------------------------------------------------------------------------------------------- its folder


def write_study(study: Path, folder: Path) -> list[Path]:
    """Write the app of a study: what it trains as the app's configuration, and with whom as files of its package.

    Args:
      study: the coordinator's folder, made by `sordino federate init`.
      folder: of the app; files of an earlier one are replaced.

    Returns:
      The files written.

    Raises:
      SordinoError: the study cannot be run, or the roster is missing.
    """
    import tomli_w

    from sordino.federation.config import FederationConfig
    from sordino.federation.folders import described_by, proposed
    from sordino.secagg import Roster

    config = FederationConfig.read(study / "federation.toml")
    terms = proposed(study, [1000] * len(config.sites))
    about = read_toml(study / "federation.toml", "federation.toml") | {"spec": "spec.toml"}
    texts: dict[str, str] = {"__init__.py": "", "server.py": SERVER, "client.py": CLIENT}
    if terms.secure or config.path(config.roster).exists():
        Roster.read(config.path(config.roster))
        texts["roster.toml"] = config.path(config.roster).read_text(encoding="utf-8")
        about["roster"] = "roster.toml"
    if config.schema is not None:
        texts["schema.toml"] = config.path(config.schema).read_text(encoding="utf-8")
        about["schema"] = "schema.toml"
    if config.test is not None and config.path(config.test).exists():
        about["test"] = str(config.path(config.test).resolve())
    spec = read_toml(config.path(config.spec))
    plain = {key: value for key, value in spec.items() if isinstance(value, str | int | float)}
    if rest := {key: value for key, value in spec.items() if key not in plain}:
        texts["spec.toml"] = tomli_w.dumps(rest)
    texts["federation.toml"] = tomli_w.dumps(about)
    head = PYPROJECT.format(first=FIRST_PUBLIC, package=PACKAGE, folder=FOLDER)
    outer = {
        "pyproject.toml": head + tomli_w.dumps(plain),
        "README.md": README.format(
            names=", ".join(config.sites),
            folder="~/sordino/flower-RUN/run",
            described=described_by(config.classes, schema=config.schema is not None),
        ),
    }
    package = folder / PACKAGE
    package.mkdir(parents=True, exist_ok=True)
    for old in ("roster.toml", "schema.toml", "spec.toml"):
        (package / old).unlink(missing_ok=True)
    every = {folder / name: text for name, text in outer.items()} | {package / n: text for n, text in texts.items()}
    for path, text in every.items():
        path.write_text(text, encoding="utf-8")
    return list(every)
