"""A certificate in plain words: one page for an ethics board."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeAlias

from sordino.core import Adjacency, Clipping, Trust, Unit
from sordino.errors import count
from sordino.evidence.certificate import EVALUATION, STATISTICS, group_of_site, numbers_of, ranges
from sordino.evidence.signing import Signer, announced, fingerprint, signed
from sordino.foreign import printable_parts
from sordino.privacy.accounting import normal
from sordino.privacy.accounting.concentrated import SMOOTHING
from sordino.privacy.accounting.events import DiscreteGaussian, concentrated_guess

MOST_GROUPS = 20

PROTECTED = {
    (Unit.RECORD, Adjacency.ADD_REMOVE): "any single record (one row of a table, one image, one text): nobody can tell "
    "with confidence whether it was among the training data",
    (Unit.RECORD, Adjacency.REPLACE_ONE): "the content of any single record (one row of a table, one image, one text): "
    "nobody can tell with confidence what it contained, even if they know all other records",
    (Unit.PERSON, Adjacency.ADD_REMOVE): "any single person, with all records of that person at a client: nobody can "
    "tell with confidence whether the person was among the training data",
    (Unit.PERSON, Adjacency.REPLACE_ONE): "all records of any single person: nobody can tell with confidence what they "
    "contained, or how many there were, even if they know the records of all other persons",
    (Unit.CLIENT, Adjacency.ADD_REMOVE): "any whole client, with all its records: nobody can tell with confidence "
    "whether its data were used at all",
    (Unit.CLIENT, Adjacency.REPLACE_ONE): "all data of any one client: nobody can tell with confidence what they were, "
    "even if they know the data of all other clients",
}
ADVERSARY = {
    Trust.UNTRUSTED_SERVER: "anyone, including the server, even if they read every message that every client sent",
    Trust.SECURE_AGGREGATION: "anyone, including the server, who sees who took part, the sums of their messages and "
    "all models, but not the message of a single client",
    Trust.TRUSTED_SERVER: "anyone who sees the models that the server sent out. The server itself is trusted: this "
    "statement does not protect against it",
}
SOURCE = {
    "secure": "cryptographic (ChaCha20), with a fresh key from the operating system",
    "seeded": "seeded: not private",
    "noiseless": "none",
}
RELEASED = {
    "gradient": "contribution to a training step (its gradient)",
    "gram": "contribution to the table of products of features",
    "curvature": "contribution to the matrix of second derivatives (how sure a coefficient is)",
    "fisher": "contribution to the table of squared gradients (how far labels lie from predictions)",
    "slope": "contribution to the calibration of how far risks lie apart",
    "leaves": "contribution to the leaves of the trees",
    "tally": "entry in the table of counts",
    "calibration": "contribution to the calibration of risks",
}

# Published anchors: how others judge or set epsilon.
WEAK = 10.0
TIERS = (
    (1.0, "at most 1: a strong formal guarantee"),
    (WEAK, "above 1 and at most 10: a reasonable guarantee, the usual goal for machine learning"),
    (math.inf, "above 10: a weak formal guarantee, which needs evidence from attacks beside it"),
)
ANCHORS = """Ponomareva et al. ("How to DP-fy ML", Journal of Artificial Intelligence Research 77, 2023) \
group ε in three tiers: at most 1, a strong formal guarantee; at most 10, a reasonable one; above 10, a weak one. The \
United States published its 2020 Census redistricting data with a total ε of 19.61 (Census Bureau, June 2021)."""


def statement(cert: Mapping[str, Any]) -> str:
    """A certificate in words, for people who decide: who is protected, against whom, how well, and what is not
    protected.

    Args:
        cert: What `certificate` returned, or the contents of certificate.json.

    Returns:
        One page of Markdown.

    Example:
        >>> import sordino as so
        >>> plan = so.Plan(so.build("dp-fedgd"), rounds=5, sizes=(100,) * 4, privacy=so.Privacy(epsilon=2.0))
        >>> print(statement(so.certificate(plan, so.source(None), version=so.__version__)).splitlines()[0])
        # Privacy statement
    """
    cert = printable_parts(cert)  # a name with a line break would add a line
    unit, adjacency, trust = Unit(cert["unit"]), Adjacency(cert["adjacency"]), Trust(cert["trust"])
    verdict = (
        f"**Certified: ε = {cert['epsilon']:.4g} at δ = {cert['delta']:g}.**"
        if cert["certified"]
        else ("**Not certified.** " + " ".join(f"{reason.rstrip('.')}." for reason in cert["reasons"]))
    )
    of_site = cert["certified"] and "client" in (cert.get("site") or {})
    if of_site and (own := group_of_site(cert)["epsilon"]) < 0.999 * cert["epsilon"]:
        whose = "persons with records at this site alone" if _at_several(cert) else "the data of this site"
        verdict += f" For {whose} **ε = {own:.4g}** holds; the other figures are of the worst site."
    return f"""# Privacy statement

{verdict}

{_what(cert)} A client is a party that holds data, such as a hospital. {_execution(cert, trust)}

## What is protected, and against whom

{_protected(cert, unit, adjacency, trust)}

## How strong the protection is

{_strength(cert, unit)}

## What is not protected

{_bullets(_not_protected(cert, unit))}

## What {"the figures" if cert["method"] in (EVALUATION, STATISTICS) else "the model"} may be used for

{_use(cert)}

## How it was done

What one {unit} adds was limited, and random noise was added that hides so much. For specialists:

{_bullets(_steps(cert))}

## Assumptions

{_assumptions(cert)}

## How to check this statement

`sordino verify certificate.json` computes ε again with a second, independent program. {_signed(cert)}{_charged(cert)}

Spec SHA-256 `{cert["spec_sha256"] or "none"}`; ledger head `{cert["ledger"]["head"] or "none"}` \
({cert["ledger"]["rows"]} rows); sordino {cert["sordino"]}.
"""


def _what(cert: Mapping[str, Any]) -> str:
    """What was released."""
    whose = count(cert["clients"], "client")
    whose += f" ({cert['records']:,} {unit_plural(cert)})" if cert["records"] is not None else ""
    if cert["method"] == EVALUATION:
        persons = cert["unit"] == Unit.PERSON
        counted = "all records of a person share one count" if persons else "each record counts once"
        return (
            f"A model was tested on the data of {whose}: {counted}, by label and the model's score, and noise was "
            f"added to the counts. The model has SHA-256 `{cert['model_sha256']}`."
        )
    if cert["method"] == STATISTICS:
        return (
            f"The data of {whose} were counted, by bins and levels of some columns, and noise was added to the counts. "
            "They complete the schema of the table, by which a model may be trained later."
        )
    rounds = count(cert["rounds"], "round")
    return f"A model was trained with the method {cert['method']} on the data of {whose} in {rounds}."


def issue(cert: Mapping[str, Any], signer: Signer | None = None) -> tuple[dict[str, Any], str]:
    """Bind a certificate to its statement, and sign it.

    Args:
        cert: What `certificate` returned.
        signer: Who signs; None leaves it unsigned.

    Returns:
        The certificate with the hash of its statement, and the statement.
    """
    text = statement(announced(cert, signer))
    bound = {**cert, "statement_sha256": hashlib.sha256(text.encode()).hexdigest()}
    return (bound if signer is None else signed(bound, signer)), text


def _protected(cert: Mapping[str, Any], unit: Unit, adjacency: Adjacency, trust: Trust) -> str:
    if not cert["certified"]:
        private = cert["noise_source"] == "secure" and cert["epsilon"] is not None
        what = "nothing is certified to be protected" if private else "nothing is protected"
        return (
            f"Protected: {what}. Whoever gets the model, or reads messages of the run, may learn anything about any "
            "record.\n\nAgainst: nobody."
        )
    return (
        f"Protected: {PROTECTED[unit, adjacency]}.\n\n"
        f"Against: {ADVERSARY[trust]}{_coalition(cert)}. It does not matter what else they know, or how much "
        "computing power they have, as long as they cannot break the cipher that the random noise comes from."
    )


def _assumptions(cert: Mapping[str, Any]) -> str:
    if not cert["certified"]:
        return "There is no guarantee, so there are no assumptions under which it holds."
    return f"The guarantee holds if all of these are true:\n\n{_bullets([*cert['assumes'], *cert['numerics']])}"


def _execution(cert: Mapping[str, Any], trust: Trust) -> str:
    if not cert["execution"].startswith("simul"):
        return f"The training ran {cert['execution']}."
    assumed = " Secure aggregation was assumed, not carried out." if trust is Trust.SECURE_AGGREGATION else ""
    where = "the machines of one party" if "machines" in cert["execution"] else "one machine"
    if not cert["certified"]:
        return f"This was a {_kind(cert['execution'])}: all data were on {where}."
    return (
        f"This was a {_kind(cert['execution'])}: all data were on {where}. The guarantee describes what others "
        f"would see of a real deployment with the same settings.{assumed}"
    )


def _kind(execution: str) -> str:
    return execution if execution.startswith("simulation") else "simulation"


def _signed(cert: Mapping[str, Any]) -> str:
    about = cert.get("signature")
    if about is None:
        return "The certificate is not signed, so anybody could have written it."
    return f"The certificate is signed by {about['signer']} `{fingerprint(about['key'])}`."


def _charged(cert: Mapping[str, Any]) -> str:
    """Why a site's ledger may hold less than its certificate: rounds that it did not answer cost nothing."""
    paid, rounds = (cert.get("site") or {}).get("rounds"), cert["rounds"]
    if paid is None or paid >= rounds:
        return ""
    return (
        f" This site answered {paid} of {rounds} rounds, and its ledger charges only these. The ε above is the bound "
        "for all rounds, so the ledger shows less."
    )


def _coalition(cert: Mapping[str, Any]) -> str:
    secure = cert.get("secure")
    if not secure or not secure["colluders"]:
        return ""
    who = "one site" if secure["colluders"] == 1 else f"{secure['colluders']} sites"
    verb = "cooperates" if secure["colluders"] == 1 else "cooperate"
    return f", even if {who} {verb} with them (against the server alone, ε is {secure['epsilon_server']:.4g})"


def _bullets(lines: Sequence[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _strength(cert: Mapping[str, Any], unit: Unit) -> str:
    epsilon = cert["epsilon"]
    if epsilon is None or not cert["certified"]:
        return "No bound is proved: the model may reveal anything about the data."
    right = 100 * float(cert["guess"])
    subject = str(unit)
    groups, names = cert["groups"], cert["client_names"]
    rows = [f"| {_short(g['clients'])} | {_span(g['records'])} | {g['epsilon']:.4g} |" for g in groups[:MOST_GROUPS]]
    if len(groups) > MOST_GROUPS:
        rows.append(f"| {len(groups) - MOST_GROUPS} more groups: see certificate.json | | |")
    alike = len({f"{group['epsilon']:.4g}" for group in groups}) == 1
    if alike and len(groups) > 1:
        sizes = [size for group in groups for size in group["records"] or ()]
        rows = [f"| all | {_span([min(sizes), max(sizes)] if sizes else None)} | {epsilon:.4g} |"]
    table = "\n".join(rows)
    whose = (
        "All clients have the same ε"
        if alike
        else f"The figures above are those of the client with the largest ε, {_name(cert['worst_client'], names)}. "
        "Every client's own"
    )
    if not alike and _at_several(cert):  # mu^2 of a person is at most the mean of its clients' mu^2
        whose += ", where a person with records at several clients has the largest one of them"
    return f"""**As a bet.** Someone must guess which of two possibilities about a {subject} is true. Before they \
see the model, both are equally likely: they are right in 50 of 100 cases. After they have seen everything that this \
statement covers, they are right in at most {_cases(right)} of 100 cases, whatever method they use. \
{_betting_account(cert)}

**As a number.** ε (epsilon) limits how much one {subject} can change the outcome: no outcome is more than \
e^ε = {_factor(epsilon)} times as likely with one possibility as with the other. δ (delta) = {cert["delta"]:g} is, \
roughly, the probability that the limit does not hold. Smaller is better for both. The same run has an ε for every δ:

| at δ | {" | ".join(cert["epsilon_at"])} |
|---|{"---|" * len(cert["epsilon_at"])}
| ε | {" | ".join(f"{value:.4g}" for value in cert["epsilon_at"].values())} |

**Compared with others.** {ANCHORS} This run is in the tier "{_tier(epsilon)}".

{whose}:

| clients | {unit_plural(cert)} of each | ε |
|---|---|---|
{table}{_legend(names)}"""


def _at_several(cert: Mapping[str, Any]) -> bool:
    """Whether persons with records at several clients are protected. Others may then tell more than their client."""
    return bool(cert.get("person")) and int(cert["person"]["clients"]) > 1


def _betting_account(cert: Mapping[str, Any]) -> str:
    """From which account the chance of a right guess was computed, and why another run may state another one."""
    releases = [release for group in cert["groups"] for release in group["releases"]]
    sampled = any(release["rate"] < 1 for release in releases)
    if _concentrated(cert):
        return (
            "This bound was computed by concentrated DP, because the noise is correlated over rounds and consists of "
            "whole numbers, as secure aggregation needs them. It is not tight. A simulation adds real-valued Gaussian "
            f"noise, for which the chance is known exactly: {_cases(100 * normal.upper_tail(-cert['mu'] / 2))} of 100 "
            "with this much noise. So a simulation and a federation with the same ε may state different chances. The "
            "difference is one of proofs: at the same ε, the federation does not add less noise."
        )
    if sampled:
        return "This bound was computed numerically from the Gaussian noise and from what was drawn at random."
    if cert.get("secure"):
        return (
            "This bound was computed from Gaussian noise of a standard deviation that is smaller by one part in 4,096. "
            "The noise that was added, in whole numbers, is a function of it."
        )
    return "This bound is exact for Gaussian noise, from which it was computed."


def _concentrated(cert: Mapping[str, Any]) -> bool:
    """Whether the account is concentrated DP."""
    return any(
        release["mechanism"] == DiscreteGaussian.name for group in cert["groups"] for release in group["releases"]
    )


def _guess(cert: Mapping[str, Any], records: int) -> float:
    """The chance of a right guess about so many records of one client, with so many times the sensitivity."""
    mu = records * cert["mu"]
    if _concentrated(cert):
        return concentrated_guess(mu)
    return normal.upper_tail(-mu * (SMOOTHING if cert.get("secure") else 1.0) / 2)


def _tier(epsilon: float) -> str:
    return next(words for limit, words in TIERS if epsilon <= limit)


def _cases(percent: float) -> str:
    return f"{percent:.3g}" if percent < 99.95 else "nearly 100"


def _use(cert: Mapping[str, Any]) -> str:
    if not cert["certified"]:
        return "Keep the model as confidential as the training data: nothing is certified about it."
    if cert["method"] == STATISTICS:
        return (
            "The completed schema, and everything computed from it alone, may be published. A model that is trained on "
            "the same data has a statement of its own, and what both reveal adds up."
        )
    if cert["method"] == EVALUATION:
        return (
            "The noised counts, and everything computed from them alone, such as accuracy, AUC and calibration, may be "
            "published. This statement says nothing about the records that the model was trained on."
        )
    return (
        "The model, and everything computed from the model alone, such as its predictions, may be published. That "
        "does not weaken the protection, however often the model is used. This statement is about "
        "privacy only. It does not say that the model is accurate, fair or fit for decisions about people."
    )


def _steps(cert: Mapping[str, Any]) -> list[str]:
    bounds = list(dict.fromkeys(_bound(query, cert) for query in cert["queries"]))
    sampler = cert["sampler"]
    person = cert.get("person")
    return [
        *([_added_up(person, cert["queries"])] if person else []),
        *bounds,
        *_noise(cert),
        f"Clients in each round: {sampler['clients']}. {_of_each_client(cert)} in a round: {sampler['records']}. "
        f"Privacy gained by drawing at random (amplification by sampling): {sampler['amplification']}.",
        f"Source of the noise: {SOURCE.get(cert['noise_source'], cert['noise_source'])}.",
    ]


def _added_up(person: Mapping[str, Any], queries: Sequence[Mapping[str, Any]]) -> str:
    used = "One record" if person["records"] == 1 else f"Up to {person['records']} records"
    which = "drawn at random" if person["choice"] == "random" else "the first ones in its table"
    counted = [query["query"].endswith(" tally") for query in queries]
    added = (
        " What they contribute was added up before it was shortened, so that all of them together count as one."
        if not all(counted)
        else ""
    )
    shared = " In tables of counts, the records of a person share one count." if any(counted) else ""
    return f"{used} of each person were used at each client, {which}.{added}{shared}"


def unit_plural(cert: Mapping[str, Any]) -> str:
    """What the sizes of clients count: records, or persons."""
    return "persons" if cert["unit"] == Unit.PERSON else "records"


def _of_each_client(cert: Mapping[str, Any]) -> str:
    return f"{unit_plural(cert).capitalize()} of each client"


def _not_protected(cert: Mapping[str, Any], unit: Unit) -> list[str]:
    evaluation = cert["method"] == EVALUATION
    tested = "The" if cert["test_records"] is None else f"The {cert['test_records']:,}"
    lines = [
        "General facts. The model may show, for example, that smoking raises the risk of a disease. That concerns "
        "smokers, whether or not their data were used.",
        "The records that the model was trained on. The certificate of the training covers them."
        if evaluation
        else "The records that were held out for testing. They were not counted."
        if cert["method"] == STATISTICS
        else f"{tested} records that the model was tested on. The guarantee does not cover them, nor the test results.",
        "Other uses of the same data. If the data are used in further runs, the limits add up (`sordino ledger`).",
    ]
    if not cert["certified"]:
        return [f"All data that the model was {'tested' if evaluation else 'trained or tested'} on."]
    sampled = any(release["rate"] < 1 for group in cert["groups"] for release in group["releases"])
    if unit is Unit.RECORD and sampled:
        lines.append("A person with several records: the guarantee is for one record, not for all records of a person.")
    elif unit is Unit.RECORD and cert["mu"] is not None:
        several = {k: _guess(cert, k) for k in (2, 5, 10)}
        bets = ", ".join(f"{_percent(part)} with {k} records" for k, part in several.items())
        lines.append(
            "A person with several records: the guarantee is for one record. About a person with several records at "
            f"one client, the bet above is won with probability up to {bets}."
        )
    elif unit is Unit.PERSON and cert["person"]["clients"] == 1:
        lines.append("A person with records at several clients: the guarantee is for the records at one of them.")
    elif unit is Unit.PERSON:
        lines.append(
            f"A person with records at more than {cert['person']['clients']} clients: the guarantee is for persons at "
            "so many or fewer."
        )
    return lines


def _noise(cert: Mapping[str, Any]) -> list[str]:
    """How much noise each client added, and which noise protects a client's data."""
    if not cert["noise"]:
        return ["No noise was added."]
    kind = "discrete Gaussian" if cert.get("secure") else "Gaussian"
    clips = {query["query"]: query["clip"] for query in cert["queries"] if query["clip"]}
    own: dict[str, list[tuple[float, Mapping[str, Any]]]] = {}
    for group in cert["groups"]:
        for query, stds in group["own_std"].items():
            if query in clips:
                of_kind = own.setdefault(RELEASED.get(query.split()[-1], query.split()[-1]), [])
                of_kind += [(std / clips[query], group) for std in (stds if isinstance(stds, list) else [stds])]
    if len(own) == 1:
        (figures,) = own.values()
        deviation = f"is {_range(figures, cert)} times that length"
    else:
        each = "; ".join(f"for the {what}, {_range(figures, cert)}" for what, figures in own.items())
        deviation = f"in multiples of that length is: {each}"
    lines = [f"Each client added {kind} noise to each of its messages. Its standard deviation {deviation}."]
    if cert["certified"]:
        lines.append(_protecting(cert))
    if cert["certified"] and cert["trust"] == Trust.UNTRUSTED_SERVER and len(clips) == 1:
        lines.append(
            f"The noise of a round's participants adds up to {cert['noise']:.4g} times that length. This figure is for "
            "the accuracy of the result: no client's protection rests on it."
        )
    return lines


def _protecting(cert: Mapping[str, Any]) -> str:
    """Which noise hides a record, that of one message or that of the sum, and how large it is."""
    ratios = [
        (release["std"] / release["sensitivity"], group)
        for group in cert["groups"]
        for release in group["releases"]
        if release["sensitivity"]
    ]
    if not ratios:
        return "No message was sent, so that nothing has to be protected."
    change = "joins or leaves" if cert["adjacency"] == Adjacency.ADD_REMOVE else "is replaced"
    if cert["trust"] == Trust.UNTRUSTED_SERVER:
        seen, reason = "message", "Others may read each message by itself, so that a client's own noise protects it."
    elif cert["trust"] == Trust.TRUSTED_SERVER:
        seen, reason = "sum", "Others see only models, so that the noise of a whole sum of messages protects all."
    else:
        seen, reason = "sum", "Others see only the sum of a round's messages, so that its noise protects all of them."
    return (
        f"{reason}{_counted_on(cert)} The standard deviation of this noise is {_range(ratios, cert)} times the most by "
        f"which one {cert['unit']} that {change} can change the {seen}{_ratio_of_site(ratios, cert)}. ε follows from "
        "this ratio and the number of messages: the larger the ratio, the smaller ε."
    )


Figures: TypeAlias = Sequence[tuple[float, Mapping[str, Any]]]


def _range(figures: Figures, cert: Mapping[str, Any]) -> str:
    """A figure of each group of clients: one number, or the least and the largest and whose they are."""
    least, most = (f"{end(value for value, _ in figures):.4g}" for end in (min, max))
    if least == most:
        return least
    lower, upper = (
        {k for value, group in figures if f"{value:.4g}" == end for k in numbers_of(group["clients"], cert["clients"])}
        for end in (least, most)
    )
    if lower & upper:
        return f"at least {least} and at most {most} (certificate.json lists them)"
    names = cert["client_names"]
    return f"at least {least} (for {_clients(lower, names)}) and at most {most} (for {_clients(upper, names)})"


def _ratio_of_site(ratios: Figures, cert: Mapping[str, Any]) -> str:
    """The least ratio of the site that the certificate is of, if clients differ."""
    if "client" not in (cert.get("site") or {}) or len(cert["groups"]) == 1:
        return ""
    own = group_of_site(cert)
    least = min((ratio for ratio, group in ratios if group is own), default=None)
    return "" if least is None else f" (at least {least:.4g} for this site)"


def _clients(numbers: Collection[int], names: Sequence[str]) -> str:
    """'client 1 (Bonn)' or 'clients 0, 2-3'."""
    return _name(min(numbers), names) if len(numbers) == 1 else f"clients {_short(ranges(sorted(numbers)))}"


def _counted_on(cert: Mapping[str, Any]) -> str:
    secure = cert.get("secure")
    if not secure or not (secure["dropouts"] or secure["colluders"]):
        return ""
    causes = [
        *([f"up to {secure['dropouts']} may fail in any round"] if secure["dropouts"] else []),
        *([f"up to {secure['colluders']} may reveal their own noise to the server"] if secure["colluders"] else []),
    ]
    return f" Only the noise of {secure['honest']} sites is counted, because {' and '.join(causes)}."


def _bound(query: Mapping[str, Any], cert: Mapping[str, Any]) -> str:
    kind = query["query"].split()[-1]
    subject = "person" if cert["unit"] == Unit.PERSON else "record"
    if kind == "count":
        return (
            "The clip was adapted to a quantile of the gradients' lengths, which was estimated from noised counts. "
            f"Each {subject} changes a count by {query['clip']:g} at most."
        )
    whose = "Each client's message" if kind == "delta" else f"Each {subject}'s {RELEASED.get(kind, kind)}"
    if query["clip"] is None:
        return f"{whose} was not shortened: there is no clip."
    if query.get("clipping"):
        return _clipping(Clipping.parse(query["clipping"]), whose, query["clip"])
    if query["bound"] == "by clip":
        return f"{whose} was shortened to length at most {query['clip']:g} (the clip)."
    moved = max(r["sensitivity"] for g in cert["groups"] for r in g["releases"] if r["query"] == query["query"])
    change = "joins or leaves" if cert["adjacency"] == Adjacency.ADD_REMOVE else "is replaced"
    return (
        f"{whose} changes what is seen by at most {moved:.4g} when one {cert['unit']} {change} ({query['bound']}). The "
        f"noise below is given in multiples of {query['clip']:.4g}."
    )


def _clipping(clipping: Clipping, whose: str, clip: float) -> str:
    if clipping.law == "automatic":
        return (
            f"{whose} was multiplied by {clip:g} / (its length + {clipping.gamma:g}) (automatic clipping), so that its "
            f"length is at most {clip:g} (the clip)."
        )
    bounds = ", ".join(f"{bound:.4g}" for bound in clipping.bounds(clip, len(clipping.layers))) or "the same for all"
    return (
        f"{whose} was shortened layer by layer (bounds: {bounds}); the squares of the bounds add up to that of "
        f"{clip:g} (the clip), so that its length is at most {clip:g}."
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
