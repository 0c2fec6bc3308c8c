"""Runs in the coordinator's process of a real federation: several coordinators, one after another."""

from pathlib import Path

from sordino.federation import coordinator


def every(transport, folder: Path) -> None:
    for place in sorted(path for path in folder.iterdir() if (path / "federation.toml").exists()):
        coordinator.serve(transport, place)
    (folder / "done").touch()
