"""The site's side: a process at the site that answers each message with `handle(request)`.

It takes messages from the SuperNode on the same machine (`flower-supernode --isolation process`). The app bundle that
the server sends is neither unpacked nor imported: the site runs the installed code, whatever the bundle holds.

The SuperNode gives messages only to a process that knows its secret file; each message has its own token. What `handle`
raises goes to the site's log, and the server reads one constant sentence.

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
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from sordino import files
from sordino.errors import SordinoError
from sordino.federation.flower import logs, named, require
from sordino.federation.flower.clock import difference
from sordino.federation.flower.lifeline import Pace, Pulse, hears, start_anew, watch
from sordino.federation.flower.reply import answer, failure
from sordino.federation.flower.supernode import MAX_RESPONSE_BYTES, uploads

if TYPE_CHECKING:
    from flwr.app import Message
    from flwr.superlink.grid import HttpGrid

CLOCK_SLACK = 60.0  # seconds by which the clocks of site and server may differ
HEARTBEAT = 10.0  # seconds; the SuperNode gives up a silent worker after 60

log = logging.getLogger("sordino.federation.flower.worker")


class Again:
    """Repeats a request that was cut off, because the other side may close an idle connection at that moment."""

    def invoke(self, send: Callable[[], Any]) -> Any:
        import httpx

        for seconds in (0.1, 0.5, 2.0):
            try:
                return send()
            except httpx.TransportError:
                time.sleep(seconds)
        return send()


class Runtime:
    """The interface by which a process takes tasks. Only this class uses private parts of Flower."""

    def __init__(self, address: str, secret: bytes | None, authority: bytes | None) -> None:
        from flwr.supercore.constant import TASK_TOKEN_HEADER
        from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor, SuperExecAuthHttpInterceptor
        from flwr.supercore.runtime import RuntimeHttpClient

        self.address, self.authority, self.token = address, authority, ""
        runtime = self

        class Token:
            def intercept(self, context: Any, call_next: Any) -> Any:
                if runtime.token:
                    context.request.headers[TASK_TOKEN_HEADER] = runtime.token
                return call_next(context)

        chain: list[Any] = [RuntimeVersionHttpInterceptor(component_name="SuperExec"), Token()]
        if secret:
            methods = {"/flwr.proto.Runtime/AcquireTask"}
            chain.append(SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods=methods))
        # Not Flower's own retry helper, which interrupts the whole process on a refusal.
        again: Any = Again()
        plain = authority is None
        self.client = RuntimeHttpClient.from_server_address(address, plain, authority, chain, retry_invoker=again)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()

    def acquire(self, server: bool = False) -> bool:
        """Whether this process was given a task: the server's app, or a message."""
        from flwr.proto.runtime_pb2 import AcquireTaskRequest
        from flwr.supercore.constant import TaskType

        # A site answers an agent's task with an error: its SuperNode would otherwise wait for ever.
        kinds = [TaskType.SERVER_APP] if server else [TaskType.CLIENT_APP, TaskType.AGENT_APP]
        self.token = ""
        self.token = self.client.AcquireTask(AcquireTaskRequest(supported_task_types=kinds)).token
        return bool(self.token)

    def pull(self) -> Message:
        from flwr.supernode.runtime.run_clientapp import pull_task_input

        message, self.context, _, _ = pull_task_input(self.client)
        return message

    def push(self, reply: Message) -> None:
        """Send the reply, then mark the task as done: a task that ends without a reply blocks the SuperNode."""
        from flwr.common.constant import SubStatus
        from flwr.supernode.runtime.run_clientapp import push_message, push_task_output

        push_message(self.client, reply, self.context)
        status = SubStatus.FAILED if reply.has_error() else SubStatus.COMPLETED
        push_task_output(self.client, None, status, "")
        self.token = ""

    def grid(self) -> HttpGrid:
        """The link for the server's task. The bundle that came with the task is dropped."""
        from flwr.common.serde import run_from_proto
        from flwr.proto.runtime_pb2 import PullTaskInputRequest
        from flwr.supercore.task_identity import TaskIdentity
        from flwr.superlink.grid import HttpGrid

        task = self.client.PullTaskInput(PullTaskInputRequest())
        TaskIdentity.task_id, TaskIdentity.run_id = task.task_id, task.run.run_id
        TaskIdentity.node_id = task.context.node_id
        grid = HttpGrid(self.address, self.authority is None, self.authority, token=self.token)
        grid.set_run(run_from_proto(task.run))
        # Flower's retry helper interrupts the whole process when a run is over; here the call raises instead.
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
        """Store the current task, so that a worker started after a crash can give it back."""
        from flwr.app.message import remove_content_from_message
        from flwr.common.serde import message_to_proto

        note = message_to_proto(remove_content_from_message(message)).SerializeToString()
        files.write(claim, self.token.encode() + b"\n" + note)

    def give_back(self, claim: Path) -> None:
        """Answer the task of a worker that died as failed. Otherwise the SuperNode takes no new task for a minute."""
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
        """Tell the SuperNode every few seconds that the worker is alive."""
        from flwr.proto.runtime_pb2 import SendTaskHeartbeatRequest

        done = threading.Event()

        def beat() -> None:
            while not done.wait(HEARTBEAT):
                try:
                    self.client.SendTaskHeartbeat(SendTaskHeartbeatRequest())
                except Exception as error:
                    log.warning("A heartbeat did not reach the SuperNode (%s).", type(error).__name__)

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


def serve(
    handle: Callable[[bytes], bytes],
    address: str,
    *,
    secret: Path | None = None,
    authority: Path | None = None,
    claim: Path | None = None,
    stop: threading.Event | None = None,
    poll: float = 0.1,
    slack: float = CLOCK_SLACK,
    rest: float | None = None,
    clock: Path | None = None,
) -> None:
    """Answer messages, one at a time, until `stop` is set.

    address: host:port of the SuperNode's own interface, on this machine.
    secret: the file that the SuperNode was given as --superexec-auth-secret-file.
    authority: certificate, where that interface speaks TLS (not needed on loopback).
    claim: a file for the current task; a worker killed in the middle then costs one reply instead of a minute.
    slack: a message is refused unread this many seconds after its deadline (clocks differ).
    rest: return after so many seconds without a message, if there was one before.
    clock: a file that tells by how many seconds the link's clock is ahead of this machine's.
    """
    require()
    import httpx

    try:
        key = secret.read_bytes() if secret else None
        trusted = authority.read_bytes() if authority else None
    except OSError as error:
        raise SordinoError(f"secret, authority: {error}; choose a file that this user can read.") from error
    stop = stop or threading.Event()
    uploads(poll)
    keep_time(clock)
    disconnected, answered = False, False
    pace = Pace(poll)
    with Runtime(address, key, trusted) as runtime:
        while not stop.is_set():
            try:
                if _one(handle, runtime, claim, slack, clock):
                    pace.worked()
                    answered = True
                elif rest is not None and answered and pace.idle > rest:
                    return
                else:
                    stop.wait(pace.wait)
                disconnected = False
            except httpx.HTTPStatusError as error:
                if refused(error) and not runtime.token:
                    raise SordinoError("secret: the SuperNode refused it; give both the same file.") from None
                log.error("The SuperNode refused a request (%d).", error.response.status_code)
                stop.wait(1.0)
            except httpx.TransportError:
                if not disconnected:
                    log.info("The SuperNode at %s does not answer yet; this worker waits for it.", address)
                disconnected = True
                stop.wait(0.5)
            except Exception:
                log.exception("A message was lost.")
                stop.wait(1.0)


def keep_time(clock: Path | None) -> None:
    """Date replies by the link's clock: Flower refuses a reply whose time is over by the site's."""
    if clock is None:
        return
    from flwr.app.message import message

    vars(message)["now"] = lambda: datetime.fromtimestamp(time.time() + difference(clock), UTC)


def _one(
    handle: Callable[[bytes], bytes],
    runtime: Runtime,
    claim: Path | None,
    slack: float,
    clock: Path | None,
) -> bool:
    """Answer one message, if there is one."""
    if claim and claim.exists():
        log.warning("The previous worker died with a message in hand; it is answered as failed.")
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
        runtime.push(answer(handle, message, slack - difference(clock)))
    if claim:
        claim.unlink()
    return True


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m sordino.federation.flower.worker", description=serve.__doc__)
    parser.add_argument("--runtime", required=True, metavar="HOST:PORT")
    parser.add_argument("--handler", required=True, metavar="MODULE:FUNCTION")
    parser.add_argument("--secret", type=Path)
    parser.add_argument("--claim", type=Path)
    parser.add_argument("--pulse", type=Path, help="a file to touch whenever the SuperNode answers")
    parser.add_argument("--clock", type=Path, help="a file in which the SuperNode states the link's time")
    parser.add_argument("--rest", type=float, help="seconds without a message after which this process starts anew")
    arguments = parser.parse_args()
    logs()
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    watch()
    hears(Pulse(arguments.pulse), MAX_RESPONSE_BYTES)
    serve(
        lambda request: named(arguments.handler, "--handler")(request),
        arguments.runtime,
        secret=arguments.secret,
        claim=arguments.claim,
        stop=stop,
        rest=arguments.rest,
        clock=arguments.clock,
    )
    if not stop.is_set():
        start_anew()  # a site that waits needs no library for numbers in memory


if __name__ == "__main__":
    main()
