"""What a coordinator or a site did, in words: one sentence per line of progress.jsonl or events.jsonl."""

from __future__ import annotations

from typing import Any


def score(line: dict[str, Any]) -> str:
    """How good the model is after a round, what it cost, and how many sites answered."""
    found = measured(line)
    return f"{found}{'  ' if found else ''}ε {line['epsilon']:6.3f}  {count(len(line['came']), 'site')}"


MEASURED = {  # of a model: how each metric is written, in the order of the line
    "accuracy": ("accuracy", ".1%"),
    "balanced_accuracy": ("balanced accuracy", ".1%"),
    "auc": ("AUC", ".3f"),
    "macro_auc": ("mean AUC", ".3f"),
    "concordance": ("concordance", ".3f"),
    "r2": ("R²", ".3f"),
    "d2": ("share of deviance explained", ".3f"),
    "log_loss": ("log loss", ".4f"),
    "perplexity": ("perplexity", ".2f"),
}


def measured(scores: dict[str, Any]) -> str:
    """The metrics of a model that people read first, those that it has.

    >>> measured({"accuracy": 0.83, "auc": 0.9, "log_loss": 0.4, "brier": 0.1})
    'accuracy 83.0%, AUC 0.900, log loss 0.4000'
    >>> measured({"perplexity": 12.345})
    'perplexity 12.35'
    """
    known = [(name, form, scores.get(key)) for key, (name, form) in MEASURED.items()]
    return ", ".join(f"{name} {value:{form}}" for name, form, value in known if value is not None)


def evaluation(line: dict[str, Any]) -> str:
    """What the sites' noised counts say about the model."""
    if "why" in line:
        return f"no evaluation: {line['why']}"
    names = {
        "accuracy": "accuracy",
        "auc": "AUC",
        "concordance": "concordance",
        "mae": "absolute error",
        "predicted_minus_observed": "predicted minus observed",
    }
    parts = ", ".join(f"{name} {interval_text(line[key], key)}" for key, name in names.items() if key in line)
    where = f"{line['records']:,} test records of {count(len(line['came']), 'site')}"
    doubt = f". {line['doubt']}" if line.get("doubt") else ""
    return f"evaluation on {where}, ε = {line['epsilon']:.4g}: {parts}{doubt}"


def count(number: int, what: str) -> str:
    """A number and its noun."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def promised(epsilon: float) -> str:
    """How much of a limit is spent when all open runs have ended."""
    return f"to open runs: ε = {epsilon:.4g} is spent when they have ended"


def of_coordinator(line: dict[str, Any], rounds: int | None) -> str:
    """One line of a coordinator's progress, in words."""
    what, site, t = line["what"], line.get("site", "a node"), line.get("t")
    where = "" if t is None else f" in round {t + 1}"
    if what == "round":
        width = len(str(rounds or line["t"] + 1))
        lost = f"lost; up to ε {line['epsilon']:.3f} charged"  # a site that was not reached charges nothing
        outcome = score(line) if line["came"] else lost
        return f"round {line['t'] + 1:{width}}{f' of {rounds}' if rounds else ''}  {outcome}"
    match what:
        case "waiting":
            return f"waiting for {', '.join(line['sites'])}"
        case "joined":
            rest = (
                f"waiting up to {line['seconds']} s for {', '.join(line['missing'])}"
                if line["missing"]
                else "all are here"
            )
            return f"{', '.join(line['sites'])} joined; {rest}"
        case "away":
            return f"{site} left the link; waiting up to {line['seconds']} s for an answer"
        case "begun":
            first = line["start"] + 1
            return f"{line['method']}, {count(line['rounds'], 'round')}, beginning with round {first}"
        case "missing":
            return f"{site} did not answer in time ({line['kind']})"
        case "refused":
            return f"{site} refused: {line['reason']}"
        case "queued":
            return f"{site} is busy with another study; this one waits at place {line['place']} of its queue"
        case "excluded":
            return f"{site} takes no part: {', '.join(line['votes'])} voted to leave it out"
        case "rotated":
            return f"{site} has the new key {line['new'][:16]}, signed by its old key {line['old'][:16]}"
        case "misfit":
            return f"{site} sent a wrong message{where}" + (f": {line['why']}" if line.get("why") else "")
        case "abandoned":
            return f"round {line['t'] + 1} has no result: {line['why']}"
        case "evaluation":
            return evaluation(line)
        case "unknown-key":
            return (
                "a node whose key is in no file of nodes/ tried to connect; ask the sites that are missing for their "
                "node.pub, and compare it with nodes/NAME.pub"
            )
        case "finished":
            why = f". {warning(line['useless'], line.get('by_chance', False))}" if "useless" in line else ""
            why += f"; the completed schema is {line['schema']}" if "schema" in line else ""
            why += f". WARNING: {line['rough']}" if "rough" in line else ""
            return f"finished: ε = {line['epsilon']:.4g}, {count(len(line['sites']), 'site')}{why}"
        case "failed":
            return f"failed: {line['why']}"
    return str(what)


def warning(why: str, by_chance: bool) -> str:
    """What a useless model means, and what helps.

    Args:
      why: what was compared.
      by_chance: the model is better than a constant guess on these records, but no more than by chance.
    """
    shown = "not shown to be better" if by_chance else "no better"
    return (
        f"WARNING: the model is {shown} than a constant guess: {why}. The noise may exceed the signal, or features "
        "differ in scale: scale the files at the sites by public figures, or try normalize=l2 or a larger epsilon. "
        "Another run on the same data adds to the epsilon that is spent on them."
    )


def of_site(line: dict[str, Any]) -> str:
    """One line of a site's own log, in words."""
    run = str(line.get("run", ""))[:8]
    match line["what"]:
        case "joining":
            return f"{line['site']} joins {line['link']}; stop with Ctrl-C"
        case "link":
            return _reached(line)
        case "restarted":
            return f"the {line['process']} is started again, because {line['why']} (see {line['log']})"
        case "agreed":
            return f"agreed to run {run}: {line['method']}, {count(line['rounds'], 'round')}"
        case "queued":
            return f"run {run} ({line['method']}) waits at place {line['place']} until another study is over"
        case "voted":
            return f"votes against {', '.join(line['against']) or 'nobody'}"
        case "rotated":
            return (
                f"accepted the new key {line['new'][:16]} of {line['site']}, signed by its old key {line['old'][:16]}"
            )
        case "withdrawn":
            return f"run {run} was withdrawn before its first round"
        case "refused":
            return f"refused ({line['code']}): {line['detail']}"
        case "failed":
            where = f"round {line['t'] + 1}" if "t" in line else "the evaluation"
            return f"failed in {where} of run {run}: {line['detail']}"
        case "evaluated":
            return f"answered the evaluation of run {run}: ε = {line['epsilon']:.4g}"
        case "finished":
            hint = f"; {line['hint']}" if "hint" in line else ""
            return f"finished run {run}: ε = {line['epsilon']:.4g} in {count(line['rounds'], 'round')}{hint}"
    return str(line["what"])


def _reached(line: dict[str, Any]) -> str:
    """Whether a site reaches its link, and what helps if it does not."""
    link = line["link"]
    host = link.rpartition(":")[0]
    return {
        "connected": f"connected to {link}",
        "refused": (
            f"{link} does not accept the key of this site's node, and is asked again. If the coordinator has just "
            "started, or this site was killed, wait a minute. Otherwise compare node.pub of this site with the "
            f"coordinator's nodes/{line.get('site', 'NAME')}.pub, and run `sordino federate doctor "
            f"{line.get('file', 'SITE.toml')}`"
        ),
        "silent": (
            f"nobody answers at {link} yet: this site waits for the coordinator, which has not started or is done. If "
            "it runs, check --link, and whether a firewall is between"
        ),
        "unsigned": (
            "the certificate of the link was not signed by this authority; ask the coordinator for its "
            "tls/authority.pem"
        ),
        "unnamed": (
            f"the certificate of the link does not name {host}; ask the coordinator to start `coordinate` with "
            f"--host {host}"
        ),
        "dated": (
            "the certificate of the link has ended, or is not valid yet by this machine's clock; check the clock, or "
            "ask the coordinator to run `sordino federate renew`"
        ),
        "plain": f"{link} answers, but not over TLS; check the port",
        "unread": "the authority's file cannot be read any more; put it back",
    }[line["state"]]


def interval_text(part: dict[str, Any], key: str, counts: bool = False) -> str:
    """An estimate with its interval."""
    style = (
        ".4g"
        if counts or key in ("brier", "brier_gain", "mae", "mse", "r2", "auc", "deviance", "concordance")
        else ".1%"
    )
    value = "open, too much noise" if part["estimate"] is None else format(part["estimate"], style)
    return f"{value} ({format(part['low'], style)} to {format(part['high'], style)})"
