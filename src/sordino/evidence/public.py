"""Every field of every file that a run publishes, and why it is safe. docs/files.md is made from this list:

    python -m sordino.evidence.public > docs/files.md

`tests/evidence/test_public.py` walks the files of real runs: a field that is not listed fails, and so
does a listed field that never occurs. Add a field here, with its reason, before you publish it.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

SETTING = "A setting, chosen without looking at the data."
PLAN = "Follows from the settings, and at record level from the clients' sizes, which are public and fixed."
ACCOUNT = "Follows from the plan's noise and sensitivities; no record enters it."
RUN_NAME = (
    "Figures follow from the plan's noise and sensitivities. The name of the run is a hash of its settings and data, "
    "with a key that stays private: without the key nobody can compare it with data that they guess."
)
NAMES_ARE_PUBLIC = "Features, labels and file names are declared public."
TESTED = (
    "Computed from the noised model and from test records, which lie outside the guarantee: at client level they are "
    "those of clients held out as a whole."
)
NEVER_DRAWN = (
    "A client that was never drawn released nothing. Who takes part follows from the public plan; where it is secret, "
    "the certificate lists the same releases for all clients."
)
FROM_RELEASES = "A function of noised releases, which the account pays for."
WORDS = "Words that follow from the settings."
HASH = "Hash of a file that is public itself."
OPEN = "Only for data that everybody may see: a benchmark, or public_data = true."

CERTIFICATE: Mapping[str, str] = {
    "format": "A constant of the version.",
    "sordino": "The version of the package.",
    "certified": PLAN,
    "reasons": WORDS,
    "epsilon": ACCOUNT,
    "delta": SETTING,
    "mu": ACCOUNT,
    "guess": ACCOUNT,
    "epsilon_asked": SETTING,
    "epsilon_at.*": ACCOUNT,
    "unit": SETTING,
    "person": "Null unless persons are protected.",
    "person.records": SETTING,
    "person.clients": SETTING,
    "person.choice": SETTING,
    "adjacency": SETTING,
    "trust": SETTING,
    "method": SETTING,
    "execution": WORDS,
    "rounds": SETTING,
    "clients": "The number of clients is public; the certificate says so.",
    "client_names": "At record level who takes part is public. Empty at client level, where it is what is hidden.",
    "cohort": PLAN,
    "records": "Sizes, in records or persons, are public and fixed. Null at client level.",
    "test_records": "The number of records held out, by position or by person. Null at client level.",
    "sampler.clients": SETTING,
    "sampler.records": SETTING,
    "sampler.amplification": WORDS,
    "sampler.schedule": "Whether the schedule is secret; its seed is then in private/secret.toml.",
    "divisor": SETTING,
    "clip": SETTING,
    "noise": ACCOUNT,
    "client_noise": ACCOUNT,
    "noise_source": "The kind of the source, and nothing of its key.",
    "queries[].query": PLAN,
    "queries[].clip": PLAN,
    "queries[].calls": PLAN,
    "queries[].joint": PLAN,
    "queries[].semidefinite": PLAN,
    "queries[].mechanism": PLAN,
    "queries[].stream": PLAN,
    "queries[].carried": PLAN,
    "queries[].step": PLAN,
    "queries[].dimension": PLAN,
    "queries[].bound": WORDS,
    "queries[].clipping": SETTING,
    "queries[].factor.inverse_band": PLAN,
    "queries[].factor.rounds": PLAN,
    "queries[].factor.diagonals": PLAN,
    "queries[].factor.momentum": SETTING,
    "queries[].factor.decay": SETTING,
    "worst_client": ACCOUNT,
    "groups[].clients": "Numbers of clients, by account.",
    "groups[].count": "Numbers of clients, by account.",
    "groups[].records": "Sizes, in records or persons, are public and fixed. Null at client level.",
    "groups[].sizes": "Sizes, in records or persons, are public and fixed. Null at client level.",
    "groups[].rounds": "The schedule is drawn before the run, without looking at data; no account hides it.",
    "groups[].mu": ACCOUNT,
    "groups[].epsilon": ACCOUNT,
    "groups[].own_std.*": ACCOUNT,
    "groups[].influence.*": PLAN,
    "groups[].releases (none)": NEVER_DRAWN,
    "groups[].releases[].query": PLAN,
    "groups[].releases[].sensitivity": PLAN,
    "groups[].releases[].std": ACCOUNT,
    "groups[].releases[].times": PLAN,
    "groups[].releases[].rate": PLAN,
    "groups[].releases[].sampler": PLAN,
    "groups[].releases[].mechanism": PLAN,
    "secure": "Null where sums are not of integers.",
    "assumes": WORDS,
    "numerics": WORDS,
    "spec_sha256": HASH,
    "model_sha256": HASH,
    "metrics_sha256": HASH,
    "curve_sha256": HASH,
    "adapter_sha256": "Hash of files that are public themselves; empty where there are none.",
    "statement_sha256": HASH,
    "card_sha256": "Hash of MODEL_CARD.md, which is public itself; empty where there is none.",
    "schema_sha256": "Hash of schema.toml, which is public itself; empty where there is none.",
    "code_sha256": "Hash of the package's sources.",
    "ledger.head": "Every row of the chain holds the identity of the data keyed by 256 random bits (private/run.key), "
    "or the name of a site's account, with 128 random bits.",
    "ledger.rows": "One row for each query and group of equal accounts.",
    "signature.algorithm": "A constant of the version.",
    "signature.key": "A public key, drawn by chance or a site's own.",
    "signature.signer": "The name of the key.",
    "signature.value": "A function of the other fields and of a secret key.",
}
BY_ROUND = (
    *("accuracy", "auc", "log_loss", "brier", "mse", "r2", "deviance", "d2", "mae", "concordance"),
    *("perplexity", "balanced_accuracy"),
)
METRICS: Mapping[str, str] = {
    "round": PLAN,
    **dict.fromkeys((*BY_ROUND, "macro_auc", "no_better"), TESTED),
    "epsilon": ACCOUNT,
}
SPEC: Mapping[str, str] = {
    **dict.fromkeys(
        (
            *("clients", "partition", "sizes", "split_seed", "participation", "batch", "divisor", "model", "length"),
            *("method", "rounds", "dtype", "compile", "normalize", "private_statistics"),
            *("evaluate_every", "threshold", "epsilon", "delta", "unit", "adjacency", "trust", "noise", "uncertified"),
            *(
                "test_fraction",
                "public_data",
                "person_ids",
                "person_records",
                "person_clients",
                "person_choice",
                "calibrate",
                "calibrate_slope",
                "clipping",
                "uncertainty",
                "integers",
                "dropouts",
                "colluders",
                "machines",
            ),
        ),
        SETTING,
    ),
    **dict.fromkeys(("label", "text", "prompt", "schema", "person"), NAMES_ARE_PUBLIC),
    **dict.fromkeys(
        ("data", "data_dir", "public_stats"),
        "The name of a file or folder, which is declared public; its whole path is in private/secret.toml.",
    ),
    "client_epsilon.*": SETTING,
    "seed": "Of an experiment; the run is then not certified.",
    "schedule_seed": "Who takes part is public. Where it is secret, the seed is in private/secret.toml instead.",
    "(option)": "An option of the method or of the model: a setting, or the name of a public file or folder, whose "
    "whole path is in private/secret.toml.",
}
MODEL: Mapping[str, str] = {
    "theta": FROM_RELEASES,
    "public_mean": "Declared public (public_stats).",
    "public_cov": "Declared public (public_stats).",
    "sordino.kind": SETTING,
    "sordino.spec": "The public spec, without its seeds.",
    "sordino.features": NAMES_ARE_PUBLIC,
    "sordino.outputs": NAMES_ARE_PUBLIC,
    "sordino.columns": NAMES_ARE_PUBLIC,
    "sordino.schema": "Declared public: written by people without looking at the records. Null without a schema.",
    "sordino.classes": NAMES_ARE_PUBLIC,
    "sordino.life_table": "Null where no life table was released.",
    "sordino.life_table[].start": "The public edges of the schema.",
    "sordino.life_table[].end": "The public edges of the schema.",
    **{f"sordino.life_table[].{name}": FROM_RELEASES for name in ("at_risk", "events", "survival")},
    "sordino.life_table[].std": ACCOUNT,
    "sordino.intervals": "Null where the run paid for no standard errors.",
    "sordino.intervals[].feature": NAMES_ARE_PUBLIC,
    **{f"sordino.intervals[].{name}": FROM_RELEASES for name in ("estimate", "standard_error", "low", "high")},
    "sordino.normalize": SETTING,
    "sordino.method": SETTING,
    "sordino.model.seed": "Of the first parameters: a setting.",
    "sordino.model.bfloat16": SETTING,
    "sordino.model.options": "Settings, and names of public files and folders, whose whole paths are in "
    "private/secret.toml.",
    "sordino.model.weights_sha256": "Hash of a folder of public weights. Null where there is none.",
}
FILES: Mapping[str, Mapping[str, str]] = {
    "certificate.json": CERTIFICATE,
    "metrics.jsonl": METRICS,
    "spec.toml": SPEC,
    "model.safetensors": MODEL,
    "schema.toml": {
        "(text)": "Written by people from what is publicly known; the run takes nothing from the records but, with "
        "private_statistics, the ranges of columns with `within` and the shares of the classes of a target with "
        "`find_prevalence`, which follow from noised counts."
    },
    "statement.md": {"(text)": "A function of certificate.json alone."},
    "MODEL_CARD.md": {
        "(text)": "A function of certificate.json, of the last line of metrics.jsonl and of what model.safetensors "
        "says of its model (columns, schema, classes)."
    },
    "curve.png": {"(picture)": "A function of metrics.jsonl, delta, the method's and the data's name alone."},
}
INTERVALS = ("accuracy", "auc", "sensitivity", "specificity", "brier", "mean_predicted", "observed")
OTHER_TASKS = ("mae", "mse", "r2", "deviance", "concordance")
EVALUATION_METRICS = (*INTERVALS, "brier_gain", "predicted_minus_observed", *OTHER_TASKS)
OF_A_METRIC = ("estimate", "low", "high")
EVALUATION: Mapping[str, str] = {  # evaluation.json, of `sordino evaluate`
    "task": NAMES_ARE_PUBLIC,
    "records": "The number of test records, or of persons, of each client is public and fixed.",
    **dict.fromkeys(("confidence", "bins", "threshold", "epsilon", "delta", "unit", "adjacency", "trust"), SETTING),
    **{f"{name}.{part}": FROM_RELEASES for name in EVALUATION_METRICS for part in OF_A_METRIC},
    "auc.binning": FROM_RELEASES,
    "constant_guess": FROM_RELEASES,
    "most_deviance": "A constant: the deviance of one count is at most that much.",
    **{
        f"calibration_curve[].{part}": FROM_RELEASES
        for part in ("from", "to", "share", "predicted", "observed", "low", "high")
    },
    "noise": ACCOUNT,
    "sensitivity_of_counts": PLAN,
    "tally": "The release itself: the noised counts, divided by the number of records.",
    "came": "In a federation, the sites whose counts are in the sum; the coordinator knows.",
}
EVALUATION_SPEC: Mapping[str, str] = {  # spec.toml of an evaluation
    "evaluation": NAMES_ARE_PUBLIC,
    "model_sha256": HASH,
    "schema_sha256": "Hash of the schema of the tables, which is public.",
    "label_unit": "Half of the public range of a quantity, the root of the public maximum of a count; 1 for others.",
    "intervals": "Of survival, the number of public intervals of time.",
    **dict.fromkeys(("bins", "threshold", "confidence", "epsilon", "delta", "unit", "adjacency", "trust"), SETTING),
    **dict.fromkeys(("dropouts", "colluders"), "Of a federation that adds up integers: a setting."),
    **dict.fromkeys(
        ("person_records", "person_clients", "person_choice", "person_ids"), "Where persons are protected: a setting."
    ),
}
EVALUATION_FILES: Mapping[str, Mapping[str, str]] = {  # public/ of an evaluation
    "evaluation.json": EVALUATION,
    "spec.toml": EVALUATION_SPEC,
    "certificate.json": CERTIFICATE,
    "statement.md": FILES["statement.md"],
}
# Files of a run in the folder of a site or a coordinator. They stay there, and say nothing to others.
KEPT_BY_A_PARTY = (
    *("README.txt", "account", "active", "approved", "box", "checkpoint", "columns", "data", "evaluation"),
    *("lost-place", "memory", "noise", "offers", "offers.json", "pending", "progress.jsonl", "reserve", "secret"),
    "survivors-*.json",
)
ADAPTER = (
    "adapter/ (transformers): the adapters of model.safetensors in another format, settings, and of the public weights "
    "that training began with the name (of a folder without its path), the class and a hash."
)
SECURE: Mapping[str, str] = {  # of a federation that adds up integers
    "secure.dropouts": SETTING,
    "secure.colluders": SETTING,
    "secure.honest": PLAN,
    "secure.epsilon_server": ACCOUNT,
}
OF_MANY_SITES: Mapping[str, str] = {  # the same with more than 256 sites
    f"secure.masks.{part}": PLAN for part in ("edge", "shares", "near", "committee", "quorum")
}
SITE: Mapping[str, str] = {  # of a site's own certificate
    "site.name": "The site's name in the roster.",
    "site.client": "The site's number in the plan.",
    "site.data": "Identity of the records, keyed by the site's data.key. It does not name an account.",
    "site.epsilon": SETTING,
    "site.delta": SETTING,
    "site.spent": "Follows from the rows of the ledger, which hold no record.",
    "site.rounds": "How many rounds the site answered; the server knows.",
}
RECEIPT: Mapping[str, str] = {  # in a site's replies, and in the coordinator's receipts.json
    "rows": "How many rows the site's ledger has: a number of releases, most of which the coordinator saw.",
    "at": "As rows.",
    "head": "Every row of the chain holds the name of an account with 128 random bits, which never leaves the site.",
    "key": "The site's public key, which is in the roster.",
    "signature": "A function of the other fields and of a secret key.",
}
KNOWN_TO_THE_SERVER = "The coordinator and the site both know it: a message said it."
WHEN = "When it was written, to the second. It does not depend on records other than by how long a round took."
AUDIT_LEDGER: Mapping[str, str] = {  # ledger.json of a site's copy for an auditor
    "name": "The site's name in the roster.",
    "epsilon": SETTING,
    "delta": SETTING,
    "spent": SITE["site.spent"],
    "assumes": "What `spent` assumes of how later runs were chosen: one of a few constant texts, or empty.",
    "rounds": SITE["site.rounds"],
    "problem": "Whether the ledger is older than its witness.",
    "intact": "Whether the chain of hashes is whole.",
    "accounts": "How many accounts people of the site opened.",
    "receipt": "Null where the site has no key or no ledger.",
    **{f"receipt.{key}": reason for key, reason in RECEIPT.items()},
}
AUDIT_LEFT_OUT = ("failed",)  # lines of events.jsonl that no copy has, because noise hides that a site failed
AUDIT_EVENTS: Mapping[str, str] = {  # log.jsonl of a site's copy: of the other lines, these fields alone
    "time": WHEN,
    "what": f"{KNOWN_TO_THE_SERVER} Lines about failures are left out, because noise hides them.",
    "run": "128 random bits that the coordinator drew.",
    "method": SETTING,
    "rounds": SETTING,
    "t": KNOWN_TO_THE_SERVER,
    "code": "One of a few constants, which the coordinator was told. The detail stays at the site.",
    "place": KNOWN_TO_THE_SERVER,
    "epsilon": ACCOUNT,
}
AUDIT_PROGRESS: Mapping[str, str] = {  # log.jsonl of a coordinator's copy: of progress.jsonl, these fields alone
    "what": "What the coordinator did, or was told.",
    **{key: AUDIT_EVENTS[key] for key in ("time", "run", "method", "rounds", "t", "place", "epsilon")},
    **dict.fromkeys(("site", "sites", "missing", "came"), "Names of sites, and who answered: the coordinator knows."),
    "kind": "The kind of a message.",
    "reason": "One of a few constant texts.",
    "start": SETTING,
}
SUMMARY: Mapping[str, str] = {
    **{f"{name}.*": TESTED for name in BY_ROUND},
    **{f"metrics.{name}": TESTED for name in BY_ROUND},
    **{f"metrics.survival_curve[].{name}": TESTED for name in ("time", "predicted", "observed", "brier")},
    **{f"metrics.{name}": TESTED for name in ("mean_predicted", "observed", "calibration_slope")},
    **{f"metrics.{name}": TESTED for name in ("calibration_intercept", "sensitivity", "specificity")},
    **{f"metrics.{name}": TESTED for name in ("macro_auc", "classes[].recall", "classes[].auc")},
    "metrics.classes[].class": NAMES_ARE_PUBLIC,
    "metrics.classes[].records": "At record level classes of the test records. Absent at client level.",
    "metrics.perplexity_before": "Computed from public weights and from test records, which lie outside the guarantee.",
    "metrics.threshold": SETTING,
    "metrics.calibration_curve[].predicted": TESTED,
    "metrics.calibration_curve[].observed": TESTED,
    "metrics.calibration_curve[].records": "At record level a tenth of the test records, up to ties. Absent at client "
    "level.",
    **{key: CERTIFICATE[key] for key in ("epsilon", "delta", "certified", "reasons", "noise", "client_noise")},
    **{key: CERTIFICATE[key] for key in ("method", "clients", "records", "rounds", "client_names")},
    "publishable": WORDS,
    "beats_guessing": TESTED,
    "out": "The directory that was named.",
    "heterogeneity.*": OPEN,
    "seconds": OPEN,
    **{f"client_metrics[].{name}": OPEN for name in ("client", "records", *BY_ROUND)},
}


class Line(NamedTuple):
    """Of the console. `open_only`: never of private data."""

    pattern: str  # a regular expression for the whole line
    reason: str
    open_only: bool = False


NUMBER = r"([-+.e\d]+%?|not defined)"
SHOWN = "(accuracy|mse|deviance|concordance|perplexity)"  # the first metric of each task
CONSOLE = (
    Line(r"run +.+ on .+, \d+ rounds", PLAN),
    Line(r"run +.+ on .+, \d+ rounds in [\d.]+ s", OPEN, True),
    Line(r"clients +\d+( with [\d,]+ (records|persons)( \([\d,]+ to [\d,]+ each\))?)?", "As in certificate.json."),
    Line(r"labels +partition .+ classes are missing", OPEN, True),
    Line(r"names +0 .+", CERTIFICATE["client_names"]),
    Line(rf"(result|error) +{SHOWN} ([-+.e\d]+%?|nan)( on [\d,]+ test records)?", TESTED),
    Line(rf"before +perplexity {NUMBER} without training", "As metrics.perplexity_before."),
    Line(
        rf"scores +AUC {NUMBER}, log loss {NUMBER} \({NUMBER} from prevalence alone\), Brier score {NUMBER}",
        TESTED,
    ),
    Line(
        rf"scores +balanced accuracy {NUMBER}, mean AUC {NUMBER}, log loss {NUMBER} \({NUMBER} from prevalence alone\)",
        TESTED,
    ),
    Line(rf"class +.+: recall {NUMBER}, AUC {NUMBER}", TESTED),
    Line(r"class +\d+ more, which --json lists, are found more often or have no test records", TESTED),
    Line(
        rf"risks +{NUMBER} predicted on average, {NUMBER} observed; calibration slope {NUMBER}, intercept {NUMBER}",
        TESTED,
    ),
    Line(rf"threshold +above {NUMBER}: sensitivity {NUMBER}, specificity {NUMBER}", TESTED),
    Line(rf"fit +R² {NUMBER}, mean absolute error {NUMBER}", TESTED),
    Line(rf"fit +{NUMBER} of it explained \({NUMBER} from the mean alone\), mean absolute error {NUMBER}", TESTED),
    Line(rf"counts +{NUMBER} predicted on average, {NUMBER} observed", TESTED),
    Line(rf"scores +Brier score {NUMBER}, mean over edges", TESTED),
    Line(rf"survival +by {NUMBER} {NUMBER} predicted, {NUMBER} observed(; by .+)?", TESTED),
    Line(r"intervals +\d+ of \d+ coefficients have a 95 % interval(; the noise is too large .+)?", FROM_RELEASES),
    Line(r"privacy +ε = .+ at δ = .+ level, .+", ACCOUNT),
    Line(r"verdict +(certified|NOT certified: .+)", ACCOUNT),
    Line(r"ledger +ε = .+ at δ = .+ over \d+ runs? on these data \(.+\)", RUN_NAME),
    Line(r"signed by +.+ [0-9a-f]{32}", CERTIFICATE["signature.key"]),
    Line(r"exposed +the .+test.+: no noise hides them, and their score is published", ACCOUNT),
    Line(
        r"files +.+: public/ may be published( because its data are public)?, private/ may not \(README\.txt\)",
        "The directory that was named.",
    ),
    Line(r"files +.+: nothing here may be published \(README\.txt\)", "The directory that was named."),
    Line(r"WARNING: the model is no better than (a constant guess|before training): .+", TESTED),
    Line(r"WARNING: the test records do not show that the model is better than a constant guess: .+", TESTED),
    Line(rf"WARNING: ε = {NUMBER} is above {NUMBER}, a weak promise: .+", ACCOUNT),
    Line(r"WARNING: the found ranges are rough .+", PLAN),
    Line(r"WARNING: no coefficient will have an interval, .+", PLAN),
    Line(rf"note: the calibration slope is {NUMBER}: risks are too sure.+", TESTED),
    Line(r"note: batch .+ is every record of clients .+, so sampling adds no privacy for them", PLAN),
    Line(rf"\S+ ━+ \d+/\d+ ({SHOWN} \S+  (ε \S+|no noise))?\s*", "Progress on stderr. " + TESTED),
    Line(rf"\S+ ━+ \d+/\d+ ({SHOWN} \S+  (ε \S+|no noise))? *\d+:\d\d:\d\d\s*", "Progress on stderr. " + OPEN, True),
)


def fields(document: Any, prefix: str = "") -> Iterator[str]:
    """Paths of a JSON document: `groups[].mu`; `*` for keys that are not names, such as rounds and queries."""
    if isinstance(document, Mapping) and document:
        for key, value in document.items():
            name = f"{prefix}.{key}" if prefix else str(key)
            yield from fields(value, f"{prefix}.*" if _keyed(prefix) else name)
    elif isinstance(document, list) and document and isinstance(document[0], Mapping):
        for part in document:
            yield from fields(part, f"{prefix}[]")
    elif _keyed(prefix):
        yield f"{prefix}.*"  # empty, or absent
    elif document == [] and prefix == "groups[].releases":
        yield f"{prefix} (none)"
    else:
        yield prefix


KEYED = ("epsilon_at", "own_std", "influence", "client_epsilon", "heterogeneity")


def unlisted_of_evaluation(folder: Path) -> list[str]:
    """Fields and files of an evaluation's public/ that nobody gave a reason for."""
    problems = []
    for path in sorted(folder.iterdir()):
        text = path.read_text(encoding="utf-8")
        named = {"(text)"}
        if path.suffix in (".json", ".toml"):
            document = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
            named = set(_fields_of_evaluation(document) if path.name == "evaluation.json" else fields(document))
        listed = EVALUATION_FILES.get(path.name, {})
        problems += [f"{path.name}: {field}" for field in sorted(named - set(listed))]
    return problems


def _fields_of_evaluation(document: Mapping[str, Any]) -> Iterator[str]:
    """As `fields`, which takes metrics by name for metrics by round."""
    for key, value in document.items():
        if isinstance(value, Mapping):
            yield from (f"{key}.{part}" for part in value)
        else:
            yield from fields({key: value})


def _keyed(prefix: str) -> bool:
    return prefix in BY_ROUND or prefix.split(".")[-1] in KEYED


def found(folder: Path) -> dict[str, set[str]]:
    """The fields of every file in a run's public/, as `FILES` names them."""
    listed: dict[str, set[str]] = {}
    for path in sorted(folder.iterdir()):
        if path.name == "certificate.json":
            listed[path.name] = set(fields(json.loads(path.read_text(encoding="utf-8"))))
        elif path.name == "metrics.jsonl":
            listed[path.name] = {
                key for line in path.read_text(encoding="utf-8").splitlines() for key in json.loads(line)
            }
        elif path.name == "spec.toml":
            listed[path.name] = spec_fields(tomllib.loads(path.read_text(encoding="utf-8")))
        elif path.name == "model.safetensors":
            listed[path.name] = _model(path)
        else:
            listed[path.name] = set(FILES.get(path.name, {"(unknown file)": ""}))
    return listed


def spec_fields(values: Mapping[str, Any]) -> set[str]:
    """A method's options under one name: what is not a key of a run is one of them, else the spec would not be read."""
    return {key if key in SPEC else "(option)" for key in fields(values)}


def _model(path: Path) -> set[str]:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as store:
        about = store.metadata() or {}
        names = set(store.keys())
    documents = {key: json.loads(text) for key, text in about.items()}
    for document in documents.values():
        if "schema" in document:
            document["schema"] = None  # one public document, whatever its columns are called
    return names | set(fields(documents))


def unlisted(folder: Path) -> list[str]:
    """Fields and files of a run's public/ that nobody gave a reason for."""
    return [
        f"{name}: {field}"
        for name, listed in found(folder).items()
        for field in sorted(listed - set(FILES.get(name, ())))
        if name != "adapter"
    ]


# ---------------------------------------------------------------------------------------------------------- for people

HEAD = """# The files of a run

`sordino run --out OUT` writes two folders.

- `OUT/public/` may be published if the run is certified. Nothing in it is then computed from protected records but
  through noised releases. Of a run that is not certified nothing may be published, unless its data are public; the
  console and `OUT/README.txt` say which it is. README.txt also says how ledgers call the run: by a
  hash with a private key.
- `OUT/private/` may not: `ledger.db` (what was paid for), `checkpoint.npz` (where the run stands), `run.key` (keys the
  hash of the data and signs the certificate), `schema.toml` (the schema that the run goes on with, of which the public
  one is a copy), `timings.jsonl` (how long rounds took, which depends on the records), `secret.toml` (whole paths of
  files and folders, and the seed of a secret schedule), `shared_ledger.json` (where the ledger of several runs lies),
  `lease.json` (tells this folder from its copies), `audit.json` and `audit.png` (what `sordino audit OUT` found with
  the records themselves), `lock`. Only its owner can read it, and some runs lack some of these.

`sordino verify`, `predict`, `ledger show` and `run --resume` take OUT, OUT/public or a file inside. Publish `public/`
as it is: `verify` compares every file with its hash in the certificate, and writes the statement and the model card
again to compare the words. Of a folder it lists files that are not of the run; nothing says who wrote them. All files
have the time of the start of the run, because other times would tell how long it took.

A run that lost its checkpoint, or got an older one back, is refused: with fresh noise its rounds would be a second
release on one charge. A resumed run compares spec, schema and metrics in `public/` with what `private/` holds, and
refuses others. It also refuses a copy of the folder after another copy was resumed, and a folder that was put back to
an earlier state: the shared ledger (`--ledger`), or else a file in the user's state directory (`$XDG_STATE_HOME` or
`~/.local/state`, in `sordino/runs/`), knows which copy goes on and how many rounds it has done. What remains: without
`--ledger`, copies that are resumed on two machines, by two users, or in containers that forget their state directory;
and whoever puts that file or the shared ledger back together with the folder. Data that everybody may see need neither.

A certificate is signed with a key of the run, or with `--sign-with identity.key`. `sordino verify OUT --key KEY` says
whether KEY signed it. Without a signature anybody can make up spec, certificate and ledger that agree.

Data-dependent partitions (`dirichlet`, `classes`, `counts`) decide by labels who holds a record, so that clients' sizes
would tell of them. They are certified for benchmark data and for data declared public (`public_data = true`), as a
simulation; on other files use `iid` or `by-column`. At client level such files need `by-column` or a schema's client
column, and a part of the *clients* is held out for testing: clients that `iid` makes of records would be tested on some
of their own, and metrics would tell how many records there are.

Every field of every public file, and why it is safe (this page is made from
`sordino.evidence.public`, and a test walks real runs for fields that are not listed):
"""


EVALUATION_HEAD = """## An evaluation

`sordino evaluate RUN --data FILE` writes a folder of the same form: `public/` with evaluation.json, spec.toml,
certificate.json (the fields above) and statement.md, and `private/` with `run.key` and `ledger.db`.
"""


AUDIT_HEAD = """## An auditor's copy

`sordino federate audit-copy DIR --out COPY` copies the public files of every certified run of a site or a coordinator
(the fields above), the coordinator's roster.toml and receipts.json, and these:
"""


def page() -> str:
    """docs/files.md."""
    parts = [HEAD]
    for name, listed in FILES.items():
        parts.append(_table(f"public/{name}", listed))
    parts.append(f"## public/adapter/\n\n{ADAPTER}\n")
    parts.append(EVALUATION_HEAD)
    for name in ("evaluation.json", "spec.toml"):
        parts.append(_table(f"public/{name} of an evaluation", EVALUATION_FILES[name]))
    parts.append(_table("certificate.json of a federation that adds up integers: also", SECURE))
    parts.append(_table("certificate.json of such a federation of more than 256 sites: also", OF_MANY_SITES))
    parts.append(_table("certificate.json of a site: also", SITE))
    parts.append(_table("A site's receipt for its ledger, in replies and in the coordinator's receipts.json", RECEIPT))
    parts.append(AUDIT_HEAD)
    parts.append(_table("ledger.json of a site's copy", AUDIT_LEDGER))
    parts.append(_table("log.jsonl of a site's copy", AUDIT_EVENTS))
    parts.append(_table("log.jsonl of a coordinator's copy", AUDIT_PROGRESS))
    parts.append(_table("`sordino run --json` (its `spec` is spec.toml)", SUMMARY))
    lines = {f"`{line.pattern}`".replace("|", "\\|"): line.reason for line in CONSOLE}
    parts.append(_table("Lines on the console (regular expressions)", lines, code=False))
    return "\n".join(parts)


def _table(title: str, rows: Mapping[str, str], *, code: bool = True) -> str:
    body = "".join(f"| {f'`{name}`' if code else name} | {reason} |\n" for name, reason in rows.items())
    return f"## {title}\n\n| field | why it is safe |\n|---|---|\n{body}"


if __name__ == "__main__":
    print(page(), end="")
