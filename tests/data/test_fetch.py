"""Finding, downloading and checking files; every download here comes from this machine."""

from __future__ import annotations

import hashlib
import http.server
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sordino.data import catalog, fetch, formats
from sordino.data.fetch import Published, Remote, locate
from sordino.data.sources import load
from sordino.errors import SordinoError

A9A = b"-1 3:1\n+1 5:1\n"
MD5 = "md5:" + hashlib.md5(A9A).hexdigest()


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("SORDINO_DATA", raising=False)
    reach = urllib.request.urlopen

    def local(request: urllib.request.Request, **options: Any) -> Any:
        if not request.full_url.startswith(("http://127.0.0.1:", "file://")):
            raise urllib.error.URLError("no network in tests")
        return reach(request, **options)

    monkeypatch.setattr("urllib.request.urlopen", local)
    return tmp_path / "cache" / "sordino"


class Handler(http.server.BaseHTTPRequestHandler):
    asked: list[str]

    def do_GET(self) -> None:
        self.asked.append(self.path)
        if self.path == "/gone":
            self.send_error(404)
            return
        if self.path == "/silent":
            threading.Event().wait(1.0)
        self.send_response(200)
        self.send_header("Content-Length", str(len(A9A) + (5 if self.path == "/short" else 0)))
        self.end_headers()
        self.wfile.write(A9A)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[tuple[str, list[str]]]:
    Handler.asked = []
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}", Handler.asked
        running.shutdown()
        thread.join(timeout=10)


def published(*urls: str, checksum: str | None = MD5) -> Published:
    return Published("a9a", "Adult (a9a)", (Remote("a9a", urls, checksum),), ("a9a",))


def put(folder: Path, content: bytes, *names: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_bytes(content)
    return folder


def test_the_folder_given_comes_first_then_the_environment_then_the_cache(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, environment = tmp_path / "given", tmp_path / "environment"
    put(cache / "a9a", b"-1 1:1\n1 1:1", "a9a", "a9a.t")
    assert load("a9a").x_train[0].argmax() == 0
    put(environment, b"-1 2:1\n1 2:1", "a9a", "a9a.t")
    monkeypatch.setenv("SORDINO_DATA", str(environment))
    assert load("a9a").x_train[0].argmax() == 1
    put(given, b"-1 3:1\n1 3:1", "a9a")
    assert load("a9a", data_dir=given).x_train[0].argmax() == 1, "half a set is none"
    put(given, b"-1 3:1\n1 3:1", "a9a.t")
    assert load("a9a", data_dir=given).x_train[0].argmax() == 2


def test_a_folder_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SordinoError, match="data_dir: there is no folder 'nowhere'"):
        load("a9a", data_dir="nowhere")
    monkeypatch.setenv("SORDINO_DATA", "nowhere")
    with pytest.raises(SordinoError, match="SORDINO_DATA: there is no folder 'nowhere'"):
        load("a9a")


def test_offline_one_message_says_what_where_from_and_where_to(cache: Path) -> None:
    with pytest.raises(SordinoError) as caught:
        load("cifar10")
    message = str(caught.value)
    assert "CIFAR-10" in message
    assert "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz (no network in tests)" in message
    assert str(cache / "cifar10") in message
    assert "data_dir or $SORDINO_DATA" in message
    assert "\n" not in message
    with pytest.raises(SordinoError, match=r"Put train-images-idx3-ubyte.gz, .*t10k-labels-idx1-ubyte.gz into"):
        load("mnist")


def test_a_download_is_checked_kept_and_not_repeated(
    cache: Path, server: tuple[str, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    url, asked = server
    for _ in range(2):
        assert locate(published(f"{url}/a9a"), ("a9a",)).read("a9a") == A9A
    assert asked == ["/a9a"]
    assert sorted(path.name for path in (cache / "a9a").iterdir()) == ["a9a", "a9a.sha256"]
    out, err = capsys.readouterr()
    assert out == ""
    assert "a9a" in err


def test_without_a_published_checksum_the_first_download_is_the_measure(
    cache: Path, server: tuple[str, list[str]]
) -> None:
    set_ = published(f"{server[0]}/a9a", checksum=None)
    locate(set_, ("a9a",))
    assert (cache / "a9a" / "a9a.sha256").read_text().strip() == hashlib.sha256(A9A).hexdigest()
    (cache / "a9a" / "a9a").write_bytes(A9A + b"1 1:1\n")
    with pytest.raises(SordinoError, match="a9a' has changed since it was downloaded; delete it to download it again"):
        locate(set_, ("a9a",)).read("a9a")
    (cache / "a9a" / "a9a").unlink()
    assert locate(set_, ("a9a",)).read("a9a") == A9A


@pytest.mark.parametrize(
    ("path", "checksum", "reason"),
    [
        ("/a9a", "md5:" + "0" * 32, "it has md5 .*, not the published 0000"),
        ("/a9a", "sha256:" + "0" * 64, "it has sha256"),
        ("/short", MD5, r"received \d+ of 19 bytes|IncompleteRead"),
        ("/gone", MD5, "Not Found"),
        ("/silent", MD5, "timed out"),
    ],
)
def test_a_failed_download_leaves_nothing_behind(
    cache: Path,
    server: tuple[str, list[str]],
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    checksum: str,
    reason: str,
) -> None:
    if path == "/silent":
        monkeypatch.setattr(fetch, "SILENCE_SECONDS", 0.2)
    with pytest.raises(SordinoError, match=reason):
        locate(published(server[0] + path, checksum=checksum), ("a9a",))
    assert list((cache / "a9a").iterdir()) == []


def test_a_download_has_an_end(cache: Path, server: tuple[str, list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "MAX_SECONDS", -1.0)
    with pytest.raises(SordinoError, match="not complete after"):
        locate(published(f"{server[0]}/a9a"), ("a9a",))
    assert list((cache / "a9a").iterdir()) == []


def test_the_second_location_serves_where_the_first_fails(tmp_path: Path, server: tuple[str, list[str]]) -> None:
    put(tmp_path, A9A, "file")
    assert locate(published(f"{server[0]}/gone", (tmp_path / "file").as_uri()), ("a9a",)).read("a9a") == A9A


def test_a_download_that_lacks_what_it_should_have(cache: Path) -> None:
    put(cache / "a9a", A9A, "a9a")
    with pytest.raises(SordinoError, match=r"lacks some of a9a, a9a.t of Adult"):
        locate(published("http://127.0.0.1:9/never"), ("a9a", "a9a.t"))


def test_the_table_is_sound() -> None:
    """Every set has a place, a reader and locations; checksums have the length of their kind."""
    for name, entry in catalog.SETS.items():
        assert entry.published.name == name
        assert entry.members
        assert entry.published.folders
        for remote in entry.published.remotes:
            assert remote.urls
            if remote.checksum is None:
                assert name == "a9a", "LIBSVM's site publishes none"
                continue
            kind, _, digest = remote.checksum.partition(":")
            assert len(digest) == 2 * hashlib.new(kind).digest_size
    assert formats.PACKED.keys() == {".gz", ".xz", ".bz2"}


def test_names_are_suggested() -> None:
    with pytest.raises(SordinoError, match=r"data: 'cifar11' is unknown. Did you mean 'cifar10'"):
        load("cifar11")
    with pytest.raises(SordinoError, match="label: 'mnist' has no columns"):
        load("mnist", label="y")
