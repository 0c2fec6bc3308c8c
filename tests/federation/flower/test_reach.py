"""Whether a site reaches its link, as `join` tells it."""

import socket
import ssl
import threading
from contextlib import contextmanager, suppress

import pytest

from sordino.federation import sentences
from sordino.federation.flower import reach
from sordino.federation.tls import certificates


@contextmanager
def server(tls, host="127.0.0.1", answer=None):
    """A link that makes one handshake, or sends an answer without TLS."""
    with socket.create_server((host, 0)) as listener:

        def serve():
            client, _ = listener.accept()
            with client:
                if answer is not None:
                    client.sendall(answer)
                    client.recv(4096)
                    return
                context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
                context.load_cert_chain(tls.certificate, tls.key)
                with suppress(OSError):
                    context.wrap_socket(client, server_side=True).close()

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"{host}:{listener.getsockname()[1]}"
        thread.join(10)


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    for name in ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


def test_a_site_says_whether_it_reaches_its_link(tmp_path, monkeypatch):
    tls, other = certificates(tmp_path / "a"), certificates(tmp_path / "b")
    ended = certificates(tmp_path / "c", days=0)
    with server(tls) as link:
        assert reach.reach(link, tls.authority) == "connected"
    assert reach.reach(link, tls.authority) == "silent"
    assert "nobody answers at 127.0.0.1:" in sentences.of_site({"what": "link", "state": "silent", "link": link})
    with server(tls) as link:
        assert reach.reach(link, other.authority) == "unsigned"
    with server(tls, host="127.0.0.2") as link:
        assert reach.reach(link, tls.authority) == "unnamed"
    with server(ended) as link:
        assert reach.reach(link, ended.authority) == "dated"
    with server(tls, answer=b"HTTP/1.0 400 Bad Request\r\n\r\n") as link:
        assert reach.reach(link, tls.authority) == "plain"
    assert reach.reach(link, tmp_path / "none.pem") == "unread"
    monkeypatch.setenv("https_proxy", "http://proxy.example:3128")
    monkeypatch.setenv("no_proxy", "")
    assert reach.reach("coordinator.example:8000", tls.authority) == ""


def test_every_state_of_the_link_has_a_sentence():
    states = ("connected", "refused", "silent", "unsigned", "unnamed", "dated", "plain", "unread")
    told = {sentences.of_site({"what": "link", "state": state, "link": "lab.example:8000"}) for state in states}
    assert len(told) == len(states)
    assert "the certificate of the link was not signed by this authority" in " ".join(told)


def test_a_site_tries_again_until_it_is_connected(tmp_path, monkeypatch):
    answers = iter(["silent", "silent", "connected", "connected", "silent"])
    monkeypatch.setattr(reach, "reach", lambda link, authority: next(answers))
    monkeypatch.setattr(reach, "AGAIN_SECONDS", 0.0)
    link = reach.Reach("lab.example:8000", tmp_path)
    assert [link.news(started) for started in (True, False, False, False, True)] == [
        "silent",
        "",
        "connected",
        "",
        "connected",
    ]
    monkeypatch.setattr(reach, "AGAIN_SECONDS", 60.0)
    assert [link.news(started) for started in (True, False)] == ["silent", ""]
