"""A site behind a socket of its machine: whoever may open the socket can send messages to the site, and nothing else.

The process that owns the data answers them with the installed code, the site's rules and its ledger. A program of
another user of the machine, such as an app that a server sent, needs no right to read the site's files.

A message and its reply are 8 bytes with the length, then the bytes.
"""

from __future__ import annotations

import logging
import os
import shutil
import socket
import socketserver
import stat
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from sordino.errors import SordinoError

MOST_BYTES = 2**30  # of a message, as a site reads it
LONGEST_PATH = 100  # bytes of the path of a socket; the system allows 107
CONNECTIONS = 8  # at the same time
READ_SECONDS = 60.0  # without a byte, after which a connection is closed
ANSWER_SECONDS = 3600.0  # for a reply
CHUNK = 2**20
_LENGTH = struct.Struct(">Q")

log = logging.getLogger("sordino.federation.door")


def ask(path: Path, request: bytes, seconds: float = ANSWER_SECONDS) -> bytes:
    """The site's reply to a message.

    Args:
      path: the socket.
      request: the message.
      seconds: to wait for the reply.

    Raises:
      OSError: nobody listens, or the reply did not come in time.
      SordinoError: the connection ended before the reply did.
    """
    with socket.socket(socket.AF_UNIX) as line:
        line.settimeout(seconds)
        line.connect(str(path))
        line.sendall(_LENGTH.pack(len(request)) + request)
        return _read(line)


def serve(
    path: Path, handle: Callable[[bytes], bytes], *, group: str | None = None, stop: threading.Event | None = None
) -> None:
    """Answer messages at a socket, one at a time, until `stop` is set.

    Args:
      path: of the socket; its folder exists.
      handle: makes the reply.
      group: whose members may send messages, beside the user of this process; None: the user's own group.
      stop: ends the loop.

    Raises:
      SordinoError: the path is taken, too long, or the group is unknown.
    """
    if len(os.fsencode(path)) > LONGEST_PATH:
        raise SordinoError(f"socket: the path has more than {LONGEST_PATH} bytes; choose a shorter one, as in /run.")
    _remove_old(path)
    answering = threading.Lock()
    room = threading.BoundedSemaphore(CONNECTIONS)

    class Answer(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.settimeout(READ_SECONDS)
            with suppress(OSError, SordinoError):
                request = _read(self.request)
                with answering:
                    try:
                        reply = handle(request)
                    except Exception:
                        log.exception("The site failed; the connection is closed without a reply.")
                        return
                self.request.sendall(_LENGTH.pack(len(reply)) + reply)

    class Server(socketserver.ThreadingUnixStreamServer):
        daemon_threads = True

        def process_request(self, request: object, client_address: object) -> None:
            if not room.acquire(blocking=False):  # another program holds all connections open
                request.close()  # type: ignore[attr-defined]
                return
            super().process_request(request, client_address)  # type: ignore[arg-type]

        def process_request_thread(self, request: object, client_address: object) -> None:
            try:
                super().process_request_thread(request, client_address)  # type: ignore[arg-type]
            finally:
                room.release()

    before = os.umask(0o117)  # the user and the group, from the first moment on
    try:
        server = Server(str(path), Answer)
    except OSError as error:
        raise SordinoError(f"socket: '{path}' cannot be made ({error.strerror}); check its folder.") from error
    finally:
        os.umask(before)
    with server:
        try:
            if group is not None:
                _give(path, group)
            stop = stop or threading.Event()
            server.timeout = 0.2
            while not stop.is_set():
                server.handle_request()
        finally:
            with suppress(OSError):
                path.unlink()


def _give(path: Path, group: str) -> None:
    try:
        shutil.chown(path, group=group)
    except (LookupError, OSError) as error:
        raise SordinoError(f"group: '{group}' is unknown, or this user is not in it ({error}).") from error


def _remove_old(path: Path) -> None:
    """Remove the socket that a killed process left.

    Raises:
      SordinoError: somebody listens, or it is another kind of file.
    """
    if not path.exists():
        return
    if not stat.S_ISSOCK(path.stat().st_mode):
        raise SordinoError(f"socket: '{path}' exists and is not a socket; choose another path.")
    with socket.socket(socket.AF_UNIX) as line:
        try:
            line.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
    raise SordinoError(f"socket: another process listens at '{path}'; stop it, or choose another path.")


def _read(line: socket.socket) -> bytes:
    (length,) = _LENGTH.unpack(_exactly(line, _LENGTH.size))
    if length > MOST_BYTES:
        raise SordinoError(f"message: {length} bytes; at most {MOST_BYTES} are read.")
    return _exactly(line, length)


def _exactly(line: socket.socket, length: int) -> bytes:
    """So many bytes. Memory is taken as they come, whatever length was announced."""
    read = bytearray()
    while len(read) < length:
        part = line.recv(min(CHUNK, length - len(read)))
        if not part:
            raise SordinoError("message: the connection ended within it.")
        read += part
    return bytes(read)
