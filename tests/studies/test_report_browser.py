"""The report's page in a real browser: Chromium, headless, over the DevTools protocol."""

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from itertools import product

import numpy as np
import pytest

import sordino as so
from sordino.studies import report
from sordino.studies.statistics import mcnemar, pack

BROWSER = os.environ.get("SORDINO_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
PATIENCE = 60  # seconds for any one answer
CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
ODD = """a "quoted" <b>label</b> & </script> | $x_1$"""

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(
        not BROWSER, reason="no Chromium: set SORDINO_CHROMIUM, or put chromium or google-chrome on PATH"
    ),
]


# ------------------------------------------------------------------------------------------------ a comparison, made up


def made_up(
    methods=10, epsilons=(0.5, 1.0, 5.0, None), seeds=(1, 2, 3), rounds=70, clients=20, classes=10, tested=2000
):
    """The shape of a real comparison, with real certificates and curves from a formula."""
    chance = np.random.default_rng(0)
    names = ["dp-fedgd", "dp-fedsofim", "dp-fedadam", "dp-fedyogi", "dp-fedavg", "dp-ftrl", "dp-adambc", "dp-fedfc"]
    labels = [*names[:2], "dp-fedsofim (momentum)", ODD, *names[2:]][:methods]
    sizes = chance.integers(50, 400, clients)
    runs, answers = [], {}
    for (i, label), epsilon, seed in product(enumerate(labels), epsilons, seeds):
        method = label if label in names else "dp-fedsofim"
        run = _run(label, method, epsilon, seed, i, rounds, [int(n) for n in sizes], classes, chance)
        answers[label, epsilon, seed] = chance.random(tested) < run["accuracy"][-1]
        runs.append(run | {"correct": pack(answers[label, epsilon, seed])})
    for change, epsilon, seed in product(("no momentum", "no correction"), epsilons, seeds):
        label = f"dp-fedsofim, {change}"
        run = _run(label, "dp-fedsofim", epsilon, seed, 3, rounds, [int(n) for n in sizes], classes, chance)
        runs.append(run | {"group": "ablation"})
    varied = {"lr": [0.03, 0.1, 0.3, 1.0, 3.0], "schedule": ["tree", "banded", "optimal"]}
    for vary, epsilon, seed in product(varied, epsilons[:2], seeds):
        for k, value in enumerate(varied[vary]):
            label = f"dp-fedsofim, {vary} = {value}"
            run = _run(label, "dp-fedsofim", epsilon, seed, 6 + abs(k - 2), rounds, [10, 20], classes, chance)
            runs.append(run | {"group": "sensitivity", "vary": vary, "value": value, "options": {vary: value}})
    pairs = []
    for label, epsilon in product(labels[1:], epsilons):
        found = mcnemar(answers[label, epsilon, 1], answers[labels[0], epsilon, 1])
        pairs.append({"epsilon": epsilon, "a": label, "b": labels[0], "seed": 1, "tested": tested, **found._asdict()})
    shares = {str(seed): chance.dirichlet(np.full(clients, 0.5), classes).T for seed in seeds}
    return {
        "sordino": so.__version__,
        "command": "sordino compare --data cifar10.npz --epsilon 0.5 1 5 inf --seeds 1 2 3",
        "host": {"cpu": "some cpu", "torch": "2.x"},
        "setting": {
            "clients": clients,
            "partition": "dirichlet:0.5",
            "rounds": rounds,
            "delta": 1e-5,
            "unit": "record",
            "adjacency": "replace-one",
            "trust": "untrusted-server",
        },
        "data": {
            "name": "CIFAR-10 features",
            "train": 50_000,
            "test": tested,
            "features": 64,
            "classes": CLASSES[:classes],
            "clients": clients,
        },
        "rounds": [t for t in (10, 20, 30, 40, 50, 60, 70) if t <= rounds],
        "target": {"reference": labels[0], "share": 0.95},
        "tuning": {
            "how": "the papers' fine grid",
            "paid": "not paid for: the settings were chosen on the same records",
            "validation": "on a tenth of the training records, held out, seed 0",
            "settings": [
                {"method": name, "epsilon": e, "options": {"lr": 0.3, "beta": 0.9}, "score": 0.61, "tried": 60}
                for name, e in product(labels, epsilons)
            ],
        },
        "partition": {seed: (4000 * share).astype(int).tolist() for seed, share in shares.items()},
        "runs": runs,
        "pairs": pairs,
        "varied": varied,
    }


def _run(label, method, epsilon, seed, i, rounds, sizes, classes, chance):
    strength = 1.0 if epsilon is None else epsilon / (epsilon + 0.25)
    t = np.arange(1, rounds + 1)
    curve = 0.1 + 0.62 * strength * (1 - 0.012 * i) * (1 - np.exp(-t / (4 + 2 * i)))
    curve += chance.normal(0, 0.012 / (0.4 + strength), rounds) * np.exp(-t / 60)
    privacy = so.Privacy(epsilon=np.inf if epsilon is None else epsilon, delta=1e-5)
    plan = so.Plan(so.build("dp-fedgd"), rounds=rounds, sizes=sizes, privacy=privacy)
    hard = np.linspace(1.15, 0.8 * strength, classes) / 0.95
    return {
        "label": label,
        "method": method,
        "epsilon": epsilon,
        "seed": seed,
        "options": {"lr": 0.3},
        "group": "comparison",
        "accuracy": curve.clip(0, 1).tolist(),
        "signal": (2 * np.exp(-t / 30) + 0.1).tolist(),
        "noise": [0.0 if epsilon is None else 0.9 / epsilon * (1 + 0.02 * i)] * rounds,
        "per_class": (curve[-1] * hard).clip(0, 1).tolist(),
        "per_client": (curve[-1] * chance.uniform(0.8, 1.2, len(sizes))).clip(0, 1).tolist(),
        "client_epsilon": [None if epsilon is None else epsilon * (1 - 0.01 * (k // 5)) for k in range(len(sizes))],
        "seconds": float(chance.uniform(2, 9)),
        "bytes_up": 2600 * rounds,
        "bytes_down": 2600 * rounds,
        "command": f"sordino run --method {method} --epsilon {epsilon or 'inf'} --rounds {rounds} --seed {seed}",
        "certificate": so.certificate(
            plan, so.source(seed=seed), version=so.__version__, spec_sha256=f"{seed:064x}", ledger_head=f"{i:064x}"
        ),
    }


# ---------------------------------------------------------------------------------------------------------- the browser


LAUNCH = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"
)


class Browser:
    """One page, spoken to through the browser's file descriptors 3 and 4: JSON, each message ended by a zero byte."""

    def __init__(self, home):
        come, here = os.pipe()
        there, go = os.pipe()
        self._in, self._out = there, here
        words = [
            *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
            *("--remote-debugging-pipe", f"--user-data-dir={home}", "--force-color-profile=srgb", "about:blank"),
        ]
        self._process = subprocess.Popen(
            [sys.executable, "-c", LAUNCH, str(come), str(go), BROWSER, *words],
            pass_fds=(come, go),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(come)
        os.close(go)
        self._buffer, self._last, self.events = b"", 0, []
        target = self._send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")
        self.send("Emulation.setFocusEmulationEnabled", enabled=True)

    def send(self, method, **params):
        return self._send(method, self._session, **params)

    def _send(self, method, session=None, **params):
        self._last += 1
        message = {"id": self._last, "method": method, "params": params} | ({"sessionId": session} if session else {})
        os.write(self._out, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + PATIENCE
        while True:
            answer = self._read(until)
            if answer.get("id") == self._last:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def _read(self, until):
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0.0, until - time.monotonic()))
            piece = os.read(self._in, 1 << 20) if ready else b""
            assert piece, "the browser is gone" if ready else f"no answer from the browser in {PATIENCE} s"
            self._buffer += piece
        message, self._buffer = self._buffer.split(b"\0", 1)
        return json.loads(message)

    def do(self, script):
        """The value of an expression on the page."""
        how = {"returnByValue": True, "awaitPromise": True, "userGesture": True}
        answer = self.send("Runtime.evaluate", expression=script, **how)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def see(self, path, width, dark, *, height=900, touch=False):
        """Open a page, in a window of some width."""
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=touch)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.send("Page.navigate", url=path.as_uri())
        until = time.monotonic() + PATIENCE
        while not self.do("document.readyState === 'complete' && Boolean(document.querySelector('#made'))"):
            assert time.monotonic() < until, "the page did not load"
            time.sleep(0.05)

    def shoot(self, path, *, whole=False):
        shot = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole, **self._clip(whole))
        path.write_bytes(base64.b64decode(shot["data"]))

    def _clip(self, whole):
        if not whole:
            return {}
        size = self.send("Page.getLayoutMetrics")["cssContentSize"]
        return {"clip": {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}}

    def complaints(self):
        """Whatever the console got that is no plain message."""
        bad = []
        for event in self.events:
            params = event.get("params", {})
            if event.get("method") == "Runtime.exceptionThrown":
                bad.append(params)
            if event.get("method") == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
                bad.append(params)
            if event.get("method") == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
                bad.append(params)
        return bad

    def close(self):
        try:
            self._process.terminate()
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
        finally:
            os.close(self._in)
            os.close(self._out)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """A comparison with all sections, and the smallest one there can be."""
    out = tmp_path_factory.mktemp("pages")
    (out / "full").mkdir()
    full = made_up(methods=4, rounds=20, seeds=(1, 2), clients=5, classes=3)
    (out / "full" / "report.html").write_text(report.page(report.view(full)), encoding="utf-8")
    least = made_up(methods=1, rounds=1, seeds=(1,), epsilons=(None,), clients=1, classes=2)
    least |= {"partition": None, "pairs": [], "rounds": [1]}
    least["runs"] = [run | {"noise": None} for run in least["runs"] if run["group"] == "comparison"]
    (out / "least.html").write_text(report.page(report.view(least)), encoding="utf-8")
    return out


DRAWN = "[...document.querySelectorAll('#trajectories path.line')].map(p => p.getAttribute('d')).join(' ')"
BUTTON = "[...document.querySelectorAll('{}')].find(button => button.innerText.split('\\n').includes('{}'))"


def test_the_page_answers(browser, pages):
    browser.see(pages / "full" / "report.html", 1280, dark=False)
    before = browser.do(DRAWN)
    assert before
    assert before.count("M") == 4

    browser.do(BUTTON.format("#trajectories .pick button", "5") + ".click()")
    other = browser.do(DRAWN)
    assert other != before
    assert browser.do("document.querySelector('#rounds .pick button[aria-pressed=true]').textContent") == "5"

    legend = BUTTON.format("#trajectories .legend button", "dp-fedsofim (momentum)")
    browser.do(f"{legend}.focus(), {legend}.click()")
    assert browser.do(DRAWN).count("M") == 3
    assert browser.do("document.activeElement.getAttribute('aria-pressed')") == "false"  # the keyboard stays there
    browser.do(f"{legend}.click()")
    assert browser.do(DRAWN) == other
    assert not browser.complaints()


def test_the_legend_shows_every_value_of_a_round(browser, pages):
    browser.see(pages / "full" / "report.html", 1280, dark=False)
    # The browser drops mouse events outside the window, so the plot is scrolled into view first.
    box = browser.do(
        "(svg => { svg.scrollIntoView({block: 'center', behavior: 'instant'});"
        " const {x, y, width, height} = svg.getBoundingClientRect(); return [x, y, width, height]; })"
        "(document.querySelector('#trajectories .plot svg'))"
    )
    browser.send("Input.dispatchMouseEvent", type="mouseMoved", x=box[0] + 50, y=box[1] + box[3] / 2)
    legend = "document.querySelector('#trajectories .legend').innerText"
    assert "round 1\n" in browser.do(legend)
    assert browser.do(legend).count("±") == 4
    browser.do("document.querySelector('#trajectories .plot svg').focus()")
    for _ in range(2):
        browser.send("Input.dispatchKeyEvent", type="keyDown", key="ArrowRight")
    assert "round 3\n" in browser.do(legend)
    assert not browser.complaints()


def of_survival():
    """A comparison whose runs have another metric, a survival curve, and no classes."""
    document = made_up(methods=2, epsilons=(1.0, None), seeds=(1, 2), rounds=6, clients=3, classes=2)
    points = [[0, 1, 1, 1, 1], [365, 0.8, 0.75, 0.7, 0.8], [730, 0.6, 0.62, 0.55, 0.69]]
    for run in document["runs"]:
        curve = {"scores": run["accuracy"], "survival": points}
        run |= {**curve, "accuracy": [], "per_class": None, "correct": None}
    document["data"] |= {"classes": [], "task": "survival"}
    document["partition"] = {seed: [[sum(row)] for row in rows] for seed, rows in document["partition"].items()}
    document["tuning"]["metric"] = "concordance"
    return document | {"metric": "concordance", "pairs": []}


def test_a_page_of_another_task(browser, tmp_path):
    (tmp_path / "survival.html").write_text(report.page(report.view(of_survival())))
    browser.see(tmp_path / "survival.html", 1280, dark=False)
    assert browser.do("document.querySelector('#trajectories h2').textContent") == "Concordance index by round"
    assert browser.do("document.querySelectorAll('#survival .line').length") == 3, "two methods and what was observed"
    assert browser.do("document.querySelector('#classes') === null && document.querySelector('#target') === null")
    assert browser.do("document.querySelector('#survival .legend').textContent.includes('0.62 (0.55 … 0.69)')")
    assert "ccuracy" not in browser.do("document.querySelector('#main').textContent")
    assert browser.complaints() == []


def test_curves_of_two_classes(browser, tmp_path):
    document = made_up(methods=2, epsilons=(1.0, None), seeds=(1,), rounds=6, clients=3, classes=2)
    for run in document["runs"]:
        run |= {"calibration": [[0.1, 0.2, 0.1, 0.3], [0.6, 0.5, 0.4, 0.6]], "roc": [[0, 0], [0.2, 0.7], [1, 1]]}
    (tmp_path / "two.html").write_text(report.page(report.view(document)))
    browser.see(tmp_path / "two.html", 360, dark=True)
    home = "dispatchEvent(new KeyboardEvent('keydown', {key: 'Home'}))"
    for kind, first in (("roc", "1 − specificity 0"), ("calibration", "predicted 0.1")):
        assert browser.do(f"document.querySelectorAll('#{kind} .line').length") == 2
        browser.do(f"document.querySelector('#{kind} svg[role=slider]').{home}")
        said = browser.do(f"document.querySelector('#{kind} .legend').textContent")
        assert first in said
    assert said.count("0.2 (0.1 … 0.3)") == 2, "every line says its nearest point"
    assert browser.complaints() == []


def test_labels_are_words(browser, pages):
    browser.see(pages / "full" / "report.html", 1280, dark=False)
    assert browser.do("[...document.querySelectorAll('#final tbody th')].map(th => th.textContent)")[3] == ODD
    assert browser.do("document.querySelectorAll('main b').length") == 0


def test_certificates_come_back_whole(browser, pages):
    made = made_up(methods=4, rounds=20, seeds=(1, 2), clients=5, classes=3)["runs"]
    browser.see(pages / "full" / "report.html", 1280, dark=False)
    back = browser.do("data.runs.map(whole)")
    assert [json.loads(one) for one in back] == [run["certificate"] for run in made]

    browser.do(
        "(s => { s.value = 'dp-fedgd'; s.dispatchEvent(new Event('change')); })"
        "(document.querySelector('#filter-label'))"
    )
    shown = "[...document.querySelectorAll('#runs details')].filter(d => !d.hidden)"
    assert browser.do(f"{shown}.length") == sum(run["label"] == "dp-fedgd" for run in made)
    browser.do(f"{shown}[0].open = true; new Promise(done => setTimeout(done, 100))")
    texts = browser.do(f"[...{shown}[0].querySelectorAll('pre')].map(p => p.textContent)")
    assert texts[0] == made[0]["command"]
    assert json.loads(texts[1]) == made[0]["certificate"]
    copier = f"{shown}[0].querySelectorAll('button')[1]"
    copied = f"{copier}.click(), new Promise(done => setTimeout(() => done({copier}.textContent), 300))"
    assert browser.do(copied) == "Copied"
    assert not browser.complaints()


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 360])
def test_how_it_looks(browser, pages, tmp_path, width, dark):
    """Nothing is wider than the window, and the colours are those asked for."""
    for page in (pages / "full" / "report.html", pages / "least.html"):
        browser.see(page, width, dark, touch=width < 500)
        assert browser.do("document.documentElement.scrollWidth") <= width
        brightness = "Math.max(...getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number))"
        assert (browser.do(brightness) < 60) == dark
        browser.shoot(tmp_path / "shot.png", whole=True)
        assert (tmp_path / "shot.png").read_bytes().startswith(b"\x89PNG")
        browser.do("document.getElementById('theme').click()")
        assert (browser.do(brightness) < 60) != dark
    assert not browser.complaints()


def test_a_large_comparison_stays_small(browser, tmp_path):
    """Ten methods, four promises, three seeds, seventy rounds."""
    page = report.page(report.view(made_up()))
    assert len(page.encode()) < 3_000_000
    (tmp_path / "report.html").write_text(page, encoding="utf-8")
    browser.see(tmp_path / "report.html", 360, dark=False, touch=True)
    assert browser.do("document.documentElement.scrollWidth") <= 360
    assert browser.do("document.querySelectorAll('#trajectories .legend button').length") == 10
    assert not browser.complaints()
