"""A certificate in plain words: one page for an ethics board."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from scipy.special import ndtr

from sordino.core import Adjacency, Trust, Unit
from sordino.privacy.accounting.events import tv_of
from sordino.privacy.evidence.signing import fingerprint

MOST_GROUPS = 20

WHO = {
    (Unit.RECORD, Adjacency.ADD_REMOVE): "any single record: whether it was among a client's data at all",
    (Unit.RECORD, Adjacency.REPLACE_ONE): "any single record: what it said, whatever other record stood in its place",
    (Unit.USER, Adjacency.ADD_REMOVE): "any whole client: whether its data were used at all",
    (Unit.USER, Adjacency.REPLACE_ONE): "any whole client: what its data were, whatever other data it held",
}
WHOM = {
    Trust.UNTRUSTED_SERVER: "anyone who reads every message that every client sent, the server included",
    Trust.SECURE_AGGREGATION: "anyone who sees who took part, the sums of their messages and all models, "
    "but no client's message by itself",
    Trust.TRUSTED_SERVER: "anyone who sees the models that were sent out; not against the server, which is trusted",
}
SOURCE = {
    "secure": "cryptographic (ChaCha20), with a fresh key from the operating system",
    "seeded": "seeded: not private",
    "silent": "none",
}


WHAT = {"gram": "table of products of its features"}


def statement(cert: Mapping[str, Any]) -> str:
    """Who is protected, against whom, how well, and what is not protected."""
    unit, adjacency, trust = Unit(cert["unit"]), Adjacency(cert["adjacency"]), Trust(cert["trust"])
    verdict = (
        f"**Certified: ε = {cert['epsilon']:.4g} at δ = {cert['delta']:g}.**"
        if cert["certified"]
        else ("**Not certified.** " + " ".join(f"{reason.rstrip('.')}." for reason in cert["reasons"]))
    )
    return f"""# Privacy statement

{verdict}

A model was trained with {cert["method"]} over {cert["clients"]} clients\
{f" and {cert['records']:,} records" if cert["records"] is not None else ""} in {cert["rounds"]} rounds. \
{_execution(cert, trust)}

## Who is protected, and against whom

The guarantee speaks of {WHO[unit, adjacency]}. It holds against \
{WHOM[trust]}{_coalition(cert)}, whatever else they know, unless they can break the cipher that the noise comes from.

## How well

{_how_well(cert, unit)}

## How it was done

{_bullets(_steps(cert))}

## What is not protected

{_bullets(_not_protected(cert, unit))}

## Assumptions

{_bullets([*cert["assumes"], *cert["numerics"]])}

Spec sha256 `{cert["spec_sha256"] or "none"}`; ledger head `{cert["ledger"]["head"] or "none"}` \
({cert["ledger"]["rows"]} in all); sordino {cert["sordino"]}. {_signed(cert)} \
Re-check: `sordino verify certificate.json`.
"""


def _execution(cert: Mapping[str, Any], trust: Trust) -> str:
    if not cert["execution"].startswith("simul"):
        return f"It ran {cert['execution']}."
    assumed = " Secure aggregation was assumed, not carried out." if trust is Trust.SECURE_AGGREGATION else ""
    return (
        f"This was a {_kind(cert['execution'])}: all data lay on one machine, and the guarantee is for what a "
        f"deployment with the same settings would let others see.{assumed}"
    )


def _kind(execution: str) -> str:
    return execution if execution.startswith("simulation") else "simulation"


def _signed(cert: Mapping[str, Any]) -> str:
    about = cert.get("signature")
    if about is None:
        return "Not signed."
    return f"Signed by {about['signer']} `{fingerprint(about['key'])}`."


def _coalition(cert: Mapping[str, Any]) -> str:
    secure = cert.get("secure")
    if not secure or not secure["colluders"]:
        return ""
    who = "one site" if secure["colluders"] == 1 else f"{secure['colluders']} sites"
    return f", even together with {who} (against the server alone ε is {secure['epsilon_server']:.4g})"


def _bullets(lines: Sequence[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _how_well(cert: Mapping[str, Any], unit: Unit) -> str:
    epsilon = cert["epsilon"]
    if epsilon is None:
        return "There is no bound: nothing about the data is hidden."
    factor = _factor(epsilon)
    right = 100 * float(cert["guess"])
    groups, names = cert["groups"], cert["client_names"]
    rows = [f"| {_short(g['clients'])} | {_span(g['records'])} | {g['epsilon']:.4g} |" for g in groups[:MOST_GROUPS]]
    if len(groups) > MOST_GROUPS:
        rows.append(f"| {len(groups) - MOST_GROUPS} more groups: see certificate.json | | |")
    table = "\n".join(rows)
    strength = "strong" if right <= 60 else "moderate" if right <= 75 else "weak"
    return f"""Had that {"record" if unit is Unit.RECORD else "client"} been different, no outcome would have been \
more than e^ε = {factor} times as likely as it was, but for a slack of δ = {cert["delta"]:g}. Put as a bet: someone \
who must guess between two possibilities that seemed equally likely is right with probability at most {right:.3g} % \
instead of 50 %. We call that {strength} (up to 60 %: strong; up to 75 %: moderate; above: weak).

| at δ | {" | ".join(cert["epsilon_at"])} |
|---|{"---|" * len(cert["epsilon_at"])}
| ε | {" | ".join(f"{value:.4g}" for value in cert["epsilon_at"].values())} |

{
        "All clients have the same account"
        if len(groups) == 1
        else "The figures are those of the client worst off, " + _name(cert["worst_client"], names) + ". All clients"
    }:

| clients | records of each | ε |
|---|---|---|
{table}{_legend(names)}"""


def _steps(cert: Mapping[str, Any]) -> list[str]:
    bounds = list(dict.fromkeys(_bound(query, cert) for query in cert["queries"]))
    sampler = cert["sampler"]
    return [
        *bounds,
        _noise(cert),
        f"Participants: {sampler['clients']}; records of each: {sampler['records']}; privacy amplification by "
        f"sampling: {sampler['amplification']}.",
        f"Noise source: {SOURCE.get(cert['noise_source'], cert['noise_source'])}.",
    ]


def _not_protected(cert: Mapping[str, Any], unit: Unit) -> list[str]:
    tested = "The" if cert["test_records"] is None else f"The {cert['test_records']:,}"
    lines = [
        "What is true of the population: a model may reveal that a trait goes with an outcome, for people in the data "
        "and people outside it alike.",
        f"{tested} records that the model was tested on: they lie outside the guarantee.",
        "The same data in other runs: every run adds to the total.",
    ]
    sampled = any(release["rate"] < 1 for group in cert["groups"] for release in group["releases"])
    if unit is Unit.RECORD and sampled:
        lines.append("A person with several records at one client: the guarantee is for one of them.")
    elif unit is Unit.RECORD and cert["mu"] is not None:
        # Discrete noise has no exact bet: what concentrated DP proves of it, with k times the sensitivity.
        several = {
            k: tv_of(k * cert["mu"]) if cert.get("secure") else float(ndtr(k * cert["mu"] / 2)) for k in (2, 5, 10)
        }
        bets = ", ".join(f"{_percent(part)} with {k}" for k, part in several.items())
        lines.append(f"A person with several records at one client: the bet is then won with probability up to {bets}.")
    return lines


def _noise(cert: Mapping[str, Any]) -> str:
    if not cert["noise"]:
        return "No noise was added."
    kind = "Discrete Gaussian" if cert.get("secure") else "Gaussian"
    clips = {query["query"]: query["clip"] for query in cert["queries"]}
    own = [r["std"] / clips[r["query"]] for group in cert["groups"] for r in group["releases"] if clips[r["query"]]]
    if cert["trust"] == Trust.UNTRUSTED_SERVER and len(clips) > 1 and max(own) > 1.001 * min(own):
        return (
            f"{kind} noise was added to each of them: for one client its standard deviation is at least {min(own):.4g} "
            f"and at most {max(own):.4g} times that length, by what is sent and in which round (certificate.json)."
        )
    return (
        f"{kind} noise was added to it: its standard deviation is {cert['client_noise']:.4g} times that length for "
        f"one client (at most), {cert['noise']:.4g} times for the sum over a round's participants{_counted_on(cert)}."
    )


def _counted_on(cert: Mapping[str, Any]) -> str:
    secure = cert.get("secure")
    if not secure:
        return ""
    return (
        f", counting the noise of {secure['honest']} sites alone: {secure['dropouts']} may fail in any round, and "
        f"{secure['colluders']} may tell the server their own"
    )


def _bound(query: Mapping[str, Any], cert: Mapping[str, Any]) -> str:
    kind = query["query"].split()[-1]
    if kind == "count":
        return (
            "The clip followed a quantile of the gradients' lengths, from counts of those below it, to which every "
            f"record added {query['clip']:g} or took it away; the counts were noised too."
        )
    whose = "Each client's message" if kind == "delta" else f"Each record's {WHAT.get(kind, kind)}"
    if query["bound"] == "by clip":
        return f"{whose} was shortened to length at most {query['clip']:g} (the clip)."
    moved = max(r["sensitivity"] for g in cert["groups"] for r in g["releases"] if r["query"] == query["query"])
    change = "joins or leaves" if cert["adjacency"] == Adjacency.ADD_REMOVE else "is replaced"
    return (
        f"{whose} moves what is seen by at most {moved:.4g} when one {cert['unit']} {change}, {query['bound']}; the "
        f"noise below is told in lengths of {query['clip']:.4g}."
    )


def _factor(epsilon: float) -> str:
    if epsilon >= 20:
        return f"about 10^{epsilon / math.log(10):.0f}"
    return f"{math.exp(epsilon):,.0f}" if epsilon > 5 else f"{math.exp(epsilon):.3g}"


def _name(client: int, names: Sequence[str]) -> str:
    return f"client {client}" + (f" ({names[client]})" if names else "")


def _legend(names: Sequence[str]) -> str:
    if not names or len(names) > MOST_GROUPS:
        return ""
    return "\n\n" + "; ".join(f"{i}: {name}" for i, name in enumerate(names)) + "."


def _percent(part: float) -> str:
    return f"{100 * part:.3g} %" if part < 0.999 else "over 99.9 %"


def _short(clients: str) -> str:
    return clients if len(clients) <= 60 else clients[:57] + "…"


def _span(records: Sequence[int] | None) -> str:
    if records is None:
        return "not told"
    return f"{records[0]:,}" if records[0] == records[1] else f"{records[0]:,} to {records[1]:,}"
