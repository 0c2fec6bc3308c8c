"""Forged run directories. Each forger changes what a real run left behind; `verify` finds it, with the signature left
in place, taken away, or replaced by one of the forger's own."""

import contextlib
import hashlib
import json
import math
import re
import shutil

import numpy as np
import pytest

from sordino.cli import main
from sordino.core import Adjacency
from sordino.errors import SordinoError
from sordino.evidence.certificate import listed
from sordino.evidence.ledger import Charge, Ledger
from sordino.evidence.signing import RunKey, sha256, signed
from sordino.evidence.statement import issue, statement
from sordino.evidence.verify import NOT_SIGNED
from sordino.privacy.accounting import gaussian
from sordino.training import model_card, run
from sordino.training.folder import RunFolder
from sordino.training.predict import predict
from sordino.training.spec import Spec
from sordino.training.verify_run import verify_run
from tests.support import tiers

RUNS = {
    "plain": {"method": "dp-fedgd"},
    "seeded": {"method": "dp-fedgd", "seed": 1},
    "scaffold": {"method": "dp-scaffold", "trust": "secure-aggregation", "uncertified": True, "steps": 3},
    "lemma": {"method": "dp-fednew-fc"},
    "xi": {"method": "dp-fednew", "limit_by": "paper-xi", "uncertified": True, "solver": "cg"},
    "stream": {"method": "dp-ftrl", "trust": "secure-aggregation"},
    "guessable": {
        "method": "dp-fedavg",
        "unit": "client",
        "trust": "trusted-server",
        "participation": "poisson:0.2",
        "clients": 50,
        "schedule_seed": 1,
    },
    "amplified": {
        "method": "dp-fedavg",
        "unit": "client",
        "trust": "trusted-server",
        "participation": "poisson:0.2",
        "clients": 50,
    },
}
FORGER = RunKey(b"a key that the forger made up...")


@pytest.fixture(scope="module")
def honest(tmp_path_factory):
    made = {}

    def make(name):
        if name not in made:
            out = tmp_path_factory.mktemp("runs") / name
            job = run.prepare(Spec.of({"epsilon": 1.0, "rounds": 5, **RUNS[name]}))
            run.start(job, out)
            run.finish(job, out, list(run.rounds(job, out)))
            made[name] = out
        return made[name]

    return make


@pytest.fixture
def forge(honest, tmp_path):
    """A copy of a run, changed; `how` the signature is dealt with: kept, stripped, or by a key of the forger's."""

    def make(base, change, how):
        out = tmp_path / how
        shutil.copytree(honest(base), out)
        path = out / "public" / "certificate.json"
        cert = json.loads(path.read_text())
        change(cert, out)
        if how != "kept":
            del cert["signature"]
        if (base, change) in CONSISTENT:  # the forger writes a statement that fits
            signer = FORGER if how == "replaced" else None
            cert = model_card.bind(out / "public", cert, signer)
            cert, text = (cert, statement(cert)) if how == "kept" else issue(cert, signer)
            (out / "public" / "statement.md").write_text(text)
            if how == "kept":
                cert["statement_sha256"] = hashlib.sha256(text.encode()).hexdigest()
        elif how == "replaced":
            cert = signed(cert, FORGER)
        path.write_text(json.dumps(cert, indent=2))
        return out

    return make


def relabelled(cert, out):
    cert.update(certified=True, reasons=[], noise_source="secure")


def louder_label(cert, out):
    relabelled(cert, out)
    cert["sampler"]["schedule"] = "secret"


def half_epsilon(cert, out):
    cert["epsilon"] = 0.5


def erased(cert, out):
    cert.update(assumes=["None."], numerics=["Exact."], execution="between hospitals over TLS", test_records=0)


def rewrite(cert, out):
    """Spec and ledger to match: nothing in them is keyed by what the forger lacks."""
    path = out / "public" / "spec.toml"
    spec = path.read_text().replace("epsilon = 1.0", f"epsilon = {cert['epsilon']!r}")
    path.write_text(spec)
    cert.update(spec_sha256=hashlib.sha256(spec.encode()).hexdigest(), epsilon_asked=cert["epsilon"])
    for name in ("ledger.db", "ledger.db-wal", "ledger.db-shm"):
        (out / "private" / name).unlink(missing_ok=True)
    with Ledger(out / "private" / "ledger.db", epsilon=cert["epsilon"], delta=cert["delta"]) as ledger:
        for group in cert["groups"]:
            who, adjacency = f"clients {group['clients']}", Adjacency(cert["adjacency"])
            ledger.charge([Charge.of(r, who, 0, "plan", adjacency) for r in listed(group["releases"])])
        cert["ledger"] = {"head": ledger.head(), "rows": len(ledger)}


def totals(cert, factor):
    """Every figure that follows from a mu so many times smaller."""
    for group in cert["groups"]:
        group["mu"] /= factor
        group["epsilon"] = gaussian.epsilon(group["mu"], cert["delta"])
    cert["mu"] /= factor
    cert["epsilon"] = gaussian.epsilon(cert["mu"], cert["delta"])
    cert["epsilon_at"] = {at: gaussian.epsilon(cert["mu"], float(at)) for at in cert["epsilon_at"]}
    cert["guess"] = (1 + gaussian.delta(cert["mu"], 0.0)) / 2


def smaller_sensitivity(cert, out):
    for group in cert["groups"]:
        for release in group["releases"]:
            release["sensitivity"] /= 30
    totals(cert, 30)
    rewrite(cert, out)


def more_noise(cert, out):
    for group in cert["groups"]:
        for release in group["releases"]:
            release["std"] *= 10
        group["own_std"] = {name: np.multiply(value, 10.0).tolist() for name, value in group["own_std"].items()}
    cert.update(noise=10 * cert["noise"], client_noise=10 * cert["client_noise"])
    totals(cert, 10)
    rewrite(cert, out)


def seedless_spec(cert, out):
    """The seed taken out of the spec beside it, too."""
    relabelled(cert, out)
    path = out / "public" / "spec.toml"
    spec = re.sub(r"^seed = 1\n", "", path.read_text(), flags=re.MULTILINE)
    assert "\nseed" not in spec
    path.write_text(spec)
    cert["spec_sha256"] = hashlib.sha256(spec.encode()).hexdigest()


def other_metrics(cert, out):
    path = out / "public" / "metrics.jsonl"
    path.write_text(path.read_text().replace('"accuracy": 0.', '"accuracy": 0.9'))


def stronger_statement(cert, out):
    path = out / "public" / "statement.md"
    assert "**Certified: ε = 1 " in path.read_text()
    path.write_text(path.read_text().replace("**Certified: ε = 1 ", "**Certified: ε = 0.5 "))


def rebound_statement(cert, out):
    """Its hash in the certificate, too: the words still differ from the numbers."""
    stronger_statement(cert, out)
    cert["statement_sha256"] = hashlib.sha256((out / "public" / "statement.md").read_bytes()).hexdigest()


def stronger_card(cert, out):
    path = out / "public" / "MODEL_CARD.md"
    assert "**ε = 1 at δ" in path.read_text()
    path.write_text(path.read_text().replace("**ε = 1 at δ", "**ε = 0.5 at δ"))


def rebound_card(cert, out):
    """Its hash in the certificate, too: the words still differ from the numbers."""
    stronger_card(cert, out)
    cert["card_sha256"] = sha256(out / "public" / "MODEL_CARD.md")


def no_test_records(cert, out):
    """No noise hides the test records, so a smaller number of them promises more."""
    cert["test_records"] = 0


def fewer_test_records(cert, out):
    cert["test_records"] -= 1


def longer_curve(cert, out):
    with open(out / "public" / "curve.png", "ab") as file:
        file.write(b"x")


CAUGHT = [
    ("plain", stronger_statement, "statement.md is not the one"),
    ("plain", rebound_statement, "statement.md does not say what the certificate says"),
    ("plain", stronger_card, "MODEL_CARD.md is not the one that the certificate names"),
    ("plain", rebound_card, "MODEL_CARD.md does not say what certificate, metrics and model say"),
    ("plain", longer_curve, "curve.png is not the one"),
    ("plain", no_test_records, "the scores in metrics.jsonl are not of 0 test records"),
    ("plain", fewer_test_records, "the scores in metrics.jsonl are not of 358 test records"),
    ("plain", half_epsilon, "epsilon"),
    ("seeded", relabelled, r"noise_source: the certificate says \"secure\""),
    ("scaffold", relabelled, "certified: the certificate says true"),
    ("xi", relabelled, "certified: the certificate says true"),
    ("guessable", louder_label, "certified: the certificate says true"),
    ("plain", erased, "assumes: "),
    ("lemma", smaller_sensitivity, r"releases\[0\].sensitivity"),
    ("stream", smaller_sensitivity, r"releases\[0\].sensitivity"),
    ("plain", smaller_sensitivity, r"releases\[0\].sensitivity"),
    ("plain", other_metrics, "metrics.jsonl is not the one"),
]


SIGNATURES = ["kept", "stripped", "replaced"]


@pytest.mark.parametrize(
    ("base", "change", "words", "how"),
    tiers(
        [(*forgery, how) for forgery in CAUGHT for how in SIGNATURES],
        [(*forgery, SIGNATURES[k % 3]) for k, forgery in enumerate(CAUGHT)]
        + [(*CAUGHT[k], how) for k in (4, 5) for how in SIGNATURES if how != SIGNATURES[k % 3]],
    ),
)
def test_a_forgery_is_caught_signed_or_not(forge, base, change, words, how):
    found = verify_run(forge(base, change, how)).problems
    assert any(re.search(words, problem) for problem in found), found


@pytest.mark.parametrize("base", list(RUNS))
def test_an_honest_run_passes_and_nothing_is_taken_as_given(honest, base):
    verdict = verify_run(honest(base))
    assert verdict.problems == []
    assert verdict.assumed == verdict.gaps == []
    assert verdict.signed.startswith("run key ")
    assert verdict.certified is (base in ("plain", "lemma", "stream", "amplified"))


CONSISTENT = [("plain", more_noise), ("seeded", seedless_spec)]


@pytest.mark.parametrize(("base", "change"), CONSISTENT)
def test_a_forgery_of_all_files_together_is_seen_by_the_signature_alone(forge, honest, base, change, capsys):
    key = RunFolder.find(honest(base)).keys().sign.public
    assert verify_run(forge(base, change, "kept")).problems == [
        "the signature does not match the certificate: it was changed after it was signed"
    ]
    stripped = forge(base, change, "stripped")
    assert verify_run(stripped).problems == []
    assert NOT_SIGNED in verify_run(stripped).gaps
    assert main(["verify", str(stripped)]) == 0
    told = capsys.readouterr().out
    assert "claims        certified" in told
    assert "a claim may be up to 0.5% below and 1% above" in told
    assert "Nobody signed the certificate, so anybody could have made files that agree" in told
    assert "it is not signed" in verify_run(stripped, key).problems[0]
    replaced = forge(base, change, "replaced")
    assert main(["verify", str(replaced)]) == 0
    assert "Pass --key to check who signed them" in capsys.readouterr().out
    assert "--key names another key" in verify_run(replaced, key).problems[0]
    assert main(["verify", str(replaced), "--key", key]) == 1


def test_the_rightful_key_is_known(honest, capsys):
    key = RunFolder.find(honest("plain")).keys().sign.public
    assert main(["verify", str(honest("plain")), "--key", key]) == 0
    assert "the key that --key names" in capsys.readouterr().out
    itself = RunFolder.find(honest("plain")).public / "certificate.json"
    for path in (honest("plain"), itself.parent, itself):
        assert main(["verify", str(path), "--key", str(itself)]) == 2
        assert "it cannot vouch for itself" in capsys.readouterr().err


def test_a_received_public_folder_is_complete(honest, tmp_path, capsys):
    """The ledger stays with its owner; whatever else is missing is not complete."""
    shutil.copytree(honest("plain") / "public", tmp_path / "received")
    assert main(["verify", str(tmp_path / "received"), "--complete"]) == 0
    assert "ledger.db, which stays with its owner" in capsys.readouterr().out
    (tmp_path / "received" / "spec.toml").unlink()
    capsys.readouterr()
    assert main(["verify", str(tmp_path / "received"), "--complete"]) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("FAILED (--complete): not everything public")


def test_the_last_line_counts_what_was_not_compared(honest, tmp_path, capsys):
    shutil.copy(honest("plain") / "public" / "certificate.json", tmp_path)
    assert main(["verify", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    count = told.count("not compared") - 1
    assert count > 4
    assert f"holds, but {count} things were not compared: " in told.splitlines()[-1]
    assert main(["verify", str(tmp_path), "--complete"]) == 1
    capsys.readouterr()
    assert main(["verify", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["complete"] is False
    assert main(["verify", str(honest("plain")), "--complete"]) == 0, "a whole run"
    assert capsys.readouterr().out.splitlines()[-1].startswith("holds: ")


@pytest.mark.parametrize("base", ["seeded", "plain"])
def test_a_certificate_alone_names_what_it_was_not_compared_with(honest, tmp_path, base):
    """Without spec and ledger a seeded run can be called secure; the reader is told what lacks."""
    cert = json.loads((honest(base) / "public" / "certificate.json").read_text())
    relabelled(cert, None)
    del cert["signature"]
    (tmp_path / "certificate.json").write_text(json.dumps(cert))
    verdict = verify_run(tmp_path / "certificate.json")
    assert verdict.problems == []
    for missing in ("spec.toml", "ledger.db", "model.safetensors", "metrics.jsonl", "statement.md", "who wrote it"):
        assert any(gap.startswith(missing) for gap in verdict.gaps), missing


def test_a_statement_of_other_code_is_held_to_its_hash(forge):
    """Another version may word a statement differently; it cannot say more than its hash allows."""

    def older(cert, out):
        cert["code_sha256"] = "0" * 64

    def older_and_stronger(cert, out):
        older(cert, out)
        stronger_statement(cert, out)

    def older_words(cert, out):
        older(cert, out)
        rebound_statement(cert, out)

    assert verify_run(forge("plain", older, "replaced")).problems == []
    assert "statement.md is not the one that the certificate names" in [
        *verify_run(forge("plain", older_and_stronger, "stripped")).problems
    ]
    verdict = verify_run(forge("plain", older_words, "kept"))
    assert "the words of statement.md: sordino with other sources wrote them" in verdict.gaps


@pytest.mark.parametrize(
    ("path", "value"),
    [("epsilon", math.nan), ("groups.0.sizes.0", math.inf), ("worst_client", 10**400), ("queries.0.bound", None)],
    ids=["NaN", "infinity", "long", "null"],
)
def test_numbers_that_no_program_can_compute_with_are_told_in_words(forge, path, value):
    """NaN is in no tier, infinity no whole number, and a number may be longer than floats are."""

    def change(cert, out):
        *parents, last = (int(key) if key.isdigit() else key for key in path.split("."))
        part = cert
        for key in parents:
            part = part[key]
        part[last] = value

    out = forge("plain", change, "stripped")
    with contextlib.suppress(SordinoError):
        assert verify_run(out).problems
    assert main(["verify", str(out)]) != 0


def test_a_card_of_other_code_is_held_to_its_hash(forge):
    """An auditor with another version cannot write the card again; it is the one that was signed all the same."""

    def older(cert, out):
        cert["code_sha256"] = "0" * 64

    def older_and_stronger(cert, out):
        older(cert, out)
        stronger_card(cert, out)

    def unbound(cert, out):
        older_and_stronger(cert, out)
        del cert["card_sha256"]

    assert not any("MODEL_CARD" in problem for problem in verify_run(forge("plain", older, "kept")).problems)
    assert "MODEL_CARD.md is not the one that the certificate names" in [
        *verify_run(forge("plain", older_and_stronger, "stripped")).problems
    ]
    assert (
        "MODEL_CARD.md, whose hash the certificate does not hold"
        in verify_run(forge("plain", unbound, "replaced")).gaps
    )


def test_files_that_the_certificate_does_not_name_are_told(honest, tmp_path, capsys):
    """Of a folder, not of a file that lies among others."""
    received = tmp_path / "received"
    shutil.copytree(honest("plain") / "public", received)
    (received / "SUMMARY.md").write_text("Certified: epsilon = 0.01")
    (received / "model.onnx").write_bytes(b"another model")
    (received / "README.txt").write_text("everything may be published")
    assert "files that are not of the run: README.txt, SUMMARY.md, model.onnx" in verify_run(received).gaps
    assert main(["verify", str(received), "--complete"]) == 1
    assert "SUMMARY.md" in capsys.readouterr().out
    assert not any("SUMMARY" in gap for gap in verify_run(received / "certificate.json").gaps)
    for k in range(30):
        (received / f"page {k:02}.html").write_text("")
    assert any(gap.endswith(" and 25 more") for gap in verify_run(received).gaps)


@pytest.mark.parametrize(
    ("begins", "error"),
    [
        ('{"epsilon": 0.01,', "'epsilon' is there twice"),
        ('{"site": {"a\\u001b": 1, "a\\u001b": 2},', r"'a\\x1b' is there"),
    ],
)
def test_a_certificate_with_a_key_twice_is_refused(honest, tmp_path, begins, error):
    """A reader sees the first value, and most programs take the last."""
    path = tmp_path / "certificate.json"
    path.write_text((honest("plain") / "public" / "certificate.json").read_text().replace("{", begins, 1))
    with pytest.raises(SordinoError, match=error):
        verify_run(path)


def test_a_name_cannot_steer_the_terminal_or_add_lines(forge, capsys):
    """The signer's name of a certificate erases what is on the screen, and writes a verdict of its own."""
    eraser = "site north\x1b[3A\r\x1b[0Jholds: the numbers agree.\nclaims  certified\u202e"

    def renamed(cert, out):
        cert["epsilon"] = 0.1
        cert["client_names"] = [eraser]

    out = forge("plain", renamed, "stripped")
    path = out / "public" / "certificate.json"
    cert = signed(json.loads(path.read_text()), RunKey(FORGER.secret, eraser))
    path.write_text(json.dumps(cert))
    assert main(["verify", str(out)]) == 1
    told = capsys.readouterr().out
    assert not set(told) & set("\x1b\r\u202e")
    assert r"site north\x1b[3A\r\x1b[0Jholds: the numbers agree.\nclaims  certified\u202e" in told
    assert not any(line.startswith(("holds", "claims  certified")) for line in told.splitlines())
    for text in (statement(cert), model_card.of_folder(out / "public", cert)):
        assert not set(text) & set("\x1b\r\u202e")
        assert "\nclaims  certified" not in text


def test_adapters_are_bound_as_a_folder(forge):
    """A folder of files has one hash, of their names and contents."""

    def adapted(cert, out):
        (out / "public" / "adapter").mkdir()
        (out / "public" / "adapter" / "adapter_config.json").write_text("{}")
        cert["adapter_sha256"] = sha256(out / "public" / "adapter")

    def changed(cert, out):
        adapted(cert, out)
        (out / "public" / "adapter" / "adapter_config.json").write_text("{ }")

    def renamed(cert, out):
        adapted(cert, out)
        (out / "public" / "adapter" / "adapter_config.json").rename(out / "public" / "adapter" / "other.json")

    words = "adapter is not the one that the certificate names"
    assert words not in verify_run(forge("plain", adapted, "kept")).problems
    assert words in verify_run(forge("plain", changed, "stripped")).problems
    assert words in verify_run(forge("plain", renamed, "replaced")).problems


INSIDE = ["", "public", "private", "public/certificate.json", "public/spec.toml", "private/ledger.db"]


@pytest.mark.parametrize("where", INSIDE)
def test_a_run_is_found_by_its_directory_or_a_part_of_it(honest, where, monkeypatch, capsys):
    path = honest("plain") / where
    assert verify_run(path).problems == []
    assert verify_run(path).gaps == []
    assert run.reopen(path).method == "dp-fedgd"
    assert main(["ledger", "show", str(path)]) == 0
    assert "holds the 1 rows that certificate.json names" in capsys.readouterr().out
    if path.is_dir():
        monkeypatch.chdir(path)
        monkeypatch.setenv("COLUMNS", "200")
        assert main(["verify", "."]) == 0


def test_a_model_that_was_swapped_or_damaged_is_refused(forge, honest, tmp_path):
    def swapped(cert, out):
        shutil.copy(honest("seeded") / "public" / "model.safetensors", out / "public" / "model.safetensors")

    np.savez(tmp_path / "new.npz", x=np.zeros((2, 64), np.float32))
    assert len(predict(honest("plain"), str(tmp_path / "new.npz")).labels) == 2
    assert len(predict(honest("plain") / "public" / "model.safetensors", str(tmp_path / "new.npz")).labels) == 2
    for how in ("kept", "stripped"):
        out = forge("plain", swapped, how)
        assert "model.safetensors is not the one that the certificate names" in verify_run(out).problems
        for path in (out, out / "public", out / "public" / "model.safetensors", out / "public" / "certificate.json"):
            with pytest.raises(SordinoError, match=r"damaged or\s+exchanged|damaged or exchanged"):
                predict(path, str(tmp_path / "new.npz"))

    def hash_too(cert, out):
        swapped(cert, out)
        cert["model_sha256"] = hashlib.sha256((out / "public" / "model.safetensors").read_bytes()).hexdigest()

    shutil.rmtree(tmp_path / "kept")
    out = forge("plain", hash_too, "kept")
    with pytest.raises(SordinoError, match="changed after it was signed"):
        predict(out, str(tmp_path / "new.npz"))


def test_the_secret_schedule_is_in_no_public_file(honest, tmp_path):
    place = RunFolder.find(honest("amplified"))
    secret = (place.private / "secret.toml").read_text().split(" = ")[1].strip()
    assert int(secret) >= 2**96
    for path in place.public.iterdir():
        assert secret not in path.read_bytes().decode("latin-1"), path
    assert json.loads((place.public / "certificate.json").read_text())["sampler"]["schedule"] == "secret"
    shutil.copytree(place.public, tmp_path / "public")  # what a reader gets
    verdict = verify_run(tmp_path / "public")
    assert verdict.problems == []
    assert any("the seed of the schedule, which is secret" in gap for gap in verdict.gaps)
    job = run.prepare(run.reopen(place.root))
    assert job.plan.schedule_seed == int(secret)
    cert = json.loads((place.public / "certificate.json").read_text())
    assert "schedule_seed" not in run.summary(job, cert, [{"round": 5, "accuracy": 0.5}], None)["spec"]


def test_a_site_can_sign_a_run_by_the_command_line(tmp_path, capsys):
    from sordino.secagg.keys import Identity

    Identity.make("north").save(tmp_path / "identity.key")
    words = ["run", "--method", "dp-fedgd", "--rounds", "2", "--out", str(tmp_path / "run")]
    assert main([*words, "--sign-with", str(tmp_path / "identity.key")]) == 0
    assert "signed by  site north" in capsys.readouterr().out
    card = Identity.load(tmp_path / "identity.key").card
    assert verify_run(tmp_path / "run", card.sign).known
    (tmp_path / "open.key").write_text("nothing")
    assert main([*words[:-1], str(tmp_path / "other"), "--sign-with", str(tmp_path / "open.key")]) == 2
    assert not (tmp_path / "other").exists()
