"""Commands in processes of their own, forked from one that has imported what is large: that is paid for once."""

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

LARGE = ["torch", "numpy", "scipy.stats", "pyarrow", "matplotlib.pyplot", "rich.console"]


def run(
    code: str,
    *words: str,
    folder: Path,
    path: Sequence[Path] = (),
    env: Mapping[str, str] | None = None,
    seconds: float | None = None,
) -> "subprocess.CompletedProcess[str]":
    """Run Python code as `python -c` does.

    Args:
      code: the code; nothing of Sordino is imported before it starts.
      words: its arguments.
      folder: where it runs.
      path: folders that come first where modules are looked for.
      env: further environment variables.
      seconds: until it is killed; None for no limit.

    Returns:
      Exit status, output and errors.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(LARGE)
    files = [folder / f".{name}-{os.urandom(8).hex()}" for name in ("out", "err")]
    process = context.Process(target=_child, args=(code, words, folder, [*map(str, path)], dict(env or {}), files))
    process.start()
    process.join(seconds)
    if process.exitcode is None:
        process.kill()
        process.join()
    out, err = (file.read_text(encoding="utf-8") for file in files)
    for file in files:
        file.unlink()
    return subprocess.CompletedProcess(words, process.exitcode or 0, out, err)


def _child(code: str, words: list[str], folder: Path, path: list[str], env: dict[str, str], files: list[Path]) -> None:
    for number, file in enumerate(files, 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
    os.chdir(folder)
    os.environ.update(env)
    sys.path[:0] = path
    sys.argv = ["-c", *words]
    exec(code, {"__name__": "__main__"})
