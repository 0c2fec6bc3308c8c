"""What tests of several folders use."""

import atexit
import gc
import io
import json
import logging
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


# To draw takes three quarters of a short run. Tests that do not look at a picture get the first one of its format.
PAINTED: dict[str, bytes] = {}


@pytest.fixture(scope="session", autouse=True)
def painting():
    """A switch: whether every figure is painted."""
    switch = {"on": False}
    try:
        from matplotlib.figure import Figure
    except ImportError:
        yield switch
        return
    paint = Figure.savefig

    def savefig(figure, path, **options):
        text = isinstance(path, io.StringIO)  # of a picture that is part of a page
        ending = f"{options['format']} text" if text else Path(path).suffix if isinstance(path, str | Path) else ""
        if switch["on"] or not ending:
            paint(figure, path, **options)
            return
        if ending not in PAINTED:
            paint(figure, path, **options)
            PAINTED[ending] = path.getvalue().encode() if text else Path(path).read_bytes()
        if text:
            path.seek(0)
            path.truncate()
            path.write(PAINTED[ending].decode())
        else:
            Path(path).write_bytes(PAINTED[ending])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", savefig)
        yield switch


@pytest.fixture(autouse=True)
def painted(request, painting, monkeypatch):
    """Tests with the mark `draws` paint. In others a run with a picture at hand does not even lay it out."""
    painting["on"] = "draws" in request.keywords
    module = sys.modules.get("sordino.training.run")
    if module is not None and not painting["on"] and ".png" in PAINTED:
        monkeypatch.setattr(module, "draw_curve", lambda path, *_: bool(path.write_bytes(PAINTED[".png"])))
    yield
    painting["on"] = False


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session):
    """Every worker begins with other files. In a fresh clone pytest compiles each of them, which takes longer than to
    collect its tests; so a worker finds most of what the others have to compile done."""
    worker = getattr(session.config, "workerinput", None)
    if worker is None or session.config.getoption("ignore"):  # a file that is named may not be ignored
        return
    files = []
    for given in session.config.args:
        folder = session.config.invocation_params.dir / given
        files += sorted(map(str, folder.rglob("test_*.py"))) if folder.is_dir() else [given]
    files, number = list(dict.fromkeys(files)), int(worker["workerid"].removeprefix("gw"))
    first = len(files) * number // worker["workercount"]
    session.config.args = files[first:] + files[:first]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """With several workers the longest tests start first, so that no worker ends alone with one of them. The order is
    the same in all of them, whatever they collected first."""
    if hasattr(config, "workerinput"):
        seconds = json.loads(DURATIONS.read_text())
        items.sort(key=lambda item: (-seconds.get(item.nodeid.partition("[")[0], 0), item.path))


def pytest_collection_finish():
    gc.freeze()
    gc.enable()


@pytest.fixture
def logged():
    """What the package logs: (level, text) of every line. Pytest's own plugin looks at every logger of every library
    before and after every test, and is off."""
    lines, logger = [], logging.getLogger("sordino")

    class Lines(logging.Handler):
        def emit(self, record):
            lines.append((record.levelname, self.format(record)))

    handler, before = Lines(), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield lines
    logger.setLevel(before)
    logger.removeHandler(handler)


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
        """The lines that were left. One that the kill cut off stands before the word "dead", and is dropped."""
        os.kill(self.life, signal.SIGKILL)  # dead already, it lies there still: the number is nobody else's
        self.process.stdin.write("bury\n")
        lines = []
        while not (line := self.line()).endswith("dead"):
            lines.append(line)
        return lines

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
