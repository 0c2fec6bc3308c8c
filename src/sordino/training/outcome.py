"""What is done with a finished run: predict with its model, re-check its certificate."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sordino.data.preprocess import preprocess
from sordino.data.sources import read_features
from sordino.data.text import tokenize
from sordino.errors import SordinoError
from sordino.models.linear import Linear, Loss
from sordino.models.nets import NETS
from sordino.models.torch_model import TorchModel
from sordino.models.transformers import TRANSFORMERS
from sordino.privacy.evidence.certificate import SECRET_SEED, certificate, numbers_of, sizes_of
from sordino.privacy.evidence.ledger import Ledger
from sordino.privacy.evidence.signing import broken, code_sha256, sha256
from sordino.privacy.evidence.verify import FOLLOWS, Verdict, verify
from sordino.privacy.mechanisms.random import Noiseless, source
from sordino.training.artifacts import Place
from sordino.training.run import assumptions, execution, network
from sordino.training.spec import Spec, read_values

UNTOLD = 1_000_000  # records of a client at user level, where no number in a certificate depends on them
# How a federation's certificate is held against its terms: `federation.terms` puts it here, which imports this module.
AGAINST_TERMS: list[Callable[[dict[str, Any], Path], Iterator[str]]] = []
DRAWN = "Every site drew its noise from a secret source; each says so in a certificate of its own."


class Predictions(NamedTuple):
    labels: list[Any]  # or values, where there are no classes
    classes: list[str]
    probabilities: list[list[float]]


def predict(model: str | Path, file: str) -> Predictions:
    """For the records of a file."""
    path = Path(model)
    path = Place.find(path).named(path, "model.safetensors")
    check_model(path)
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


def load_model(path: Path) -> tuple[Linear | TorchModel, torch.Tensor, dict[str, Any], Any]:
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
        model: Linear | TorchModel = network(spec, about["features"], about["outputs"])
    else:
        model = Linear(about["features"], about["outputs"], Loss(about["kind"]))
    public = (tensors["public_mean"].numpy(), tensors["public_cov"].numpy()) if "public_mean" in tensors else None
    return model, tensors["theta"], about, public


def verify_run(path: Path, key: str | None = None) -> Verdict:
    """A certificate by itself, and against the files that lie beside it, if they do: the plan rebuilt from the spec,
    the ledger, the model, the metrics. `key`: the public key that must have signed it (`signing.known_keys`)."""
    place = Place.find(path)
    path = place.named(path, "certificate.json")
    cert = read_certificate(path)
    verdict = verify(cert, key)
    spec, ledger, against = place.public / "spec.toml", place.private / "ledger.db", _against_ledger
    if "site" in cert and len(path.absolute().parents) > 2:  # a site's own: runs/RUN/certificate.json
        ledger, against = path.absolute().parents[2] / "ledger.db", partial(_against_site, path.absolute().parent.name)
    try:
        for beside, compare in ((spec, partial(_against_spec, place, verdict.gaps)), (ledger, against)):
            if beside.is_file():
                verdict.problems.extend(compare(cert, beside))
            else:
                verdict.gaps.append(f"{beside.name}, which is not beside it")
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        if isinstance(error, SordinoError):
            raise
        raise SordinoError(f"certificate: a field is missing or malformed ({error!r}).") from None
    for field, name in (("model_sha256", "model.safetensors"), ("metrics_sha256", "metrics.jsonl")):
        if not cert[field]:
            verdict.gaps.append(f"{name}, whose hash the certificate does not hold")
        elif not (place.public / name).is_file():
            verdict.gaps.append(f"{name}, which is not beside it")
        elif sha256(place.public / name) != cert[field]:
            verdict.problems.append(f"{name} is not the one that the certificate names")
    return verdict


def read_certificate(path: Path) -> dict[str, Any]:
    try:
        cert = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise SordinoError(f"certificate: there is no file '{path}'; check the path.") from None
    except (ValueError, RecursionError) as error:
        raise SordinoError(f"certificate: '{path}' is not JSON ({error}).") from None
    if not isinstance(cert, dict):
        raise SordinoError(f"certificate: '{path}' does not hold a certificate.")
    return cert


def _against_spec(place: Place, gaps: list[str], cert: dict[str, Any], path: Path) -> Iterator[str]:
    """The certificate that a plan made from this spec would have, number by number."""
    if sha256(path) != cert["spec_sha256"]:
        yield "spec.toml is not the one that the certificate names"
    terms = path.with_name("terms.json")
    if "data" not in read_values(path):  # a federation's: every site has data of its own
        if not terms.is_file():
            gaps.append("the plan of the federation, whose terms.json is not beside it")
            return
        if not AGAINST_TERMS:
            gaps.append("the plan of the federation: import sordino.federation.terms to rebuild it")
            return
        yield from AGAINST_TERMS[0](cert, terms)
        gaps[:] = [gap for gap in gaps if not gap.startswith(FOLLOWS)]
        return
    try:
        spec = Spec.read(path)
        secret = place.private / "secret.toml"
        if secret.is_file():
            spec = Spec.of(read_values(path) | read_values(secret))
        elif cert["sampler"]["schedule"] == "secret":
            gaps.append("the seed of the schedule, which is secret: that it cannot be guessed")
            if spec.schedule_seed is None:
                spec = replace(spec, schedule_seed=SECRET_SEED)
        sizes = sizes_of(cert) or (UNTOLD,) * int(cert["clients"])
        plan = spec.plan(sizes)
        rebuilt = certificate(
            plan,
            Noiseless() if plan.noiseless else source(spec.seed),
            version=cert["sordino"],
            execution=execution(spec),
            assumes=assumptions(spec),
            doubts=[spec.doubt] if spec.doubt else [],
        )
    except SordinoError as error:
        yield f"no plan follows from spec.toml ({error})"
        return
    yield from differences(cert, rebuilt)
    gaps[:] = [gap for gap in gaps if not gap.startswith(FOLLOWS)]
    if cert["code_sha256"] != code_sha256():
        gaps.append(
            f"the code: sordino {cert['sordino']} with other sources wrote the certificate, and this installation "
            "rebuilt its numbers"
        )


# What other files say, or the reader knows: compared elsewhere, or not at all.
APART = ("sordino", "code_sha256", "spec_sha256", "model_sha256", "metrics_sha256", "ledger", "signature", "site")
GIVEN = ("client_names", "test_records")  # facts about the data


def differences(cert: Mapping[str, Any], rebuilt: Mapping[str, Any]) -> Iterator[str]:
    """Where the certificate differs from the one that its plan has: numbers by more than 1e-6 of themselves."""
    for key in sorted({*cert, *rebuilt} - {*APART, *GIVEN}):
        yield from _differ(key, cert.get(key, "nothing"), json.loads(json.dumps(rebuilt.get(key, "nothing"))))


def _differ(where: str, said: Any, found: Any) -> Iterator[str]:
    if isinstance(said, dict) and isinstance(found, dict) and said.keys() == found.keys():
        for key in said:
            yield from _differ(f"{where}.{key}", said[key], found[key])
    elif isinstance(said, list) and isinstance(found, list) and len(said) == len(found):
        for k, (a, b) in enumerate(zip(said, found, strict=True)):
            yield from _differ(f"{where}[{k}]", a, b)
    elif isinstance(said, int | float) and isinstance(found, int | float) and type(said) is not bool:
        if not math.isclose(said, found, rel_tol=1e-6, abs_tol=1e-300):
            yield f"{where}: the certificate says {said:.8g}, the plan of spec.toml gives {found:.8g}"
    elif said != found:
        yield f"{where}: the certificate says {_shown(said)}, the plan of spec.toml gives {_shown(found)}"


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 160 else text[:157] + "…"


def _against_site(run: str, cert: dict[str, Any], path: Path) -> Iterator[str]:
    """A site's ledger has a row a round; each is a release of its group, and no more of them."""
    with Ledger(path) as book:
        yield from book.audit(cert["ledger"]["head"], cert["ledger"]["rows"])
        rows = [row for row in book.rows() if row.plan == run]
    mine = next(g for g in cert["groups"] if cert["site"]["client"] in numbers_of(g["clients"], int(cert["clients"])))
    for release in mine["releases"]:
        own = [row for row in rows if row.query == release["query"]]
        if sum(row.times for row in own) > release["times"]:
            yield f"the ledger holds more releases of {release['query']} than the certificate"
        if any(abs(row.sensitivity / row.std / (release["sensitivity"] / release["std"]) - 1) > 1e-6 for row in own):
            yield f"the ledger holds other noise for {release['query']} than the certificate"
    if {row.query for row in rows} - {release["query"] for release in mine["releases"]} - {"nothing"}:
        yield "the ledger holds releases that the certificate does not name"


def _against_ledger(cert: dict[str, Any], path: Path) -> Iterator[str]:
    with Ledger(path) as book:
        yield from book.audit(cert["ledger"]["head"], cert["ledger"]["rows"])
        paid = {(row.who, row.query): (row.sensitivity, row.std, row.times, row.rate) for row in book.rows()}
    for group in cert["groups"]:
        for release in group["releases"]:
            said = (release["sensitivity"], release["std"], release["times"], release["rate"])
            if paid.get((f"clients {group['clients']}", release["query"])) != said:
                yield f"the ledger does not hold what clients {group['clients']} are said to have released"
