"""What every file in results/ says of itself: the command, the commit, the versions."""

from __future__ import annotations

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("sordino", "torch", "numpy", "scipy", "cryptography", "dp-accounting")


def provenance(command: str) -> dict[str, Any]:
    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    commit = git("rev-parse", "HEAD")
    return {
        "command": command,
        "commit": commit,
        # None where there is no repository to ask, as in a copy of the files.
        "uncommitted_changes_in_src": bool(git("status", "--porcelain", "--", "../src")) if commit else None,
        "python": platform.python_version(),
        "versions": {name: installed for name in PACKAGES if (installed := _version(name))},
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
