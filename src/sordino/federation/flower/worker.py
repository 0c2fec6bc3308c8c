"""The site's side: a process of the site which answers each letter with `handle(letter)`.

It takes letters from the SuperNode beside it (`flower-supernode --isolation process`). The app bundle that the server
sends along is neither unpacked nor imported: whatever it holds, the site runs what is installed here, so there is no
list of permitted bundles to keep.

Only who knows the SuperNode's secret file is given letters; each comes with a token of its own. What `handle` raises
goes to the site's log, and the server reads one constant sentence.

    python -m sordino.federation.flower.worker --runtime 127.0.0.1:9094 --secret FILE --handler module:function
"""

from __future__ import annotations

import argparse
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from sordino import files
from sordino.errors import SordinoError
from sordino.federation.flower import logs, named, require
from sordino.federation.flower.supernode import uploads
from sordino.federation.flower.transport import FIELD, RECORD, opened

if TYPE_CHECKING:
    from flwr.app import Message
    from flwr.superlink.grid import HttpGrid

FAILED = "The site could not answer."  # all that a server ever reads of a failure
HEARTBEAT = 10.0  # seconds; the SuperNode gives a silent worker up after 60

log = logging.getLogger("sordino.federation.flower.worker")


class Again:
    """A request that was cut off is made again: the other side closes idle connections, now and then in that moment."""

    def invoke(self, send: Callable[[], Any]) -> Any:
        import httpx

        for seconds in (0.1, 0.5, 2.0):
            try:
                return send()
            except httpx.TransportError:
                time.sleep(seconds)
        return send()


class Runtime:
    """The interface by which a process takes tasks: the one place that touches what Flower calls private."""

    def __init__(self, address: str, secret: bytes | None, authority: bytes | None) -> None:
        from flwr.supercore.constant import TASK_TOKEN_HEADER
        from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor, SuperExecAuthHttpInterceptor
        from flwr.supercore.runtime import RuntimeHttpClient

        self.address, self.authority, self.token = address, authority, ""
        worn = self

        class Token:
            def intercept(self, context: Any, call_next: Any) -> Any:
                if worn.token:
                    context.request.headers[TASK_TOKEN_HEADER] = worn.token
                return call_next(context)

        chain: list[Any] = [RuntimeVersionHttpInterceptor(component_name="SuperExec"), Token()]
        if secret:
            methods = {"/flwr.proto.Runtime/AcquireTask"}
            chain.append(SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods=methods))
        # Not Flower's own retry helper: on a refusal that one interrupts the whole process.
        again: Any = Again()
        plain = authority is None
        self.client = RuntimeHttpClient.from_server_address(address, plain, authority, chain, retry_invoker=again)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()

    def acquire(self, server: bool = False) -> bool:
        """Whether a task was given to this process: the server's app, or a letter."""
        from flwr.proto.runtime_pb2 import AcquireTaskRequest
        from flwr.supercore.constant import TaskType

        # A site answers an agent's task too, with an error: its SuperNode would wait for ever.
        kinds = [TaskType.SERVER_APP] if server else [TaskType.CLIENT_APP, TaskType.AGENT_APP]
        self.token = ""
        self.token = self.client.AcquireTask(AcquireTaskRequest(supported_task_types=kinds)).token
        return bool(self.token)

    def pull(self) -> Message:
        from flwr.supernode.runtime.run_clientapp import pull_task_input

        message, self.context, _, _ = pull_task_input(self.client)
        return message

    def push(self, reply: Message) -> None:
        """Send the reply, and only then call the task done: one that ends without a reply blocks the SuperNode."""
        from flwr.common.constant import SubStatus
        from flwr.supernode.runtime.run_clientapp import push_message, push_task_output

        push_message(self.client, reply, self.context)
        status = SubStatus.FAILED if reply.has_error() else SubStatus.COMPLETED
        push_task_output(self.client, None, status, "")
        self.token = ""

    def grid(self) -> HttpGrid:
        """The link as the server's task sees it; the bundle that came with the task is dropped."""
        from flwr.common.serde import run_from_proto
        from flwr.proto.runtime_pb2 import PullTaskInputRequest
        from flwr.supercore.task_identity import TaskIdentity
        from flwr.superlink.grid import HttpGrid

        given = self.client.PullTaskInput(PullTaskInputRequest())
        TaskIdentity.task_id, TaskIdentity.run_id = given.task_id, given.run.run_id
        TaskIdentity.node_id = given.context.node_id
        grid = HttpGrid(self.address, self.authority is None, self.authority, token=self.token)
        grid.set_run(run_from_proto(given.run))
        # Flower's retry helper interrupts the whole process when a run is over; here that is an error of the call.
        retry = grid._retry_invoker
        flower = retry.should_giveup
        retry.should_giveup = lambda error: refused(error) or bool(flower and flower(error))
        return grid

    def finish(self, failed: bool) -> None:
        from flwr.common.constant import SubStatus
        from flwr.supernode.runtime.run_clientapp import push_task_output

        details = "The coordinator failed; see its log." if failed else ""
        push_task_output(self.client, None, SubStatus.FAILED if failed else SubStatus.COMPLETED, details)
        self.token = ""

    def keep(self, claim: Path, message: Message) -> None:
        """Note the task in hand, so that a worker which starts after a crash can give it back."""
        from flwr.app.message import remove_content_from_message
        from flwr.common.serde import message_to_proto

        note = message_to_proto(remove_content_from_message(message)).SerializeToString()
        files.write(claim, self.token.encode() + b"\n" + note)

    def give_back(self, claim: Path) -> None:
        """Answer a task left by a worker that died, as failed: else its SuperNode takes nothing new for a minute."""
        from flwr.app import Context, RecordDict
        from flwr.common.serde import message_from_proto
        from flwr.proto.message_pb2 import Message as Proto

        token, _, note = claim.read_bytes().partition(b"\n")
        message = message_from_proto(Proto.FromString(note))
        self.token = token.decode()
        node, run = message.metadata.dst_node_id, message.metadata.run_id
        self.context = Context(run_id=run, node_id=node, node_config={}, state=RecordDict(), run_config={})
        self.push(failure(message))

    @contextmanager
    def alive(self) -> Iterator[None]:
        """Tell the SuperNode every few seconds that the task is in work."""
        from flwr.proto.runtime_pb2 import SendTaskHeartbeatRequest

        done = threading.Event()

        def beat() -> None:
            while not done.wait(HEARTBEAT):
                try:
                    self.client.SendTaskHeartbeat(SendTaskHeartbeatRequest())
                except Exception as error:
                    log.warning("No heartbeat reached the SuperNode (%s).", type(error).__name__)

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


def refused(error: Exception) -> bool:
    import httpx

    return isinstance(error, httpx.HTTPStatusError) and error.response.status_code == 401


def failure(message: Message) -> Message:
    from flwr.app import Error, Message

    return Message(Error(code=2, reason=FAILED), reply_to=message)  # 2: "the app raised an exception"


def answer(handle: Callable[[bytes], bytes], message: Message, slack: float) -> Message:
    from flwr.app import ConfigRecord, Message, RecordDict

    letter, code = opened(message)
    if letter is None:
        log.error("A message without a letter was refused (%s).", code)
        return failure(message)
    if time.time() > message.metadata.created_at + message.metadata.ttl + slack:
        log.error("A letter past its deadline was refused; if there are many, compare this clock with the server's.")
        return failure(message)
    try:
        reply = handle(letter)
        if not isinstance(reply, bytes):
            raise TypeError(f"the handler gave {type(reply).__name__}, not bytes")
    except Exception:
        log.exception("The handler failed; the server reads: %s", FAILED)
        return failure(message)
    return Message(RecordDict({RECORD: ConfigRecord({FIELD: reply})}), reply_to=message)


def serve(
    handle: Callable[[bytes], bytes],
    address: str,
    *,
    secret: Path | None = None,
    authority: Path | None = None,
    claim: Path | None = None,
    stop: threading.Event | None = None,
    poll: float = 0.1,
    slack: float = 60.0,
) -> None:
    """Answer letters, one at a time, until `stop` is set.

    address: host:port of the SuperNode's own interface, on this machine.
    secret: the file that the SuperNode was given as --superexec-auth-secret-file.
    authority: certificate, where that interface speaks TLS (not needed on loopback).
    claim: a file for the task in hand; a worker killed in the middle then costs one reply instead of a minute.
    slack: a letter is refused, unread, this many seconds after its deadline (clocks differ).
    """
    require()
    import httpx

    try:
        key = secret.read_bytes() if secret else None
        trusted = authority.read_bytes() if authority else None
    except OSError as error:
        raise SordinoError(f"secret, authority: {error}; name a file that this user can read.") from error
    stop = stop or threading.Event()
    uploads(poll)
    noiseless = False
    with Runtime(address, key, trusted) as runtime:
        while not stop.is_set():
            try:
                if not _one(handle, runtime, claim, slack):
                    stop.wait(poll)
                noiseless = False
            except httpx.HTTPStatusError as error:
                if refused(error) and not runtime.token:
                    raise SordinoError("secret: the SuperNode refused it; give both the same file.") from None
                log.error("The SuperNode refused a request (%d).", error.response.status_code)
                stop.wait(1.0)
            except httpx.TransportError:
                if not noiseless:
                    log.warning("The SuperNode at %s does not answer; trying on.", address)
                noiseless = True
                stop.wait(0.5)
            except Exception:
                log.exception("A letter was lost.")
                stop.wait(1.0)


def _one(handle: Callable[[bytes], bytes], runtime: Runtime, claim: Path | None, slack: float) -> bool:
    """Answer a letter, if there is one."""
    if claim and claim.exists():
        log.warning("A letter in work was lost with the worker before this one; it is answered as failed.")
        try:
            runtime.give_back(claim)
        finally:
            claim.unlink()
    if not runtime.acquire():
        return False
    with runtime.alive():
        message = runtime.pull()
        if claim:
            runtime.keep(claim, message)
        runtime.push(answer(handle, message, slack))
    if claim:
        claim.unlink()
    return True


def main() -> None:
    words = argparse.ArgumentParser(prog="python -m sordino.federation.flower.worker", description=serve.__doc__)
    words.add_argument("--runtime", required=True, metavar="HOST:PORT")
    words.add_argument("--handler", required=True, metavar="MODULE:FUNCTION")
    words.add_argument("--secret", type=Path)
    words.add_argument("--claim", type=Path)
    given = words.parse_args()
    logs()
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    serve(named(given.handler, "--handler"), given.runtime, secret=given.secret, claim=given.claim, stop=stop)


if __name__ == "__main__":
    main()
