"""One run on several processes of `torch.distributed`: the ranks share out the clients of a round, or rows of a sum.

Every rank holds all records and runs the whole engine: the same plan, sampler, noise and rules. Two things are shared
out:

- *clients*: where clients compute messages, each rank computes those of its clients, with their noise if clients add
  their own. The messages are gathered, and every rank adds them up in the order in which one process does.
- *rows*: where a round is one clipped sum (the fused path of `simulate`), or where there are fewer clients than ranks,
  each rank clips and sums its rows. The float64 sums are gathered and added in the order of ranks.

All ranks draw from one stream by address, so the noise of a release is the same on every rank. It is added once, to
what was gathered; no sum over ranks contains noise twice. The account does not change: cohorts and minibatches are
those of the plan.

Why the sensitivity stays: a record's term is in the sum of exactly one rank, and the sums of all ranks together, with
their additions, drift no further by rounding than one sum may (`arithmetic.sum_of_parts`).

The ranks are one trusted party. Gradients without noise and the key of the noise travel between them, and `gloo` and
`nccl` do not encrypt: the network between machines must be as trusted as their memory.

Example:
    >>> import sordino as so
    >>> from sordino.engines.distributed import ALONE
    >>> data = so.load("digits")
    >>> records = so.Records.of(data.x_train, data.y_train, so.split(data, "iid", 4))
    >>> plan = so.Plan(so.build("dp-fedgd"), rounds=1, sizes=records.sizes, privacy=so.Privacy(epsilon=8.0))
    >>> team = ALONE  # under torchrun: team = join()
    >>> [result.t for result in so.simulate.run(plan, so.Linear(64, 10), records, so.source(None), team=team)]
    [0]
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sordino.core import Shard, Tree
from sordino.data.records import Lazy, Records, check_device
from sordino.errors import SordinoError
from sordino.models.arithmetic import sum_of_parts
from sordino.privacy import calibration
from sordino.privacy.mechanisms.random import Secure, Source
from sordino.privacy.plan import Plan
from sordino.tree import leaves, pack, tree_map, unpack

TIMEOUT = 600.0  # seconds that a rank waits for the others
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # torchrun sets them
COMMAND = "torchrun --nproc-per-node 2 -m sordino run SPEC.toml --distributed"

Work = tuple[np.ndarray, Any]  # some clients, and the shard of their records (None: drawn for every question)


@dataclass(frozen=True)
class Team:
    """The processes that compute one run together, as one of them sees it. `join` makes it; `ALONE` is one process.

    Args:
        rank: The number of this process. Rank 0 writes files, holds the ledger and prints.
        size: How many processes there are.
        machines: On how many machines they run.
        device: Where this process computes.

    Example:
        >>> Team().size
        1
    """

    rank: int = 0
    size: int = 1
    machines: int = 1
    device: str = "cpu"

    def exchange(self, own: Tensor) -> list[Tensor]:
        """What every rank gives, in the order of ranks: the same bits on every rank.

        Args:
            own: What this rank gives; of one shape and type on all ranks.

        Returns:
            One tensor per rank.

        Raises:
            SordinoError: Another rank ended, or did not answer in time.
        """
        if self.size == 1:
            return [own]
        own = own.contiguous()
        gathered = [torch.empty_like(own) for _ in range(self.size)]
        try:
            torch.distributed.all_gather(gathered, own)
        except RuntimeError as error:
            raise _lost(self.rank, error) from None
        return gathered

    def from_first(self, data: bytes) -> bytes:
        """The bytes that rank 0 gives, on every rank. Other ranks' bytes are not read."""
        length = int(self.exchange(torch.tensor([len(data)]))[0])
        own = torch.zeros(length, dtype=torch.uint8)
        if self.rank == 0 and length:
            own = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return self.exchange(own)[0].numpy().tobytes() if length else b""

    def tell(self, done: int, checkpoint: Tree) -> None:
        """Rank 0 tells the others how many rounds are done, and the last round's checkpoint. They call `told`."""
        if self.size > 1:
            self.from_first(done.to_bytes(8, "little") + (pack(checkpoint) if done else b""))

    def told(self) -> tuple[int, Tree]:
        """What rank 0 tells: the rounds that are done, and the last round's checkpoint; () if there is none."""
        data = self.from_first(b"")
        done = int.from_bytes(data[:8], "little")
        return done, unpack(data[8:]) if done else ()

    def check_agreement(self, facts: Mapping[str, bytes]) -> None:
        """Refuse to go on unless all ranks hold the same facts.

        Args:
            facts: What must be equal, by the name that an error shows; the same names on all ranks.

        Raises:
            SordinoError: Names the first rank and the first fact that differ from those of rank 0.
        """
        digests = b"".join(hashlib.sha256(fact).digest() for fact in facts.values())
        each = [part.view(len(facts), -1) for part in self.exchange(torch.tensor(bytearray(digests)))]
        for rank, theirs in enumerate(each):
            for name, own, first in zip(facts, theirs, each[0], strict=True):
                if not torch.equal(own, first):
                    raise SordinoError(
                        f"distributed: {name} of rank {rank} differ from those of rank 0; give every rank the same "
                        "command, data and installation."
                    )

    def check_same(self, theta: Tensor, t: int) -> None:
        """Refuse to go on with models that differ by a bit, as after noise that ranks do not share.

        Args:
            theta: The parameters after the round.
            t: The round.

        Raises:
            SordinoError: The ranks hold different parameters.
        """
        if self.size == 1:
            return
        kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[theta.element_size()]
        bits = theta.detach().contiguous().view(kind).long()
        mixed = bits * (2 * torch.arange(bits.numel(), device=bits.device) + 1).view(bits.shape)  # modulo 2^64
        sums = [int(part[0]) for part in self.exchange(mixed.sum().cpu().reshape(1))]
        if len(set(sums)) > 1:
            raise SordinoError(
                f"distributed: after round {t + 1} ranks hold different models; use one kind of machine, one "
                "installation and one number of threads."
            )

    def joint(self, source: Source) -> Source:
        """The one stream of a run, equal on all ranks.

        Where it is secret, rank 0 draws a key and sends it to the others. The key serves this run alone, and nobody
        writes it down.

        Args:
            source: The source that the caller gave; of one kind on all ranks.

        Returns:
            The stream.

        Raises:
            SordinoError: The ranks have different sources.
        """
        if self.size == 1:
            return source.fresh()
        self.check_agreement({"the sources of noise": repr(source).encode()})
        return Secure(self.from_first(secrets.token_bytes(32))) if source.private else source.fresh()

    def check(self, plan: Plan, model: Any, records: Records | Lazy, theta: Tensor, runs: int = 1) -> None:
        """Refuse what is not shared out, and ranks that would compute something else.

        A rank adds the noise of its clients, so that a plan with less noise on one rank would be a privacy bug.

        Args:
            plan: The plan.
            model: The model.
            records: The clients' records.
            theta: Starting parameters.
            runs: How many runs are trained together.

        Raises:
            SordinoError: Names what is refused, and the remedy.
        """
        if self.size == 1:
            return
        remedy = "leave --distributed out"
        if plan.integers is not None:
            raise SordinoError(f"integers: they are added up client by client in one process; {remedy}, or integers.")
        if runs > 1:
            raise SordinoError(f"distributed: {runs} runs side by side belong to one process; {remedy}.")
        if getattr(model, "random", False):
            raise SordinoError(
                f"distributed: {type(model).__name__} draws dropout, which would depend on the number of ranks; set "
                f"dropout=0 (of adapters lora_dropout=0), or {remedy}."
            )
        held = [records.x, records.y, records.filled, records.weight] if isinstance(records, Records) else []
        network = getattr(model, "module", None)
        weights = [] if network is None else list(network.state_dict().values())
        self.check_agreement(
            {
                "plans": _numbers_of(plan),
                "records": repr(records.sizes).encode() + _hashed(held),
                "models": _hashed([theta, *weights]),
            }
        )

    def spread(
        self, work: Sequence[Work], compute: Callable[[np.ndarray, Any], Tree], *, at_once: bool = True
    ) -> Iterator[tuple[np.ndarray, Tree]]:
        """Compute something of every client, each on one rank.

        Args:
            work: Batches of clients.
            compute: (clients, shard) -> a tree whose leaves have one row per client.
            at_once: Gather all batches by one call. False: batch by batch, which bounds the memory of matrices.

        Yields:
            The clients of each batch with their tree, in order.
        """
        if self.size == 1:
            for clients, shard in work:
                yield clients, compute(clients, shard)
            return
        for wave in [work] if at_once else [[batch] for batch in work]:
            for (clients, _), tree in zip(wave, self._wave(wave, compute), strict=True):
                yield clients, tree

    def _wave(self, work: Sequence[Work], compute: Callable[[np.ndarray, Any], Tree]) -> Iterator[Tree]:
        """The trees of some batches, gathered by one exchange per leaf."""
        pieces = _pieces(work, self.size)
        mine = [piece for piece in pieces if piece.rank == self.rank]
        # A rank without a client of its own computes the first piece: it must know the form of the others' trees.
        own = [compute(*piece.of(work)) for piece in mine or pieces[:1]]
        columns = [
            self._gather([leaves(tree)[k] for tree in own[: len(mine)]], leaf, pieces)
            for k, leaf in enumerate(leaves(own[0]))
        ]
        for batch in range(len(work)):
            here = [p for p, piece in enumerate(pieces) if piece.batch == batch]
            whole = iter([torch.cat([column[p] for p in here]) for column in columns])
            yield tree_map(lambda leaf, parts=whole: next(parts), own[0])

    def _gather(self, own: list[Tensor], like: Tensor, pieces: Sequence[_Piece]) -> list[Tensor]:
        """One leaf of all pieces. Ranks have unequal numbers of rows, so each pads to the longest."""
        rows = [sum(piece.amount for piece in pieces if piece.rank == rank) for rank in range(self.size)]
        padded = like.new_zeros(max(rows), *like.shape[1:])
        if own:
            torch.cat(own, out=padded[: rows[self.rank]])
        gathered, taken, result = self.exchange(padded), [0] * self.size, []
        for piece in pieces:
            first = taken[piece.rank]
            taken[piece.rank] += piece.amount
            result.append(gathered[piece.rank][first : first + piece.amount])
        return result


ALONE = Team()


def _numbers_of(plan: Plan) -> bytes:
    """What decides noise, clips, participants and minibatches, in text."""
    queries = [(s, k, query) for s, stage in enumerate(plan.stages) for k, query in enumerate(stage.queries)]
    noise = [
        (s, k, str(query.kind), query.clip, query.calls, calibration.client_std(plan, s, k).tolist())
        for s, k, query in queries
    ]
    sums = [float(calibration.aggregate_std(plan, s, k)) for s, k, _ in queries]
    cohorts = [cohort.tolist() for cohort in plan.cohorts]
    drawn = str(plan.sampling), plan.rates.tolist(), plan.slots.tolist()
    return repr((plan.method.name, plan.sizes, plan.weights.tolist(), noise, sums, cohorts, drawn)).encode()


def _hashed(tensors: Sequence[Tensor | None]) -> bytes:
    """A hash of the bits of tensors."""
    digest = hashlib.sha256()
    for tensor in tensors:
        if tensor is not None:
            digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.digest()


class _Piece(NamedTuple):
    """Some clients of a batch, for one rank."""

    batch: int
    first: int
    amount: int
    rank: int

    def of(self, work: Sequence[Work]) -> Work:
        clients, shard = work[self.batch]
        few = slice(self.first, self.first + self.amount)
        return clients[few], None if shard is None else some_clients(shard, few)


def _pieces(work: Sequence[Work], ranks: int) -> list[_Piece]:
    """Batches cut into at most one piece per rank. Each piece goes to the rank that has the fewest rows so far."""
    pieces, load = list[_Piece](), [0] * ranks
    for batch, (clients, shard) in enumerate(work):
        ends = [len(clients) * k // ranks for k in range(ranks + 1)]
        rows = 1 if shard is None else shard.x.shape[-2]
        for first, last in itertools.pairwise(ends):
            if last > first:
                rank = load.index(min(load))
                load[rank] += rows * (last - first)
                pieces.append(_Piece(batch, first, last - first, rank))
    return pieces


def some_clients(shard: Shard, few: slice) -> Shard:
    """Some clients of a batch. The mask may lack the axis of runs, so axes count from the end.

    Args:
        shard: The records of a batch of clients.
        few: Which of them.

    Returns:
        Their records.
    """
    x, y, mask = shard.x[..., few, :, :], shard.y[..., few, :], shard.mask[..., few, :]
    return shard._replace(x=x, y=y, mask=mask, length=None if shard.length is None else shard.length[..., few, :])


class SplitRows:
    """A model whose clipped sums are shared out by rows: every rank clips and sums its own. All else is the model's.

    One record moves a sum by at most `clip`: its term is in the sum of one rank, and rounding over all ranks is bounded
    as that of one sum (`arithmetic.sum_of_parts`).

    Args:
        model: The model.
        team: The ranks.
    """

    def __init__(self, model: Any, team: Team) -> None:
        self._model, self._team = model, team

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def clipped_sum(self, theta: Tensor, shard: Shard, clip: float, *scale: Tensor, **how: Any) -> Tensor:
        """The model's clipped sum, in float64.

        Args:
            theta: The parameters.
            shard: The records, all of them on every rank.
            clip: Bound on the norm of one record's gradient.
            scale, how: What the model's own sum takes beside.

        Returns:
            The sum over all ranks, added in their order.

        Raises:
            SordinoError: There are so many records that rounding could move their sum by more than the clip allows.
        """
        ranks, each = self._team.size, shard.per_person
        persons = shard.x.shape[-2] // each
        first, last = (persons * k // ranks for k in (self._team.rank, self._team.rank + 1))
        mine = last > first or not persons
        rows = slice(each * first, each * last) if mine else slice(0, each)  # a rank without rows masks one
        length = None if shard.length is None else shard.length[..., rows]
        mask = shard.mask[..., rows] if mine else torch.zeros_like(shard.mask[..., rows])
        part = Shard(shard.x[..., rows, :], shard.y[..., rows], mask, length, each)
        with sum_of_parts(ranks, persons):
            total: Tensor = self._model.clipped_sum(theta, part, clip, *scale, **how)
        start, *others = self._team.exchange(total.double())
        return sum(others, start)


def join(device: str = "cpu", timeout: float = TIMEOUT) -> Team:
    """Join the process group that `torchrun` describes in the environment: `gloo`, and `nccl` between GPUs.

    Args:
        device: `cpu`, or `cuda`: then each process takes the GPU of its local rank.
        timeout: Seconds after which a rank that does not answer is given up.

    Returns:
        This process and the others.

    Raises:
        SordinoError: torchrun did not start this process, there are too few GPUs, or the others cannot be reached.

    Example:
        >>> import os
        >>> from sordino.errors import SordinoError
        >>> try:
        ...     join() if "RANK" not in os.environ else None
        ... except SordinoError as error:
        ...     print(str(error).split(";")[0])
        distributed: RANK is not set, so torchrun did not start this process
    """
    missing = [name for name in VARIABLES if name not in os.environ]
    if missing:
        raise SordinoError(
            f"distributed: {missing[0]} is not set, so torchrun did not start this process; write: {COMMAND}"
        )
    rank, size, local, here = (int(os.environ[name]) for name in VARIABLES[:4])
    if device == "cuda":
        device = f"cuda:{local}"
        torch.cuda.set_device(check_device(device))
        os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")  # a timeout raises, and does not abort the process
    backend = "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo"
    try:
        torch.distributed.init_process_group(backend, timeout=timedelta(seconds=timeout))
    except (RuntimeError, ValueError) as error:
        raise _lost(rank, error) from None
    machines = int(os.environ.get("GROUP_WORLD_SIZE", -(-size // here)))
    return Team(rank, size, machines, device)


def leave() -> None:
    """Leave the process group that `join` joined."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _lost(rank: int, error: Exception) -> SordinoError:
    # gloo begins with a line of its sources in brackets, and ends with advice.
    why = re.sub(r"^\[[^]]*\] *", "", (str(error).splitlines() or [type(error).__name__])[0]).split(". ")[0]
    return SordinoError(f"distributed: rank {rank} lost another rank, which ended or does not answer ({why}).")
