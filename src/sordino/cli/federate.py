"""`sordino federate`: a federation over a real network, or all of one on this machine."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from sordino.cli.show import add_json, bar, check_json, command, console, emit
from sordino.errors import SordinoError


def add(commands: Any) -> None:
    parent = command(
        commands,
        "federate",
        act,
        "train over a real network, between parties that do not trust each other",
        "sordino federate up --sites 3\n"
        "sordino federate init study --sites north,south,west --features 64 --classes 0,1\n"
        "sordino federate keys north site-north\n"
        "sordino federate doctor site-north/site.toml\n"
        "sordino federate coordinate study --host coordinator.example.org\n"
        "sordino federate join site-north/site.toml --link coordinator.example.org:8000 --authority authority.pem",
    )
    parts = parent.add_subparsers(title="steps", metavar="STEP")
    for add_one in (_add_up, _add_init, _add_keys, _add_doctor, _add_coordinate, _add_join):
        add_one(parts)


def act(arguments: argparse.Namespace) -> int:
    raise SordinoError("federate: name a step: up, init, keys, doctor, coordinate or join.")


# ------------------------------------------------------------------------------------------------------------------ up


def _add_up(parts: Any) -> None:
    parser = command(
        parts,
        "up",
        _up,
        "run a whole federation on this machine: link, coordinator and sites as processes of their own, over TLS",
        "sordino federate up --sites 3\n"
        "sordino federate up --sites 5 --dropouts 1 --set rounds=20 --out runs/trial\n"
        "sordino federate up --data patients.csv --label outcome",
    )
    parser.add_argument("--sites", type=int, default=3, metavar="N", help="number of sites (default: 3)")
    parser.add_argument("--data", default="digits", metavar="X", help="as in 'sordino run'; divided among the sites")
    parser.add_argument("--label", metavar="COLUMN", help="the label's column in --data, where it is a table")
    parser.add_argument("--dropouts", type=int, default=0, metavar="N", help="sites that may fail in a round")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="method=…, rounds=…, epsilon=…")
    parser.add_argument("--out", metavar="DIR", help="where everything goes (default: runs/federation-TIME)")
    parser.add_argument("--resume", metavar="DIR", help="go on with one that was stopped")
    add_json(parser)


def _up(arguments: argparse.Namespace) -> int:
    check_json(arguments)
    from sordino.federation import folder
    from sordino.federation.flower import require
    from sordino.settings import parse_setting

    require()
    if arguments.resume:
        out = Path(arguments.resume)
        if not (out / "coordinator" / "federation.toml").exists():
            raise SordinoError(f"--resume: '{out}' holds no federation; check the path.")
        if (out / "coordinator" / "run" / "certificate.json").exists():
            raise SordinoError(f"--resume: the run in '{out}' is over; its certificates are in {out}/sites/*/runs/*/.")
    else:
        out = Path(arguments.out or f"runs/federation-{time.strftime('%Y%m%d-%H%M%S')}")
        if out.exists() and any(out.iterdir()):
            raise SordinoError(f"--out: '{out}' is not empty; --resume {out} goes on with it.")
        spec = dict(parse_setting(text) for text in arguments.set)
        about = {"data": arguments.data, "label": arguments.label, "dropouts": arguments.dropouts}
        folder.demonstration(out, arguments.sites, spec=spec, **about)
    began = time.monotonic()
    try:
        lines = list(_shown(folder.up(out), out))
    except KeyboardInterrupt:
        print(f"go on with: sordino federate up --resume {out}", file=sys.stderr)
        raise
    last = lines[-1]
    if last["what"] == "failed":
        raise SordinoError(f"{last['why']} (everything is in '{out}')")
    document = _outcome(out, lines, time.monotonic() - began)
    if not emit(arguments, document):
        _tell(out, document)
    return 0


def _shown(lines: Any, out: Path) -> Any:
    """The same lines, with a bar on stderr; where that is a file or a pipe, a line for each, as it comes."""
    if not sys.stderr.isatty():
        rounds: int | None = None
        for line in lines:
            rounds = line["rounds"] if line["what"] == "begun" else rounds
            print(_sentence(line, rounds), file=sys.stderr, flush=True)
            yield line
        return
    with bar("starting link and sites") as progress:
        for line in lines:
            if line["what"] == "waiting":
                progress.update(description=f"waiting for {', '.join(line['sites'])}")
            elif line["what"] == "begun":
                progress.update(description=line["method"], total=line["rounds"], completed=line["start"])
            elif line["what"] == "round":
                progress.update(completed=line["t"] + 1, shown=_score(line))
            elif line["what"] in ("refused", "abandoned", "missing"):
                progress.print(_sentence(line, None))
            yield line


def _score(line: dict[str, Any]) -> str:
    score = f"accuracy {line['accuracy']:.1%}  " if "accuracy" in line else ""
    return f"{score}ε {line['epsilon']:.3g}  {len(line['came'])} sites"


def _sentence(line: dict[str, Any], rounds: int | None) -> str:
    """One line of a log."""
    when = time.strftime("%Y-%m-%d %H:%M:%S")
    if line["what"] == "waiting":
        return f"{when} waiting for {', '.join(line['sites'])}"
    if line["what"] == "begun":
        return f"{when} begun: {line['method']}, {line['rounds']} rounds, from round {line['start'] + 1}"
    if line["what"] == "round":
        return f"{when} round {line['t'] + 1}{f' of {rounds}' if rounds else ''}: {_score(line)}"
    rest = ", ".join(f"{key} {value}" for key, value in line.items() if key != "what")
    return f"{when} {line['what']}{f': {rest}' if rest else ''}"


def _outcome(out: Path, lines: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
    import json

    import sordino.federation.terms  # noqa: F401  # how a federation's certificate is rebuilt
    from sordino.training.verify_run import verify_run

    sites = []
    for place in sorted((out / "sites").iterdir()):
        for run in sorted((place / "runs").iterdir()):
            path = run / "certificate.json"
            if path.exists():
                cert = json.loads(path.read_text(encoding="utf-8"))
                held = not verify_run(path).problems
                kept = {key: cert[key] for key in ("epsilon", "delta", "certified", "trust", "secure", "site")}
                sites.append({"certificate": str(path), "verified": held, **kept})
    rounds = [line for line in lines if line["what"] == "round"]
    scores = [line["accuracy"] for line in rounds if "accuracy" in line]
    return {
        "sites": sites,
        "rounds": len(rounds),
        "accuracy": scores[-1] if scores else None,
        "seconds": seconds,
        "out": str(out),
    }


def _tell(out: Path, document: dict[str, Any]) -> None:
    page = console()
    accuracy = "" if document["accuracy"] is None else f", accuracy {document['accuracy']:.1%} on records of its own"
    page.print(f"{document['rounds']} rounds in {document['seconds']:.0f} s{accuracy}", markup=False)
    for site in document["sites"]:
        secure, own = site["secure"], site["site"]
        alone = f" (against the server alone {secure['epsilon_server']:.4g})" if secure else ""
        says = "[bold green]certified[/]" if site["certified"] else "[bold red]not certified[/]"
        holds = "verified" if site["verified"] else "NOT verified"
        page.print(
            f"{own['name']}: {says}: ε = {site['epsilon']:.4g} at δ = {site['delta']:g}, {site['trust']}{alone}; "
            f"{holds}; spent {own['spent']:.4g} of {own['epsilon']:g}"
        )
    page.print(f"each site's certificate.json and statement.md: {out}/sites/*/runs/*/", markup=False)


# -------------------------------------------------------------------------------------------------------- the others


def _add_init(parts: Any) -> None:
    parser = command(
        parts,
        "init",
        _init,
        "write a coordinator's folder: spec.toml, federation.toml, a Flower app, and a README with the commands",
        "sordino federate init study --sites north,south,west --features 64 --classes 0,1,2",
    )
    parser.add_argument("folder", metavar="DIR")
    parser.add_argument("--sites", required=True, metavar="A,B,C", help="names of the sites")
    parser.add_argument("--features", required=True, type=int, metavar="N", help="numbers of a record: public")
    parser.add_argument("--classes", default="", metavar="A,B", help="the labels: public; none for a quantity")
    parser.add_argument("--method", default="dp-fedsofim", metavar="X")
    parser.add_argument("--rounds", type=int, default=20, metavar="N")
    parser.add_argument("--epsilon", type=float, default=8.0, metavar="X")
    parser.add_argument("--trust", default="secure-aggregation", metavar="X")
    parser.add_argument("--dropouts", type=int, default=0, metavar="N", help="sites that may fail in a round")
    parser.add_argument("--colluders", type=int, default=1, metavar="N", help="sites that may side with the server")


def _init(arguments: argparse.Namespace) -> int:
    from sordino.federation import folder

    words = ("features", "method", "rounds", "epsilon", "trust", "dropouts", "colluders")
    classes = [word for word in arguments.classes.split(",") if word]
    names = [word.strip() for word in arguments.sites.split(",")]
    rest = {word: getattr(arguments, word) for word in words}
    made = folder.init(Path(arguments.folder), names, classes=classes, **rest)
    console().print("written: " + ", ".join(str(path) for path in made), markup=False)
    console().print(f"next: {arguments.folder}/README.md", markup=False)
    return 0


def _add_keys(parts: Any) -> None:
    parser = command(
        parts,
        "keys",
        _keys,
        "make a site's keys and a site.toml to fill in; prints the public card for the roster",
        "sordino federate keys north site-north --data patients.csv --label outcome >> roster.toml",
    )
    parser.add_argument("name", metavar="NAME")
    parser.add_argument("folder", metavar="DIR")
    parser.add_argument("--data", default="data.csv", metavar="FILE")
    parser.add_argument("--label", default="", metavar="COLUMN")
    parser.add_argument("--classes", default="", metavar="A,B", help="the public set of labels")
    parser.add_argument("--limit", type=float, default=8.0, metavar="EPSILON", help="over all runs (default: 8)")


def _keys(arguments: argparse.Namespace) -> int:
    from sordino.federation import folder
    from sordino.secagg import Roster

    place = Path(arguments.folder)
    classes = [word for word in arguments.classes.split(",") if word]
    data = str(Path(arguments.data).resolve()) if Path(arguments.data).exists() else arguments.data
    identity = folder.make_site(
        place, arguments.name, data=data, classes=classes, epsilon=arguments.limit, label=arguments.label
    )
    print(Roster.lines(identity.card))
    if not (Path(data).exists() or (place / data).exists()):
        print(f"note: there is no file '{data}' here nor in {place} yet; site.toml looks for it there", file=sys.stderr)
    return 0


def _add_doctor(parts: Any) -> None:
    parser = command(
        parts,
        "doctor",
        _doctor,
        "check a site's data, keys and budget before it joins",
        "sordino federate doctor site-north/site.toml\nsordino federate doctor site.toml --federation study",
    )
    parser.add_argument("site", metavar="SITE.toml")
    parser.add_argument("--federation", metavar="DIR", help="a coordinator's folder, to see whether it can be afforded")
    add_json(parser)


def _doctor(arguments: argparse.Namespace) -> int:
    check_json(arguments)
    from sordino.federation import folder

    found = list(folder.doctor(Path(arguments.site), arguments.federation and Path(arguments.federation)))
    if not emit(arguments, [{"fine": bool(fine), "what": what} for fine, what in found]):
        for fine, what in found:
            console().print(("[green]ok[/]    " if fine else "[red]mend[/]  ") + what.replace("[", "\\["))
    return 0 if all(fine for fine, _ in found) else 1


def _add_coordinate(parts: Any) -> None:
    parser = command(
        parts,
        "coordinate",
        _coordinate,
        "start the link and the coordinator, and train with the sites that come",
        "sordino federate coordinate study\nsordino federate coordinate study --host coordinator.example.org",
    )
    parser.add_argument("folder", metavar="DIR", help="made by 'sordino federate init'")
    parser.add_argument("--host", action="append", default=[], metavar="NAME", help="by which sites reach the link")
    parser.add_argument("--bind", default="127.0.0.1", metavar="ADDRESS", help="(default: loopback, behind a proxy)")
    parser.add_argument("--port", type=int, default=8000, metavar="N")


def _coordinate(arguments: argparse.Namespace) -> int:
    from sordino.federation.flower import deploy

    _check_port(arguments.port)
    place = Path(arguments.folder)
    lines = deploy.coordinate(place, hosts=arguments.host, bind=arguments.bind, port=arguments.port)
    *_, last = _shown(lines, place)
    if last["what"] == "failed":
        raise SordinoError(str(last["why"]))
    console().print(f"certificate.json, statement.md and model.safetensors: {place}/run", markup=False)
    return 0


def _check_port(port: int) -> None:
    if not 1 <= port <= 65_535:
        raise SordinoError(f"--port: {port} must lie between 1 and 65535.")


def _add_join(parts: Any) -> None:
    parser = command(
        parts,
        "join",
        _join,
        "connect a site to a link and answer its letters, until stopped",
        "sordino federate join site-north/site.toml --link coordinator.example.org:8000 --authority authority.pem",
    )
    parser.add_argument("site", metavar="SITE.toml")
    parser.add_argument("--link", required=True, metavar="HOST:PORT")
    parser.add_argument("--authority", required=True, metavar="FILE", help="the coordinator's tls/authority.pem")
    parser.add_argument("--port", type=int, default=9094, metavar="N", help="a free port of this machine's loopback")


def _join(arguments: argparse.Namespace) -> int:
    from sordino.federation.flower import deploy

    _check_port(arguments.port)
    deploy.join(Path(arguments.site), arguments.link, Path(arguments.authority), port=arguments.port)
    return 0
