"""What is done with a finished run: predict with its model, re-check its certificate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from sordino.core import SordinoError
from sordino.data.sources import preprocess, read_features
from sordino.models.linear import Linear, Loss
from sordino.privacy.certificate import Verdict, verify
from sordino.privacy.ledger import Ledger


def predict(model: str | Path, file: str) -> tuple[list[Any], list[list[float]] | None]:
    """(labels or values, probabilities of the classes) for the records of a file."""
    path = Path(model) / "model.safetensors" if Path(model).is_dir() else Path(model)
    linear, theta, about, public = load_model(path)
    x = read_features(file, about["columns"], about["features"])
    x = preprocess(x, public, about["normalize"])
    features = torch.from_numpy(x).to(theta)
    if linear.kind is Loss.SQUARES:
        return linear.predict(theta, features).tolist(), None
    return [about["classes"][k] for k in linear.predict(theta, features).tolist()], linear.scores(
        theta, features
    ).tolist()


def load_model(path: Path) -> tuple[Linear, torch.Tensor, dict[str, Any], Any]:
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise SordinoError(f"model: there is no file '{path}'; name a run's model.safetensors.")
    try:
        with safe_open(path, framework="pt") as store:
            about = json.loads((store.metadata() or {})["sordino"])
            tensors = {name: store.get_tensor(name) for name in store.keys()}  # noqa: SIM118
    except (SafetensorError, KeyError, ValueError) as error:
        raise SordinoError(f"model: '{path}' is not a model of a run ({error}).") from None
    linear = Linear(about["features"], about["outputs"], Loss(about["kind"]))
    public = (tensors["public_mean"].numpy(), tensors["public_cov"].numpy()) if "public_mean" in tensors else None
    return linear, tensors["theta"], about, public


def verify_run(path: Path) -> Verdict:
    """A certificate by itself, and against the spec and the ledger that lie beside it, if they do."""
    import hashlib

    try:
        cert = json.loads(path.read_text())
    except FileNotFoundError:
        raise SordinoError(f"certificate: there is no file '{path}'; check the path.") from None
    except ValueError as error:
        raise SordinoError(f"certificate: '{path}' is not JSON ({error}).") from None
    if not isinstance(cert, dict):
        raise SordinoError(f"certificate: '{path}' does not hold a certificate.")
    verdict = verify(cert)
    spec, ledger = path.with_name("spec.toml"), path.with_name("ledger.db")
    if spec.is_file() and hashlib.sha256(spec.read_bytes()).hexdigest() != cert["spec_sha256"]:
        verdict.problems.append("spec.toml is not the one that the certificate names")
    if ledger.is_file() and cert["ledger"]["rows"]:
        with Ledger(ledger) as book:
            verdict.problems.extend(book.audit(cert["ledger"]["head"], cert["ledger"]["rows"]))
    return verdict
