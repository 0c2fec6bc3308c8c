"""Faults and attacks over real processes (tests/federation/fault_trials.py), into results/faults.{json,md}."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from provenance import provenance

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "federation"))


HEAD = """# Faults and attacks over real processes

`python benchmarks/faults.py`: a link, six SuperNodes with their workers and a coordinator on loopback, over TLS. Any
two sites may drop out and any one may collude, so four of six are needed to open a sum. A run has three rounds (four
if the table shows four), and a site has fifteen seconds to answer. Killed processes are started again. Afterwards each
site's ledger is compared with what left the site: *unpaid* counts rounds that left without exactly one charge as
planned.

| what happens | sites in each round's sum | certificates | unpaid |
| --- | --- | --- | --- |
"""


def page(out: dict[str, Any]) -> str:
    """The page for readers."""
    runs = out["runs"]
    random_faults = {name: run for name, run in runs.items() if name.startswith("random-faults-")}
    hostile = {name: run for name, run in runs.items() if "tries" in run}
    text = HEAD
    for name, run in runs.items():
        if name not in random_faults and name not in hostile:
            came = ", ".join(str(count) if count else "not opened" for count in run["came"])
            masked = "" if run["trust"] == "secure-aggregation" else " (untrusted server)"
            text += f"| {run['what']}{masked} | {came} | {run['site_certificates']} of 6 | {run['unpaid']} |\n"
    for run in hostile.values():
        moved = run.get("moved_of_sensitivity")
        text += f"\n**{run['what'].capitalize()}**: {run['tries']} messages of {run['kinds']} kinds; "
        text += f"{len(run['wrong'])} wrong answers, {run['unpaid']} rounds unpaid."
        if moved:
            text += " Models that target one record moved the answer by " + " and ".join(f"{m:.2f}" for m in moved)
            text += " of the sensitivity when that record was replaced (1 is allowed)."
        text += "\n"
    if random_faults:
        faults = ", ".join(f"{what} {times}" for what, times in sorted(out["random_faults"].items()))
        count = Counter(sites for run in random_faults.values() for sites in run["came"])
        secure = sum(run["trust"] == "secure-aggregation" for run in random_faults.values())
        text += f"\n**{len(random_faults)} random schedules**, {secure} of them with secure aggregation. "
        text += f"Faults in all attempts: {faults}. "
        text += f"Of {sum(count.values())} rounds {count[6]} had all six sites and {count[0]} had no result; "
        text += f"{sum(run['unpaid'] for run in random_faults.values())} were unpaid. "
        short = [run for run in random_faults.values() if run["site_certificates"] < 6]
        if short:
            text += f"In {len(short)} of the schedules a site missed the last message in all three attempts and has no "
            text += "certificate. "
        text += "Checks of a ledger after an exchange "
        text += f"that found fewer charges than releases: {len(out['violations'])}.\n"
    unknown = ", ".join(f"{name}: {answer}" for name, answer in out["unknown_sites"].items())
    text += f"\n**Unknown sites at the link**: {unknown}.\n"
    died = ", ".join(f"{name} {times}" for name, times in sorted(out["restarts"].items()))
    parts = ", ".join(f"{count} of commit {commit[:7]}" for commit, count in out["rows_of_commits"].items())
    text += f"\nScenarios, by the commit at which they ran last: {parts}.\n"
    return text + f"\nProcesses killed and started again: {died}. {out['seconds'] / 60:.0f} minutes in all.\n"


def joined(earlier: dict[str, Any], trial: dict[str, Any]) -> dict[str, Any]:
    """Two parts of the same trial: scenarios of both in their order, and sums of what was counted."""
    import scenarios

    made = earlier["provenance"]["commit"]
    runs = {name: {"commit": made} | run for name, run in earlier["runs"].items()} | trial["runs"]
    counted = {key: dict(Counter(earlier[key]) + Counter(trial[key])) for key in ("restarts", "random_faults")}
    return {
        **trial,
        **counted,
        "seconds": earlier["seconds"] + trial["seconds"],
        "violations": earlier["violations"] + trial["violations"],
        "runs": {name: runs[name] for name in scenarios.SCENARIOS if name in runs},
    }


def main() -> None:
    import fault_trials
    import scenarios

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", choices=list(scenarios.SCENARIOS), default=list(scenarios.SCENARIOS))
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "faults.json")
    parser.add_argument("--add", action="store_true", help="add these scenarios to those in the file, or replace them")
    parser.add_argument("--keep", type=Path, help="where to leave everything, for a look")
    options = parser.parse_args()
    about = provenance("python benchmarks/faults.py")
    with tempfile.TemporaryDirectory() as place:
        trial = fault_trials.run(
            options.keep or Path(place), tuple(options.only), lambda text: print(text, flush=True), True
        )
    trial["runs"] = {name: {"commit": about["commit"]} | run for name, run in trial["runs"].items()}
    if options.add and options.out.exists():
        trial = joined(json.loads(options.out.read_text()), trial)
    wrong = {name: bad for name, run in trial["runs"].items() if (bad := fault_trials.problems(name, run))}
    for name, run in trial["runs"].items():
        run["expected"] = list(scenarios.SCENARIOS[name].came)
        outcome = f"{run['tries']} tries" if "tries" in run else f"{run['came']}, {run['seconds']:.0f} s"
        print(f"{'NOT' if name in wrong else 'ok '} {name}: {outcome} {wrong.get(name, '')}")
    commits = dict(Counter(run["commit"] for run in trial["runs"].values()))
    out = {"provenance": about, "rows_of_commits": commits, **trial, "not_as_expected": wrong}
    options.out.write_text(json.dumps(out, indent=1) + "\n")
    options.out.with_suffix(".md").write_text(page(out))
    sys.exit(bool(wrong or trial["violations"] or set(trial["unknown_sites"].values()) != {"refused"}))


if __name__ == "__main__":
    main()
