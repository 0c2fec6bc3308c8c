"""What a run stores: checkpoints, timings and models (`folder.py` says where).

A checkpoint is replaced in one step, so that a kill leaves the old one or the new one, and it is on disk before
anything about its round is shown.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import tomllib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sordino import files
from sordino.core import Tree
from sordino.data.sources import Dataset
from sordino.errors import SordinoError
from sordino.evidence.signing import sha256
from sordino.foreign import read_json
from sordino.lazy import Tensor, torch
from sordino.models import registry
from sordino.models.registry import BuiltModel
from sordino.training.folder import RunFolder, missing
from sordino.training.resolved import ResolvedSpec
from sordino.tree import pack, unpack

TIMINGS = "timings.jsonl"
MOST_FEATURES = 10**8  # of a model that is read
# What a model and its tokenizer are read from, in a folder of weights; tables or runs beside them do not count.
WEIGHT_FILES = (".json", ".safetensors", ".bin", ".txt", ".model")

# ---------------------------------------------------------------------------------------------------------- checkpoints


class Progress(NamedTuple):
    """How far a run is: rounds done, the engine's checkpoint, the model handed out, and the metrics of each round."""

    done: int
    checkpoint: Tree
    theta: Tensor | None
    history: list[dict[str, Any]]


def digest(history: Iterable[dict[str, Any]], before: str = "") -> str:
    """Hash of the metrics of all rounds, each line chained to the hash of those before it.

    Args:
      history: the lines.
      before: the hash of the lines before them; empty where there are none.

    Returns:
      The hash in hexadecimal digits; `before` without lines.
    """
    for line in history:
        before = hashlib.sha256(f"{before}{json.dumps(line)}".encode()).hexdigest()
    return before


def store(folder: RunFolder, identity: str, tree: Tree, metrics: dict[str, Any] | None, before: str = "") -> str:
    """Replace the checkpoint in one step.

    Args:
      folder: of the run.
      identity: of its spec and data.
      tree: (the engine's checkpoint, theta), or () before the first round.
      metrics: the line of the last round; None before the first.
      before: `digest` of the lines before it, which public/ alone holds.

    Returns:
      `digest` with this line.
    """
    # Durable: a power cut must not bring an older round back.
    packed = np.frombuffer(pack(tree), np.uint8)
    with files.replacing(folder.private / "checkpoint.npz") as temporary, open(temporary, "wb") as file:
        np.savez(file, identity=identity, line=json.dumps(metrics), before=before, tree=packed)
    return digest([] if metrics is None else [metrics], before)


def restore(folder: RunFolder, identity: str) -> Progress:
    """How far the run is.

    Args:
      folder: of the run.
      identity: of the spec and data at hand. Others than those of the rounds done are refused, because the certificate
        would describe noise that was not added.

    Raises:
      SordinoError: the checkpoint cannot be read, or is of another spec or other data, or the public metrics are not
        those that the run wrote.
    """
    path, metrics = folder.private / "checkpoint.npz", folder.public / "metrics.jsonl"
    try:
        with np.load(path, allow_pickle=False) as archive:
            known, last, before = str(archive["identity"]), json.loads(str(archive["line"])), str(archive["before"])
            tree = unpack(archive["tree"].tobytes())
        done = int(last["round"]) if last else 0
    except Exception as error:  # a damaged archive fails in many ways
        raise SordinoError(f"resume: '{path}' cannot be read ({error}); start a new run.") from None
    if known != identity:
        raise SordinoError(
            f"resume: spec.toml or the data changed since round {done} of '{folder.root}'; put them back as "
            "they were. A new run on the same data adds to the epsilon that is spent on them."
        )
    if not done:
        return Progress(0, tree, None, [])
    # A kill may fall between the checkpoint and its line, or inside the line: the checkpoint holds the last line.
    try:
        lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()[: done - 1]]
    except (OSError, ValueError):
        lines = []
    if len(lines) != done - 1 or digest(lines) != before:
        raise SordinoError(
            f"resume: '{metrics}' does not hold the metrics of the {done} rounds done as the run wrote them; put the "
            "file back as it was, or start a new run."
        )
    if not (isinstance(tree, tuple) and len(tree) == 2 and isinstance(tree[1], Tensor)):
        raise SordinoError(f"resume: '{path}' is of round {done} and holds no model; start a new run.")
    return Progress(done, tree[0], tree[1], [*lines, last])


def add_timing(folder: RunFolder, done: int, seconds: float) -> None:
    """Note how long the rounds took: privately, because that depends on the records."""
    files.append(folder.private / TIMINGS, json.dumps({"round": done, "seconds": round(seconds, 6)}) + "\n")


def total_seconds(folder: RunFolder) -> float:
    """Seconds of all rounds so far."""
    path, seconds = folder.private / TIMINGS, 0.0
    for line in path.read_text().splitlines() if path.exists() else ():
        with suppress(ValueError, KeyError, TypeError):  # a kill may have cut a line
            seconds = float(json.loads(line)["seconds"])
    return seconds


# --------------------------------------------------------------------------------------------------------------- models


class SavedModel(NamedTuple):
    """A model.safetensors: the model, its parameters, what its file says of it, and public mean and covariance."""

    model: BuiltModel
    theta: Tensor
    about: dict[str, Any]
    public: tuple[np.ndarray, np.ndarray] | None


def save_model(
    path: Path,
    resolved: ResolvedSpec,
    dataset: Dataset,
    model: BuiltModel,
    theta: Tensor,
    life_table: list[dict[str, float]] | None = None,
    intervals: list[dict[str, Any]] | None = None,
) -> None:
    """Write theta, and what `load_model` needs to build the model and to prepare features as training did.

    life_table: of a survival model, the noised one that `auto` released.
    intervals: of a linear model, those of its coefficients, where the run paid for them.
    """
    from safetensors.torch import save_file

    tensors = {"theta": theta.contiguous().cpu()}
    if dataset.public is not None:
        mean, cov = dataset.public
        tensors |= {"public_mean": torch.from_numpy(mean), "public_cov": torch.from_numpy(cov)}
    choice = resolved.model
    weights = choice.options.get("weights")
    about = {
        "kind": str(getattr(model, "kind", choice.name)) if choice.name == "auto" else choice.name,
        "spec": dataclasses.replace(resolved.portable, seed=None, schedule_seed=None).toml(),  # not who took part
        "features": model.features,
        "outputs": model.outputs,
        "columns": dataset.features,
        "schema": None if dataset.schema is None else dataset.schema.values(),
        "classes": dataset.classes,
        "life_table": life_table,
        "intervals": intervals,
        "normalize": resolved.source.normalize,
        "method": resolved.method_name,
        "model": {
            "seed": choice.seed,
            "bfloat16": choice.bfloat16,
            "options": json.dumps(choice.portable),
            "weights_sha256": weights_sha256(Path(weights)) if weights else None,
        },
    }
    save_file(tensors, path, metadata={"sordino": json.dumps(about)})
    if choice.entry.adapters:  # adapters as other programs read them
        from sordino.models import lora

        lora.save_peft(path.with_name("adapter"), model, theta)


def adapter_sha256(model: Path) -> str:
    """The hash of the adapter beside a model.safetensors; empty where there is none."""
    adapter = model.with_name("adapter")
    return sha256(adapter) if adapter.is_dir() else ""


def weights_sha256(path: Path) -> str:
    """The hash of the files in a folder of weights that a model and its tokenizer are read from, or of one file."""
    return sha256(path, WEIGHT_FILES)


def load_model(path: Path, weights: str | Path | None = None) -> SavedModel:
    """Read a model.safetensors that `save_model` wrote.

    Args:
      path: the file.
      weights: the folder of weights that the model was trained from. By default the run's private part names it.

    Raises:
      SordinoError: the file holds no model, or the weights are not at hand, or they are other ones.
    """
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise missing(path, "model")
    try:
        with safe_open(path, framework="pt") as archive:
            about = read_json((archive.metadata() or {})["sordino"])
            tensors = {name: archive.get_tensor(name) for name in archive.keys()}  # noqa: SIM118
        _check_about(about)
        choice = about["model"]
        options = dict(read_json(choice["options"]))
        theta = tensors["theta"]
    except (SafetensorError, KeyError, ValueError, TypeError, RecursionError) as error:
        raise SordinoError(f"model: '{path}' is not a model of a run ({error}).") from None
    private = RunFolder.find(path).secret()
    options |= {key: private[key] for key in options if key in private}
    if options.get("weights") or weights is not None:
        options["weights"] = _weights(options.get("weights"), weights, choice.get("weights_sha256"))
        choice["options"] = json.dumps(options)
    autocast = torch.bfloat16 if choice["bfloat16"] else None
    try:
        model = registry.build(
            about["kind"], about["features"], len(about["classes"]), seed=choice["seed"], autocast=autocast, **options
        )
    except (ArithmeticError, IndexError, KeyError, MemoryError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, SordinoError):
            raise
        raise SordinoError(f"model: '{path}' describes no model ({type(error).__name__}: {error}).") from None
    if theta.shape != (model.size,) or not theta.is_floating_point():
        raise SordinoError(
            f"model: '{path}' does not hold the {model.size:,} numbers of the model that it describes; it was "
            "damaged or exchanged. Get it from its source again."
        )
    public = (tensors["public_mean"].numpy(), tensors["public_cov"].numpy()) if "public_mean" in tensors else None
    return SavedModel(model, theta, about, public)


def _check_about(about: Mapping[str, Any]) -> None:
    """Check what the file of a model says of it: the file may be anybody's.

    Raises:
      KeyError, TypeError, ValueError: a part is missing or has another form.
    """
    texts = about["kind"], about["spec"], about["normalize"], about["model"]["options"]
    lists = about["classes"], about["columns"]
    if not all(isinstance(text, str) for text in texts):
        raise TypeError("kind, spec, normalize and options must be texts")
    if not all(isinstance(names, list) and all(isinstance(name, str) for name in names) for names in lists):
        raise TypeError("classes and columns must be lists of texts")
    if type(about["features"]) is not int or not 1 <= about["features"] <= MOST_FEATURES:
        raise ValueError(f"features must be a whole number between 1 and {MOST_FEATURES:,}")
    if type(about["model"]["seed"]) is not int:
        raise TypeError("the seed must be a whole number")
    tomllib.loads(about["spec"])


def _weights(known: str | None, given: str | Path | None, expected: str | None) -> str:
    """The folder of weights that a model was trained from.

    Args:
      known: its name, or its whole path where the run's private part is at hand; None if there was none.
      given: the folder that the user names.
      expected: the hash of its files; None in files of before.
    """
    if known is None:
        raise SordinoError("weights: the model was trained without a folder of weights; leave it out.")
    remedy = "name it by --weights FOLDER, or load_run(run, weights=FOLDER)"
    path = Path(known if given is None else given).expanduser()
    if given is None and not path.is_absolute():
        raise SordinoError(f"weights: the model was trained from '{known}', whose folder is not public; {remedy}.")
    if not path.exists():
        raise SordinoError(f"weights: there is no '{path}', and the model was trained from such weights; {remedy}.")
    if expected is not None and weights_sha256(path) != expected:
        raise SordinoError(f"weights: the model was trained from other files than those of '{path}'; {remedy}.")
    return str(path.resolve())
