"""Two processes of gloo against one. Run as a program, this file is one of the two."""

import contextlib
import io
import json
import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from sordino import cli
from sordino.core import Privacy, Shard, Unit
from sordino.data.records import Records
from sordino.engines import distributed, simulate
from sordino.engines.distributed import ALONE, SplitRows, Team, join, leave
from sordino.errors import SordinoError
from sordino.files import lock
from sordino.methods import build
from sordino.models.linear import Linear
from sordino.models.torch_model import TorchModel
from sordino.privacy.mechanisms.random import Address, source
from sordino.privacy.plan import Plan
from sordino.training import ranks, run
from sordino.training.spec import Spec
from sordino.training.verify_run import verify_run
from tests.support import forks, plan_for

ROOT = Path(__file__).parents[2]
SIZES = (20, 35, 50, 9, 41, 28)
SPEC = {"data": "digits", "method": "dp-fedsofim", "rounds": 4, "clients": 3, "participation": "fixed:2", "seed": 1}
COMMAND = [f"--set={key}={value}" for key, value in SPEC.items()]


def tables(person=False):
    rng, client = np.random.default_rng(0), np.repeat(np.arange(len(SIZES)), SIZES)
    x, y = rng.normal(size=(sum(SIZES), 8)), rng.integers(0, 3, sum(SIZES))
    grouped = {"person": np.arange(len(client)) // 3, "per_person": 2} if person else {}
    return Records.of(x, y, client, **grouped)


def network():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return TorchModel(nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3)), check=False)


def of_persons(method, records, **options):
    privacy = Privacy(8.0, unit=Unit.PERSON, person_records=2, person_clients=2)
    return Plan(build(method, Unit.PERSON, **options), 6, records.sizes, privacy)


SUMS, STEPS = {"trust": "secure-aggregation"}, {"batch": "poisson:8"}
# The method, what the plan is, and whether the ranks share out clients: then bits are those of one process. Where they
# share out rows, partial sums are added in another order than rows are, and results agree to rounding.
LINEAR = {
    "fused, every message seen": ("dp-fedgd", {}, False),
    "fused, sums seen": ("dp-fedsofim", SUMS, False),
    "fused, models seen": ("dp-fedgd", {"trust": "trusted-server"}, False),
    "fused, minibatches": ("dp-fedgd", STEPS, False),
    "fused, one client": ("dp-fedgd", SUMS | {"participation": "fixed:1"}, False),
    "auto": ("auto", {}, True),
    "auto, sums seen": ("auto", SUMS, True),
    "local steps": ("dp-fedadamw", {}, True),
    "local steps, minibatches": ("dp-fedadamw", STEPS, True),
    "local steps, minibatches of all": (
        "dp-fedadamw",
        {"batch": "poisson:20", "participation": "fixed:2"},
        True,
    ),
    "local steps, one client": ("dp-fedadamw", STEPS | {"participation": "fixed:1"}, False),
    "memory": ("dp-scaffold", {"participation": "fixed:5"}, True),
    "caches": ("dp-fednew", SUMS, True),
    "whole clients": (
        "dp-fedavg",
        {"unit": Unit.CLIENT, "trust": "trusted-server", "participation": "poisson:0.4"},
        True,
    ),
    "correlated noise": ("dp-ftrl", SUMS, False),
}


def case(name):
    """(plan, model, records, whether bits are equal)."""
    if name.startswith("persons"):
        records = tables(person=True)
        method = "dp-fedgd" if name == "persons" else "dp-fedadamw"
        return of_persons(method, records), Linear(8, 3), records, method != "dp-fedgd"
    if name.startswith("network"):
        method = "dp-fedadamw" if "steps" in name else "dp-fedadam"
        participation = "fixed:1" if "one client" in name else "full"
        return plan_for(method, tables(), participation=participation, **STEPS), network(), tables(), False
    method, options, exact = LINEAR[name]
    return plan_for(method, tables(), uncertified=True, **options), Linear(8, 3), tables(), exact


CASES = [
    *LINEAR,
    "persons",
    "persons, local steps",
    "network",
    "network, local steps",
    "network, local steps, one client",
]


def trained(name, team=ALONE, noise=None):
    plan, model, records, _ = case(name)
    rounds = simulate.run(plan, model, records, noise or source(3), team=team)
    return torch.stack([result.model for result in rounds])


# ------------------------------------------------------------------------------------------------------------ mutants


class NoiseOnEveryRank(SplitRows):
    """Wrong: every rank adds the noise of the release to its part of the sum."""

    def clipped_sum(self, theta, shard, clip, *rest, **how):
        total = super().clipped_sum(theta, shard, clip, *rest, **how)
        noise = torch.from_numpy(source(3).normal(Address(2**32 - 1, 0, 0), tuple(total.shape)))
        first, *others = self._team.exchange(total / self._team.size + noise)
        return sum(others, first)


class OverlappingRows(SplitRows):
    """Wrong: the first row is in the sum of every rank."""

    def clipped_sum(self, theta, shard, clip, *rest, **how):
        total = super().clipped_sum(theta, shard, clip, *rest, **how)
        first = Shard(shard.x[:1], shard.y[:1], shard.mask[:1])
        return total + self._model.clipped_sum(theta, first, clip, *rest, **how)


class OwnKeys(Team):
    """Wrong: every rank draws a key of its own."""

    def joint(self, source):
        return source.fresh()


# ---------------------------------------------------------------------------------------------------- the two processes


def refused(work):
    try:
        work()
    except SordinoError as error:
        return str(error)
    return ""


def commands(folder):
    """What two processes of `sordino run --distributed` print and return."""
    run.draw_curve = lambda *arguments: False
    told = {}
    for name, words in {"whole": [*COMMAND, "--out", "whole"], "resumed": ["--resume", "partial"]}.items():
        os.environ["MASTER_PORT"] = os.environ[f"PORT_{name.upper()}"]
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = cli.main(["run", *words, "--distributed"])
        told[name] = [code, out.getvalue(), err.getvalue()]
    return told


def refusals(team):
    other = {"lr": 0.5} if team.rank else {}
    spec = Spec.of(SPEC | other)
    plan, model, records, _ = case("network")
    dropout = TorchModel(nn.Sequential(nn.Linear(8, 6), nn.Dropout(0.5), nn.Linear(6, 3)), check=False)
    both = [source(1), source(2)]
    quiet, shifted, another = replace(plan, noise=0.1), replace(records, x=records.x + 1), network()
    another.module[2].weight.requires_grad_(False).add_(1.0)

    def start(*arguments):
        return next(simulate.run(*arguments, source(3), team=team))

    theta = torch.zeros(2, model.size)
    return {
        "settings": refused(lambda: ranks.check(run.prepare(spec), team)),
        "plans": refused(lambda: start(quiet if team.rank else plan, model, records)),
        "records": refused(lambda: start(plan, model, shifted if team.rank else records)),
        "models": refused(lambda: start(plan, another if team.rank else model, records)),
        "noise": refused(lambda: trained("auto", team, source(team.rank))),
        "keys": refused(lambda: trained("fused, sums seen", OwnKeys(team.rank, team.size), source(None))),
        "dropout": refused(lambda: start(plan, dropout, records)),
        "runs": refused(lambda: next(simulate.run(plan, model, records, both, theta=theta, team=team))),
        "statistics": refused(lambda: ranks.joint_spec(Spec.of({"private_statistics": 0.1}), team)),
        "persons": refused(lambda: ranks.joint_spec(Spec.of({"person_choice": "random"}), team)),
    }


def worker(folder):
    """One of the two processes: everything that the tests look at, in files."""
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    told = {"commands": commands(folder)}
    os.environ["MASTER_PORT"] = os.environ["PORT_CASES"]
    team = join()
    models = {name: trained(name, team) for name in CASES}
    models["secret"] = trained("auto", team, source(None))
    told["refusals"] = refusals(team)
    spec = ranks.joint_spec(Spec.of({"data": "digits", "participation": "fixed:2"}), team)
    told["schedule"] = str(spec.schedule_seed)
    for mutant in (NoiseOnEveryRank, OverlappingRows):
        simulate.SplitRows = mutant
        models[mutant.__name__] = trained("fused, every message seen", team)
    simulate.SplitRows = SplitRows
    torch.save(models, folder / f"models-{rank}.pt")
    (folder / f"told-{rank}.json").write_text(json.dumps(told))
    if rank == 1:
        os._exit(9)  # in the middle of a run: rank 0 must not wait for ever
    lost = {"ended": refused(lambda: trained("auto", team))}
    (folder / "lost.json").write_text(json.dumps(lost))
    leave()


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """The files of two processes that ran all cases together, once for all workers of a test run."""
    here = tmp_path_factory.getbasetemp()
    folder = (here.parent if "PYTEST_XDIST_WORKER" in os.environ else here) / "ranks"
    folder.mkdir(exist_ok=True)
    with lock(folder.with_suffix(".lock")):
        if not (folder / "done").exists():
            run_all_cases(folder)
            (folder / "done").touch()
    return folder


def run_all_cases(folder):
    prepared = run.prepare(Spec.of(SPEC))
    run.start(prepared, folder / "partial")
    lines = run.rounds(prepared, folder / "partial")
    assert [next(lines)["round"] for _ in range(2)] == [1, 2]
    lines.close()
    env = os.environ | {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    env |= {f"PORT_{name}": str(port) for name, port in zip(("WHOLE", "RESUMED", "CASES"), free_ports(3), strict=True)}
    code = f"import runpy\n\nrunpy.run_path({__file__!r}, run_name='__main__')"

    def rank(number):
        own = env | {"RANK": str(number), "LOCAL_RANK": str(number)}
        return forks.run(code, str(folder), folder=folder, path=[ROOT, ROOT / "src"], env=own, seconds=120)

    with ThreadPoolExecutor(2) as both:
        done = list(both.map(rank, (0, 1)))
    assert [each.returncode for each in done] == [0, 9], [each.stderr for each in done]


def free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def told(folder, rank):
    return json.loads((folder / f"told-{rank}.json").read_text())


# --------------------------------------------------------------------------------------------------------------- tests


def test_two_processes_train_the_model_of_one(two):
    first, second = (torch.load(two / f"models-{rank}.pt") for rank in (0, 1))
    for name in CASES:
        alone, exact = trained(name), case(name)[3]
        assert torch.equal(first[name], second[name]), name
        assert torch.equal(first[name], alone) if exact else torch.allclose(first[name], alone, 1e-4, 1e-6), name
    assert torch.equal(first["secret"], second["secret"])
    assert not torch.allclose(first["secret"], first["auto"], 1e-4, 1e-6)


def test_noise_on_every_rank_and_rows_on_two_ranks_are_noticed(two):
    models, alone = torch.load(two / "models-0.pt"), trained("fused, every message seen")
    for mutant in (NoiseOnEveryRank, OverlappingRows):
        assert not torch.allclose(models[mutant.__name__], alone, 1e-4, 1e-6), mutant


def test_ranks_that_disagree_are_refused(two):
    for rank in (0, 1):
        found = told(two, rank)["refusals"]
        assert "settings of rank 1 differ from those of rank 0" in found["settings"]
        for name in ("plans", "records", "models"):
            assert f"{name} of rank 1 differ" in found[name]
        assert "the sources of noise of rank 1 differ" in found["noise"]
        assert "after round 1 ranks hold different models" in found["keys"]
    assert told(two, 0)["schedule"] == told(two, 1)["schedule"] != "None"


def test_what_is_not_shared_out_is_refused_by_name(two):
    found = told(two, 1)["refusals"]
    assert "TorchModel draws dropout" in found["dropout"]
    assert "2 runs side by side" in found["runs"]
    assert found["statistics"].startswith("private_statistics: ")
    assert found["persons"].startswith("person_choice: ")
    plan = Plan(build("dp-fedgd"), 2, (5, 5), Privacy(8.0))
    object.__setattr__(plan, "integers", object())
    with pytest.raises(SordinoError, match="integers: they are added up client by client"):
        Team(0, 2).check(plan, Linear(8, 3), tables(), torch.zeros(27))


def test_the_certificate_says_that_ranks_were_on_several_machines(tmp_path):
    spec = ranks.joint_spec(Spec.of({"rounds": 5, "clients": 3, "test_fraction": 0.5}), OneOf(0, 4, machines=2))
    prepared = run.prepare(spec)
    run.start(prepared, tmp_path / "run")
    cert = run.finish(prepared, tmp_path / "run", list(run.rounds(prepared, tmp_path / "run")))
    assert cert["certified"]
    assert cert["execution"] == "simulation on benchmark data, on 2 machines"
    assert any("nobody else reads the network between them" in each for each in cert["assumes"])
    text = (tmp_path / "run" / "public" / "statement.md").read_text()
    assert "all data were on the machines of one party" in text
    assert verify_run(tmp_path / "run").problems == []
    reopened = run.reopen(tmp_path / "run")
    assert reopened.machines == 2
    with pytest.raises(SordinoError, match="machines: the run began on 2"):
        ranks.joint_spec(reopened, OneOf(0, 4, machines=4), resumed=True)


def test_a_rank_that_ended_leaves_a_sentence(two):
    ended = json.loads((two / "lost.json").read_text())["ended"]
    assert ended.startswith("distributed: rank 0 lost another rank, which ended or does not answer (")


def test_the_command_of_two_ranks_writes_what_one_writes(two, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["run", *COMMAND, "--out", "alone"]) == 0
    for name, out in (("whole", two / "whole"), ("resumed", two / "partial")):
        (code, text, _), silent = told(two, 0)["commands"][name], told(two, 1)["commands"][name]
        assert code == 0
        assert "dp-fedsofim on digits, 4 rounds" in text
        assert silent == [0, "", ""]
        for file in ("model.safetensors", "metrics.jsonl", "spec.toml"):
            assert (out / "public" / file).read_bytes() == (tmp_path / "alone" / "public" / file).read_bytes(), file


class OneOf(Team):
    """A rank whose partners give what it gives."""

    def exchange(self, own):
        return [own] * self.size


class Part(Team):
    """A rank that sees its own part of a sum."""

    def exchange(self, own):
        return [own]


@pytest.mark.parametrize("per_person", [1, 2])
@pytest.mark.parametrize("make", [lambda: Linear(8, 3), network], ids=["linear", "network"])
def test_each_record_is_in_the_sum_of_one_rank(make, per_person):
    model = make()
    rng = torch.Generator().manual_seed(0)
    x, y = 3 * torch.randn(10, 8, generator=rng), torch.arange(10) % 3
    theta, clip = torch.randn(model.size, generator=rng), 0.5

    def parts(mask, ranks=3):
        shard = Shard(x, y, mask, None, per_person)
        return [SplitRows(model, Part(rank, ranks)).clipped_sum(theta, shard, clip) for rank in range(ranks)]

    whole = sum(parts(torch.ones(10)))
    one = model.clipped_sum(theta, Shard(x, y, torch.ones(10), None, per_person), clip).double()
    torch.testing.assert_close(whole, one, rtol=1e-6, atol=1e-6)
    for person in range(10 // per_person):
        mask = torch.ones(10)
        mask[person * per_person : (person + 1) * per_person] = 0
        moved = [(a - b).norm() for a, b in zip(parts(torch.ones(10)), parts(mask), strict=True)]
        assert sum(change > 0 for change in moved) == 1
        assert (whole - sum(parts(mask))).norm() <= clip
    assert len(parts(torch.ones(10), ranks=12)) == 12  # ranks without a row add zero


def test_sums_whose_rounding_could_exceed_the_clip_are_refused():
    rows = torch.zeros(1, 1).expand(2**35, 1)
    shard = Shard(rows, rows[:, 0], rows[:, 0])
    with pytest.raises(SordinoError, match="34,359,738,368 in 2 parts"):
        SplitRows(Linear(1, 2), Part(0, 2)).clipped_sum(torch.zeros(4), shard, 1.0)


def test_work_is_shared_out_evenly():
    work = [(np.arange(k), None) for k in (5, 1, 1, 1)]
    pieces = distributed._pieces(work, 2)
    clients = [sum(piece.amount for piece in pieces if piece.rank == rank) for rank in (0, 1)]
    assert clients == [4, 4]


def test_without_torchrun_the_command_names_it(monkeypatch, capsys):
    for name in distributed.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert cli.main(["run", "--distributed"]) == 2
    assert "torchrun --nproc-per-node 2 -m sordino run" in capsys.readouterr().err


@pytest.mark.soak
def test_torchrun_of_two_processes_prints_one_run(tmp_path):
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "sordino", "run", *COMMAND]
    env = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, *words, "--distributed", "--out", "two"], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("dp-fedsofim on digits") == 1


@pytest.mark.soak
def test_a_rank_that_does_not_answer_is_given_up(tmp_path):
    code = (
        "import os, sys, time, torch\nfrom sordino.engines.distributed import join\nteam = join(timeout=3.0)\n"
        "time.sleep(10 * team.rank)\nteam.exchange(torch.zeros(1))\n"
    )
    env = os.environ | {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    env |= {"MASTER_PORT": str(free_ports(1)[0]), "PYTHONPATH": str(ROOT / "src")}
    began = time.monotonic()
    both = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    assert "lost another rank, which ended or does not answer" in both[0].communicate(timeout=60)[1]
    assert time.monotonic() - began < 30
    both[1].communicate(timeout=60)


if __name__ == "__main__":
    worker(Path(sys.argv[1]))
