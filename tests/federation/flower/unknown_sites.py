"""Sites that the link does not know, and that try to connect."""

import socket
from contextlib import suppress

from sordino.federation.flower import commands, processes
from sordino.federation.flower.keys import node_key, secret
from sordino.federation.tls import certificates


def try_all(federation, member):
    """The outcome for each unknown site: "refused", or its log. `member` is a site whose key one of them has."""
    keys = federation.folder / "keys"
    node_key(keys / "unknown")
    other = certificates(keys / "other").authority
    own, own_secret = federation.tls.authority, secret(keys / "unknown.secret")
    started = {
        "unknown-key": commands.supernode_command(federation.address, own, keys / "unknown", own_secret),
        "wrong-certificate": commands.supernode_command(federation.address, other, keys / member, own_secret),
        "no-key": commands.supernode_command(federation.address, own, keys / "unknown", own_secret),
    }
    at = started["no-key"].index("--auth-supernode-private-key")
    del started["no-key"][at : at + 2]
    for (name, command), port in zip(started.items(), processes.free_ports(3), strict=True):
        command[-1] = str(port)
        federation.start(f"node-{name}", command, federation.env)
    return {**{name: outcome(federation, name) for name in started}, "plain-http": plain(federation.address)}


def outcome(federation, name):
    process = federation.processes.pop(f"node-{name}")
    status, log = process.wait(60), federation.log(f"node-{name}").read_text()
    process.stdin.close()
    turned_away = status and "Failed to initialize the connection" in log and "SuperNode ID" not in log
    return "refused" if turned_away else log[-1000:]


def plain(address):
    with socket.create_connection(address.split(":"), timeout=10) as line:
        line.sendall(b"GET /v1/health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        with suppress(ConnectionResetError):
            if (said := line.recv(1000)).startswith(b"HTTP"):
                return said.decode()
    return "refused"
