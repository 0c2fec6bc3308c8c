"""Federated instruction tuning on a small real text: phrases of SST-2. Writes results/instructions.{json,md}.

    python benchmarks/instructions.py prepare DATA_DIR FOLDER              # texts and a tokenizer, a few MB
    python benchmarks/instructions.py run FOLDER --device cuda --workers 8
    python benchmarks/instructions.py run FOLDER --device cuda --workers 6 --size gpt2     # of GPT-2's size
    python benchmarks/instructions.py run FOLDER --smoke --out FILE.json   # a minute on a CPU
    python benchmarks/instructions.py report                               # the page alone

No published weights are at hand, so a small GPT-2 is trained first, without privacy, on phrases that are taken to be
public. They share no four consecutive words with a private phrase or a development sentence. The private phrases become
instructions: half ask whether a phrase is positive or negative, half ask for a phrase of one kind. One record is one
instruction with its answer; a phrase stands in one of them. The tokenizer knows the public phrases alone.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import random
import statistics
from pathlib import Path
from typing import Any

import numpy as np

from compact import text
from fleet import train
from provenance import provenance

OUT = Path(__file__).resolve().parents[1] / "results" / "instructions.json"
PRIVATE, LEAST_WORDS, GRAM, LENGTH, VOCABULARY = 12_000, 8, 4, 64, 6_000
EPSILONS, SEEDS, ROUNDS, CLIENTS, BATCH = (2.0, 8.0, math.inf), (1, 2, 3), 100, 4, 64
METHODS = ("auto", "dp-fedadam", "dp-fedadamw", "dp-fedavg")
JUDGE, WRITE, KINDS = "is this positive or negative ? {}", "write a {} phrase", ("negative", "positive")
SIZES: dict[str, dict[str, Any]] = {  # of the model, its training, and what is tuned
    "small": {"n_embd": 256, "n_layer": 4, "n_head": 4, "passes": 12, "methods": METHODS, "seeds": SEEDS},
    "gpt2": {
        **{"n_embd": 768, "n_layer": 12, "n_head": 12, "passes": 8},
        **{"methods": METHODS[:2], "seeds": SEEDS[:1]},
    },
}
PUBLIC_BATCH, PUBLIC_STEP = 128, {"small": 1e-3, "gpt2": 5e-4}
SMOKE: dict[str, Any] = {"rounds": 2, "passes": 1, "rows": 300}


def prepare(source: str, folder: Path) -> None:
    """Three files of texts, and a tokenizer of the public one."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    from sordino.data import glue

    learned, judged = glue.load("sst2", "train", source), glue.load("sst2", "dev", source)
    assert learned.y is not None
    assert judged.y is not None
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    long = [k for k, phrase in enumerate(learned.first) if len(phrase.split()) >= LEAST_WORDS]
    draw.shuffle(long)
    private = set(long[:PRIVATE])
    held = [*judged.first, *(learned.first[k] for k in private)]
    known = set().union(*map(grams, held))
    public = [phrase for k, phrase in enumerate(learned.first) if k not in private and not grams(phrase) & known]
    (folder / "public.txt").write_text("\n".join(phrase.strip() for phrase in public) + "\n", encoding="utf-8")

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    asked = [JUDGE.format(""), *(WRITE.format(kind) for kind in KINDS)]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    how = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator([*public, *asked * 100], how)
    tokenizer.save(str(folder / "tokenizer.json"))

    rows = [(learned.first[k], int(learned.y[k]), task) for task, k in zip(tasks(), sorted(private), strict=False)]
    table(folder / "private.csv", rows)
    sentences = list(zip(judged.first, map(int, judged.y), strict=True))
    table(folder / "judged.csv", [(*each, task) for task in ("judge", "write") for each in sentences])


def grams(phrase: str) -> set[tuple[str, ...]]:
    """All runs of GRAM words; of a shorter phrase itself."""
    words = phrase.split()
    return {tuple(words[k : k + GRAM]) for k in range(len(words) - GRAM + 1)} or {tuple(words)}


def tasks() -> Any:
    draw = random.Random(1)
    while True:
        yield draw.choice(("judge", "write"))


def table(path: Path, rows: list[tuple[str, int, str]]) -> None:
    """A table of prompts and answers."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(("prompt", "answer", "task", "kind"))
        for phrase, kind, task in rows:
            phrase = phrase.strip()
            pair = (JUDGE.format(phrase), KINDS[kind]) if task == "judge" else (WRITE.format(KINDS[kind]), phrase)
            writer.writerow((*pair, task, KINDS[kind]))


def pretrain(folder: Path, device: str, size: str, passes: int, rows: int | None) -> tuple[float, int]:
    """A GPT-2 of the public phrases, in the folder; its perplexity on every twentieth, which it does not see, and its
    number of parameters."""
    import torch
    from tokenizers import Tokenizer
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    lines = (folder / "public.txt").read_text(encoding="utf-8").splitlines()[:rows]
    ids = torch.zeros(len(lines), LENGTH // 2, dtype=torch.long)  # 0 ends a text and fills a row
    for k, line in enumerate(lines):
        row = tokenizer.encode(line).ids[: LENGTH // 2 - 1]
        ids[k, : len(row)] = torch.tensor(row)
    ids = ids.to(device)
    held, seen = ids[::20], ids[torch.arange(len(ids), device=device) % 20 != 0]
    sizes: dict[str, Any] = {key: SIZES[size][key] for key in ("n_embd", "n_layer", "n_head")}
    sizes["n_positions"] = 2 * LENGTH
    config = GPT2Config(vocab_size=tokenizer.get_vocab_size(), bos_token_id=0, eos_token_id=0, **sizes)
    model = GPT2LMHeadModel(config).to(device)
    steps = passes * (len(seen) // PUBLIC_BATCH)
    adam = torch.optim.AdamW(model.parameters(), lr=PUBLIC_STEP[size], weight_decay=0.1)
    falls = torch.optim.lr_scheduler.OneCycleLR(adam, PUBLIC_STEP[size], max(steps, 2), pct_start=0.1)

    def loss(part: Any) -> Any:
        ended = (part[:, 1:] == 0).cumsum(1) <= 1
        with torch.autocast(device, torch.bfloat16, enabled=size != "small"):
            logits = model(input_ids=part).logits[:, :-1].float()
        each = torch.nn.functional.cross_entropy(logits.mT, part[:, 1:], reduction="none")
        return (each * ended).sum() / ended.sum()

    for _ in range(steps):
        adam.zero_grad()
        loss(seen[torch.randint(len(seen), (PUBLIC_BATCH,), device=device)]).backward()
        adam.step()
        falls.step()
    model.eval()
    with torch.no_grad():
        final = float(torch.stack([loss(part) for part in held.split(256)]).mean())
    model.save_pretrained(folder / "gpt2")
    (folder / "gpt2" / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    return math.exp(final), sum(p.numel() for p in model.parameters())


def spec(folder: str, device: str, rounds: int) -> dict[str, Any]:
    return {
        "data": str(Path(folder) / "private.csv"),
        "text": "answer",
        "prompt": "prompt",
        "model": "causal-lora",
        "weights": str(Path(folder) / "gpt2"),
        "length": LENGTH,
        "lora_rank": 16,
        "clients": CLIENTS,
        "rounds": rounds,
        "batch": f"poisson:{BATCH}",
        "delta": 1e-5,
        "dtype": "bfloat16" if device == "cuda" else "float32",
    }


def load(part: str, folder: str) -> None:
    """Nothing: a run reads its own table."""


def judge(run: Any, folder: str, device: str) -> list[float]:
    """Perplexity of both kinds of answers on development sentences, and the share of the right answers."""
    model = run.resolved.build_model(LENGTH, 0)
    return judged(model, run.theta.to(device), folder)


def judged(model: Any, theta: Any, folder: str) -> list[float]:
    from sordino.models import causal
    from sordino.training import language

    with (Path(folder) / "judged.csv").open(newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))

    def rows(mine: list[dict[str, str]], answers: list[str]) -> Any:
        return language.rows(LENGTH, Path(folder) / "gpt2", answers, [line["prompt"] for line in mine])

    found = []
    for task in ("judge", "write"):
        mine = [line for line in lines if line["task"] == task]
        found.append(causal.perplexity(model, theta, rows(mine, [line["answer"] for line in mine])))
    mine = [line for line in lines if line["task"] == "judge"]
    losses = [causal.losses(model, theta, rows(mine, [kind] * len(mine))).cpu().numpy() for kind in KINDS]
    said = np.where(losses[1] < losses[0], KINDS[1], KINDS[0])
    return [*found, float(np.mean(said == np.array([line["kind"] for line in mine])))]


def run(words: argparse.Namespace) -> None:
    folder, rounds = words.folder, SMOKE["rounds"] if words.smoke else ROUNDS
    if words.smoke:
        cut(Path(folder), SMOKE["rows"])
    size = SIZES[words.size]
    passes, rows = (SMOKE["passes"], SMOKE["rows"]) if words.smoke else (size["passes"], None)
    public, parameters = pretrain(Path(folder), words.device, words.size, passes, rows)
    jobs = [
        {"method": method, "epsilon": epsilon, "seeds": [seed], "at": [rounds], "part": "all"}
        for epsilon in (EPSILONS[-1:] if words.smoke else EPSILONS)
        for method in size["methods"][: 1 if words.smoke else None]
        for seed in size["seeds"][: 1 if words.smoke else None]
    ]
    for job in jobs:
        job["values"] = {**spec(folder, words.device, rounds), "method": job["method"], "epsilon": job["epsilon"]}
    document: dict[str, Any] = {
        "provenance": provenance(
            f"python benchmarks/instructions.py run FOLDER --device {words.device}"
            + ("" if words.size == "small" else f" --size {words.size}")
        ),
        "rounds": rounds,
        "parameters": parameters,
        "public_perplexity": round(public, 1),
        "public_phrases": len((Path(folder) / "public.txt").read_text(encoding="utf-8").splitlines()),
        "before": before(folder, words.device),
        "runs": [],
    }
    how: dict[str, Any] = {"device": words.device, "workers": words.workers, "judge": judge}
    for number, result in train(jobs, load, (folder,), **how):
        job = {key: jobs[number][key] for key in ("method", "epsilon", "seeds")}
        job["epsilon"] = str(job["epsilon"])
        if "scores" in result:
            result = {"scores": [round(score, 4) for scores in result["scores"] for score in scores[rounds]]}
        document["runs"].append(job | result)
        print(job, result, flush=True)
        words.out.write_text(text(document), encoding="utf-8")


def before(folder: str, device: str) -> list[float]:
    """What the public model scores."""
    from sordino.training.resolved import resolve
    from sordino.training.spec import Spec

    resolved = resolve(Spec.of({**spec(folder, device, 1), "method": "dp-fedgd"}), device)
    model = resolved.build_model(LENGTH, 0)
    return [round(score, 4) for score in judged(model, model.init().to(device), folder)]


def cut(folder: Path, rows: int) -> None:
    """Few private records, to see that it runs."""
    path = folder / "private.csv"
    path.write_text("\n".join(path.read_text(encoding="utf-8").splitlines()[: rows + 1]) + "\n", encoding="utf-8")


def page(document: dict[str, Any]) -> str:
    """The page, from the JSON alone."""

    def cell(method: str, epsilon: float, k: int) -> str:
        runs = [job for job in document["runs"] if (job["method"], job["epsilon"]) == (method, str(epsilon))]
        scores = [job["scores"][k] * (100 if k == 2 else 1) for job in runs if "scores" in job]
        if not scores:
            return "–"
        spread = statistics.stdev(scores) if len(scores) > 1 else 0.0
        return f"{statistics.mean(scores):.{digits[k]}f} ± {spread:.{digits[k]}f}"

    digits = (2, 0, 1)
    titles = ("Perplexity of judgements", "Perplexity of phrases", "Right judgements, in %")
    lines = [
        "# Instruction tuning on phrases of SST-2",
        "",
        f"`python benchmarks/instructions.py prepare DATA_DIR FOLDER`, then `{document['provenance']['command']}`. "
        f"{PRIVATE:,} private phrases of at least {LEAST_WORDS} words are {CLIENTS} clients' instructions: half ask "
        "whether a phrase is positive or negative, half ask for a phrase of one kind. One record is one instruction "
        f"with its answer. Adapters of rank 16, {document['rounds']} rounds, Poisson minibatches of {BATCH} per "
        "client, untrusted server, replace-one, δ = 1e-5; all methods with their defaults, for which "
        f"`auto` takes five minibatches per round. Mean ± standard deviation of {len(SEEDS)} seeds, on the "
        "development sentences: 872 instructions of each kind.",
        "",
        "The model before is a GPT-2 of 4 layers and 256 features, trained without privacy on "
        f"{document['public_phrases']:,} phrases taken to be public, which share no four consecutive words with the "
        f"others (perplexity {document['public_perplexity']:g} on phrases it has not seen). It has never read an "
        "instruction. It is far smaller than models that people tune, so read the figures against each other.",
        "",
        "Tuning teaches the form of the answers at every ε: perplexities fall by orders of magnitude. Which judgement "
        "is right it hardly teaches, even without noise: this model knows too little of the words. At ε = 2 `auto` has "
        "the lowest perplexities; later the others are level or ahead.",
    ]
    for k, title in enumerate(titles):
        start = document["before"][k] * (100 if k == 2 else 1)
        head = ["method", *("without noise" if math.isinf(e) else f"ε = {e:g}" for e in EPSILONS)]
        lines += ["", f"## {title}", "", f"Before tuning: {start:,.{digits[k]}f}.", ""]
        lines += ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
        lines += [f"| `{m}` | " + " | ".join(cell(m, e, k) for e in EPSILONS) + " |" for m in METHODS]
    return "\n".join([*lines, ""])


def larger(document: dict[str, Any]) -> str:
    """The part about the model of GPT-2's size: one run per row."""
    before, *rest = document["before"], *(job for job in document["runs"] if "scores" in job)
    rows = [
        ("before tuning", "", before),
        *((f"`{j['method']}`", f"{float(j['epsilon']):g}", j["scores"]) for j in rest),
    ]
    lines = [
        "",
        "## A model of GPT-2's size",
        "",
        f"`{document['provenance']['command']}`: 12 layers of 768 features, {document['parameters']:,} parameters, "
        f"trained on the same public phrases (perplexity {document['public_perplexity']:g} on phrases it has not "
        "seen), tuned alike, one seed. Runs that do not stand here had not ended when the time on the GPU was over; "
        "those of `auto` take five times as many records per round.",
        "",
        "| method | ε | perplexity of judgements | perplexity of phrases | right judgements, in % |",
        "|---|---|---|---|---|",
        *(f"| {name} | {epsilon} | {a:,.2f} | {b:,.0f} | {100 * c:.1f} |" for name, epsilon, (a, b, c) in rows),
    ]
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("prepare", "run", "report"))
    parser.add_argument("folder", nargs="*", help="prepare: DATA_DIR FOLDER; run: FOLDER")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--size", choices=tuple(SIZES), default="small", help="of the model that is tuned")
    parser.add_argument("--smoke", action="store_true", help="two rounds of one method; it shortens the private file")
    parser.add_argument("--out", type=Path, help="results/instructions.json, or results/instructions_gpt2.json")
    words = parser.parse_args()
    words.out = words.out or (OUT if words.size == "small" else OUT.with_stem(f"{OUT.stem}_{words.size}"))
    if words.what == "prepare":
        prepare(words.folder[0], Path(words.folder[1]))
        return
    if words.what == "run":
        words.folder = words.folder[0]
        run(words)
    if words.out.parent == OUT.parent:
        written = page(json.loads(OUT.read_text(encoding="utf-8")))
        written += larger(json.loads(OUT.with_stem("instructions_gpt2").read_text(encoding="utf-8")))
        OUT.with_suffix(".md").write_text(written, encoding="utf-8")
        print(written)


if __name__ == "__main__":
    main()
