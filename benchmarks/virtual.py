"""A study over virtual sites in Flower's simulation (Ray), and the same study in our engine: results/virtual.json.

    python benchmarks/virtual.py --sites 1000

Every virtual site has its own folder: records, limit, ledger and certificate, as a real one. Its noise is seeded here,
so that our engine can add the same noise; the models must then agree. Needs `flwr[simulation]`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

from provenance import provenance

ROOT = Path(__file__).parents[1]
FEATURES, CLASSES, RECORDS, SEED = 4, ["0", "1", "2"], 10, 7


def make(folder: Path, count: int, rounds: int) -> tuple[Path, Path]:
    """Folders of the coordinator and of all sites."""
    from sordino.secagg import Identity

    rng = np.random.default_rng(0)
    sites, names = folder / "sites", [f"site{k:04d}" for k in range(count)]
    for name in names:
        place = sites / name
        place.mkdir(parents=True)
        y = np.arange(RECORDS) % len(CLASSES)
        np.savez(place / "data.npz", x=rng.normal(np.eye(FEATURES)[y], 1).astype(np.float32), y=y)
        own = {"name": name, "data": "data.npz", "epsilon": 50.0, "delta": 1e-3, "classes": CLASSES, "seed": SEED}
        (place / "site.toml").write_text(tomli_w.dumps(own | {"witness": f"../../{name}.witness"}))
        Identity.make(name).save(place / "identity.key")
    study = folder / "study"
    study.mkdir()
    spec = {"method": "dp-fedgd", "rounds": rounds, "epsilon": 8.0, "delta": 1e-5, "trust": "untrusted-server"}
    (study / "spec.toml").write_text(tomli_w.dumps(spec))
    about = {"sites": names, "features": FEATURES, "classes": CLASSES, "deadline": 3600.0, "patience": 3600.0}
    (study / "federation.toml").write_text(tomli_w.dumps(about))
    return study, sites


def simulate(study: Path, sites: Path, count: int, cores: int) -> None:
    """Run the app as Flower's simulation does."""
    from flwr.simulation import run_simulation

    from sordino.federation.flower.app import client_app, server_app

    os.environ |= {"SORDINO_SITES": str(sites), "SORDINO_FOLDER": str(study), "FLWR_TELEMETRY_ENABLED": "0"}
    backend: Any = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"num_cpus": cores}}
    run_simulation(server_app(study), client_app(), num_supernodes=count, backend_config=backend)
    if not (study / "run" / "certificate.json").exists():
        raise RuntimeError(f"the run did not end; see {study}/run/progress.jsonl")


def expected(study: Path, sites: Path) -> Any:
    """The model of our engine, with the same records and the same noise."""
    from sordino.data.records import Records
    from sordino.engines import simulate as engine
    from sordino.federation.config import SiteConfig
    from sordino.federation.site_data import SiteData
    from sordino.federation.terms import Terms
    from sordino.privacy.mechanisms.random import Seeded

    terms = Terms.read((study / "run" / "terms.json").read_text(encoding="utf-8"))
    own = [SiteData(SiteConfig.read(sites / name / "site.toml")) for name in terms.names]
    parts = [data.load(terms.resolved.source.normalize) for data in own]
    x, y = (np.concatenate([getattr(part, key) for part in parts]) for key in ("x_train", "y_train"))
    client = np.repeat(np.arange(len(parts)), [len(part.y_train) for part in parts])
    records = Records.of(x, y, client, dtype=terms.number)
    *_, last = engine.run(terms.plan, terms.model, records, Seeded(SEED), shares=True)
    return last.model


def measure(count: int, rounds: int, cores: int) -> dict[str, Any]:
    from sordino.training.artifacts import load_model

    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as folder:
        study, sites = make(Path(folder), count, rounds)
        began = time.perf_counter()
        simulate(study, sites, count, cores)
        seconds = time.perf_counter() - began
        theta, want = load_model(study / "run" / "model.safetensors")[1], expected(study, sites)
        lines = [json.loads(line) for line in (study / "run" / "progress.jsonl").read_text().splitlines()]
        came = [len(line["came"]) for line in lines if line["what"] == "round"]
        certificates = [json.loads(path.read_text()) for path in sites.glob("*/runs/*/certificate.json")]
    return {
        "sites": count,
        "rounds": rounds,
        "came": came,
        "seconds": round(seconds, 1),
        "difference": float((theta - want).abs().max()),
        "largest": float(want.abs().max()),
        "certificates": len(certificates),
        "epsilons": sorted({round(cert["epsilon"], 6) for cert in certificates}),
        "server_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "cores": cores,
    }


def page(document: dict[str, Any]) -> str:
    """What the site shows of it."""
    about, sites, rounds = document["provenance"], document["sites"], document["rounds"]
    return (
        f"Flower's simulation (flwr {about['flwr']}, Ray {about['ray']}) ran the app with {sites:,} virtual sites on "
        f"{document['cores']} cores: {rounds} rounds in {document['seconds']:.0f} s, hello, terms, ledgers and "
        f"certificates included, and {document['server_mb']} MB for the server's process. Every site has a folder, "
        f"a ledger and a certificate of its own ({document['certificates']:,} certificates, ε = "
        f"{document['epsilons'][0]:g}). With the same noise, the model differs from our engine's by at most "
        f"{document['difference']:.1e} (`{about['command']}`).\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sites", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "virtual.json")
    words = parser.parse_args()
    about = {"flwr": version("flwr"), "ray": version("ray"), "machine": platform.machine()}
    found = measure(words.sites, words.rounds, words.cores)
    command = f"python benchmarks/virtual.py --sites {words.sites} --rounds {words.rounds}"
    document = {"provenance": provenance(command) | about, **found}
    words.out.write_text(json.dumps(document, indent=1) + "\n")
    words.out.with_suffix(".md").write_text(page(document))
    print(found)


if __name__ == "__main__":
    main()
