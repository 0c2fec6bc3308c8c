"""What the processes of the tests run: a site's handler, and a server that does what is asked of it by files."""

import os
import pickle
import time
from pathlib import Path

from sordino.wire import MAGIC


def handle(request: bytes) -> bytes:
    """The message backwards; or what it says. A coordinator's messages go to the site."""
    if request.startswith(MAGIC):
        from sordino.federation import handler

        return handler.handle(request)
    word, _, rest = request[:100].partition(b" ")
    if word == b"raise":
        raise ValueError(f"patient {rest.decode()}")
    if word == b"sleep":
        Path(os.environ["BEGUN"], os.environ["SORDINO_SITE"]).touch()
        time.sleep(float(rest))
    if word == b"long":
        return bytes(int(rest))
    return request[::-1]


def serve(transport, folder: Path) -> None:
    """First the trainings of $COORDINATORS, if it is set. Then each file N.ask holds (messages, seconds, enough), and
    N.told gets (replies, failures, sites)."""
    if trainings := os.environ.get("COORDINATORS"):
        import coordinators

        coordinators.every(transport, Path(trainings))
    number = 0
    while True:
        number += 1
        while not (folder / f"{number}.ask").exists():
            time.sleep(0.05)
        question = pickle.loads((folder / f"{number}.ask").read_bytes())
        if question is None:
            return
        requests, seconds, enough = question
        replies = transport.exchange(
            requests, seconds, (lambda got, least=enough: len(got) >= least) if enough else None
        )
        told = (replies, dict(transport.failures), transport.sites())
        (folder / "told").write_bytes(pickle.dumps(told))
        (folder / "told").rename(folder / f"{number}.told")
