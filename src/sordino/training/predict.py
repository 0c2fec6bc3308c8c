"""Predictions of a trained model for new records."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch

from sordino.data.preprocess import preprocess
from sordino.data.schema import Schema
from sordino.data.sources import encode_file, read_features
from sordino.data.text import tokenize
from sordino.errors import SordinoError
from sordino.models import registry
from sordino.models.linear import Loss
from sordino.privacy.evidence.signing import broken, sha256
from sordino.training.artifacts import load_model
from sordino.training.folder import RunFolder
from sordino.training.verify_run import read_certificate


class Predictions(NamedTuple):
    labels: list[Any]  # or values, where labels are quantities
    classes: list[str]
    probabilities: list[list[float]]


def predict(model: str | Path, file: str) -> Predictions:
    """Predict the label of every record in a file.

    Args:
      model: the directory of a run, its public/, or a model.safetensors.
      file: a table with the columns of training, an .npz with x, or a text file for models that read text.
    """
    path = Path(model)
    path = RunFolder.find(path).named(path, "model.safetensors")
    check_model(path)
    trained, theta, about, public = load_model(path)
    if registry.entry(about["kind"]).reads == "text" and not file.endswith(".npz"):
        x = tokenize(sentences(file), about["features"]).astype("float32")
    elif about.get("schema"):
        x = preprocess(encode_file(file, Schema.of(about["schema"])), None, about["normalize"])
    else:
        x = preprocess(read_features(file, about["columns"], about["features"]), public, about["normalize"])
    features = torch.from_numpy(x).to(theta)
    if about["kind"] == Loss.SQUARES:
        return Predictions(trained.predict(theta, features).tolist(), [], [])
    labels = [about["classes"][k] for k in trained.predict(theta, features).tolist()]
    return Predictions(labels, list(about["classes"]), trained.scores(theta, features).tolist())


def check_model(path: Path) -> None:
    """Refuse a model that is not the one that the certificate beside it names."""
    beside = path.with_name("certificate.json")
    if not path.is_file() or not beside.is_file():
        return
    cert = read_certificate(beside)
    if "signature" in cert and (why := broken(cert)):
        raise SordinoError(f"model: of the certificate beside '{path}', {why}; get both from their source again.")
    if (known := cert.get("model_sha256")) and sha256(path) != known:
        raise SordinoError(
            f"model: '{path}' is not the model that the certificate beside it was made for; it was damaged or "
            "exchanged. Get it from its source again."
        )


def sentences(file: str) -> list[str]:
    """The lines of a text file: one sentence per line, without a heading and without labels."""
    if Path(file).suffix.lower() in (".csv", ".tsv", ".parquet"):
        raise SordinoError(
            f"data: '{file}' is a table; give a text file with one sentence per line, or token ids as an .npz."
        )
    try:
        lines = Path(file).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SordinoError(
            f"data: '{file}' cannot be read ({error}); give a text file with one sentence per line."
        ) from None
    if not lines:
        raise SordinoError(f"data: '{file}' is empty; give a text file with one sentence per line.")
    return lines
