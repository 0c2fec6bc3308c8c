"""A run: from a spec to a directory with the model, its curve, its certificate and its statement.

The order inside a round is what makes a run safe to kill: the round's outcome is stored (`checkpoint.npz`, replaced
atomically) before anything about it is shown. A resumed run goes on from what was stored; no round is released twice.
The plan is charged once, after an empty checkpoint was stored: a charged ledger without its checkpoint is refused,
because another model would be another release.

What may be published lies in `public/`, what may not in `private/` (`privacy.public` lists every public field). Every
hash of the data is keyed by `private/run.key`.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import sordino
from sordino import files
from sordino.core import Tree, Unit
from sordino.data import glue, text
from sordino.data.partition import describe, split
from sordino.data.records import Records
from sordino.data.sources import Dataset, load
from sordino.engines import simulate
from sordino.engines.oracle import MATRICES
from sordino.errors import SordinoError
from sordino.methods import build, entry
from sordino.models import lora, nets, transformers
from sordino.models.linear import Linear, Loss
from sordino.models.nets import NETS
from sordino.models.torch_model import TorchModel
from sordino.models.transformers import TRANSFORMERS
from sordino.privacy import spending
from sordino.privacy.evidence.certificate import certificate, finite, ranges
from sordino.privacy.evidence.ledger import Entry, Ledger
from sordino.privacy.evidence.signing import Signer, sha256, signed
from sordino.privacy.evidence.statement import statement
from sordino.privacy.mechanisms.random import Noiseless, Source, source
from sordino.privacy.plan import Plan
from sordino.training.artifacts import Place
from sordino.training.spec import READ_LABELS, Spec, read_values
from sordino.tree import pack, unpack

TIMINGS = "timings.jsonl"


@dataclass(frozen=True)
class Job:
    """A spec with its data in memory and its noise calibrated; nothing has been released yet."""

    spec: Spec
    dataset: Dataset
    records: Records
    model: Linear | TorchModel
    plan: Plan
    source: Source

    @property
    def names(self) -> list[str]:
        """Of the clients, in order, where the partition brings them. Whose data were used is what user level hides."""
        if self.dataset.site is None or not self.spec.partition.startswith("by-"):
            return []
        if self.plan.privacy.unit is Unit.USER:
            return []
        return [str(name) for name in np.unique(self.dataset.site)]

    def identity(self, key: bytes) -> str:
        """Of spec and data: a run that goes on must go on with the same. It enters the ledger's chain, whose head the
        certificate publishes; without the key nobody can compare it with data that they guess."""
        return hashlib.blake2b(self._digest, key=key, person=b"sordino run", digest_size=32).hexdigest()

    @cached_property
    def _digest(self) -> bytes:
        """Not keyed, and never written down."""
        digest = hashlib.sha256(f"{self.spec.toml()}{self.plan.sizes}".encode())
        for part in (self.records.x, self.records.y):
            digest.update(part.contiguous().cpu().numpy().data)
        return digest.digest()

    @property
    def assumes(self) -> list[str]:
        return assumptions(self.spec)

    def published(self) -> dict[str, Any]:
        """The spec's keys that may be published."""
        return tomllib.loads(self.spec.published(self.plan)[0])


def read(spec: Spec) -> Dataset:
    """The data that a spec names; sentences as token ids."""
    if spec.data in glue.TASKS:
        if not (spec.model in TRANSFORMERS and TRANSFORMERS[spec.model].text):
            raise SordinoError(f"model: '{spec.data}' is text; name a model that reads it, such as minilm-lora.")
        return text.load(spec.data, length=spec.length, tokenizer=_tokenizer(spec), data_dir=spec.data_dir)
    column = spec.partition.partition(":")[2] if spec.partition.startswith("by-column") else None
    return load(
        spec.data,
        label=spec.label,
        client=column,
        test_fraction=spec.test_fraction,
        seed=spec.split_seed,
        public_stats=spec.public_stats,
        normalize=spec.resolved().normalize or "none",
        data_dir=spec.data_dir,
        # At user level a test on some of a protected client's records would be a release that nobody pays for.
        whole_clients=spec.unit == Unit.USER and spec.partition.startswith("by-") and not spec.open_data,
    )


def execution(spec: Spec) -> str:
    """Where the clients were; the statement begins with it."""
    if spec.benchmark:
        return "simulation on benchmark data"
    return "simulation on data declared public" if spec.public_data else "simulated on one machine"


def assumptions(spec: Spec) -> list[str]:
    """What a run's certificate assumes beside what its plan does."""
    facts = []
    if spec.public_stats:
        facts.append("The statistics that features were centred and whitened by are public.")
    if spec.open_data and spec.partition.partition(":")[0] in READ_LABELS:
        facts.append(
            "Clients are simulated: their partition reads the labels of records that everybody may see, and their "
            "sizes follow from it. The guarantee is for clients whose sizes are public and fixed."
        )
    if spec.unit == Unit.USER and spec.partition.startswith("by-") and not spec.open_data:
        facts.append(
            "Test records are those of clients held out as a whole, or of a test part that the file brings, which is "
            "taken to hold no record of a protected client."
        )
    return facts


def _tokenizer(spec: Spec) -> str:
    return "minilm" if spec.weights is None or not Path(spec.weights).is_dir() else spec.weights


def prepare(spec: Spec, dataset: Dataset | None = None, device: str = "cpu") -> Job:
    """Load (unless the data are at hand), partition, choose the model, calibrate."""
    spec = spec.resolved()
    dataset = read(spec) if dataset is None else dataset
    spec.certifiable()
    if spec.partition.startswith("by-") and spec.clients and dataset.site is not None:
        found = len(np.unique(dataset.site))
        if found != spec.clients:
            raise SordinoError(f"clients: the data hold {found} clients, not {spec.clients}; leave the number out.")
    client = split(dataset, spec.partition, spec.clients, sizes=spec.sizes, seed=spec.split_seed)
    records = Records.of(dataset.x_train, dataset.y_train, client, dtype=spec.number, device=device)
    model = choose_model(spec, dataset)
    plan = spec.plan(records.sizes)
    chance = Noiseless(spec.seed or 0) if plan.noiseless else source(spec.seed)
    return Job(spec, dataset, records, model, plan, chance)


def choose_model(spec: Spec, dataset: Dataset) -> Linear | TorchModel:
    """`auto`: softmax for classes, least squares for quantities."""
    features, classes = dataset.x_train.shape[1], len(dataset.classes)
    if spec.deep:
        return network(spec, features, classes)
    kind = (Loss.SOFTMAX if classes else Loss.SQUARES) if spec.model == "auto" else Loss(spec.model)
    if (kind is Loss.SQUARES) != (not classes):
        raise SordinoError(f"model: {kind} does not fit labels that are {'classes' if classes else 'quantities'}.")
    if not classes and entry(spec.method).normalize != "none":
        raise SordinoError(f"method: {spec.method} derives its steps for classes; name another, such as dp-fedgd.")
    if kind is Loss.LOGISTIC and classes != 2:
        raise SordinoError(f"model: logistic is for two classes, the data have {classes}; use softmax.")
    weights = None
    if spec.class_weights is not None:
        if len(spec.class_weights) != classes:
            raise SordinoError(f"class_weights: {len(spec.class_weights)} weights for {classes} classes.")
        weights = torch.tensor(spec.class_weights)
    return Linear(features, classes if kind is Loss.SOFTMAX else 1, kind, class_weights=weights)


def network(spec: Spec, features: int, classes: int) -> TorchModel:
    """The network that a spec names; its first parameters follow from the split's seed, which is public."""
    if not classes:
        raise SordinoError(f"model: {spec.model} tells classes apart, and the labels are quantities.")
    if spec.class_weights is not None:
        raise SordinoError("class_weights: only linear models weigh classes; leave them out.")
    method = build(spec.method, Unit(spec.unit), **spec.options)
    kinds = {query.kind for stage in method.stages for query in stage.queries} & set(MATRICES)
    if lacking := [str(kind) for kind in kinds if not hasattr(TorchModel, f"{kind}_sum")]:
        raise SordinoError(
            f"method: {spec.method} asks for a {lacking[0]} matrix, which {spec.model} has no way to give; use a "
            "linear model, or a method such as dp-fedadam, dp-fedavg or dp-fedadamw."
        )
    reads_text = spec.model in TRANSFORMERS and TRANSFORMERS[spec.model].text
    if reads_text and spec.data not in glue.TASKS and not spec.data.endswith(".npz"):
        raise SordinoError(f"model: {spec.model} reads text ({', '.join(glue.TASKS)}), not '{spec.data}'; use mlp.")
    if spec.model in ("cnn", "resnet18-gn") and features not in nets.IMAGE_SHAPES:
        raise SordinoError(
            f"model: {spec.model} reads images of 8 x 8, 28 x 28 or 32 x 32 x 3 numbers; these rows have {features}. "
            "Use mlp, or a linear model."
        )
    if spec.model in NETS:
        return nets.build(spec.model, features, classes, seed=spec.split_seed)
    made = transformers.build(
        spec.model,
        classes=classes,
        weights=spec.weights,
        rank=spec.lora_rank,
        alpha=spec.lora_alpha,
        dropout=spec.lora_dropout,
        length=features,
        seed=spec.split_seed,
        autocast=torch.bfloat16 if spec.dtype == "bfloat16" else None,
    )
    made.seen(torch.zeros(1, features))  # refuses rows of another width before anything is begun
    return made


def evaluate(model: Linear | TorchModel, theta: Tensor, x: Tensor, y: Tensor) -> dict[str, float]:
    """On records outside the guarantee: accuracy and, for two classes, AUC; mean squared error for quantities."""
    kind = getattr(model, "kind", Loss.SOFTMAX)
    if kind is Loss.SQUARES:
        return {"mse": float((model.predict(theta, x).double() - y.double()).square().mean())}
    z = model.logits(theta, x)
    guess = (z[..., 0] > 0).long() if kind is Loss.LOGISTIC else z.argmax(-1)
    # Counted, then divided once in float64: a mean in float32 differs from the share of the commonest class.
    scores = {"accuracy": int((guess == y).sum()) / y.numel() if y.numel() else math.nan}
    classes = 2 if kind is Loss.LOGISTIC else model.outputs
    if classes == 2 and 0 < int(y.sum()) < len(y):
        from scipy.stats import rankdata

        ranks = rankdata((z[:, -1] - z[:, 0] if model.outputs == 2 else z[:, 0]).cpu().numpy())
        positive = y.cpu().numpy() == 1
        k = int(positive.sum())
        scores["auc"] = float((ranks[positive].sum() - k * (k + 1) / 2) / (k * (len(y) - k)))
    return scores


def start(job: Job, out: Path) -> None:
    """Make the run directory."""
    if out.exists() and any(out.iterdir()):
        raise SordinoError(f"out: '{out}' is not empty; resume it with --resume {out}, or name another directory.")
    Place.of(out).make(*job.spec.published(job.plan))


def reopen(out: Path) -> Spec:
    """The spec of a run, the secret part included."""
    place = Place.find(out)
    if place.root == place.public or not (place.public / "spec.toml").is_file():
        raise SordinoError(f"--resume: '{out}' holds no run (no public/spec.toml); check the path.")
    secret = place.private / "secret.toml"
    return Spec.of(read_values(place.public / "spec.toml") | (read_values(secret) if secret.is_file() else {}))


def pay(job: Job, ledger: Ledger, who: str) -> None:
    """Charge the whole plan, once, before its first round: a row for each query and group of equal clients."""
    for group in spending.groups(job.plan):
        clients = f"clients {ranges(group.clients)}"
        if group.releases and not ledger.charged(who, clients, 0):
            ledger.charge([Entry.of(r, clients, 0, who, job.plan.privacy.adjacency) for r in group.releases])


def rounds(job: Job, out: Path | None = None) -> Iterator[dict[str, Any]]:
    """Train, and yield each round's metrics; with `out`, from wherever the directory stands, and paid for there."""
    with ExitStack() as stack:
        tree: Tree = ()
        done, history, seconds = 0, list[dict[str, Any]](), 0.0
        if out:
            place = Place.find(out)
            stack.enter_context(_alone(place))
            who = job.identity(place.keys().identity)
            limit = (None, None) if job.spec.noise is not None else (job.plan.privacy.epsilon, job.plan.privacy.delta)
            ledger = stack.enter_context(Ledger(place.private / "ledger.db", epsilon=limit[0], delta=limit[1]))
            done, tree, history = _begin(job, place, ledger, who)
            (place.public / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in history))
            seconds = timing(place)
        yield from history
        x, y = torch.from_numpy(job.dataset.x_test).to(job.records.x), torch.from_numpy(job.dataset.y_test)
        began = time.perf_counter() - seconds
        for this_round in simulate.run(job.plan, job.model, job.records, job.source, start=done, checkpoint=tree):
            looked = (this_round.t + 1) % job.spec.evaluate_every == 0 or this_round.t + 1 == job.plan.rounds
            line: dict[str, Any] = {
                "round": this_round.t + 1,
                **(evaluate(job.model, this_round.model, x, y.to(x.device)) if looked else {}),
                "epsilon": finite(spending.epsilon_after(job.plan, this_round.t)),
            }
            if out:
                _store(place, who, (this_round.checkpoint, this_round.model), line)
                ledger.mark(who, this_round.t + 1)
                with open(place.public / "metrics.jsonl", "a") as file:
                    file.write(json.dumps(line) + "\n")
                # Private: how long a round takes depends on the records.
                took = round(time.perf_counter() - began, 6)
                files.append(place.private / TIMINGS, json.dumps({"round": this_round.t + 1, "seconds": took}) + "\n")
            yield line


def finish(job: Job, out: Path, history: list[dict[str, Any]], signer: Signer | None = None) -> dict[str, Any]:
    """Write model, certificate, statement and curve; return the certificate, signed by `signer` or the run's key."""
    place = Place.find(out)
    keys = place.keys()
    done, tree, _ = _restore(place, job.identity(keys.identity), raw=True)
    if not done or not isinstance(tree[1], Tensor):
        raise SordinoError(f"out: no round of '{out}' is done yet; train it first.")
    save_model(place.public / "model.safetensors", job.spec, job.dataset, job.model, tree[1])
    with Ledger(place.private / "ledger.db") as ledger:
        cert = certificate(
            job.plan,
            job.source,
            version=sordino.__version__,
            spec_sha256=hashlib.sha256(job.spec.published(job.plan)[0].encode()).hexdigest(),
            model_sha256=sha256(place.public / "model.safetensors"),
            metrics_sha256=sha256(place.public / "metrics.jsonl"),
            ledger_head=ledger.head(),
            ledger_rows=len(ledger),
            tested=len(job.dataset.y_test) if job.plan.privacy.unit is Unit.RECORD else None,
            execution=execution(job.spec),
            assumes=job.assumes,
            doubts=[job.spec.doubt] if job.spec.doubt else [],
            names=job.names,
        )
    cert = signed(cert, signer or keys.sign)
    (place.public / "statement.md").write_text(statement(cert), encoding="utf-8")
    title = f"{job.spec.method} on {job.dataset.name}, {job.plan.clients} clients"
    draw_curve(place.public / "curve.png", title, job.plan.privacy.delta, history)
    (place.public / "certificate.json").write_text(json.dumps(cert, indent=2) + "\n", encoding="utf-8")
    _level(place.public)
    return cert


def _level(folder: Path) -> None:
    """Give all files the time at which the run was begun, because the others would tell how long it took, and the same
    mode."""
    first = (folder / "spec.toml").stat()
    for path in (*folder.rglob("*"), folder):
        if path.is_file():
            os.chmod(path, first.st_mode & 0o777)
        os.utime(path, (first.st_mtime, first.st_mtime))


def beats_guessing(job: Job, last: dict[str, Any]) -> bool:
    """Better than always naming the commonest class (or the mean) of the test records?

    Classes are compared by how many records are right. Squared errors are compared in float64; a margin of 1e-9 is
    above its rounding, so that the mean itself never seems to be better than the mean.
    """
    y = job.dataset.y_test
    if not job.dataset.classes:
        return bool(last["mse"] < (1 - 1e-9) * y.astype(np.float64).var())
    return bool(round(last["accuracy"] * len(y)) > np.bincount(y).max())


def heterogeneity(job: Job) -> dict[str, float] | None:
    """How unlike simulated clients are, on average: KL of their labels from uniform, and classes they lack.

    An exact function of the records: told of data that everybody may see, and of no others.
    """
    if not job.spec.open_data or not job.dataset.classes or job.spec.partition.startswith("by-"):
        return None
    owner = np.repeat(np.arange(job.plan.clients), job.plan.sizes)
    clients = describe(job.records.y.cpu().numpy(), owner, len(job.dataset.classes))
    return {
        "kl_from_uniform": sum(c.kl_from_uniform for c in clients) / len(clients),
        "absent_classes": sum(c.absent for c in clients) / len(clients),
    }


def timing(place: Place) -> float:
    """Seconds of all rounds so far."""
    path, seconds = place.private / TIMINGS, 0.0
    for line in path.read_text().splitlines() if path.exists() else ():
        with suppress(ValueError, KeyError, TypeError):  # a kill may have cut a line
            seconds = float(json.loads(line)["seconds"])
    return seconds


def summary(job: Job, cert: dict[str, Any], history: list[dict[str, Any]], out: Path | None) -> dict[str, Any]:
    """What `--json` prints."""
    by_round = {k: {str(line["round"]): line[k] for line in history if k in line} for k in ("accuracy", "auc", "mse")}
    return {
        **{k: v for k, v in by_round.items() if v},
        "epsilon": cert["epsilon"],
        "delta": cert["delta"],
        "certified": cert["certified"],
        "reasons": cert["reasons"],
        "noise": cert["noise"],
        "client_noise": cert["client_noise"],
        "method": job.spec.method,
        "clients": job.plan.clients,
        "records": cert["records"],
        "rounds": job.plan.rounds,
        "beats_guessing": beats_guessing(job, history[-1]),
        "client_names": cert["client_names"],
        "out": str(out) if out else None,
        "spec": job.published(),
        **(_of_open_data(job, out) if job.spec.open_data else {}),
    }


def _of_open_data(job: Job, out: Path | None) -> dict[str, Any]:
    """Exact functions of the records, and the time that they took."""
    return {"heterogeneity": heterogeneity(job), "seconds": timing(Place.find(out)) if out else None}


# --------------------------------------------------------------------------------------------------- the directory


@contextmanager
def _alone(place: Place) -> Iterator[None]:
    """Two processes in one directory would release a round twice. The lock goes with its process, however that ends."""
    with ExitStack() as held:
        try:
            held.enter_context(files.lock(place.private / "lock", wait=False))
        except BlockingIOError:
            raise SordinoError(f"resume: another process works in '{place.root}'; wait for it or stop it.") from None
        yield


def _begin(job: Job, place: Place, ledger: Ledger, who: str) -> tuple[int, Tree, list[dict[str, Any]]]:
    """Where the run stands, and paid for.

    An empty checkpoint is stored before the charge. So a charge without a checkpoint means that the checkpoint was
    taken away, and the rounds after it may have been seen: with fresh noise they would be released a second time. A
    kill between the charge and the first round leaves the empty checkpoint, and nothing was shown.
    """
    path, charged = place.private / "checkpoint.npz", len(ledger) > 0
    if not path.exists():
        metrics, model = place.public / "metrics.jsonl", place.public / "model.safetensors"
        if charged or model.exists() or (metrics.exists() and metrics.stat().st_size):
            raise SordinoError(
                f"resume: '{path}' is gone, and the run was paid for already; doing its rounds again would release a "
                "second model on one charge. Start a new run."
            )
        _store(place, who, (), None)
    done, tree, history = _restore(place, who)
    if done < ledger.marked(who):
        raise SordinoError(
            f"resume: '{path}' holds round {done}, and {ledger.marked(who)} rounds were stored; doing them again would "
            "release them twice. Put the newest checkpoint back, or start a new run."
        )
    if done and not charged:
        raise SordinoError(f"resume: '{ledger.path}' does not hold the charge of {done} rounds done; start a new run.")
    pay(job, ledger, who)
    return done, tree, history


def _store(place: Place, who: str, tree: Tree, line: dict[str, Any] | None) -> None:
    """Replace the checkpoint in one step, so that a kill leaves the old one or the new one."""
    # Durable: a power cut must not bring an older round back.
    with files.replacing(place.private / "checkpoint.npz") as temporary, open(temporary, "wb") as file:
        np.savez(file, identity=who, line=json.dumps(line), tree=np.frombuffer(pack(tree), np.uint8))


def _restore(place: Place, who: str, *, raw: bool = False) -> tuple[int, Tree, list[dict[str, Any]]]:
    """(rounds done, checkpoint, metrics so far). A spec or data other than those of the rounds done are refused: the
    certificate would speak of noise that was not added."""
    path, metrics = place.private / "checkpoint.npz", place.public / "metrics.jsonl"
    try:
        with np.load(path, allow_pickle=False) as store:
            known, last, tree = str(store["identity"]), json.loads(str(store["line"])), unpack(store["tree"].tobytes())
        done = int(last["round"]) if last else 0
        # A kill may fall between the checkpoint and its line, or inside the line: the checkpoint's own is whole.
        whole = metrics.read_text().splitlines()[: done - 1] if done and metrics.exists() else []
        history = [*map(json.loads, whole), last] if last else []
    except Exception as error:  # a damaged archive fails in a dozen ways
        raise SordinoError(f"resume: '{path}' cannot be read ({error}); start a new run.") from None
    if known != who:
        raise SordinoError(
            f"resume: spec.toml or the data changed since round {done} of '{place.root}'; start a new run."
        )
    if len(history) != done:
        raise SordinoError(f"resume: '{metrics}' lacks some of the {done} rounds done; start a new run.")
    return done, tree if raw or not done else tree[0], history


def save_model(path: Path, spec: Spec, dataset: Dataset, model: Linear | TorchModel, theta: Tensor) -> None:
    """theta, and what `predict` needs to build the model, and to prepare features as training did."""
    from safetensors.torch import save_file

    tensors = {"theta": theta.contiguous().cpu()}
    if dataset.public is not None:
        mean, cov = dataset.public
        tensors |= {"public_mean": torch.from_numpy(mean), "public_cov": torch.from_numpy(cov)}
    about = {
        "kind": str(getattr(model, "kind", spec.model)),
        "spec": replace(spec, seed=None, schedule_seed=None).toml(),  # a model does not tell who took part
        "features": model.features,
        "outputs": model.outputs,
        "columns": dataset.features,
        "classes": dataset.classes,
        "normalize": spec.normalize,
        "method": spec.method,
    }
    save_file(tensors, path, metadata={"sordino": json.dumps(about)})
    if spec.model in TRANSFORMERS:  # adapters as other programs read them
        lora.save_peft(path.with_name("adapter"), model, theta)


def draw_curve(path: Path, title: str, delta: float, history: list[dict[str, Any]]) -> bool:
    """The lines of metrics.jsonl: accuracy by round, and epsilon spent so far beside it. False where matplotlib is not
    installed."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    key = "mse" if "mse" in history[-1] else "accuracy"
    history = [line for line in history if key in line]
    t = [line["round"] for line in history]
    figure = Figure(figsize=(7, 4), dpi=130, layout="constrained")
    left = figure.subplots()
    left.plot(t, [line[key] for line in history], color="#1f5fa8", lw=2)
    left.set_xlabel("round")
    left.set_ylabel("mean squared error" if key == "mse" else "test accuracy", color="#1f5fa8")
    left.grid(alpha=0.25)
    spent = [line["epsilon"] for line in history]
    if None not in spent:
        right = left.twinx()
        right.plot(t, spent, color="#b3541e", lw=1.5, ls="--")
        right.set_ylabel(f"ε spent (δ = {delta:g})", color="#b3541e")
        right.set_ylim(bottom=0)
    left.set_title(title, fontsize=11)
    figure.savefig(path)
    return True
