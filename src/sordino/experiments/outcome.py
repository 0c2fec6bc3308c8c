"""What is done with a finished run: predict with its model, re-check its certificate."""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sordino.core import SordinoError, Unit
from sordino.data.sources import preprocess, read_features
from sordino.data.text import tokenize
from sordino.experiments.run import network
from sordino.experiments.spec import Spec
from sordino.methods import build
from sordino.models.flat import Flat
from sordino.models.linear import Linear, Loss
from sordino.models.nets import NETS
from sordino.models.transformers import TRANSFORMERS
from sordino.privacy.certificate import finite
from sordino.privacy.ledger import Ledger
from sordino.privacy.participation import Participation, Sampling
from sordino.privacy.verify import Verdict, verify


class Predictions(NamedTuple):
    labels: list[Any]  # or values, where there are no classes
    classes: list[str]
    probabilities: list[list[float]]


def predict(model: str | Path, file: str) -> Predictions:
    """For the records of a file."""
    path = Path(model) / "model.safetensors" if Path(model).is_dir() else Path(model)
    trained, theta, about, public = load_model(path)
    if about["kind"] in TRANSFORMERS and TRANSFORMERS[about["kind"]].text and not file.endswith(".npz"):
        x = tokenize(sentences(file), about["features"]).astype("float32")
    else:
        x = preprocess(read_features(file, about["columns"], about["features"]), public, about["normalize"])
    features = torch.from_numpy(x).to(theta)
    if about["kind"] == Loss.SQUARES:
        return Predictions(trained.predict(theta, features).tolist(), [], [])
    labels = [about["classes"][k] for k in trained.predict(theta, features).tolist()]
    return Predictions(labels, list(about["classes"]), trained.scores(theta, features).tolist())


def sentences(file: str) -> list[str]:
    """One a line, without a heading and without labels."""
    if Path(file).suffix.lower() in (".csv", ".tsv", ".parquet"):
        raise SordinoError(
            f"data: '{file}' is a table; give a text file, one sentence a line, or token ids as an .npz."
        )
    try:
        found = Path(file).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SordinoError(f"data: '{file}' cannot be read ({error}); give a text file, one sentence a line.") from None
    if not found:
        raise SordinoError(f"data: '{file}' is empty; give a text file, one sentence a line.")
    return found


def load_model(path: Path) -> tuple[Linear | Flat, torch.Tensor, dict[str, Any], Any]:
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise SordinoError(f"model: there is no file '{path}'; name a run's model.safetensors.")
    try:
        with safe_open(path, framework="pt") as store:
            about = json.loads((store.metadata() or {})["sordino"])
            tensors = {name: store.get_tensor(name) for name in store.keys()}  # noqa: SIM118
    except (SafetensorError, KeyError, ValueError) as error:
        raise SordinoError(f"model: '{path}' is not a model of a run ({error}).") from None
    if about["kind"] in (*NETS, *TRANSFORMERS):
        spec = Spec.of(tomllib.loads(about["spec"]))
        model: Linear | Flat = network(spec, about["features"], about["outputs"])
    else:
        model = Linear(about["features"], about["outputs"], Loss(about["kind"]))
    public = (tensors["public_mean"].numpy(), tensors["public_cov"].numpy()) if "public_mean" in tensors else None
    return model, tensors["theta"], about, public


def verify_run(path: Path) -> Verdict:
    """A certificate by itself, and against the spec and the ledger that lie beside it, if they do."""
    path = path / "certificate.json" if path.is_dir() else path
    try:
        cert = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SordinoError(f"certificate: there is no file '{path}'; check the path.") from None
    except ValueError as error:
        raise SordinoError(f"certificate: '{path}' is not JSON ({error}).") from None
    if not isinstance(cert, dict):
        raise SordinoError(f"certificate: '{path}' does not hold a certificate.")
    verdict = verify(cert)
    spec, ledger = path.with_name("spec.toml"), path.with_name("ledger.db")
    against = _against_ledger
    if "site" in cert and len(path.absolute().parents) > 2:  # a site's own: runs/RUN/certificate.json
        ledger, against = path.absolute().parents[2] / "ledger.db", partial(_against_site, path.absolute().parent.name)
    for beside, compare in ((spec, _against_spec), (ledger, against)):
        if beside.is_file():
            verdict.problems.extend(compare(cert, beside))
        else:
            verdict.gaps.append(f"{beside.name}, which is not beside it")
    return verdict


def _against_spec(cert: dict[str, Any], path: Path) -> Iterator[str]:
    if hashlib.sha256(path.read_bytes()).hexdigest() != cert["spec_sha256"]:
        yield "spec.toml is not the one that the certificate names"
    spec = Spec.read(path)
    asked = None if spec.noise is not None else finite(spec.epsilon)
    same = ("delta", "unit", "adjacency", "trust", "method", "rounds")
    claims = {"epsilon_asked": asked, **{key: getattr(spec, key) for key in same}}
    for key, value in claims.items():
        if cert[key] != value:
            yield f"spec.toml says {key} {value}, the certificate {cert[key]}"
    drawn = {"clients": Participation.parse(spec.participation), "records": Sampling.parse(spec.batch)}
    for key, law in drawn.items():
        if cert["sampler"][key] != ("all" if law == Sampling() else str(law)):
            yield f"spec.toml draws {key} by {law}, the certificate says {cert['sampler'][key]}"
    stated = {query["query"]: query for query in cert["queries"]}
    for s, stage in enumerate(build(spec.method, Unit(spec.unit), **spec.options).stages):
        for k, query in enumerate(stage.queries):
            said = stated.get(f"{s}.{k} {query.kind}", {})
            real: dict[str, float] = {"calls": query.calls, "joint": query.joint}
            real |= {"clip": query.clip} if query.bound is None else {}
            if query.noise is not None and any(said.get(key) != value for key, value in real.items()):
                yield f"{spec.method} asks {s}.{k} {query.kind} otherwise than the certificate says"


def _against_site(run: str, cert: dict[str, Any], path: Path) -> Iterator[str]:
    """A site's ledger has a row a round; each is a release of its group, and no more of them."""
    with Ledger(path) as book:
        yield from book.audit(cert["ledger"]["head"], cert["ledger"]["rows"])
        rows = [row for row in book.rows() if row.plan == run]
    mine = next(g for g in cert["groups"] if cert["site"]["client"] in _numbers(g["clients"]))
    for release in mine["releases"]:
        own = [row for row in rows if row.query == release["query"]]
        if sum(row.times for row in own) > release["times"]:
            yield f"the ledger holds more releases of {release['query']} than the certificate"
        if any(abs(row.sensitivity / row.std / (release["sensitivity"] / release["std"]) - 1) > 1e-6 for row in own):
            yield f"the ledger holds other noise for {release['query']} than the certificate"
    if {row.query for row in rows} - {release["query"] for release in mine["releases"]} - {"nothing"}:
        yield "the ledger holds releases that the certificate does not name"


def _numbers(text: str) -> set[int]:
    """Of '0-4, 7'."""
    spans = (part.split("-") for part in text.split(", "))
    return {k for span in spans for k in range(int(span[0]), int(span[-1]) + 1)}


def _against_ledger(cert: dict[str, Any], path: Path) -> Iterator[str]:
    with Ledger(path) as book:
        yield from book.audit(cert["ledger"]["head"], cert["ledger"]["rows"])
        paid = {(row.who, row.query): (row.sensitivity, row.std, row.times, row.rate) for row in book.rows()}
    for group in cert["groups"]:
        for release in group["releases"]:
            said = (release["sensitivity"], release["std"], release["times"], release["rate"])
            if paid.get((f"clients {group['clients']}", release["query"])) != said:
                yield f"the ledger does not hold what clients {group['clients']} are said to have released"
