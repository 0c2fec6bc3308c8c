"""What tests of several folders use."""

import atexit
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

# Ledgers wait until the disk has each entry. Temporary folders lie in memory where it has room, so tests need not wait.
# Some tests start what they compile there.
MEMORY, ROOM = Path("/dev/shm"), 4 * 2**30
if "TMPDIR" not in os.environ and MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > ROOM:
    executes = not os.statvfs(MEMORY).f_flag & os.ST_NOEXEC
    os.environ["TMPDIR"] = tempfile.tempdir = str(MEMORY) if executes else tempfile.gettempdir()

# Sites write their witnesses there; processes that tests start inherit it.
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="sordino-state-")
atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)

# Nothing that collection makes is garbage. To look for it takes a quarter of the time.
gc.disable()

# CPU seconds of the longest tests, by file and function; parameters share them.
DURATIONS = Path(__file__).parent / "support" / "durations.json"


@pytest.fixture(scope="session")
def picture(tmp_path_factory):
    """The bytes of one real picture of a run, drawn once per process."""
    from sordino.training.evaluate import draw_curve

    path = tmp_path_factory.mktemp("picture") / "curve.png"
    history = [{"round": t, "accuracy": 0.5 + t / 10, "epsilon": float(t)} for t in (1, 2)]
    return path.read_bytes() if draw_curve(path, "any run", 1e-5, history) else None


@pytest.fixture(autouse=True)
def one_picture(request, monkeypatch):
    """Drawing takes three quarters of a short run. Tests that do not look at the picture get the same one each time."""
    module = sys.modules.get("sordino.training.run")
    if module is None or "draws" in request.keywords:
        return

    def draw(path, title, delta, history):
        content = request.getfixturevalue("picture")
        if content is not None:
            path.write_bytes(content)
        return content is not None

    monkeypatch.setattr(module, "draw_curve", draw)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """With several workers the longest tests start first, so that no worker ends alone with one of them."""
    if hasattr(config, "workerinput"):
        seconds = json.loads(DURATIONS.read_text())
        items.sort(key=lambda item: -seconds.get(item.nodeid.partition("[")[0], 0))


def pytest_collection_finish():
    gc.freeze()
    gc.enable()


LIVES = """
import atexit, os, sys
{imports}
while sys.stdin.readline():
    if not os.fork():
        break
    sys.stdin.readline()
    os.wait()
    print("dead", flush=True)
else:
    sys.exit()
print(os.getpid(), flush=True)
atexit.register(print, "end", flush=True)
{compute}
"""


class Lives:
    """A process to be killed again and again: `imports` are paid for once, every life that does the `compute` is forked
    from there. What a life prints comes line by line; "end" is the last of them, if it gets that far."""

    def __init__(self, imports, compute, *arguments):
        code = LIVES.format(imports=imports, compute=compute)
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
        self.process = subprocess.Popen([sys.executable, "-c", code, *map(str, arguments)], **pipes)
        self.life = 0

    def begin(self):
        self.process.stdin.write("begin\n")
        self.life = int(self.line())

    def line(self):
        line = self.process.stdout.readline().strip()
        assert line, "the process is gone"
        return line

    def kill(self):
        """The lines that were left."""
        os.kill(self.life, signal.SIGKILL)  # dead already, it lies there still: the number is nobody else's
        self.process.stdin.write("bury\n")
        return list(iter(self.line, "dead"))

    def close(self):
        self.process.communicate()


@pytest.fixture
def lives():
    made = []

    def make(imports, compute, *arguments):
        made.append(Lives(imports, compute, *arguments))
        return made[-1]

    yield make
    for each in made:
        each.close()
