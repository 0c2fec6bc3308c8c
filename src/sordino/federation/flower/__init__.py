"""Letters of bytes over Flower's SuperLink and SuperNodes: what is in them is the business of the layer above.

No code travels. Flower's own app bundle is an empty shell which the server side needs to start a run; a site takes
its letters with the installed `worker` and never unpacks what the server sent along.
"""

from __future__ import annotations

import logging
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from sordino.errors import SordinoError

FLWR = "1.41."  # parts that its authors call private are used in `worker` and `supernode`


def require() -> None:
    """Flower is here, in the one version whose inner parts were read."""
    try:
        found = version("flwr")
    except PackageNotFoundError:
        raise SordinoError("Flower is not installed: pip install 'sordino[flower]'.") from None
    if not found.startswith(FLWR):
        raise SordinoError(f"flwr {found} is installed and {FLWR}* is needed: pip install 'sordino[flower]'.")


def named(reference: str, field: str) -> Any:
    """The object that "module:name" names."""
    module, _, name = reference.partition(":")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise SordinoError(f"{field}: {reference!r} is not found ({error}); give module:function.") from error


def logs() -> None:
    """What sordino has to say, and warnings of others, on standard error."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("sordino").setLevel(logging.INFO)
