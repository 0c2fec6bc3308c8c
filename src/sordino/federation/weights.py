"""The folder of weights that a model begins with: every party has a copy, and the terms hold the hash of its files.

The hash covers the tokenizer too, so that all sites read their texts as the same tokens. No weights are sent.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from sordino.errors import SordinoError
from sordino.training.artifacts import WEIGHT_FILES, weights_sha256


def folder_hash(folder: str) -> str:
    """The hash of a party's own folder of weights. It is computed again only if a file changed.

    Args:
      folder: its path; empty where the party names none.

    Returns:
      The hash; empty where there is no folder.

    Raises:
      SordinoError: the folder is not there, or holds no weights.
    """
    if not folder:
        return ""
    place = Path(folder)
    if not place.is_dir():
        raise SordinoError(f"weights: there is no folder '{folder}'; name one that save_pretrained wrote.")
    files = sorted(each for each in place.iterdir() if each.suffix in WEIGHT_FILES and each.is_file())
    if not files:
        raise SordinoError(f"weights: '{folder}' holds no files of a model; name one that save_pretrained wrote.")
    stats = ((each.name, each.stat()) for each in files)
    return _hash(folder, tuple((name, at.st_mtime_ns, at.st_ctime_ns, at.st_size, at.st_ino) for name, at in stats))


@lru_cache(maxsize=8)
def _hash(folder: str, state: tuple[tuple[str | int, ...], ...]) -> str:
    return weights_sha256(Path(folder))


def check_weights(agreed: str, folder: str) -> None:
    """Compare a party's own folder with the hash that the terms state.

    Args:
      agreed: the hash; empty where the model needs no folder.
      folder: its path; empty where the party names none.

    Raises:
      SordinoError: the files are other ones, or one of the two is missing.
    """
    own = folder_hash(folder)
    if own == agreed:
        return
    if not own:
        raise SordinoError(
            f"weights: the model begins with a folder of weights (sha256 {agreed}), and none is named here; set "
            "weights to your own copy of it."
        )
    if not agreed:
        raise SordinoError(f"weights: '{folder}' is named here, and the terms state no weights; remove the key.")
    raise SordinoError(
        f"weights: the files of '{folder}' have sha256 {own}, and the terms state {agreed}: model and tokenizer must "
        "be the same files everywhere."
    )
