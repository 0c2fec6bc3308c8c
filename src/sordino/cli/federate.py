"""`sordino federate`: a federation over a network, or a whole one on this machine."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sordino.cli import operate
from sordino.cli.show import add_json, bar, check_json, command, console, emit, facts, marked, say, steps, table
from sordino.errors import SordinoError
from sordino.federation import sentences

if TYPE_CHECKING:
    from sordino.operations.doctor import Check

UP_FLAGS = (
    # of `up`: a flag, whose name is the key of spec.toml, and what it says in --help
    ("--method", "see 'sordino methods' (default: auto)"),
    ("--model", "see 'sordino run --help' (default: auto)"),
    ("--rounds", "number of rounds (default: 10)"),
    ("--epsilon", "privacy budget of the run (default: 8)"),
    ("--trust", "secure-aggregation or untrusted-server (default: secure-aggregation)"),
    ("--batch", "records per gradient: full, poisson:16, poisson:0.01 or fixed:16 (default: full)"),
)


def add(commands: Any) -> None:
    parts = steps(
        commands,
        "federate",
        "train over a real network, between parties that do not trust each other",
        "sordino federate up --sites 3\n"
        "sordino federate init study --sites north,south,west --features 64 --classes 0,1\n"
        "sordino federate keys north site-north\n"
        "sordino federate doctor site-north/site.toml\n"
        "sordino federate coordinate study --host coordinator.example.org\n"
        "sordino federate join site-north/site.toml --link coordinator.example.org:8000 --authority authority.pem\n"
        "sordino federate status study",
        "doctor",
    )
    every = (
        _add_up,
        _add_init,
        _add_keys,
        _add_doctor,
        _add_coordinate,
        _add_join,
        operate.add_app,
        operate.add_serve,
        operate.add_approve,
        operate.add_studies,
        operate.add_backup,
        operate.add_restore,
        operate.add_audit_copy,
        operate.add_status,
        _add_renew,
        operate.add_rotate,
        operate.add_vote,
    )
    for add_one in every:
        add_one(parts)


# ------------------------------------------------------------------------------------------------------------------ up


def _add_up(parts: Any) -> None:
    parser = command(
        parts,
        "up",
        _up,
        "run a whole federation on this machine, in about a minute: link, coordinator and sites, over TLS",
        "sordino federate up --sites 3\n"
        "sordino federate up --sites 5 --dropouts 1 --rounds 20 --out runs/trial\n"
        "sordino federate up --sites 12 --method dp-ftrl\n"
        "sordino federate up --sites 12 --batch poisson:16\n"
        "sordino federate up --data patients.csv --label outcome\n"
        "sordino federate up --data patients.csv --schema schema.toml --person patient\n"
        "sordino federate up --data answers.csv --text answer --prompt question --model causal-lora "
        "--set weights=gpt2 --method dp-fedadam",
    )
    parser.add_argument(
        "--sites", type=int, metavar="N", help="number of sites (default: one per client of the schema, else 3)"
    )
    parser.add_argument("--data", default="digits", metavar="X", help="as in 'sordino run'; divided among the sites")
    parser.add_argument("--label", metavar="COLUMN", help="the label's column, if --data is a table")
    parser.add_argument("--text", metavar="COLUMN", help="column of text of the table, for models that read text")
    parser.add_argument("--prompt", metavar="COLUMN", help="of causal-lora: column of what comes before each text")
    parser.add_argument(
        "--schema", metavar="FILE", help="the schema.toml of the table, in place of --label; every site gets it"
    )
    parser.add_argument(
        "--dropouts", type=int, default=0, metavar="N", help="sites that may fail in a round (default: 0)"
    )
    parser.add_argument(
        "--evaluate", type=float, metavar="E", help="epsilon of an evaluation on the sites' own test records at the end"
    )
    parser.add_argument(
        "--person",
        metavar="COLUMN",
        help="column of the schema's table that says whom a record is about: all records of a person are protected "
        "together",
    )
    for flag, text in UP_FLAGS:
        parser.add_argument(flag, dest=f"key_{flag[2:]}", metavar="X", help=text)
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="any key of spec.toml: lr=0.5, unit=client …"
    )
    parser.add_argument("--out", metavar="DIR", help="folder for all files (default: runs/federation-TIME)")
    parser.add_argument("--resume", metavar="DIR", help="continue a federation that was stopped")
    parser.add_argument(
        "--prepare", action="store_true", help="only write the folders, for `coordinate` and `join` in other places"
    )
    add_json(parser)


def _up(arguments: argparse.Namespace) -> int:
    check_json(arguments)
    from sordino.federation.flower import require
    from sordino.operations import demonstration

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
            raise SordinoError(f"--out: '{out}' is not empty; choose another folder, or --resume {out} to continue it.")
        spec = _spec_of(arguments)
        about = {
            "person": arguments.person,
            "data": arguments.data,
            "label": arguments.label,
            "text": arguments.text,
            "prompt": arguments.prompt,
            "dropouts": arguments.dropouts,
        }
        about |= {"evaluation": arguments.evaluate, "schema": arguments.schema and Path(arguments.schema)}
        demonstration.prepare(out, arguments.sites, spec=spec, **about)
        if arguments.prepare:
            return _prepared(arguments, out)
    began = time.monotonic()
    try:
        if not sys.stderr.isatty():  # the bar of a terminal says it itself
            say(f"{time.strftime('%H:%M:%S')}  starting link and sites", aside=True)
        lines = list(_shown(demonstration.up(out)))
    except KeyboardInterrupt:
        print(f"continue with: sordino federate up --resume {out}", file=sys.stderr)
        raise
    last = lines[-1]
    if last["what"] == "failed":
        raise SordinoError(f"{last['why']} (everything is in '{out}')")
    document = _outcome(out, lines, time.monotonic() - began)
    if not emit(arguments, document):
        _show_outcome(out, document)
    return 0


def _spec_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """The keys of spec.toml that flags and --set give; a key that both give is refused."""
    from sordino.settings import parse_setting

    flags = {flag[2:]: value for flag, _ in UP_FLAGS if (value := getattr(arguments, f"key_{flag[2:]}")) is not None}
    spec = dict(parse_setting(text) for text in arguments.set)
    if both := sorted(flags.keys() & spec.keys()):
        raise SordinoError(f"--set {both[0]}: --{both[0]} is given too; leave one out.")
    return spec | dict(parse_setting(f"{key}={value}") for key, value in flags.items())


def _prepared(arguments: argparse.Namespace, out: Path) -> int:
    """Say what was written, and what to start with it."""
    sites = sorted(path.name for path in (out / "sites").iterdir())
    if not emit(arguments, {"out": str(out), "sites": sites}):
        facts(
            [
                ("written", f"{out}/coordinator and {out}/sites/{{{','.join(sites)}}}"),
                ("coordinator", f"sordino federate coordinate {out}/coordinator"),
                ("each site", f"sordino federate join {out}/sites/{sites[0]}/site.toml --link HOST:8000 --authority "
                 f"{out}/coordinator/tls/authority.pem"),
            ]
        )  # fmt: skip
    return 0


# ------------------------------------------------------------------------------------------------------------ progress


def _shown(lines: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The same lines, with a progress bar on stderr. If stderr is not a terminal, one line of text per line."""
    if not sys.stderr.isatty():
        rounds: int | None = None
        for line, told in _told(lines):
            rounds = line["rounds"] if line["what"] == "begun" else rounds
            for each in told:
                say(f"{time.strftime('%H:%M:%S')}  {sentences.of_coordinator(each, rounds)}", aside=True)
            yield line
        return
    with bar("starting link and sites") as progress:
        for line, told in _told(lines):
            for each in told:
                if each["what"] == "waiting":
                    progress.update(description=f"waiting for {', '.join(each['sites'])}")
                elif each["what"] == "joined" and each["missing"]:
                    progress.update(description=f"waiting for {', '.join(each['missing'])}")
                elif each["what"] == "begun":
                    progress.update(description=each["method"], total=each["rounds"], completed=each["start"])
                elif each["what"] == "round":
                    progress.update(completed=each["t"] + 1, shown=sentences.score(each))
                elif each["what"] != "finished":
                    progress.print(sentences.of_coordinator(each, None))
            yield line


def _told(lines: Iterable[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Each line, and those to print with it. The error in which a command ends says why a run failed, and who refused
    its terms, so that these lines are not printed before it."""
    refused: list[dict[str, Any]] = []
    for line in lines:
        if line["what"] == "refused" and line["kind"] == "agreed":
            refused.append(line)
            yield line, []
            continue
        if line["what"] == "failed":
            yield line, [each for each in refused if f"{each['site']}: {each['reason']}" not in str(line["why"])]
        else:
            yield line, [*refused, line]
        refused = []


# ----------------------------------------------------------------------------------------------------------- outcome


def _outcome(out: Path, lines: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
    from sordino.evidence.certificate import group_of_site
    from sordino.federation.terms import against_terms
    from sordino.training.verify_run import read_certificate, verify_run

    sites = []
    for place in sorted((out / "sites").iterdir()):
        for run in sorted((place / "runs").iterdir()):
            path = run / "certificate.json"
            if path.exists():
                cert = read_certificate(path)
                verified = not verify_run(path, against_terms=against_terms).problems
                claims = {key: cert[key] for key in ("delta", "certified", "trust", "secure", "site")}
                sites.append(
                    {
                        "certificate": str(path),
                        "verified": verified,
                        "epsilon": group_of_site(cert)["epsilon"],
                        **claims,
                    }
                )
    rounds = [line for line in lines if line["what"] == "round"]
    scores = {key: [line[key] for line in rounds if key in line] for key in ("accuracy", "perplexity")}
    return {
        "sites": sites,
        "rounds": len(rounds),
        **{key: values[-1] if values else None for key, values in scores.items()},
        "metrics": lines[-1].get("metrics"),
        "useless": lines[-1].get("useless"),
        "by_chance": lines[-1].get("by_chance", False),
        "evaluation": next((line for line in lines if line["what"] == "evaluation"), None),
        "seconds": seconds,
        "out": str(out),
    }


def _result(metrics: dict[str, Any]) -> list[tuple[str, str]]:
    """Headings and lines on the model. The first holds what the others do not say."""
    from sordino.cli.run import quality

    others = quality(metrics, metrics["constant"])
    said = tuple(part for _, line in others for part in line.split(", "))
    rest = {
        key: metrics.get(key)
        for key, (name, _) in sentences.MEASURED.items()
        if not any(part.startswith(f"{name} ") for part in said)
    }
    where = f"on the coordinator's {metrics['records']:,} test records, which no noise hides"
    return [("result", f"{sentences.measured(rest)} {where}".strip()), *others]


def _show_outcome(out: Path, document: dict[str, Any]) -> None:
    page, metrics = console(), document["metrics"]
    rounds = sentences.count(document["rounds"], "round")
    page.print(f"{rounds} in {document['seconds']:.0f} s, with the start of link and sites", markup=False)
    if metrics:
        for heading, line in _result(metrics):
            page.print(f"{heading:<13}{line}", markup=False)
    page.print()
    rows = []
    for site in document["sites"]:
        budget, own = site["site"], site["epsilon"]
        rows.append(
            [
                budget["name"],
                f"{own:.4g}",
                f"{min(own, site['secure']['epsilon_server']) if site['secure'] else own:.4g}",
                f"{site['delta']:g}",
                marked("[green]yes[/]" if site["certified"] else "[red]no[/]"),
                marked("[green]yes[/]" if site["verified"] else "[red]no[/]"),
                f"{budget['spent']:.4g} of {budget['epsilon']:g}",
            ]
        )
    table(["site", "ε", "ε, server alone", "δ", "certified", "verified", "budget spent"], rows)
    page.print()
    for heading, where in (
        ("trust model", document["sites"][0]["trust"] if document["sites"] else "-"),
        ("model", f"{out}/coordinator/run/model.safetensors"),
        ("certificates", f"{out}/sites/*/runs/*/certificate.json"),
        ("statements", f"{out}/sites/*/runs/*/statement.md"),
    ):
        page.print(f"{heading:<13}{where}", markup=False)
    if document["evaluation"]:
        page.print(sentences.evaluation(document["evaluation"]), markup=False)
    if document["useless"]:
        page.print(sentences.warning(document["useless"], document["by_chance"]), markup=False)
    page.print(f"{'files':<13}{out}: {out}/README.txt says which files may leave", markup=False)


# -------------------------------------------------------------------------------------------------------- the others


def _add_init(parts: Any) -> None:
    parser = command(
        parts,
        "init",
        _init,
        "write a coordinator's folder: spec.toml, federation.toml, and a README with the commands",
        "sordino federate init study --sites north,south,west --features 64 --classes 0,1,2",
    )
    parser.add_argument("folder", metavar="DIR", help="folder to write")
    parser.add_argument("--sites", required=True, metavar="A,B,C", help="names of the sites")
    parser.add_argument("--features", type=int, metavar="N", help="number of columns without the label (public)")
    parser.add_argument(
        "--classes", default="", metavar="A,B", help="the labels (public); leave out if the label is a number"
    )
    parser.add_argument(
        "--schema", metavar="FILE", help="the schema.toml of the tables, in place of --features and --classes"
    )
    parser.add_argument(
        "--method", metavar="X", help="method (default: auto; dp-fedsofim for numbers without a schema)"
    )
    parser.add_argument("--rounds", type=int, default=20, metavar="N", help="number of rounds (default: 20)")
    parser.add_argument(
        "--epsilon", type=float, default=8.0, metavar="X", help="privacy budget of the run (default: 8)"
    )
    parser.add_argument(
        "--trust",
        default="secure-aggregation",
        metavar="X",
        help="secure-aggregation or untrusted-server (default: secure-aggregation)",
    )
    parser.add_argument(
        "--dropouts", type=int, default=0, metavar="N", help="sites that may fail in a round (default: 0)"
    )
    parser.add_argument(
        "--colluders", type=int, default=1, metavar="N", help="sites that may collude with the server (default: 1)"
    )
    parser.add_argument(
        "--trim",
        type=int,
        default=0,
        metavar="N",
        help="with untrusted-server: sites whose garbage must not move the model (default: 0)",
    )


def _init(arguments: argparse.Namespace) -> int:
    from sordino.federation import folders

    keys = ("features", "method", "rounds", "epsilon", "trust", "dropouts", "colluders", "trim")
    classes = [label for label in arguments.classes.split(",") if label]
    names = [name.strip() for name in arguments.sites.split(",")]
    options = {key: getattr(arguments, key) for key in keys}
    if (arguments.features is None) == (arguments.schema is None):
        raise SordinoError("--features: give either the number of features, or --schema FILE, which has it.")
    schema = arguments.schema and Path(arguments.schema)
    page = console()
    for path in folders.init(Path(arguments.folder), names, classes=classes, schema=schema, **options):
        page.print(f"written  {path}", markup=False)
    page.print(f"next     read {arguments.folder}/README.md: it lists the commands for each site", markup=False)
    return 0


def _add_keys(parts: Any) -> None:
    parser = command(
        parts,
        "keys",
        _keys,
        "create a site's keys and a site.toml to check; prints the public card for the roster",
        "sordino federate keys north site-north --data patients.csv --label outcome >> roster.toml",
    )
    parser.add_argument("name", metavar="NAME", help="name of the site")
    parser.add_argument("folder", metavar="DIR", help="folder to write")
    parser.add_argument("--data", metavar="FILE", help="the site's records (default: data.csv)")
    parser.add_argument("--label", metavar="COLUMN", help="the label's column, if --data is a table")
    parser.add_argument(
        "--classes", metavar="A,B", help="the public list of labels; leave out if the label is a number"
    )
    parser.add_argument(
        "--schema", metavar="FILE", help="the schema.toml of the table, in place of --label and --classes"
    )
    parser.add_argument(
        "--text",
        metavar="COLUMN",
        help="the column of text of the table: for minilm-lora, or with --weights for sequence-lora or, without "
        "--classes, for causal-lora",
    )
    parser.add_argument("--prompt", metavar="COLUMN", help="of causal-lora: the column of what comes before each text")
    parser.add_argument(
        "--weights", metavar="DIR", help="this site's own copy of the folder of weights that the model begins with"
    )
    parser.add_argument("--limit", type=float, metavar="EPSILON", help="limit of epsilon over all runs (default: 8)")


def _keys(arguments: argparse.Namespace) -> int:
    from sordino.federation import folders
    from sordino.federation.flower.keys import ensure_node_key
    from sordino.secagg import Roster

    place = Path(arguments.folder)
    kept = (place / "identity.key").exists()
    keys = ("data", "label", "classes", "schema", "text", "prompt", "weights", "limit")
    given = [f"--{key}" for key in keys if getattr(arguments, key) is not None]
    classes = [label for label in (arguments.classes or "").split(",") if label]
    data = arguments.data or "data.csv"
    data = str(Path(data).resolve()) if Path(data).exists() else data
    identity = folders.make_site(
        place,
        arguments.name,
        data=data,
        epsilon=8.0 if arguments.limit is None else arguments.limit,
        classes=classes,
        label=arguments.label or "",
        schema=arguments.schema and Path(arguments.schema),
        text=arguments.text or "",
        prompt=arguments.prompt or "",
        weights=str(Path(arguments.weights).expanduser().resolve()) if arguments.weights else "",
    )
    ensure_node_key(place / "node")
    print(Roster.lines(identity.card))
    if kept:
        ignored = f", and {', '.join(given)} had no effect" if given else ""
        print(
            f"note: the keys and {place}/site.toml were kept as they are{ignored}; edit {place}/site.toml to change "
            "data, classes or the limit (epsilon)",
            file=sys.stderr,
        )
        return 0
    print(
        f"written  {place}/site.toml and keys. Send the lines above and {place}/node.pub to the coordinator, and keep "
        f"the rest\nnext     edit {place}/site.toml, and check it: sordino federate doctor {place}/site.toml",
        file=sys.stderr,
    )
    if not (Path(data).exists() or (place / data).exists()):
        print(
            f"note: '{data}' does not exist yet, neither here nor in {place}; set data in {place}/site.toml",
            file=sys.stderr,
        )
    return 0


def _add_doctor(parts: Any) -> None:
    parser = command(
        parts,
        "doctor",
        _doctor,
        "check a site's data, keys and budget before it joins, or a coordinator's folder",
        "sordino federate doctor site-north/site.toml\n"
        "sordino federate doctor site.toml --federation study\n"
        "sordino federate doctor study",
    )
    parser.add_argument(
        "site", metavar="SITE.toml|DIR", help="the site's settings or folder, or a coordinator's folder"
    )
    parser.add_argument(
        "--federation", metavar="DIR", help="a coordinator's folder: check its run against site.toml and the budget"
    )
    parser.add_argument(
        "--authority", metavar="FILE", help="the coordinator's authority.pem (default: the one beside SITE.toml)"
    )
    add_json(parser)


def _doctor(arguments: argparse.Namespace) -> int:
    check_json(arguments)
    from sordino.operations.doctor import coordinator_doctor, doctor

    place = Path(arguments.site)
    coordinates = (place / "federation.toml").exists()
    if coordinates and (arguments.federation or arguments.authority):
        raise SordinoError(f"--federation, --authority: '{place}' is a coordinator's folder; leave both out.")
    others = (value and Path(value) for value in (arguments.federation, arguments.authority))
    checks = list(coordinator_doctor(place) if coordinates else doctor(operate.site_file(arguments.site), *others))
    document = [
        {"fine": bool(c.fine), "about": c.about, "what": c.says, "soon": c.soon, "note": c.note} for c in checks
    ]
    if not emit(arguments, document):
        page, width = console(), max(len(check.about) for check in checks)
        for check in checks:
            page.print(f"{_mark(check)}  {check.about:<{width}}  " + check.says.replace("[", "\\["))
        problems = sum(not check.fine for check in checks)
        ready = "this coordinator is ready" if coordinates else "this site is ready to join"
        page.print()
        page.print(f"{sentences.count(problems, 'problem')} to fix" if problems else ready)
    return 0 if all(check.fine for check in checks) else 1


def _mark(check: Check) -> str:
    """The word before a check, as wide as all others."""
    if not check.fine:
        return "[red]fix [/]"
    if check.soon:
        return "[yellow]soon[/]"
    return "[yellow]note[/]" if check.note else "[green]ok  [/]"


def _add_coordinate(parts: Any) -> None:
    parser = command(
        parts,
        "coordinate",
        _coordinate,
        "start the link and the coordinator, wait for the sites, and train",
        "sordino federate coordinate study\nsordino federate coordinate study --host coordinator.example.org",
    )
    parser.add_argument("folder", metavar="DIR", help="made by 'sordino federate init'")
    parser.add_argument(
        "--host", action="append", default=[], metavar="NAME", help="name by which sites reach the link"
    )
    parser.add_argument(
        "--bind",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="address to listen on (default: loopback, behind a proxy)",
    )
    parser.add_argument(
        "--port",
        type=int,
        default=8000,
        metavar="N",
        help="TCP port that the link listens on, and that sites name in --link HOST:N (default: 8000)",
    )
    operate.add_status_port(parser)
    _add_transport(parser)


def _coordinate(arguments: argparse.Namespace) -> int:
    from sordino.federation.transports import deployment

    _check_port(arguments.port)
    place = Path(arguments.folder)
    transport = deployment(arguments.transport)
    operate.serve_status(place, arguments.status_port)
    lines = transport.coordinate(place, hosts=arguments.host, bind=arguments.bind, port=arguments.port)
    *_, last = _shown(lines)
    if last["what"] == "failed":
        raise SordinoError(str(last["why"]))
    page = console()
    for what, name in (
        ("model", "model.safetensors"),
        ("certificate", "certificate.json"),
        ("statement", "statement.md"),
    ):
        page.print(f"{what:<12}{place}/run/{name}", markup=False)
    if (place / "run" / "evaluation" / "evaluation.json").is_file():
        page.print(f"{'evaluation':<12}{place}/run/evaluation/evaluation.json", markup=False)
    return 0


def _add_transport(parser: Any) -> None:
    parser.add_argument("--transport", default="flower", metavar="X", help="flower, or one of another package")


def _check_port(port: int) -> None:
    if not 1 <= port <= 65_535:
        raise SordinoError(f"--port: {port} must lie between 1 and 65535.")


def _add_renew(parts: Any) -> None:
    parser = command(
        parts,
        "renew",
        _renew,
        "renew the certificate of a coordinator's link; the sites need nothing new",
        "sordino federate renew study\n"
        "sordino federate renew study --host new.example.org\n"
        "sordino federate renew study --new-authority",
    )
    parser.add_argument("folder", metavar="DIR", help="made by 'sordino federate init'")
    parser.add_argument("--host", action="append", default=[], metavar="NAME", help="another name of the link")
    parser.add_argument(
        "--new-authority", action="store_true", help="make new keys too; every site needs the new tls/authority.pem"
    )


def _renew(arguments: argparse.Namespace) -> int:
    from sordino.federation import tls as made

    place = Path(arguments.folder) / "tls"
    if made.is_empty(place):
        raise SordinoError(f"'{place}' has no certificates; `sordino federate coordinate` makes them.")
    if arguments.new_authority:
        hosts = [*made.known_hosts(place, arguments.host), *arguments.host]
        tls = made.certificates(place, hosts=hosts)
        then = f"send {tls.authority} to the sites (it is public), then start `coordinate` and each `join` again"
    else:
        tls = made.renew(place, hosts=arguments.host)
        then = "start `coordinate` again; the sites need nothing new"
    page = console()
    page.print(f"valid until {made.end_of(tls.certificate):%d %b %Y}  {tls.certificate}", markup=False)
    page.print(f"next        {then}", markup=False)
    return 0


def _add_join(parts: Any) -> None:
    parser = command(
        parts,
        "join",
        _join,
        "connect a site to a link and answer its messages, until stopped",
        "sordino federate join site-north/site.toml --link coordinator.example.org:8000 --authority authority.pem",
    )
    operate.add_site(parser)
    parser.add_argument("--link", required=True, metavar="HOST:PORT", help="where the coordinator's link listens")
    parser.add_argument("--authority", required=True, metavar="FILE", help="the coordinator's tls/authority.pem")
    parser.add_argument(
        "--port", type=int, default=9094, metavar="N", help="a free port on this machine (default: 9094)"
    )
    operate.add_status_port(parser)
    _add_transport(parser)


def _join(arguments: argparse.Namespace) -> int:
    from sordino.federation.transports import deployment

    _check_port(arguments.port)
    transport = deployment(arguments.transport)
    site = operate.site_file(arguments.site)
    operate.serve_status(site.parent, arguments.status_port)
    for line in transport.join(site, arguments.link, Path(arguments.authority), port=arguments.port):
        say(f"{time.strftime('%H:%M:%S')}  {sentences.of_site(line)}")
    return 0
