"""A certificate checked by itself and against the files beside it: spec, ledger, model and metrics."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

from sordino.errors import SordinoError, listed
from sordino.evidence.certificate import EVALUATION, SECRET_SEED, certificate, finite, group_of_site, sizes_of
from sordino.evidence.ledger import Ledger
from sordino.evidence.public import KEPT_BY_A_PARTY
from sordino.evidence.signing import code_sha256, sha256
from sordino.evidence.spent import limit_mu
from sordino.evidence.statement import statement
from sordino.evidence.verify import Verdict, malformed, verify
from sordino.foreign import read_json
from sordino.privacy.mechanisms.quantization import Answer
from sordino.privacy.mechanisms.random import Noiseless, source
from sordino.privacy.plan import Plan
from sordino.settings import read_toml
from sordino.training import model_card
from sordino.training.folder import EVALUATION_FILE, RunFolder, missing
from sordino.training.resolved import ResolvedSpec, resolve
from sordino.training.spec import Spec

SIZE_PLACEHOLDER = 1_000_000  # records per client at client level, where no number in a certificate depends on them
# Yields the differences between a certificate and another file, which lies beside it.
Compare = Callable[[dict[str, Any], Path], Iterator[str]]

# What a document that is no certificate raises: a field of another kind, NaN, or a number beyond floats.
UNREADABLE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError, StopIteration)
LEDGER_STAYS = "ledger.db, which stays with its owner"
LENGTHS = "the lengths of the answers that are sent as integers: they follow from"


def verify_run(path: Path, key: str | None = None, *, against_terms: Compare | None = None) -> Verdict:
    """Check a certificate, and compare it with the files beside it: the plan rebuilt from the spec, the ledger, the
    model and the metrics.

    Args:
      path: the directory of a run, its public/, or a certificate.json.
      key: the public key that must have signed it (`signing.known_keys`).
      against_terms: compares a federation's certificate with its terms.json: `federation.terms.against_terms`. Without
        it, the verdict lists the federation's plan as a gap.
    """
    folder = RunFolder.find(path)
    whole = path.is_dir() or (folder.root / "public").is_dir()  # and not one file among others
    path = folder.named(path, "certificate.json")
    cert = read_certificate(path)
    verdict = verify(cert, key)
    against: Compare = _against_ledger
    spec, ledger = folder.public / "spec.toml", folder.private / "ledger.db"
    received = "site" not in cert and not (folder.root / "private").is_dir()  # a copy of public/ alone
    # A coordinator has no ledger: every site keeps its own, and signs for it.
    coordinators = "site" not in cert and (folder.public / "terms.json").is_file()
    if "site" in cert and len(path.absolute().parents) > 3:  # a site's own: runs/RUN/certificate.json
        where, name = path.absolute().parent, path.absolute().parent.name
        if cert["method"] == EVALUATION:  # runs/RUN/evaluation/certificate.json
            where, name = where.parent, f"{where.parent.name} {EVALUATION}"
        ledger, against = where.parents[1] / "ledger.db", partial(_against_site, name)
    try:
        for beside, compare in ((spec, partial(_against_spec, folder, verdict, against_terms)), (ledger, against)):
            if beside.is_file():
                verdict.problems.extend(compare(cert, beside))
            elif beside != ledger or not coordinators:
                stays = beside == ledger and received
                verdict.gaps.append(LEDGER_STAYS if stays else f"{beside.name}, which is not beside it")
    except UNREADABLE as error:
        if isinstance(error, SordinoError):
            raise
        raise malformed(error) from None
    evaluation = cert["method"] == EVALUATION
    for field, name in BOUND.items():
        name = EVALUATION_FILE if evaluation and field == "metrics_sha256" else name
        known, beside = cert.get(field), folder.public / name
        if evaluation and field == "model_sha256" and not beside.exists():
            above = folder.root.absolute().parent  # an evaluation lies in the folder of its run
            beside = above / "public" / name if (above / "public").is_dir() else above / name
        if known and not beside.exists():
            verdict.gaps.append(f"{name}, which is not beside it")
        elif known and sha256(beside) != known:
            verdict.problems.append(f"{name} is not the one that the certificate names")
        elif not known and "site" in cert and field == "metrics_sha256":
            continue  # the scores on a site's own test records, which it keeps and nobody certifies
        elif not known and (beside.exists() or field in ALWAYS_BOUND):
            verdict.gaps.append(f"{name}, whose hash the certificate does not hold")
    verdict.problems.extend(_against_statement(cert, folder.public / "statement.md", verdict.gaps))
    verdict.problems.extend(_against_card(cert, folder.public, verdict.gaps))
    if whole and (others := _others(folder.public, coordinators or "site" in cert)):
        verdict.gaps.append(f"files that are not of the run: {listed(others)}")
    return verdict


def _others(folder: Path, of_a_party: bool) -> list[str]:
    """Files beside a certificate that it does not name and that nothing is compared with; hidden ones aside."""
    known = ["certificate.json", "spec.toml", "terms.json", EVALUATION_FILE, *BOUND.values()]
    known += KEPT_BY_A_PARTY if of_a_party else []
    names = (path.name for path in sorted(folder.iterdir()) if not path.name.startswith("."))
    return [name for name in names if not any(fnmatchcase(name, pattern) for pattern in known)]


def _against_statement(cert: dict[str, Any], path: Path, gaps: list[str]) -> Iterator[str]:
    """The statement says what the certificate says: it is written again and compared."""
    if not path.is_file():
        return
    try:
        same = path.read_bytes() == statement(cert).encode()
    except UNREADABLE:
        yield "no statement follows from the certificate"
        return
    if not same and cert["code_sha256"] == code_sha256():
        yield "statement.md does not say what the certificate says"
    elif not same:
        gaps.append("the words of statement.md: sordino with other sources wrote them")


def _against_card(cert: dict[str, Any], folder: Path, gaps: list[str]) -> Iterator[str]:
    """The model card says what certificate, metrics and model say: it is written again and compared."""
    path = folder / model_card.NAME
    if not path.is_file():
        return
    try:
        same = path.read_bytes() == model_card.of_folder(folder, cert).encode()
    except (OSError, *UNREADABLE):
        gaps.append(f"{model_card.NAME}, because the metrics or the model are not beside it")
        return
    if not same and cert["code_sha256"] == code_sha256():
        yield f"{model_card.NAME} does not say what certificate, metrics and model say"
    elif not same:
        gaps.append(f"the words of {model_card.NAME}: sordino with other sources wrote them")


def read_certificate(path: Path) -> dict[str, Any]:
    """The content of a certificate.json."""
    try:
        cert = read_json(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise missing(path, "certificate") from None
    except SordinoError as error:
        raise SordinoError(f"certificate: '{path}' cannot be trusted. {error}") from None
    except (ValueError, RecursionError) as error:
        raise SordinoError(f"certificate: '{path}' is not JSON ({error}).") from None
    if not isinstance(cert, dict):
        raise SordinoError(f"certificate: '{path}' does not hold a certificate.")
    return cert


def _against_spec(
    folder: RunFolder, verdict: Verdict, against_terms: Compare | None, cert: dict[str, Any], path: Path
) -> Iterator[str]:
    """Compare with the certificate that a plan made from this spec has, number by number."""
    if sha256(path) != cert["spec_sha256"]:
        yield "spec.toml is not the one that the certificate names"
    terms, values = path.with_name("terms.json"), read_toml(path)
    if EVALUATION in values:
        yield from _against_evaluation(cert, values, path.with_name(EVALUATION_FILE), verdict.gaps)
        verdict.assumed.clear()  # the rebuilt plan gives them
        return
    if "data" not in values:  # a federation's: every site has its own data
        if not terms.is_file():
            verdict.gaps.append("the plan of the federation, whose terms.json is not beside it")
            return
        if against_terms is None:
            verdict.gaps.append("the plan of the federation: pass against_terms to rebuild it from terms.json")
            return
        yield from against_terms(cert, terms)
        verdict.assumed.clear()  # the plan rebuilt from the terms gives them
        with suppress(ValueError):  # terms that are not JSON are a problem already
            if cert["secure"] and read_json(terms.read_text(encoding="utf-8")).get("weights"):
                verdict.gaps.append(f"{LENGTHS} the weights, which are not beside it")
        return
    try:
        resolved = _read_spec(folder, verdict.gaps, cert)
        if (public := resolved.options.get("public")) and not Path(str(public)).is_file():
            name = Path(str(public)).name
            verdict.gaps.append(f"the plan of spec.toml, which reads the file '{name}' (public), and that is not here")
            return
        sizes = sizes_of(cert) or (SIZE_PLACEHOLDER,) * int(cert["clients"])
        rebuilt = certificate(
            resolved.plan(sizes, messages=partial(answers_of, cert)),
            Noiseless() if resolved.noiseless else source(resolved.seed),
            version=cert["sordino"],
            execution=resolved.execution,
            assumes=resolved.assumptions,
            doubts=resolved.doubts,
        )
    except SordinoError as error:
        yield f"no plan follows from spec.toml ({error})"
        return
    yield from differences(cert, rebuilt)
    yield from _against_scores(cert, path.with_name(BOUND["metrics_sha256"]))
    verdict.assumed.clear()  # the rebuilt plan gives them
    if resolved.spec.integers:
        verdict.gaps.append(f"{LENGTHS} model and features")
    if cert["code_sha256"] != code_sha256():
        verdict.gaps.append(
            f"the code: sordino {cert['sordino']} with other sources wrote the certificate, and this installation "
            "rebuilt its numbers"
        )


def _against_scores(cert: Mapping[str, Any], path: Path) -> Iterator[str]:
    """The scores are of as many test records as the certificate says: no noise hides these, so it must not say fewer.

    A share of right answers is a whole number over that of the test records.
    """
    tested = cert["test_records"]
    if tested is None or not path.is_file():
        return
    lines = [read_json(line) for line in path.read_text(encoding="utf-8").splitlines()]
    shares = [line["accuracy"] for line in lines if isinstance(line.get("accuracy"), float)]
    right = [share * tested for share in shares if math.isfinite(share)]
    if (lines and not tested) or any(abs(number - round(number)) > 1e-6 * tested for number in right):
        yield f"the scores in {path.name} are not of {tested:,} test records"


def answers_of(cert: dict[str, Any], plan: Plan) -> tuple[tuple[Answer, ...], ...]:
    """What the messages of each stage hold, as the certificate describes its queries."""
    answers: list[list[Answer]] = [[] for _ in plan.stages]
    for query in cert["queries"]:
        stage, number = map(int, str(query["query"]).split()[0].split("."))
        answers[stage].append(Answer(number, (int(query["dimension"]),)))
    return tuple(map(tuple, answers))


def _against_evaluation(cert: dict[str, Any], values: Mapping[str, Any], path: Path, gaps: list[str]) -> Iterator[str]:
    """Compare with the certificate that the plan of an evaluation has, and the metrics with their noised counts."""
    from sordino.training.evaluation_plan import (
        Settings,
        assumptions,
        plan_of,
        rebuilt,
    )  # here: other certificates need no torch

    known = path.is_file()
    if not known and "site" not in cert:  # a site knows its own counts alone, and no metrics
        gaps.append(f"{path.name}, which is not beside it")
    try:
        if values.get("model_sha256") != cert["model_sha256"]:
            yield "spec.toml names another model than the certificate"
        found = read_json(path.read_text(encoding="utf-8")) if known else {}
        sizes = sizes_of(cert) or ()
        plan, metrics = rebuilt(values, sizes, found) if known else (plan_of(Settings.of(values), sizes), {})
        fresh = source(0 if cert["noise_source"] == "seeded" else None)
        assumes = assumptions(Settings.of(values))
        again = certificate(plan, fresh, version=cert["sordino"], execution=cert["execution"], assumes=assumes)
    except (SordinoError, ValueError) as error:
        yield f"no plan follows from spec.toml and {path.name} ({error})"
        return
    yield from differences({**cert, "assumes": again["assumes"]}, again)  # of a federation there are more
    if cert["code_sha256"] == code_sha256():
        for words in assumes:
            if words not in cert["assumes"]:
                yield f"an assumption that follows from spec.toml is missing: {words}"
    if known and list(_differ("metrics", found, json.loads(json.dumps(metrics)))):
        yield f"the metrics in {path.name} do not follow from the noised counts in it"


def _read_spec(folder: RunFolder, gaps: list[str], cert: dict[str, Any]) -> ResolvedSpec:
    """The run's spec, with its secret part where that is at hand."""
    secret = folder.private / "secret.toml"
    spec = Spec.of(folder.settings())
    hidden = cert["sampler"]["schedule"] == "secret" and not secret.is_file()
    if hidden:
        gaps.append("the seed of the schedule, which is secret: that it cannot be guessed")
    if spec.schedule_seed is None:
        spec = dataclasses.replace(spec, schedule_seed=SECRET_SEED if hidden else 0)
    return resolve(spec)


# Files in public/ whose hash the certificate holds, and those of which every run has one.
BOUND = {
    "model_sha256": "model.safetensors",
    "metrics_sha256": "metrics.jsonl",
    "statement_sha256": "statement.md",
    "card_sha256": model_card.NAME,
    "curve_sha256": "curve.png",
    "schema_sha256": "schema.toml",
    "adapter_sha256": "adapter",
}
ALWAYS_BOUND = ("model_sha256", "metrics_sha256", "statement_sha256")
# Fields that other files determine, or that the reader knows: compared elsewhere, or not at all.
NOT_REBUILT = ("sordino", "code_sha256", "spec_sha256", *BOUND, "ledger", "signature", "site")
DATA_FACTS = ("client_names", "test_records")  # facts about the data


def differences(
    cert: Mapping[str, Any], rebuilt: Mapping[str, Any], but: Sequence[str] = (*NOT_REBUILT, *DATA_FACTS)
) -> Iterator[str]:
    """Where the certificate differs from the one that its plan has: numbers by more than 1e-6 of themselves.

    but: fields that are left out.
    """
    for key in sorted({*cert, *rebuilt} - {*but}):
        yield from _differ(key, cert.get(key, "nothing"), json.loads(json.dumps(rebuilt.get(key, "nothing"))))


def _differ(where: str, claimed: Any, rebuilt: Any) -> Iterator[str]:
    if isinstance(claimed, dict) and isinstance(rebuilt, dict) and claimed.keys() == rebuilt.keys():
        for key in claimed:
            yield from _differ(f"{where}.{key}", claimed[key], rebuilt[key])
    elif isinstance(claimed, list) and isinstance(rebuilt, list) and len(claimed) == len(rebuilt):
        for k, (a, b) in enumerate(zip(claimed, rebuilt, strict=True)):
            yield from _differ(f"{where}[{k}]", a, b)
    elif isinstance(claimed, int | float) and isinstance(rebuilt, int | float) and type(claimed) is not bool:
        if not math.isclose(claimed, rebuilt, rel_tol=1e-6, abs_tol=1e-300):
            yield f"{where}: the certificate says {claimed:.8g}, the plan of spec.toml gives {rebuilt:.8g}"
    elif claimed != rebuilt:
        yield f"{where}: the certificate says {_shown(claimed)}, the plan of spec.toml gives {_shown(rebuilt)}"


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 160 else text[:157] + "…"


def _against_site(run: str, cert: dict[str, Any], path: Path) -> Iterator[str]:
    """Compare with a site's ledger, which has one row per round: the releases of its group, and no others."""
    site = cert["site"]
    with Ledger(path, read_only=True) as book:
        yield from book.audit(cert["ledger"]["head"], cert["ledger"]["rows"])
        if book.hash_of(cert["ledger"]["rows"]) != cert["ledger"]["head"]:
            yield f"row {cert['ledger']['rows']} of the ledger has not the hash that the certificate names"
        rows = [row for row in book.rows() if row.plan == run and row.is_release]
        before = max([cert["ledger"]["rows"], *(row.seq for row in rows)])
        for who in sorted({row.who for row in rows}):
            spent, told = book.spent_epsilon(who, site["delta"], rows=before), site["spent"]
            if not math.isclose(math.inf if told is None else told, spent, rel_tol=1e-6):
                yield f"the site's account had spent ε = {spent:.6g}, and the certificate says {told}"
        limits = [*book.limits(), *([(site["epsilon"], site["delta"])] if cert["method"] == EVALUATION else [])]
        if not any(math.isclose(limit_mu(*each), limit_mu(site["epsilon"], site["delta"])) for each in limits):
            yield f"the ledger never had the limit of ε = {site['epsilon']} at δ = {site['delta']}"
    mine = group_of_site(cert)
    if (answered := len({row.round for row in rows})) != cert["site"]["rounds"]:
        yield f"the site paid for {answered} rounds, and the certificate says that it answered {cert['site']['rounds']}"
    streams = {query["query"] for query in cert["queries"] if query["stream"]}
    for release in mine["releases"]:
        charged = [row for row in rows if row.query == release["query"]]
        if (
            release["query"] in streams
        ):  # one release of the certificate, whose rounds pay for their parts of mu squared
            paid = sum(row.times * (row.sensitivity / row.std) ** 2 for row in charged)
            if paid > release["times"] * (release["sensitivity"] / release["std"]) ** 2 * (1 + 1e-6):
                yield f"the ledger holds more of the stream {release['query']} than the certificate"
            continue
        if sum(row.times for row in charged) > release["times"]:
            yield f"the ledger holds more releases of {release['query']} than the certificate"
        if any(
            abs(row.sensitivity / row.std / (release["sensitivity"] / release["std"]) - 1) > 1e-6 for row in charged
        ):
            yield f"the ledger holds other noise for {release['query']} than the certificate"
    if {row.query for row in rows} - {release["query"] for release in mine["releases"]} - {"nothing"}:
        yield "the ledger holds releases that the certificate does not name"


def _against_ledger(cert: dict[str, Any], path: Path) -> Iterator[str]:
    with Ledger(path, read_only=True) as book:
        yield from book.audit(cert["ledger"]["head"], cert["ledger"]["rows"])
        paid = {(row.who, row.query): (finite(row.sensitivity), row.std, row.times, row.rate) for row in book.rows()}
    for group in cert["groups"]:
        for release in group["releases"]:
            claimed = (release["sensitivity"], release["std"], release["times"], release["rate"])
            if paid.get((f"clients {group['clients']}", release["query"])) != claimed:
                yield f"the ledger does not hold what clients {group['clients']} released, according to the certificate"
