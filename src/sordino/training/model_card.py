"""MODEL_CARD.md: what a model is for, how good it is, what it protects, and which columns it reads.

It is a function of certificate.json, metrics.jsonl and the header of model.safetensors, which are public, and of
nothing else. So `sordino verify` writes it again and compares.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sordino.core import Adjacency, Trust, Unit
from sordino.errors import SordinoError, count
from sordino.evidence.signing import Signer, announced, fingerprint
from sordino.evidence.statement import ADVERSARY, PROTECTED
from sordino.foreign import printable, printable_parts, read_json
from sordino.models.registry import REGISTRY

if TYPE_CHECKING:
    from sordino.data.schema import Schema

NAME = "MODEL_CARD.md"
PREDICTS = {
    "count": "a count",
    "survival": "the probability of no event by each public edge of time, and the risk that it happens before the last",
}
MOST_COLUMNS = 200  # listed; further ones are counted
RECORDS = (
    "Predictions for new records of the same kind as the training data: the same columns, recorded in the same way, of "
    "a population like theirs."
)
TEXTS = "Texts of the same kind as the training data, in the same language."


def bind(folder: Path, cert: Mapping[str, Any], signer: Signer | None) -> dict[str, Any]:
    """Write the card of the run whose public files lie in `folder`, and put its hash into the certificate.

    Args:
      folder: the public files.
      cert: what `certificate` returned; nobody has signed it yet.
      signer: who will sign it, as the card says; None for nobody.

    Returns:
      The certificate with the hash of the card.
    """
    data = of_folder(folder, announced(cert, signer)).encode()
    (folder / NAME).write_bytes(data)
    return {**cert, "card_sha256": hashlib.sha256(data).hexdigest()}


def of_folder(folder: Path, cert: Mapping[str, Any]) -> str:
    """The card that follows from the public files of a run."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return card(cert, read_json(lines[-1]) if lines else {}, read_header(folder / "model.safetensors"))


def read_header(path: Path) -> dict[str, Any]:
    """What a model.safetensors says of its model, without reading its parameters."""
    try:
        with open(path, "rb") as file:
            header = read_json(file.read(int.from_bytes(file.read(8), "little")))
        return dict(read_json(header["__metadata__"]["sordino"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SordinoError(f"model: '{path}' is not a model of a run ({error}).") from None


def card(cert: Mapping[str, Any], metrics: Mapping[str, Any], about: Mapping[str, Any]) -> str:
    """The card as Markdown.

    Args:
      cert: the certificate.
      metrics: the last line of metrics.jsonl.
      about: the header of the model.
    """
    schema = _schema(about["schema"]) if about.get("schema") else None
    cert, metrics = printable_parts(cert), printable_parts(metrics)  # a name with a line break would add a line
    about = printable_parts(about)
    classes = [str(name) for name in about["classes"]]
    target = schema.target.column if schema is not None and schema.target is not None else None
    predicts = f"the classes {', '.join(classes[:20])}{' …' if len(classes) > 20 else ''}" if classes else "a number"
    size, use = f"{about['features']} features", RECORDS
    if (known := REGISTRY.get(about["kind"])) is not None and known.causal:
        predicts = "the next token of a text, and so writes text"
        size, use = f"{about['features']} tokens per text", TEXTS
    if schema is not None and schema.task in PREDICTS:
        predicts = PREDICTS[schema.task]
    what = predicts if target is None else f"the column `{printable(target)}`: {predicts}"
    return f"""# Model card

A {about["kind"]} model of {size}, trained with the method {cert["method"]} on the data of \
{count(cert["clients"], "client")} in {count(cert["rounds"], "round")} by sordino {cert["sordino"]}. It predicts {what}.

## Intended use

{use} Test it on data of the place where it will be used before anybody relies on it.

## Not intended

{_not_intended(cert, schema)}

## Metrics

{_metrics(cert, metrics)}

{_life_table(about)}{_intervals(about)}## Privacy

{_privacy(cert)}

## Data

{f"The model reads texts of up to {about['features']} tokens." if use is TEXTS else _data(about, schema)}

## How to verify

`sordino verify RUN` computes ε again with a second program, compares the model, the metrics and this card with the \
certificate, and shows who signed it. `sordino predict` and `sordino.load_run` refuse another model than this one.

- Model SHA-256: `{cert["model_sha256"]}`
{_base(about)}- {_signed(cert)}
"""


def _schema(fields: Mapping[str, Any]) -> Schema:
    from sordino.data.schema import Schema  # here: many models have none, and `sordino verify` starts faster

    return Schema.of(fields)


def _not_intended(cert: Mapping[str, Any], schema: Schema | None) -> str:
    lines = [
        "Decisions about a person without review by somebody who is qualified for them.",
        "Populations, instruments or times that the training data do not cover; nobody tested the model on them.",
        "Statements about causes: the weights of the model are associations, with noise added for privacy.",
    ]
    if schema is not None:
        lines.append("Values beyond the ranges below: they are clamped, so that the model cannot tell them apart.")
    if not cert["certified"]:
        lines.append("Publication, unless the training data are public: the run is not certified.")
    return "\n".join(f"- {line}" for line in lines)


def _metrics(cert: Mapping[str, Any], metrics: Mapping[str, Any]) -> str:
    tested = cert["test_records"]
    on = "test records that were held out" if tested is None else f"{tested:,} test records that were held out"
    values = {key: value for key, value in metrics.items() if key not in ("round", "epsilon")}
    numbers = {
        key: value for key, value in values.items() if isinstance(value, int | float) and type(value) is not bool
    }
    rows = "".join(f"| {key.replace('_', ' ')} | {value:.4g} |\n" for key, value in numbers.items())
    why = metrics.get("no_better")
    doubt = f"**The model is no better than a constant guess: {why}.**\n\n" if why else ""
    return f"{doubt}| metric | value |\n|---|---|\n{rows}\nOn {on}. No noise hides those records from these figures."


def _life_table(about: Mapping[str, Any]) -> str:
    """The noised life table of a survival model; empty for other models."""
    table = about.get("life_table")
    if not table:
        return ""
    rows = "".join(
        f"| {row['start']:g} to {row['end']:g} | {row['at_risk']:.4f} | {row['events']:.4f} | {row['survival']:.3f} |\n"
        for row in table
    )
    return (
        "## Life table\n\nShares of the training records, with the noise of the run's first release, whose standard "
        f"deviation is {table[0]['std']:.2g} per cell. Survival is their product-limit curve, with noise smoothed.\n\n"
        f"| interval | at risk | with the event | survival at its end |\n|---|---|---|---|\n{rows}\n"
    )


def _intervals(about: Mapping[str, Any]) -> str:
    """Coefficients with intervals, where the run paid for them."""
    table = about.get("intervals")
    if not table:
        return ""
    known = [row for row in table if row["low"] is not None]
    rows = "".join(
        f"| {_cell(row['feature'])} | {row['estimate']:.3g} | {row['standard_error']:.2g} | {row['low']:.3g} to "
        f"{row['high']:.3g} |\n"
        for row in known[:MOST_COLUMNS]
    )
    words = {"quantity": "Change of the target", "count": "Change of the logarithm of the expected count"}
    target = ((about.get("schema") or {}).get("target") or {}).get("task", "")
    what = f"Log odds of `{_cell(about['classes'][-1])}`" if about["classes"] else words.get(target, "Change")
    return (
        f"## Coefficients\n\n{what} per unit of an encoded feature, with sampling "
        f"error and the noise of the run. {len(table) - len(known)} of {len(table)} coefficients have no interval, "
        "because the noise hides them or their columns sum to 1.\n\n"
        f"| feature | estimate | standard error | 95 % interval |\n|---|---|---|---|\n{rows}\n"
    )


def _privacy(cert: Mapping[str, Any]) -> str:
    if not cert["certified"]:
        reasons = "; ".join(str(reason).rstrip(".") for reason in cert["reasons"])
        return f"**Not certified**: {reasons}. Nothing is certified to be protected."
    unit, adjacency, trust = Unit(cert["unit"]), Adjacency(cert["adjacency"]), Trust(cert["trust"])
    return (
        f"**ε = {cert['epsilon']:.4g} at δ = {cert['delta']:g}**, {unit} level, {adjacency}, {trust}.\n\n"
        f"- Protected: {PROTECTED[unit, adjacency]}.\n"
        f"- Against: {ADVERSARY[trust]}.\n"
        "- The certificate speaks of this run alone; other runs on the same data add to it.\n\n"
        "`statement.md` says what this means, what it assumes and what it does not protect."
    )


def _data(about: Mapping[str, Any], schema: Schema | None) -> str:
    scaled = f"Every record is scaled by itself (`normalize = {about['normalize']}`)." * (about["normalize"] != "none")
    if schema is None:
        names = [f"`{_cell(name)}`" for name in about["columns"][:MOST_COLUMNS]]
        listed = f": {', '.join(names)}" if names else ", which have no names"
        return f"The model reads {about['features']} numbers{listed}. {scaled}".rstrip()
    from sordino.data.columns import TYPES, Drop

    kinds = {kind: name for name, kind in TYPES.items()}
    used = [(name, column) for name, column in schema.columns.items() if not isinstance(column, Drop)]
    rows = "".join(
        f"| {_cell(name)} | {kinds[type(column)]} | {_cell(column.says())} |\n" for name, column in used[:MOST_COLUMNS]
    )
    rows += "".join(
        f"| {name} | features | {_cell(what)} |\n" for name, what, _ in schema.expansion.says(schema.blocks)
    )
    more = f"\n{len(used) - MOST_COLUMNS} further columns are in the schema.\n" if len(used) > MOST_COLUMNS else ""
    dropped = sum(isinstance(column, Drop) for column in schema.columns.values())
    task = "" if schema.target is None else f" The target is `{_cell(schema.target.column)}` ({schema.target.task})."
    unused = f" Columns that are not used: {dropped}." if dropped else ""
    return (
        f"A public schema (SHA-256 `{schema.sha256()}`) turns these columns into {len(schema.features)} features. It "
        f"is declared to be written without looking at the records.{task}{unused} {scaled}\n\n"
        f"| column | type | what a value becomes |\n|---|---|---|\n{rows}{more}"
    ).rstrip()


def _base(about: Mapping[str, Any]) -> str:
    """The weights that training began with, where they are those of a folder; empty for other models."""
    model = about.get("model") or {}
    if not model.get("weights_sha256"):
        return ""
    name = _cell(read_json(model["options"]).get("weights"))
    return f"- Base: the weights `{name}`, whose files have the SHA-256 `{model['weights_sha256']}`\n"


def _signed(cert: Mapping[str, Any]) -> str:
    signature = cert.get("signature")
    if not signature:
        return "The certificate is not signed."
    return f"Signed by {signature['signer']}, fingerprint `{fingerprint(signature['key'])}`"


def _cell(text: Any) -> str:
    """Text inside a table."""
    return printable(" ".join(str(text).split())).replace("|", "\\|")
