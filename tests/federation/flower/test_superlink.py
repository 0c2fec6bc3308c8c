"""What stands before Flower's link: a login for its control interface, and a limit on sizes."""

import asyncio

import pytest

from sordino.federation.flower.superlink import HEADER, Guard, login

TOKEN = login(b"secret")


def ask(path, headers=None, chunks=(b"",), most=10):
    """(status, what the application behind read)."""
    seen, sent = [], []

    async def app(scope, receive, send):
        if scope["type"] == "lifespan":
            return
        while True:
            event = await receive()
            seen.append(event)
            if event["type"] == "http.disconnect" or not event.get("more_body"):
                break
        await send({"type": "http.response.start", "status": 200, "headers": []})

    parts = [{"type": "http.request", "body": chunk, "more_body": k < len(chunks)} for k, chunk in enumerate(chunks, 1)]
    given = iter(parts)

    async def receive():
        return next(given)

    async def send(event):
        sent.append(event)

    lines = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
    scope = {"type": "http", "path": path, "headers": lines}
    asyncio.run(Guard(app, TOKEN, most)(scope, receive, send))
    return sent[0]["status"], seen


@pytest.mark.parametrize("path", ["/v1/control/start-run", "/v1/control/stop-run", "/v1/control/register-node"])
def test_the_control_interface_needs_the_login(path):
    assert ask(path) == (401, [])
    assert ask(path, {HEADER: login(b"guess")}) == (401, [])
    assert ask(path, {HEADER: TOKEN})[0] == 200


def test_nodes_and_the_server_need_none_here_and_all_else_is_closed():
    assert ask("/v1/fleet/pull-messages")[0] == 200
    assert ask("/v1/runtime/acquire-task")[0] == 200
    for path in ("/docs", "/openapi.json", "/", "/v1/controlled"):
        assert ask(path) == (404, [])


def test_a_long_request_is_refused_before_it_is_read():
    path = "/v1/fleet/push-object"
    assert ask(path, {"content-length": "10"})[0] == 200
    assert ask(path, {"content-length": "11"}) == (413, [])
    assert ask(path, {"content-length": "-1"}) == (413, [])
    _, seen = ask(path, chunks=(b"x" * 6, b"x" * 6, b"x" * 6))  # it does not tell its length
    assert [event["type"] for event in seen] == ["http.request", "http.disconnect"]
