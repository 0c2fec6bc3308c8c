"""A read-only page and Prometheus metrics of a status, served on loopback.

The page is plain HTML without scripts. Its figures are those of `sordino federate status`: epsilon, rounds, who
answered, and scores on test records of the coordinator or from noised counts. No figure comes from a site's records.
Both are for the operator of the folder; nobody else can reach a server on loopback.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from sordino.errors import SordinoError
from sordino.federation import sentences
from sordino.operations.status import BudgetStatus, CoordinatorStatus, document, of_folder

HOST = "127.0.0.1"
REFRESH = 5  # seconds
WIDTH, HEIGHT = 600.0, 160.0  # of the curve
Samples = list[tuple[dict[str, str], float]]  # labels and value
STATES = ("not begun", "waiting", "running", "stopped", "finished", "failed")
# Every metric with its help text. None of them depends on records other than through what was paid for.
COORDINATOR_METRICS = {
    "sordino_run_state": "1 for the state that the run is in",
    "sordino_rounds": "rounds of the run",
    "sordino_rounds_done": "rounds that ended",
    "sordino_rounds_lost": "rounds that ended without a result",
    "sordino_epsilon_spent": "epsilon of the rounds so far",
    "sordino_epsilon_planned": "epsilon of the whole run",
    "sordino_site_rounds": "rounds that a site answered",
    "sordino_site_rounds_lost": "rounds that a site did not answer",
    "sordino_site_here": "1 if the site answered when it was asked last",
}
SITE_METRICS = {
    "sordino_epsilon_spent": "epsilon that the account of this site spent",
    "sordino_epsilon_limit": "limit of epsilon over all runs",
    "sordino_epsilon_left": "largest epsilon of one more run, beside what open runs were promised",
    "sordino_rounds_answered": "rounds that this site answered, in all runs",
    "sordino_runs_finished": "runs that ended",
    "sordino_refusals": "requests that this site refused",
    "sordino_failures": "rounds in which this site failed",
}
STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #888; --good: #2a7; --bad: #c53; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; margin-bottom: 0; } h2 { font-size: 1.05rem; margin-top: 2rem; }
.facts { display: flex; flex-wrap: wrap; gap: 1rem 2.5rem; margin: 1rem 0; }
.facts div span { display: block; color: var(--soft); font-size: .85rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; } td, th { text-align: left; padding: .3rem .8rem .3rem 0; }
tr { border-bottom: 1px solid var(--line); } .here, .finished { color: var(--good); }
.late, .refused, .failed { color: var(--bad); } svg { width: 100%; height: auto; }
pre { overflow-x: auto; border: 1px solid var(--line); padding: .8rem; font-size: .85rem; max-height: 24rem; }
"""


def page(status: CoordinatorStatus | BudgetStatus) -> str:
    """The page of a status."""
    title, body = _site(status) if isinstance(status, BudgetStatus) else _coordinator(status)
    log = escape("\n".join(reversed(status.log))) or "nothing yet"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><meta http-equiv="refresh" content="{REFRESH}">'
        f"<style>{STYLE}</style></head><body>{body}<h2>Log, newest first</h2><pre>{log}</pre></body></html>"
    )


def _coordinator(status: CoordinatorStatus) -> tuple[str, str]:
    spent = f"{status.epsilon:.3g}" + (f" of {status.planned_epsilon:g}" if status.planned_epsilon else "")
    lost = f", {status.lost} without a result" if status.lost else ""
    facts = [
        ("state", f'<b class="{escape(status.state)}">{escape(status.state)}</b>'),
        ("round", escape(f"{status.done} of {status.rounds}{lost}" if status.rounds else "none")),
        ("ε spent", escape(spent)),
        ("method", escape(status.method or "not agreed")),
        ("last change", escape(status.changed or "none")),
    ]
    body = "<h1>Federation</h1>" + _facts(facts)
    if status.why:
        body += f'<p class="failed">{escape(status.why)}</p>'
    rows = [
        f'<tr><td>{escape(s.name)}</td><td class="{s.state}">{s.state}</td><td>{s.rounds}</td><td>{s.lost}</td>'
        f"<td>{escape(s.why)}</td></tr>"
        for s in status.sites
    ]
    head = "<tr><th>site</th><th>state</th><th>answered</th><th>missed</th><th>why</th></tr>"
    body += f'<h2>Sites</h2><div class="scroll"><table>{head}{"".join(rows)}</table></div>'
    if status.curve:
        body += f"<h2>{escape(status.metric)} on the coordinator's test records</h2>{_curve(status.curve)}"
    if status.evaluation:
        body += f"<h2>On the sites' test records</h2><p>{escape(sentences.evaluation(status.evaluation))}</p>"
    return f"Federation: {status.state}", body


def _site(status: BudgetStatus) -> tuple[str, str]:
    facts = [
        ("ε spent", f"{status.epsilon:.3g} of {status.limit:g} at δ = {status.delta:g}{status.caveat}"),
        *([] if status.promised is None else [("ε when open runs have ended", f"{status.promised:.3g}")]),
        ("ε left for one run", f"{status.left:.3g}"),
        ("rounds answered", str(status.answered)),
        ("runs ended", str(status.runs)),
        ("refusals", str(status.refusals)),
        ("failures", str(status.failures)),
    ]
    body = f"<h1>Site {escape(status.name)}</h1>" + _facts([(k, escape(v)) for k, v in facts])
    if status.problem:
        body += f'<p class="failed">This site refuses every message: {escape(status.problem)}</p>'
    return f"Site {status.name}", body


def _facts(facts: list[tuple[str, str]]) -> str:
    return f'<div class="facts">{"".join(f"<div><span>{escape(k)}</span>{v}</div>" for k, v in facts)}</div>'


def _curve(points: list[tuple[int, float]]) -> str:
    """An SVG line of a metric by round."""
    values = [value for _, value in points]
    low, high, last = min(values), max(values), max(t for t, _ in points)
    span = (high - low) or 1.0
    places = " ".join(
        f"{WIDTH * t / last:.1f},{10 + (HEIGHT - 20) * (1 - (value - low) / span):.1f}" for t, value in points
    )
    return (
        f'<svg viewBox="0 0 {WIDTH:g} {HEIGHT:g}" role="img" aria-label="from {values[0]:.3g} to {values[-1]:.3g}">'
        f'<polyline points="{places}" fill="none" stroke="currentColor" stroke-width="2"/></svg>'
        f"<p>{values[-1]:.3g} after round {points[-1][0]}; between {low:.3g} and {high:.3g}</p>"
    )


# ------------------------------------------------------------------------------------------------------------- metrics


def metrics(status: CoordinatorStatus | BudgetStatus) -> str:
    """The status in the text format of Prometheus."""
    if isinstance(status, BudgetStatus):
        values = (status.epsilon, status.limit, status.left, status.answered, status.runs, status.refusals)
        plain = dict(zip(SITE_METRICS, (*values, status.failures), strict=True))
        return _text(SITE_METRICS, {name: [({}, float(value))] for name, value in plain.items()})
    single = {
        "sordino_rounds": status.rounds,
        "sordino_rounds_done": status.done,
        "sordino_rounds_lost": status.lost,
        "sordino_epsilon_spent": status.epsilon,
        "sordino_epsilon_planned": status.planned_epsilon or 0.0,
    }
    samples: dict[str, Samples] = {name: [({}, float(value))] for name, value in single.items()}
    samples["sordino_run_state"] = [({"state": state}, float(state == status.state)) for state in STATES]
    samples["sordino_site_rounds"] = [({"site": s.name}, float(s.rounds)) for s in status.sites]
    samples["sordino_site_rounds_lost"] = [({"site": s.name}, float(s.lost)) for s in status.sites]
    samples["sordino_site_here"] = [({"site": s.name}, float(s.state in ("here", "finished"))) for s in status.sites]
    return _text(COORDINATOR_METRICS, samples)


def _text(helps: dict[str, str], samples: dict[str, Samples]) -> str:
    lines = []
    for name, help_text in helps.items():
        lines += [f"# HELP {name} {help_text}", f"# TYPE {name} gauge"]
        lines += [f"{name}{_labels(labels)} {value:.10g}" for labels, value in samples[name]]
    return "\n".join(lines) + "\n"


def _labels(labels: dict[str, str]) -> str:
    quoted = (f'{key}="{value.translate(ESCAPED)}"' for key, value in labels.items())
    return f"{{{','.join(quoted)}}}" if labels else ""


ESCAPED = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})

# -------------------------------------------------------------------------------------------------------------- server


class StatusServer(ThreadingHTTPServer):
    """Serves `/`, `/metrics` and `/status.json` of a folder, in a thread of its own, until it is closed."""

    daemon_threads = True

    def __init__(self, folder: Path, port: int) -> None:
        self.folder = folder
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            raise SordinoError(f"port: {port} cannot be used on loopback ({error.strerror}); choose another.") from None
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_address[1]}/"


class _Handler(BaseHTTPRequestHandler):
    server: StatusServer
    server_version, sys_version = "sordino", ""

    def do_GET(self) -> None:
        host = (self.headers.get("Host") or "").rsplit(":", 1)[0]
        if host not in (HOST, "localhost"):  # a page of another site must not read this one by its own name
            return self._send(403, "text/plain", "only for this machine\n")
        written: dict[str, tuple[str, Callable[[Any], str]]] = {
            "/": ("text/html", page),
            "/metrics": ("text/plain; version=0.0.4", metrics),
            "/status.json": ("application/json", _json),
        }
        if self.path not in written:
            return self._send(404, "text/plain", f"try one of {', '.join(written)}\n")
        kind, write = written[self.path]
        try:
            text = write(of_folder(self.server.folder))
        except (SordinoError, OSError, ValueError) as error:
            return self._send(503, "text/plain", f"{error}\n")
        return self._send(200, kind, text)

    def _send(self, code: int, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(code)
        for name, value in (
            ("Content-Type", kind if ";" in kind else f"{kind}; charset=utf-8"),
            ("Content-Length", str(len(body))),
            ("Cache-Control", "no-store"),
            ("X-Content-Type-Options", "nosniff"),
            ("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"),
        ):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Say nothing: the terminal shows the run."""


def _json(status: CoordinatorStatus | BudgetStatus) -> str:
    return json.dumps(document(status), indent=2) + "\n"
