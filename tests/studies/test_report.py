"""Tables by hand, Markdown and page that hold what they should, labels that cannot break them."""

import json
import sys
from html.parser import HTMLParser

import pytest

from sordino.studies import figures, report

ODD = """</script><b>"it's" | $x_1$ & *so* _on_"""
CERTIFICATE = {
    "certified": False,
    "reasons": ["seeded: not private"],
    "epsilon": 0.99999999999993,
    "groups": [{"n": 1}],
}


def run(label, epsilon, seed, accuracy, **more):
    return {
        "label": label,
        "method": label,
        "epsilon": epsilon,
        "seed": seed,
        "options": {},
        "group": "comparison",
        "accuracy": accuracy,
        "signal": [1.23456] * len(accuracy),
        "noise": [2.0 if epsilon else 0.0] * len(accuracy),
        "per_class": [0.5, 0.9],
        "per_client": [0.5, None],
        "client_epsilon": [epsilon, epsilon],
        "correct": "gA==",
        "seconds": 2.0,
        "bytes_up": 400,
        "bytes_down": 800,
        "command": f"sordino run --seed {seed}",
        "certificate": CERTIFICATE | {"seed": seed},
        **more,
    }


def swept(vary, value, last, seed=1, **options):
    more = {"group": "sensitivity", "vary": vary, "value": value, "options": {vary: value, **options}}
    return run("a", 1.0, seed, [0.1, last], **more)


@pytest.fixture
def document():
    """Two methods, two promises, two seeds, four rounds; the second method keeps to the promise."""
    return {
        "sordino": "0.1.0",
        "command": "sordino compare",
        "host": {"cpu": "some"},
        "setting": {
            "partition": "iid",
            "delta": 1e-5,
            "unit": "record",
            "adjacency": "replace-one",
            "trust": "untrusted-server",
        },
        "data": {"name": "digits", "train": 1438, "test": 8, "features": 64, "classes": ["x", "y"], "clients": 2},
        "rounds": [2, 4],
        "target": {"reference": "a", "share": 0.95},
        "tuning": {
            "how": "a grid",
            "paid": "not paid for",
            "validation": None,
            "settings": [{"method": "a", "epsilon": 1.0, "options": {"lr": 0.3}, "score": 0.5, "tried": 9}],
        },
        "partition": {"1": [[1, 2], [3, 4]]},
        "runs": [
            run("a", 1.0, 1, [0.2, 0.4, 0.6, 0.8], seconds=1.0, client_epsilon=[1.0, 0.5]),
            run("a", 1.0, 2, [0.2, 0.4, 0.8, 0.6], seconds=3.0, per_class=[0.7, 0.7]),
            run(ODD, 1.0, 1, [0.5, 0.6, 0.7, 0.65], client_epsilon=[1.0, 1.0]),
            run(ODD, 1.0, 2, [0.5, 0.6, 0.7, 0.65]),
            run("a", None, 1, [0.9, 0.9, 0.9, 0.9], per_class=[1.0, 0.8]),
            run("a", None, 2, [0.9, 0.9, 0.9, 0.9], per_class=[1.0, 0.8]),
            run("a, less", 1.0, 1, [0.3, 0.3, 0.3, 0.3], group="ablation", method="a"),
            swept("lr", 0.1, 0.4),
            swept("lr", 0.1, 0.6, seed=2),
            swept("lr", 3.0, 0.3),
        ],
        "pairs": [
            {"epsilon": 1.0, "a": "a", "b": ODD, "seed": 1, "tested": 8, "n10": 9, "n01": 1, "chi2": 4.9, "p": 0.0269},
            {"epsilon": None, "a": "a", "b": ODD, "seed": 1, "tested": 8, "n10": 1, "n01": 2, "chi2": 0.0, "p": 1.0},
        ],
        "varied": {"lr": [0.1, 1.0, 3.0]},
    }


def texts(table):
    return [[cell.text for cell in row] for row in table.rows]


# ---------------------------------------------------------------------------------------------------------- the tables


def test_the_final_table_marks_the_best_and_the_near(document):
    table = report.final(document)
    assert table.head == ["method", "ε = 1", "ε = ∞"]
    assert texts(table) == [["a", "70.0 ± 10.0", "90.0 ± 0.0"], [ODD, "65.0 ± 0.0", "–"]]
    assert [[cell.mark for cell in row] for row in table.rows] == [["", "best", "best"], ["", "near", ""]]


def test_within_the_standard_deviation_of_the_best_alone():
    best, wide, near = report.Score(0.7, 0.02), report.Score(0.6, 0.3), report.Score(0.69, 0.0)
    assert [cell.mark for cell in report.marked([best, wide, near, None])] == ["best", "", "near", ""]


def test_the_metric_asked_for_has_a_table_and_ranks(document):
    assert report.by_metric(document) is None
    losses = {("a", 1.0): [0.5, 0.7], (ODD, 1.0): [0.4, 0.3], ("a", None): [0.2, None]}
    for each in document["runs"]:
        if each["group"] == "comparison":
            each["scores"] = [0.69, 0.69, 0.69, losses[each["label"], each["epsilon"]][each["seed"] - 1]]
    document["metric"] = "log_loss"
    table = report.by_metric(document)
    assert texts(table) == [["a", "0.6 ± 0.1", "not defined"], [ODD, "0.35 ± 0.05", "–"]]
    assert [[cell.mark for cell in row] for row in table.rows] == [["", "", ""], ["", "best", ""]]
    assert table.note.startswith("Log loss, less is better, mean ± standard deviation over 2 seeds")
    assert f"Best at the last round by log loss: {ODD} at ε = 1 (0.35 ± 0.05)" in report.summary(document)[-1]
    assert "## By log loss, at the last round" in report.text(document)
    assert json.loads(json.dumps(report.view(document)))["metric"] == "log loss"
    document["metric"] = "auc"
    assert report.by_metric(document).rows[0][1].mark == "best"
    document["tuning"]["metric"] = "auc"
    assert report.tuning(document).head[3] == "validation AUC"


@pytest.mark.parametrize(
    ("task", "metric", "values", "name"),
    [
        ("quantity", "mae", [4.0, 3.0, 2.5, 2.25], "mean absolute error"),
        ("survival", "concordance", [0.5, 0.6, 0.65, 0.7], "concordance index"),
    ],
)
def test_other_tasks_are_shown_by_their_metric(document, task, metric, values, name):
    points = [[1.0, 1.1, 0.9, 1.3], [2.0, 1.9, 1.7, 2.1]]
    for k, each in enumerate(document["runs"]):
        curve = (
            {"calibration": points} if task == "quantity" else {"survival": [[0, 1, 1, 1, 1], [2, 0.7, 0.6, 0.5, 0.8]]}
        )
        changed = {"accuracy": [], "per_class": None, "correct": None, "scores": [v * (1 + k / 100) for v in values]}
        document["runs"][k] = {**each, **changed, **curve}
    document |= {"metric": metric, "pairs": [], "partition": {"1": [[3], [7]]}}
    document["data"] |= {"classes": [], "task": task}
    document["tuning"]["metric"] = metric
    first = report.final(document)
    mean, std = report.score([values[-1], values[-1] * 1.01])
    assert first.rows[0][1].text == f"{mean:.4g} ± {std:.2g}"
    assert first.rows[0][1].mark == ("best" if metric == "mae" else ""), "of a loss the least is best"
    assert ("less is better" in first.note) == (metric == "mae")
    assert report.by_metric(document) is None
    assert report.to_target(document) is None
    assert report.by_class(document) == {}
    text = report.text(document)
    assert f"## {name[0].upper()}{name[1:]} at the last round" in text
    assert "ccuracy" not in text
    assert f"Best at the last round by {name}" in text
    view = report.view(document)
    assert view["measure"]["factor"] == 1
    assert view["curves"][0]["mean"][-1] == pytest.approx(values[-1] * 1.005, rel=1e-3)
    assert view["classes"] == ["records"]
    kind = "calibration" if task == "quantity" else "survival"
    assert {line["label"] for line in view["model_curves"][kind]["1"]} == {"a", ODD}
    assert view["model_curves"]["roc"] == {}
    drawn = dict(figures._figures(view, figures.pyplot()))
    assert {f"{metric}_epsilon_1", f"{kind}_epsilon_1", f"{kind}_epsilon_infinity"} <= drawn.keys()
    assert drawn[f"{metric}_epsilon_1"].axes[0].get_ylabel() == f"test {name}"


def test_one_seed_has_no_deviation(document):
    document["runs"] = [run for run in document["runs"] if run["seed"] == 1]
    assert texts(report.final(document)) == [["a", "80.0", "90.0"], [ODD, "65.0", "–"]]
    assert "one seed" in report.final(document).note
    assert "±" not in report.text(document).split("## Costs")[0]


def test_tables_by_round_hold_the_printed_rounds(document):
    tables = report.by_round(document)
    assert list(tables) == ["1", "∞"]
    assert tables["1"].head == ["method", "round 2", "round 4"]
    assert texts(tables["1"]) == [["a", "40.0 ± 0.0", "70.0 ± 10.0"], [ODD, "60.0 ± 0.0", "65.0 ± 0.0"]]
    assert texts(tables["∞"])[1] == [ODD, "–", "–"]


def test_a_round_that_was_not_played_is_left_open(document):
    document["rounds"] = [4, 9]
    assert texts(report.by_round(document)["1"])[0] == ["a", "70.0 ± 10.0", "–"]


def test_rounds_to_a_target_count_the_first_that_reaches_it(document):
    """0.95 x 0.7 = 0.665: both reach it in round 3, and the second falls below again."""
    table = report.to_target(document)
    assert table.head == ["method", "ε = 1 (66.5 %)", "ε = ∞ (85.5 %)"]
    assert texts(table) == [["a", "3 / 4", "1 / 2"], [ODD, "3 / –", "–"]]
    document["target"]["reference"] = "another"
    assert report.to_target(document) is None


def test_the_target_itself_is_reached():
    assert report.reached([0.1, 0.1 + 0.2, 0.4], 0.3) == 2
    assert report.reached([0.3, 0.1, 0.3], 0.3, [2, 3]) == 3
    assert report.reached([0.1], 0.3) is None


def test_costs_are_bytes_per_round_and_in_all(document):
    assert texts(report.costs(document)) == [
        ["a", "100", "200", "400", "800", "2.0 ± 0.7"],
        [ODD, "100", "200", "400", "800", "2.0 ± 0.0"],
    ]


def test_pairs_name_the_winner_or_neither(document):
    tables = report.pairs(document)
    assert texts(tables["1"]) == [["a", ODD, "1", "9", "1", "4.90", "0.0269", "a"]]
    assert texts(tables["∞"])[0][-1] == "neither"
    document["pairs"][0] |= {"n10": 1, "n01": 40, "p": 1e-9}
    assert texts(report.pairs(document)["1"])[0][-2:] == ["< 0.0001", ODD]


def test_what_classes_pay_is_relative_to_the_largest_epsilon(document):
    """The second method has no other ε to be compared with."""
    tables = report.by_class(document)
    assert texts(tables["1"]) == [["a", "60.0 (−40.0)", "80.0 (+0.0)"], [ODD, "50.0", "90.0"]]
    assert texts(tables["∞"]) == [["a", "100.0", "80.0"]]


def test_noise_is_paid_for_against_the_largest_epsilon():
    shares = {("a", 1.0): [0.5, None], ("a", 8.0): [0.75, 0.5], ("a", 2.0): [0.5, 0.75]}
    assert report.payment(shares) == {("a", 1.0): [-0.25, None], ("a", 2.0): [-0.25, 0.25]}


def test_clients_of_different_seeds_are_not_mixed(document):
    tables = report.client_epsilon(document)
    assert texts(tables["1"]["1"]) == [["0", "1", "1"], ["1", "0.5", "1"]]
    assert texts(tables["2"]["1"]) == [["0 to 1", "1", "1"]]
    assert texts(tables["1"]["∞"]) == [["0 to 1", "–"]]


def test_an_ablation_stands_beside_the_whole_method(document):
    """Beside the method whole, where it was ablated."""
    table = report.ablation(document)
    assert table.head == ["method", "ε = 1"]
    assert texts(table) == [["a", "70.0 ± 10.0"], ["a, less", "30.0"]]


def test_sensitivity(document):
    table = report.sensitivity(document)["lr"]
    assert table.head == ["method", "0.1", "3"]
    assert texts(table) == [["a, ε = 1", "50.0 ± 10.0", "30.0"]]


def test_settings_that_differ_in_something_else_are_not_mixed(document):
    document["runs"].append(swept("lr", 3.0, 0.9, beta=0.5))
    assert texts(report.sensitivity(document)["lr"]) == [
        ["a, ε = 1", "50.0 ± 10.0", "30.0"],
        ["a (beta 0.5), ε = 1", "–", "90.0"],
    ]


def test_a_comparison_alone(document):
    document["runs"] = [run for run in document["runs"] if run["group"] == "comparison"]
    document["tuning"]["settings"], document["pairs"], document["partition"] = [], [], None
    assert report.ablation(document) is None
    assert report.tuning(document) is None
    assert report.sensitivity(document) == report.pairs(document) == {}
    assert "Ablations" not in report.text(document)
    assert report.view(document)["partition"] == {}


# ----------------------------------------------------------------------------------------------------------- the words


def test_summary_names_the_promise_and_its_price(document):
    words = " ".join(report.summary(document))
    assert "2 methods on digits: 1,438 training and 8 test records" in words
    assert "ε = 1 at δ = 1e-05, record level, replace-one, untrusted-server" in words
    assert "ε = ∞ is without noise and promises nothing." in words
    assert "All runs with noise have a seed, so that they can be repeated. Whoever knows the seed" in words
    assert "for 8 of these 8 runs. Certified as they are: 0 of 8." in words
    assert "Tuning: a grid. Not paid for." in words
    assert "Best at the last round: a at ε = 1 (70.0 ± 10.0 %)" in words


def test_summary_names_all_that_are_equally_good(document):
    for each in document["runs"]:
        if each["label"] == ODD and each["epsilon"] == 1.0 and each["group"] == "comparison":
            each["accuracy"][-1] = 0.7
    assert f"Best at the last round: a at ε = 1 (70.0 ± 10.0 %) and {ODD} at ε = 1 (70.0 ± 0.0 %)" in " ".join(
        report.summary(document)
    )


def test_without_noise_there_is_no_promise(document):
    document["runs"] = [run for run in document["runs"] if run["epsilon"] is None]
    words = " ".join(report.summary(document))
    assert "1 method on digits" in words
    assert "No promise: nothing here adds noise." in words
    assert "Certified: 0 of 0" in words


def test_markdown_escapes_labels_and_keeps_columns(document):
    text = report.text(document)
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert "| a | **70.0 ± 10.0** | **90.0 ± 0.0** |" in rows
    odd = '&lt;/script>&lt;b>"it\'s" \\| \\$x_1\\$ & \\*so\\* \\_on\\_'
    assert f"| {odd} | ≈ 65.0 ± 0.0 | – |" in rows
    assert "<b>" not in text
    tables = text.split("\n\n")
    for table in (part.splitlines() for part in tables if part.startswith("|")):
        assert len({line.replace("\\|", "").count("|") for line in table}) == 1


# ------------------------------------------------------------------------------------------------------------ the page


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.open, self.links, self.scripts, self.ids = [], [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        known = dict(attributes)
        self.links += [known[key] for key in ("src", "href") if key in known]
        self.ids += [known["id"]] if "id" in known else []
        if tag not in ("meta", "link", "br"):
            self.open.append(tag)
        if tag == "script":
            self.scripts.append((known.get("type"), ""))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, text):
        if self.open and self.open[-1] == "script":
            kind, before = self.scripts.pop()
            self.scripts.append((kind, before + text))


def test_page_stands_alone(document):
    text = report.page(report.view(document))
    page = Page(text)
    assert page.open == []
    assert page.links == ["data:,"]
    assert "http://" not in text
    assert "https://" not in text
    assert len(set(page.ids)) == len(page.ids)


def test_page_holds_its_data(document):
    document["data"]["name"] = "{{data}} & <i>"
    view = report.view(document)
    text = report.page(view)
    (kind, data), (_, code) = Page(text).scripts
    assert kind == "application/json"
    assert json.loads(data) == json.loads(json.dumps(view))
    assert code.strip().startswith('"use strict"')
    assert "<title>Comparison on {{data}} &amp; &lt;i&gt;</title>" in text
    assert "gA==" not in data


def test_view_keeps_four_digits_but_certificates_whole(document):
    view = report.view(document)
    first = view["curves"][0]
    assert (first["label"], first["epsilon"], first["signal"][0]) == ("a", "1", 1.235)
    assert first["mean"] == [0.2, 0.4, 0.7, 0.7]
    assert first["std"] == [0.0, 0.0, 0.1, 0.1]
    back = [{key: view["parts"][k] for key, k in one["certificate"].items()} for one in view["runs"]]
    assert back == [one["certificate"] for one in document["runs"]]
    assert len(view["parts"]) == len(CERTIFICATE) + 2  # and two seeds


def test_what_is_not_finite_is_left_open(document):
    document["runs"][0]["noise"] = [float("inf"), float("nan"), 1.0, 1.0]
    assert report.view(document)["curves"][0]["noise"] == [None, None, 1.5, 1.5]
    report.page(report.view(document))


# ---------------------------------------------------------------------------------------------------------- the folder


@pytest.mark.draws
def test_everything_is_written(document, tmp_path):
    pytest.importorskip("matplotlib")
    written = report.write(document, tmp_path / "new" / "out")
    names = {str(path.relative_to(tmp_path / "new" / "out")) for path in written}
    drawn = {"accuracy_epsilon_1", "accuracy_epsilon_infinity", "frontier", "noise", "partition", "sensitivity_0"}
    assert names == {"report.html", "report.md"} | {f"figures/{n}.{e}" for n in drawn for e in ("png", "svg")}
    assert all(path.stat().st_size for path in written)
    assert "![frontier](figures/frontier.png)" in written[1].read_text(encoding="utf-8")


def test_without_matplotlib_it_says_so(document, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert [path.name for path in report.write(document, tmp_path)] == ["report.html", "report.md"]
    assert "None: they need matplotlib" in (tmp_path / "report.md").read_text(encoding="utf-8")
    assert not (tmp_path / "figures").exists()
