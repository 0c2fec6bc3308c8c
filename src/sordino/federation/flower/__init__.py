"""The transport over Flower's SuperLink and SuperNodes. It carries bytes and does not read them.

A transport is one folder like this one, and adding another touches nothing else in `federation`. It provides
- an object with `sites()` and `exchange(requests, seconds, enough)`, the `Transport` of `federation.messenger`, with
  which it calls `federation.coordinator.serve(transport, folder)` in the coordinator's process;
- a process per site that calls `federation.handler.handle(request)` for each message and sends back its reply;
- `coordinate` and `join`, the entry points for several machines (`deploy.py`).

Nothing outside this folder imports it, except the entry points: `cli/federate.py`, and
`operations/demonstration.py` for `sordino federate up`.

No code travels. Flower's app bundle is an empty shell that the server side needs to start a run. A site takes its
messages with the installed `worker` and never unpacks the bundle.

`app.py` is another way to carry the same messages: a standard app for a Flower deployment that somebody already runs,
by Flower's public interface. `mod.py` makes other apps private. Both work with later versions of Flower too.
"""

from __future__ import annotations

import logging
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from sordino.errors import SordinoError

NODES = "SORDINO_NODES"  # names a file for the server: {site: number of its node at the link}
FLWR = "1.41."  # `worker` and `supernode` use private parts of this version
FIRST_PUBLIC = "1.21"  # the first version with the public interface that `app` and `mod` use


def require() -> None:
    """Check that Flower is installed, in the version whose internals this folder uses.

    Raises:
      SordinoError: it is missing, or another version.
    """
    try:
        installed = version("flwr")
    except PackageNotFoundError:
        raise SordinoError("Flower is not installed: pip install 'sordino[flower]'.") from None
    if not installed.startswith(FLWR):
        raise SordinoError(f"flwr {installed} is installed and {FLWR}* is needed: pip install 'sordino[flower]'.")


def require_public() -> None:
    """Check that Flower is installed, with the public interface that `app` and `mod` use.

    Raises:
      SordinoError: it is missing, or older.
    """
    try:
        installed = version("flwr")
    except PackageNotFoundError:
        raise SordinoError("Flower is not installed: pip install 'sordino[flower-app]'.") from None
    first, own = ([int(part) for part in text.split(".")[:2]] for text in (FIRST_PUBLIC, installed))
    if own < first:
        raise SordinoError(f"flwr {installed} is installed, and {FIRST_PUBLIC} or later is needed.")


def named(reference: str, field: str) -> Any:
    """The object that "module:name" names."""
    module, _, name = reference.partition(":")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise SordinoError(f"{field}: {reference!r} is not found ({error}); give module:function.") from error


def logs() -> None:
    """Log what sordino reports, and warnings of other packages, to standard error."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("sordino").setLevel(logging.INFO)
