"""Secure aggregation: what a round costs, and what its readers do with any bytes. Writes results/secagg.json.

    OMP_NUM_THREADS=1 python benchmarks/secagg.py                   # 20 sites, 100,000 numbers, threshold 11
    OMP_NUM_THREADS=1 python benchmarks/secagg.py --fuzz 150000     # that, and as many spoiled messages
    OMP_NUM_THREADS=1 python benchmarks/secagg.py --many            # 10, 100 and 1,000 sites, into the same file

Times are the best of several rounds, on one core; a site's are means over the sites of a round.
"""

from __future__ import annotations

import argparse
import json
import random
import secrets
import statistics
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from provenance import provenance
from sordino.errors import SordinoError
from sordino.federation import masks
from sordino.secagg import Identity, Member, Roster, Session, open_sum, read_masked, read_offer, read_reveal, seals
from sordino.secagg import confirm as make_confirmation
from sordino.secagg import masked as mask_message
from sordino.secagg import offer as make_offer
from sordino.secagg import reveal as make_reveal
from sordino.secagg import sparse as secagg_sparse
from sordino.secagg.messages import _signed, read_sparse_offer
from sordino.wire import decode

OUT = Path(__file__).parents[1] / "results" / "secagg.json"
SITES, DIMENSION, DROPOUTS = 20, 100_000, 9


def federation(sites: int, dropouts: int) -> list[Member]:
    identities = [Identity.make(f"site-{i}") for i in range(sites)]
    session = Session.of("benchmark", Roster(tuple(each.card for each in identities)), "ab" * 32, dropouts)
    return [Member(each, session, secrets.token_bytes(32)) for each in identities]


def timed(make: Callable[[Member], bytes], members: list[Member]) -> tuple[dict[str, bytes], float]:
    began = time.perf_counter()
    messages = {member.name: make(member) for member in members}
    return messages, (time.perf_counter() - began) / len(members)


def one_round(members: list[Member], t: int, dimension: int, gone: int) -> dict[str, float]:
    """`gone` sites offer and send nothing more; all others stay."""
    session, rng = members[0].session, np.random.default_rng(t)
    vectors = {each.name: rng.integers(0, 2**32, dimension, dtype=np.uint32) for each in members}
    stay = members[: len(members) - gone]
    offers, offering = timed(lambda each: make_offer(each, t), members)
    sent, masking = timed(lambda each: mask_message(each, t, offers, vectors[each.name]), stay)
    began = time.perf_counter()
    passed = seals(session, t, sent)
    sealing = time.perf_counter() - began
    agreed, confirming = timed(lambda each: make_confirmation(each, t, offers, list(sent), passed), stay)
    reveals, revealing = timed(lambda each: make_reveal(each, t, offers, list(sent), agreed), stay)
    began = time.perf_counter()
    total = open_sum(session, t, offers, sent, reveals)
    opening = time.perf_counter() - began
    assert np.array_equal(total, np.sum([vectors[name] for name in sent], axis=0, dtype=np.uint32))
    name = stay[0].name
    return {
        "offer_s": offering,
        "masked_s": masking,
        "confirm_s": confirming,
        "reveal_s": revealing,
        "client_s": offering + masking + confirming + revealing,
        "server_s": sealing + opening,
        "offer_bytes": len(offers[name]),
        "masked_bytes": len(sent[name]),
        "reveal_bytes": len(reveals[name]),
        "sent_bytes": len(offers[name]) + len(sent[name]) + len(reveals[name]),
        "received_bytes": sum(map(len, offers.values()))
        + sum(map(len, passed.values()))
        + sum(map(len, agreed.values())),
    }


def cost(repeats: int) -> dict[str, Any]:
    members, by_dropouts = federation(SITES, DROPOUTS), dict[str, Any]()
    for gone in (0, DROPOUTS):
        rounds = [one_round(members, t, DIMENSION, gone) for t in range(repeats)]
        best = {key: min(each[key] for each in rounds) for key in rounds[0]}
        best["sent_over_unmasked"] = best["sent_bytes"] / (4 * DIMENSION)
        best["sent_and_received_over_unmasked"] = (best["sent_bytes"] + best["received_bytes"]) / (4 * DIMENSION)
        best["client_samples_s"] = [each["client_s"] for each in rounds]
        best["client_s_median"] = statistics.median(best["client_samples_s"])
        by_dropouts[f"{gone} dropouts"] = best
    threshold = members[0].session.threshold
    return {"sites": SITES, "dimension": DIMENSION, "threshold": threshold, "repeats": repeats, **by_dropouts}


# --------------------------------------------------------------------------------------------------------- many sites

MANY = ((10, 1, 1), (100, 5, 2), (1000, 50, 20))  # sites, dropouts, colluders
MANY_DIMENSION = 10_000


def cpu(make: Callable[[], Any]) -> tuple[Any, float]:
    """A result and the processor time that it took: many sites in one process on a busy machine."""
    began = time.process_time()
    return make(), time.process_time() - began


def wide_round(sites: int, dropouts: int, colluders: int) -> dict[str, Any]:
    """One round of all sites in this process; as many as may drop out send no vector. Means over the sites."""
    identities = [Identity.make(f"site-{i}") for i in range(sites)]
    roster, reading = cpu(lambda: Roster(tuple(each.card for each in identities)))
    session, _ = cpu(lambda: Session.of("benchmark", roster, "ab" * 32, dropouts, colluders))
    graph, deriving = cpu(lambda: session.adjacency)
    members = {each.name: Member(each, session, secrets.token_bytes(32)) for each in identities}
    rng = np.random.default_rng(sites)
    vectors = {name: rng.integers(0, 2**32, MANY_DIMENSION, dtype=np.uint32) for name in members}
    sparse = masks.is_sparse(session)
    offers, offering = cpu(lambda: {name: masks.offer(member, 0) for name, member in members.items()})
    common, sealing = {masks.PRESENT: masks.present_bits(session, offers).tobytes()}, 0.0
    if sparse:
        verified, sealing = cpu(lambda: {n: read_sparse_offer(session, 0, n, data) for n, data in offers.items()})
        slips = {n: secagg_sparse.slips(session, 0, verified, n).tobytes() for n in members}
        shown = {n: {**common, masks.SLIPS: slips[n]} for n in members}
    else:
        shown = dict.fromkeys(members, offers)
    stay = list(members)[: sites - dropouts]
    sent, masking = cpu(lambda: {n: masks.masked(members[n], 0, shown[n], vectors[n], "") for n in stay})
    alive = secagg_sparse.survivors(session, sent) if sparse else stay
    sent = {name: sent[name] for name in alive}
    given, more = cpu(lambda: seals(session, 0, sent))
    signers = [name for name in alive if name in session.committee]
    agreed, confirming = cpu(
        lambda: {n: masks.confirm(members[n], 0, shown[n], alive, given, None, "") for n in signers}
    )
    if session.graph is not None:
        agreed = dict(list(agreed.items())[: session.graph.quorum])
    near = {n: {k: given[k] for k in session.neighbours(n) if k in given} if sparse else given for n in alive}
    reveals, revealing = cpu(
        lambda: {n: masks.reveal(members[n], 0, shown[n], alive, near[n], agreed, None, "") for n in alive}
    )
    opened = secagg_sparse.open_sum if sparse else open_sum
    total, opening = cpu(lambda: opened(session, 0, offers, sent, reveals))
    assert np.array_equal(total, np.sum([vectors[name] for name in alive], axis=0, dtype=np.uint32))
    name = alive[0]
    shown_bytes = sum(map(len, shown[name].values()))
    list_bytes = len(json.dumps(alive)) * (2 if name in session.committee or not sparse else 1)
    signed = sum(map(len, near[name].values())) + sum(map(len, agreed.values()))
    sent_bytes = len(offers[name]) + len(sent[name]) + len(reveals[name])
    return {
        "sites": sites,
        "dropouts": dropouts,
        "colluders": colluders,
        "neighbours": float(graph.sum(1).mean()),
        "shares": session.threshold if session.graph is None else session.graph.shares,
        "committee": len(session.committee),
        "dimension": MANY_DIMENSION,
        "site_cpu_s": offering / sites + masking / len(stay) + confirming / len(signers) + revealing / len(alive),
        "site_sent_bytes_without_vector": sent_bytes - 4 * MANY_DIMENSION,
        "site_received_offers_bytes": shown_bytes,
        "site_received_list_bytes": list_bytes,
        "site_received_signatures_bytes": signed,
        "roster_cpu_s": reading,
        "graph_cpu_s": deriving,
        "server_cpu_s": sealing + more + opening,
    }


# -------------------------------------------------------------------------------------------------------------- fuzz

WORDS = [b"[", b"]", b"{", b"}", b'"', b",", b":", b"-", b"0", b"1e999", b"null", b"true", b"NaN", b"\\ud800", b"\xff"]
WORDS += [b"2147483648", b"9" * 30, b'"u4"', b'"f8"', b"[[site]]", b"\n", b"[[[[[[[[[", b'"a":', b"SRD1", bytes(8)]


WORST = {"worst_s": 0.0, "peak_bytes": 0, "peak_bytes_per_byte": 0.0}


def spoiled(data: bytes, others: list[bytes], rng: random.Random) -> bytes:
    """Bits turned over, bytes cut, doubled, exchanged for words of the formats or parts of other messages."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        at, width = rng.randrange(len(out) + 1), rng.choice((0, 1, 1, 2, 4, 16, 64))
        match rng.randrange(7):
            case 0 if at < len(out):
                out[at] ^= 1 << rng.randrange(8)
            case 1:
                out[at : at + width] = rng.choice(WORDS)
            case 2:
                out[at : at + width] = rng.randbytes(width)
            case 3:
                del out[at : at + width]
            case 4:
                out[at:at] = out[at : at + width] * rng.choice((1, 2, 50))
            case 5:
                other = rng.choice(others)
                start = rng.randrange(len(other))
                out[at : at + width] = other[start : start + width]
            case _:
                del out[at:]
    return bytes(out)


def headed(data: bytes, others: list[bytes], rng: random.Random) -> bytes:
    """Its head spoiled, and the head's length put right, so that the spoiling is read."""
    size = int.from_bytes(data[4:8], "little")
    head = spoiled(data[8 : 8 + size], others, rng)
    return data[:4] + struct.pack("<I", len(head)) + head + data[8 + size :]


def shaped(data: bytes, rng: random.Random) -> bytes:
    """The shape of its first array, or all of its arrays, exchanged."""
    size = int.from_bytes(data[4:8], "little")
    head = json.loads(data[8 : 8 + size])
    numbers = rng.choice([(0, 2**31), (0, 1, 3, 66, -1, 2**16, 2**31, 2**31 + 1, 2**63, 1.0, "1")])
    shape = [rng.choice(numbers) for _ in range(rng.randrange(6))]
    head["arrays"][0][2] = shape
    if rng.random() < 0.3:
        head["arrays"] = [["a", rng.choice(("u1", "u4", "f8", "i8")), shape]]
    text = json.dumps(head).encode()
    return data[:4] + struct.pack("<I", len(text)) + text + data[8 + size :]


def crowded(data: bytes, rng: random.Random) -> bytes:
    """A long head of many small things."""
    many = rng.choice((10_000, 50_000))
    table = "{" + ",".join(f'"{i}":{{}}' for i in range(many)) + "}"
    fields = rng.choice(("[" * many, "9" * many, f"[{'[],' * many}0]", table))
    arrays = ",".join(f'["{i}","u1",[0]]' for i in range(many)) if rng.random() < 0.3 else ""
    text = f'{{"kind":"a","fields":{{"a":{fields}}},"arrays":[{arrays}]}}'.encode()
    return data[:4] + struct.pack("<I", len(text)) + text


def fuzz(count: int, seed: int = 0) -> dict[str, Any]:
    """Every reader, in turn. A third of the messages get a right signature afterwards, so that it hides nothing."""
    members, rng = federation(4, 1), random.Random(seed)
    session, liar = members[0].session, members[1]
    offers = {each.name: make_offer(each, 0) for each in members}
    vectors = np.arange(50, dtype=np.uint32)
    sent = {each.name: mask_message(each, 0, offers, vectors) for each in members[:3]}
    reveals = {each.name: make_reveal(each, 0, offers, list(sent)) for each in members[:3]}
    roster = session.roster.toml().encode()
    seeds = {"offer": offers[liar.name], "masked": sent[liar.name], "reveal": reveals[liar.name], "roster": roster}
    readers: dict[str, Callable[[bytes], object]] = {
        "offer": lambda data: read_offer(session, 0, liar.name, data),
        "masked": lambda data: read_masked(session, 0, liar.name, data),
        "reveal": lambda data: read_reveal(session, 0, liar.name, data),
        "roster": Roster.parse,
        "wire.decode": decode,
    }
    seeds["wire.decode"] = seeds["reveal"]
    others, kinds = list(seeds.values()), list(readers)
    tally = {kind: {"inputs": 0, "read": 0, "refused": 0, "other_errors": 0, **WORST} for kind in kinds}
    errors = list[str]()
    for i in range(count):
        kind = kinds[i % len(kinds)]
        data = seeds[kind]
        way = 1.0 if kind == "roster" else rng.random()
        if way < 0.002:
            data = crowded(data, rng)
        elif way < 0.05:
            data = shaped(data, rng)
        else:
            data = headed(data, others, rng) if way < 0.6 else spoiled(data, others, rng)
        if kind in ("offer", "masked", "reveal") and rng.random() < 1 / 3:
            data = data[:-64] + liar.identity.sign(_signed(data[:-64]))
        watched = i % 10 < 5 and i >= count // 2  # memory is watched in a quarter of them, where time is not taken
        row = tally[kind]
        row["inputs"] += 1
        if watched:
            tracemalloc.start()
        began = time.perf_counter()
        try:
            readers[kind](data)
            row["read"] += 1
        except SordinoError:
            row["refused"] += 1
        except Exception as error:
            row["other_errors"] += 1
            errors.append(f"{kind}: {type(error).__name__}: {error}")
        took = time.perf_counter() - began
        if watched:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            row["peak_bytes"] = max(row["peak_bytes"], peak)
            row["peak_bytes_per_byte"] = max(row["peak_bytes_per_byte"], peak / max(len(data), 1000))
        else:
            row["worst_s"] = max(row["worst_s"], took)
    return {
        "inputs": count,
        "seed": seed,
        "readers": tally,
        "other_errors": sum(int(row["other_errors"]) for row in tally.values()),
        "examples_of_other_errors": sorted(set(errors))[:5],
        **{key: max(row[key] for row in tally.values()) for key in WORST},
    }


def many() -> None:
    """Add what rounds of many sites cost to the results."""
    document = json.loads(OUT.read_text())
    found = {"provenance": provenance("OMP_NUM_THREADS=1 python benchmarks/secagg.py --many")}
    document["many"] = found | {f"{case[0]} sites": wide_round(*case) for case in MANY}
    OUT.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document["many"], indent=1))


def main(repeats: int, inputs: int) -> None:
    command = "OMP_NUM_THREADS=1 python benchmarks/secagg.py" + (f" --fuzz {inputs}" if inputs else "")
    document = {"provenance": provenance(command), "round": cost(repeats)}
    if inputs:
        document["fuzz"] = fuzz(inputs)
    OUT.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--fuzz", type=int, default=0, metavar="N")
    parser.add_argument("--many", action="store_true", help="10, 100 and 1,000 sites")
    arguments = parser.parse_args()
    many() if arguments.many else main(arguments.repeats, arguments.fuzz)
