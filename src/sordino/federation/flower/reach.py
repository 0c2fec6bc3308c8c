"""Whether a site reaches its link: one TLS handshake, without the libraries that the node needs."""

from __future__ import annotations

import socket
import ssl
import time
import urllib.request
from pathlib import Path

HANDSHAKE_SECONDS = 4.0
AGAIN_SECONDS = 10.0  # between two tries, while nobody answers
_DATES, _NAMES = (9, 10), (62, 64)  # OpenSSL's codes: not valid yet, ended; another host, another address


def reach(link: str, authority: Path) -> str:
    """Connect to a link and check its certificate.

    Args:
      link: HOST:PORT.
      authority: the coordinator's tls/authority.pem.

    Returns:
      "connected", or what is in the way: "silent" (nobody answers), "unsigned" (by this authority), "unnamed" (the
      certificate is of another host), "dated" (it has ended, or is not valid yet), "plain" (no TLS) or "unread" (the
      authority's file). An empty text if a proxy of this machine's settings leads to the link, which is not tried.
    """
    host, _, port = link.rpartition(":")
    if urllib.request.getproxies().keys() & {"https", "all"} and not urllib.request.proxy_bypass(host):
        return ""
    try:
        context = ssl.create_default_context(cafile=authority)
    except OSError:
        return "unread"
    try:
        with (
            socket.create_connection((host, int(port)), HANDSHAKE_SECONDS) as plain,
            context.wrap_socket(plain, server_hostname=host),
        ):
            return "connected"
    except ssl.SSLCertVerificationError as error:
        return "dated" if error.verify_code in _DATES else "unnamed" if error.verify_code in _NAMES else "unsigned"
    except ssl.SSLError:
        return "plain"
    except (OSError, ValueError, OverflowError):  # a name that cannot be looked up, or a port above 65535
        return "silent"


class Reach:
    """Tells when it changes whether a site reaches its link. It tries again until it does."""

    def __init__(self, link: str, authority: Path) -> None:
        self.link, self.authority = link, authority
        self._state, self._next = "", 0.0

    def news(self, started: bool) -> str:
        """What `reach` says, if it differs from before or the node was just started; otherwise an empty text."""
        waits = self._state in ("", "connected") or time.monotonic() < self._next
        if waits and not started:
            return ""
        before, self._state = self._state, reach(self.link, self.authority)
        self._next = time.monotonic() + AGAIN_SECONDS
        return self._state if started or self._state != before else ""
