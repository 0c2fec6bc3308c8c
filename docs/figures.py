"""Every figure on the site and in the README comes from results/ through this script.

    python docs/figures.py          bring the README's table and the figures inside sentences up to date
    python docs/figures.py --demo   run the demo again first: its output, certificate, statement and curve

Tables are generated whole (`tables`): the build of the site writes them into docs/_generated, and pages include them.
Templates in docs/_tables hold `{{ name of a figure }}` in their cells. A figure inside a sentence is plain text on the
page; docs/figures.toml lists the words around it and the figure's name. tests/docs/test_figures.py fails where a page
and the results differ.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple

DOCS = Path(__file__).parent
ROOT = DOCS.parent
RESULTS = ROOT / "results"
NUMBER = r"([−\d.,]*\d)"
CELL = re.compile(r"\{\{ (.+?) \}\}")
EPSILONS = (0.5, 1.0, 5.0, 10.0)
TRUSTS = {"untrusted-server": "every message seen", "secure-aggregation": "only sums seen"}
SPEEDS = (  # rows of the table of speed: what, the figure's name, the unit
    (
        "a private round over 20 clients × 2,500 records, relative to the two matrix products that it needs",
        "round",
        "×",
    ),
    ("10,000 clients, relative to 20 clients with the same records", "many", "×"),
    ("five local steps, relative to a DP-FedGD round", "local", "×"),
    ("a DP-FedNew-FC round, relative to a DP-FedGD round", "fc", "×"),
    (
        "a DP-FedNew round with Hessians of 650 × 650, relative to the one product per client that builds them",
        "fednew",
        "×",
    ),
    ("peak memory, relative to the data", "peak", "×"),
    ("64 runs one after another, relative to 64 at once on the same cores, at least", "together", "×"),
    ("cryptographic normals per second", "normals", "million"),
)
MEDIANS = {  # of the raw samples: the figure's name, and its digits
    "round_over_two_matmuls": ("round", 2),
    "many_clients_over_few": ("many", 2),
    "five_local_steps_over_round": ("local", 1),
    "fednew_fc_over_round": ("fc", 1),
    "fednew_over_product": ("fednew", 1),
}


@functools.cache
def load(name: str) -> Any:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


# ----------------------------------------------------------------------------------------------------------- figures


def figure(name: str) -> str:
    """A figure by its name: that of `figures`, or `TABLE; WHICH; LABEL; …; ROUND` of a paper's table."""
    if name in figures():
        return figures()[name]
    table, which, *words, at = (part.strip() for part in name.split(";"))
    figures_of_line = []
    for line in load(f"paper/{table}.json")["lines"]:
        labels = {
            key: f"{value:g}" if isinstance(value, float) else str(value) for key, value in line["labels"].items()
        }
        if {*words} <= {*labels.values(), *(f"{key}={value}" for key, value in labels.items())} and at in line[
            "rounds"
        ]:
            figures_of_line.append(line["rounds"][at])
    if len(figures_of_line) != 1:
        raise KeyError(f"'{name}' names {len(figures_of_line)} lines of results/paper/{table}.json, not one")
    return f"{figures_of_line[0][which]:.{figures_of_line[0].get('digits', 1)}f}".replace("-", "−")


@functools.cache
def figures() -> dict[str, str]:
    """Figures of the comparisons, of digits and of speed, from the samples."""
    values = {
        "opacus ew": f"{load('deep_cpu.json')['auto_over_opacus']['opacus ew']:.1f}",
        "opacus ew, last": f"{1 / load('deep_cpu.json')['auto_over_opacus']['opacus ew, channels last']:.1f}",
        "plain gradient": f"{load('deep_cpu.json')['auto_over_plain']:.1f}",
        "growth": f"{100 * benchmark('guard').GROWTH:.0f}",
        "bet": f"{100 * NormalDist().cdf(load('demo_certificate.json')['mu'] / 2):.0f}",
    }
    for row in load("digits.json")["rows"]:
        values[f"digits {row['trust']} {row['epsilon']}"] = f"{100 * statistics.mean(row['samples']):.0f}"
    for trust in TRUSTS:
        rivals, auto_scores = scores(f"table3/{trust}.json"), scores(f"table3/{trust}_auto.json")
        for epsilon, t in itertools.product(EPSILONS, (10, 70)):
            values[f"{trust} auto {epsilon:g} {t}"] = f"{auto_scores['auto', epsilon, t]:.1f}"
            best = max(score for (_, e, r), score in rivals.items() if (e, r) == (epsilon, t))
            values[f"{trust} best {epsilon:g} {t}"] = f"{best:.1f}"
    for (label, epsilon, t), score in scores("table3/untrusted-server.json").items():
        values[f"cifar {label} {epsilon:g} {t}"] = f"{score:.1f}"
    rows = json.loads((DOCS / "comparison.json").read_text(encoding="utf-8"))["tables"]["final"]["rows"]
    values["report auto 0.5 70"] = next(row for row in rows if row[0] == "auto")[1][0].split()[0]
    for row in load("accounts.json")["rows"]:
        values[f"accounts {row['q']} {row['by']}"] = f"{row['noise']:.2f}"
    for data, method, epsilon, accuracy, *_ in load("disk.json")["rows"]:
        values[f"disk {data} {method} {epsilon:g}"] = f"{accuracy:.1f}"
    for data, method, epsilon, accuracy, std, _ in load("scaled.json")["rows"]:
        values[f"scaled {data} {method} {epsilon:g}"] = f"{accuracy:.1f}"
        values[f"scaled spread {data} {method} {epsilon:g}"] = f"{std:.1f}"
    for name, row, means, *_ in itertools.chain(*list(load("structures.json").values())[1:]):
        values |= {f"structures {name} {row} {k}": f"{mean:.1f}" for k, mean in enumerate(means)}  # as in the tables
    spreads = [row[4] for row in load("disk.json")["rows"] if row[4] is not None]
    values["disk least spread"], values["disk most spread"] = f"{min(spreads):.1f}", f"{max(spreads):.1f}"
    values["microseconds"] = f"{max(load('many_cuda.json')['microseconds_per_run_and_round'].values()):.1f}"
    return values


def scores(name: str) -> dict[tuple[str, float, int], float]:
    """Mean accuracy in percent by (label, epsilon, round), of a comparison.

    Settings chosen for round 10 have a label of their own.
    """
    samples: dict[tuple[str, float, int], list[float]] = {}
    for run in load(name)["runs"]:
        for t in (10, 70):
            samples.setdefault((run["label"], run["epsilon"], t), []).append(run["accuracy"][str(t)])
    for label, budgets in load(name).get("early", {}).items():
        for epsilon, accuracies in budgets.items():
            samples[f"{label}, tuned for round 10", float(epsilon), 10] = accuracies
    return {key: 100 * statistics.mean(values) for key, values in samples.items()}


def architectures() -> list[str]:
    """Those that `make bench` was run on."""
    return sorted({path.stem for name in ("bench", "many_cpu") for path in (RESULTS / name).glob("*.json")})


def speeds(arch: str) -> dict[str, str]:
    """Figures of one architecture, from the raw samples."""
    values = {}
    if (RESULTS / "bench" / f"{arch}.json").exists():
        raw = load(f"bench/{arch}.json")["raw"]
        for name, (short, digits) in MEDIANS.items():
            if name in raw:
                values[short] = f"{statistics.median(raw[name]['samples']):.{digits}f}"
        values["peak"] = f"{statistics.median(s['peak_over_data'] for s in raw['peak_over_data']['samples']):.1f}"
        values["normals"] = f"{statistics.median(raw['secure_normals_per_second']['samples']) / 1e6:.0f}"
    if (RESULTS / "many_cpu" / f"{arch}.json").exists():
        values["together"] = f"{min(load(f'many_cpu/{arch}.json')['times_faster'].values()):.1f}"
    return values


# ------------------------------------------------------------------------------------------------------------ tables


def tables() -> dict[str, str]:
    """Every generated table, and the report of the comparison, by the name of its file."""
    from sordino.studies import report

    tables_by_name = {
        "digits.md": digits_table(),
        "comparison.md": comparison_table(),
        "speed.md": speed_table(),
        "demo_verify.md": f"```text\n{(RESULTS / 'demo_verify.txt').read_text(encoding='utf-8').strip()}\n```\n",
        "demo.md": f"```text\n{(RESULTS / 'demo.txt').read_text(encoding='utf-8').strip()}\n```\n",
    }
    for path in sorted((DOCS / "_tables").glob("*.md")):
        tables_by_name[path.name] = CELL.sub(lambda match: figure(match[1]), path.read_text(encoding="utf-8"))
    tables_by_name["checks-cuda.md"] = checks_table("checks_cuda.json")
    tables_by_name["checks.md"], tables_by_name["audits.md"], tables_by_name["halved.md"] = (
        checks_table("checks.json"),
        audit_table("audit.json"),
        audit_table("audit_halved.json"),
    )
    tables_by_name["theory.md"] = benchmark("theory").page(load("theory.json"))
    estimation, subsampled = benchmark("estimation"), benchmark("subsampled")
    tables_by_name["estimation.md"] = estimation.page(load("estimation.json")).replace("../docs/", "/")
    tables_by_name["mnist_full.md"] = benchmark("mnist_full").page(load("mnist_full.json"))
    tables_by_name["subsampled.md"] = subsampled.report(load("subsampled.json")["rows"])
    tables_by_name["report.html"] = report.page(json.loads((DOCS / "comparison.json").read_text(encoding="utf-8")))
    return tables_by_name


def paper_pages() -> dict[str, str]:
    """The tables of the papers and their pictures, as `python -m papers` writes them."""
    from papers import picture
    from papers import tables as papers

    pages = {}
    for path in sorted((RESULTS / "paper").glob("*.json")):
        document, name = full(load(f"paper/{path.name}")), f"{path.stem}.svg"
        pages[f"{path.stem}.md"] = papers.markdown(document)
        if (svg := picture.drawn(document)) is not None:
            pages[name] = svg
            pages[f"{path.stem}.md"] += f"\n![{document['about']}]({name})\n"
    return pages


def benchmark(name: str) -> Any:
    """A script of benchmarks/, which knows how to write its report."""
    folder = str(ROOT / "benchmarks")
    sys.path.insert(0, folder)
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(folder)


def full(document: dict[str, Any]) -> dict[str, Any]:
    """A paper's table with what `benchmarks/compact.py` left out: missing figures, and differences."""

    def cell(kept: dict[str, Any]) -> dict[str, Any]:
        known = {"std": None, "published": None, "published_std": None, **kept}
        gap = None if known["published"] is None else known["ours"] - known["published"]
        return {**known, "difference": gap}

    lines = [{**line, "rounds": {t: cell(c) for t, c in line["rounds"].items()}} for line in document["lines"]]
    return {**document, "lines": lines}


def grid(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)) + "\n"


def digits_table() -> str:
    epsilons = ("1.0", "2.0", "4.0", "8.0", "inf")
    head = ["ε", *(e.removesuffix(".0").replace("inf", "∞") for e in epsilons)]
    rows = [
        [f"{words} (`{trust}`)", *(f"{figure(f'digits {trust} {e}')} %" for e in epsilons)]
        for trust, words in TRUSTS.items()
    ]
    return grid(head, rows)


def comparison_table() -> str:
    rows = []
    for trust, words in TRUSTS.items():
        for which, label in (("best", "best tuned rival"), ("auto", "`auto`")):
            cells = [
                f"{figure(f'{trust} {which} {e:g} 10')}\u00a0→\u00a0{figure(f'{trust} {which} {e:g} 70')}"
                for e in EPSILONS
            ]
            rows.append([f"{label}, {words}", *cells])
    return grid(["ε", *(f"{e:g}" for e in EPSILONS)], rows)


def reports(name: str) -> list[dict[str, Any]]:
    """The rows of checks or audits: with their columns once, or as `sordino check` and `sordino audit` write them."""
    document = load(name)
    if isinstance(document, list):
        return document
    return [dict(zip(document["columns"], row, strict=True)) for row in document["rows"]]


def checks_table(name: str) -> str:
    """By method: how near the search came to each claim, and whether every contract held."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for row in reports(name):
        rows.setdefault(row["name"], []).append(row)
    return grid(
        ["method", "claims", "nearest to a claim", "passed"],
        [
            [
                f"`{method}`",
                str(len(mine)),
                f"{max((r['worst_found'] / r['claimed'] for r in mine if r['claimed']), default=0):.4f}",
                "yes" if all(r["passed"] for r in mine) else "**no**",
            ]
            for method, mine in rows.items()
        ],
    )


def audit_table(name: str) -> str:
    """By method and setting: the certified epsilon, and the lower bounds that the attack reached."""
    keys = ("unit", "adjacency", "trust", "batch")
    bounds = ("lower_gaussian", "lower_account")  # null where an account does not apply
    rows = []
    for row in reports(name):
        by_account = max(row[bound] for bound in bounds if row[bound] is not None)
        rows.append(
            [
                f"`{row['method']}`",
                *(row[key] for key in keys),
                f"{row['certified']:.2f}",
                f"{row['lower_thresholds']:.2f}",
                f"{by_account:.2f}",
                f"{row['reach']:.1%}",
                f"{row['least_claim']:.1%}",
                f"{row['runs']:,}",
                "**broken**" if max(by_account, row["lower_thresholds"]) > row["certified"] else "holds",
            ]
        )
    head = ["certified ε", "by thresholds", "by account", "reach", "least claim", "runs", "verdict"]
    return grid(["method", *keys, *head], rows)


def speed_table() -> str:
    """One column per architecture."""
    known = {arch: speeds(arch) for arch in architectures()}
    rows = [
        [what, *(f"{values[name]} {unit}" if name in values else "" for values in known.values())]
        for what, name, unit in SPEEDS
    ]
    return grid(["", *map(headed, known)], rows)


def headed(arch: str) -> str:
    """An architecture, and its CPU where the results name it."""
    if not (RESULTS / "bench" / f"{arch}.json").exists():
        return arch
    origin = load(f"bench/{arch}.json")["provenance"]
    return ", ".join([arch, *([origin["cpu"]] if "cpu" in origin else []), f"{origin['threads']} threads"])


# ------------------------------------------------------------------------------------------------------------- pages


class Claim(NamedTuple):
    """Words of a page with a figure for each {}."""

    page: str
    words: str
    figures: tuple[str, ...]

    def pattern(self) -> re.Pattern[str]:
        parts = [r"\s+".join(map(re.escape, re.split(r"\s+", part))) for part in self.words.split("{}")]
        return re.compile(NUMBER.join(parts))

    def update(self, text: str) -> str:
        """The page with this claim's figures as the results have them."""
        match = self.pattern().search(text)
        if match is None:
            raise ValueError(f"docs/{self.page} does not say: {self.words}")
        for k in reversed(range(len(self.figures))):
            start, end = match.span(k + 1)
            text = text[:start] + figure(self.figures[k]) + text[end:]
        return text


def claims() -> list[Claim]:
    document = tomllib.loads((DOCS / "figures.toml").read_text(encoding="utf-8"))
    return [Claim(each["page"], each["words"], tuple(each["figures"])) for each in document["claim"]]


def readme(text: str) -> str:
    """The README with its table, and the output of the demo, as the results have them."""
    new, count = re.subn(r"(?m)^\| ε \|.*\n(?:\|.*\n)+", lambda _: digits_table(), text)
    if count != 1:
        raise ValueError(f"README.md has {count} tables whose head begins with ε, not one")
    shown = (RESULTS / "demo.txt").read_text(encoding="utf-8").partition("\n")[2]
    new, count = re.subn(r"(?m)^run +auto on digits.*\n(?:.+\n)*?(?=```)", lambda _: shown, new)
    if count != 1:
        raise ValueError(f"README.md has {count} outputs of the demo, not one")
    return new


def update() -> list[str]:
    """Bring all pages up to date; returns those that changed."""
    pages = {ROOT / "README.md": readme((ROOT / "README.md").read_text(encoding="utf-8"))}
    for claim in claims():
        path = DOCS / claim.page
        pages[path] = claim.update(pages.get(path) or path.read_text(encoding="utf-8"))
    changed = [path for path, text in pages.items() if path.read_text(encoding="utf-8") != text]
    for path in changed:
        path.write_text(pages[path], encoding="utf-8")
    return [str(path.relative_to(ROOT)) for path in changed]


def demo() -> None:
    """Run what `make demo` runs; keep its output, certificate, statement and curve."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "sordino.cli", "run"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
        (out,) = Path(folder, "runs").iterdir()
        (RESULTS / "demo.txt").write_text("$ sordino run\n" + done.stdout)
        name = out.relative_to(folder)
        command = [sys.executable, "-m", "sordino.cli", "verify", str(name)]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
        (RESULTS / "demo_verify.txt").write_text(f"$ sordino verify {name}\n" + done.stdout)
        shutil.copy(out / "public" / "certificate.json", RESULTS / "demo_certificate.json")
        shutil.copy(out / "public" / "statement.md", DOCS / "statement.md")
        shutil.copy(out / "public" / "curve.png", DOCS / "curve.png")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    if "--demo" in sys.argv:
        demo()
    for page in update():
        print(f"updated {page}")
