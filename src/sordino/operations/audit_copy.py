"""A copy for an auditor, who only reads: certificates, how far the ledger is, and the log without private figures.

Every field of the copy is on the list of `sordino.evidence.public`, and only what is listed is copied. So the
copy of a site has no record, no key, no score on test records, and no word of a failure, which noise hides.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sordino.errors import SordinoError
from sordino.evidence import public
from sordino.evidence.ledger import Ledger
from sordino.federation import witness
from sordino.federation.config import SiteConfig
from sordino.federation.progress import parsed, read_lines
from sordino.federation.site_data import SiteData
from sordino.federation.witness import RECEIPTS
from sordino.foreign import read_json
from sordino.operations.status import of_site

OF_A_RUN = ("certificate.json", "statement.md", "spec.toml", "terms.json", "model.safetensors", "schema.toml")
OF_AN_EVALUATION = ("certificate.json", "statement.md", "spec.toml", "evaluation.json")


def audit_copy(folder: Path, out: Path) -> list[str]:
    """Write an auditor's copy of the folder of a site or of a coordinator.

    Args:
      folder: the folder, with site.toml or federation.toml.
      out: a new folder. Everybody on this machine may read it: all that is in it may be published.

    Returns:
      The names of the files in it.

    Raises:
      SordinoError: the folder is neither, or `out` is not empty.
    """
    if out.exists() and any(out.iterdir()):
        raise SordinoError(f"--out: '{out}' is not empty; choose another folder.")
    if (folder / "site.toml").exists():
        texts, runs, log = _of_site(folder), sorted((folder / "runs").glob("[!.]*")), folder / "events.jsonl"
        listed: Mapping[str, str] = public.AUDIT_EVENTS
        left_out: tuple[str, ...] = public.AUDIT_LEFT_OUT
    elif (folder / "federation.toml").exists():
        texts, runs, log = _of_coordinator(folder), [folder / "run"], folder / "run" / "progress.jsonl"
        listed, left_out = public.AUDIT_PROGRESS, ()
    else:
        raise SordinoError(f"'{folder}' holds neither site.toml nor federation.toml; name a folder that does.")
    texts["log.jsonl"] = "".join(f"{json.dumps(line)}\n" for line in _listed(log, listed, left_out))
    out.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (out / name).write_text(text, encoding="utf-8")
    for run in runs:
        _copy_run(run, out / "runs" / run.name)
    for path in (out, *out.rglob("*")):
        os.chmod(path, 0o755 if path.is_dir() else 0o444)
    return sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.is_file())


def _of_site(folder: Path) -> dict[str, str]:
    """What a site says about its ledger, signed by its key."""
    config, status = SiteConfig.read(folder / "site.toml"), of_site(folder)
    path, signer = config.path(config.ledger), SiteData(config).signer
    document: dict[str, Any] = {
        "name": config.name,
        "epsilon": config.epsilon,
        "delta": config.delta,
        "spent": status.epsilon,
        "assumes": status.caveat.removeprefix(", "),
        "rounds": status.answered,
        "problem": bool(status.problem),
        "receipt": None,
    }
    if path.exists():
        with Ledger(path, read_only=True) as ledger:
            document["intact"] = not ledger.audit()
            document["accounts"] = len(ledger.accounts())
            mark = witness.Mark(len(ledger), len(ledger), ledger.head())
        document["receipt"] = None if signer is None else witness.receipt(mark, signer)
    return {"ledger.json": json.dumps(document, indent=2) + "\n"}


def _of_coordinator(folder: Path) -> dict[str, str]:
    """The newest receipts of all sites, and their public cards."""
    receipts, roster = folder / RECEIPTS, folder / "roster.toml"
    texts = {"receipts.json": receipts.read_text(encoding="utf-8")} if receipts.exists() else {}
    return texts | ({"roster.toml": roster.read_text(encoding="utf-8")} if roster.exists() else {})


def _listed(path: Path, listed: Mapping[str, str], left_out: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """The lines of a log but for these kinds, with the listed fields alone."""
    for line in parsed(read_lines(path)):
        if line.get("what") not in left_out:
            yield {key: value for key, value in line.items() if key in listed}


def _copy_run(run: Path, out: Path) -> None:
    """The public files of a run that is over and certified; of others nothing may leave."""
    for place, names in ((run, OF_A_RUN), (run / "evaluation", OF_AN_EVALUATION)):
        path = place / "certificate.json"
        if not path.exists() or not read_json(path.read_text(encoding="utf-8"))["certified"]:
            continue
        to = out / place.relative_to(run)
        to.mkdir(parents=True)
        for name in names:
            if (place / name).exists():
                shutil.copyfile(place / name, to / name)
