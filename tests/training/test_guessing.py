"""The warning "no better than a constant guess" agrees with exact counts."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sordino.cli.run import remedy
from sordino.core import Trust
from sordino.models.linear import Linear, Loss
from sordino.training import survival
from sordino.training.evaluate import beats_constant_guess, evaluate, hardly_better, no_better


def data(y, classes):
    return SimpleNamespace(y_test=y, classes=classes, unit=1.0, task="classes" if classes else "quantity")


def scored(hits, y):
    """Scores of a model that is right on exactly the first `hits` of the records."""
    guess = np.where(np.arange(len(y)) < hits, y, (y + 1) % 3)
    model = Linear(3, 3, bias=False)
    theta = 5 * torch.eye(3).flatten()
    x = torch.nn.functional.one_hot(torch.from_numpy(guess), 3).float()
    assert torch.equal(model.predict(theta, x), torch.from_numpy(guess))
    return evaluate(model, theta, x, torch.from_numpy(y))


@pytest.mark.parametrize("n", [10, 30, 77, 360, 1797])
def test_as_many_hits_as_the_commonest_class_are_no_better_and_one_more_is(n):
    for most in {max(n // 3 + 1, n // 2), (9 * n) // 10, (7 * n) // 11 + 1}:
        y = np.repeat([0, 1, 2], [most, n - most - 1, 1])
        for hits, better in ((most - 1, False), (most, False), (most + 1, True)):
            found = scored(hits, y)
            assert found["accuracy"] == hits / n, "a share in float64"
            assert beats_constant_guess(data(y, ("a", "b", "c")), found) is better, (n, most, hits)


@pytest.mark.parametrize("offset", [0.0, 0.1, 1000.0])
def test_the_mean_itself_is_no_better_than_the_mean(offset):
    rng = np.random.default_rng(0)
    model = Linear(1, 1, Loss.SQUARES, bias=False)
    for n in (7, 100, 999):
        y = (offset + rng.standard_normal(n)).astype(np.float32)
        x = torch.ones(n, 1)
        constant = torch.tensor([float(y.astype(np.float64).mean())], dtype=torch.float64)
        assert not beats_constant_guess(data(y, ()), evaluate(model, constant, x.double(), torch.from_numpy(y)))
        exact = evaluate(model, torch.tensor([1.0]), torch.from_numpy(y)[:, None], torch.from_numpy(y))
        assert beats_constant_guess(data(y, ()), exact)


def two(z, y):
    """Scores of log-odds."""
    model = Linear(1, 1, Loss.LOGISTIC, bias=False)
    return evaluate(model, torch.ones(1), torch.from_numpy(z)[:, None].float(), torch.from_numpy(y))


@pytest.mark.parametrize("positive", [1, 10, 300, 500])
def test_two_classes_are_compared_by_log_loss_with_the_prevalence_and_by_auc(positive):
    y = np.repeat([0, 1], [1000 - positive, positive])
    both, prior = data(y, ("a", "b")), np.log(positive / (1000 - positive))
    assert not beats_constant_guess(both, two(np.full(1000, prior), y)), "the prevalence itself"
    assert not beats_constant_guess(both, two(np.full(1000, -20.0), y)), "always the same class"
    informed = prior + np.where(y == 1, 1.0, -0.1)
    assert beats_constant_guess(both, two(informed, y))
    assert not beats_constant_guess(both, two(informed - 6, y)), "in order, but risks that are far too low"
    assert not beats_constant_guess(both, two(prior - np.where(y == 1, 1.0, -0.1), y)), "in the wrong order"


def test_risks_below_one_half_can_be_better_than_a_constant():
    """At 1 % prevalence no record is predicted to be positive: accuracy is that of the constant, log loss is not."""
    y = np.repeat([0, 1], [990, 10])
    scores = two(np.where(y == 1, -1.0, -5.0), y)
    assert scores["accuracy"] == 0.99
    assert beats_constant_guess(data(y, ("a", "b")), scores)


def test_an_auc_of_one_half_is_no_better_whatever_the_log_loss():
    y = np.repeat([0, 1], [500, 500])
    assert not beats_constant_guess(data(y, ("a", "b")), {"accuracy": 0.6, "log_loss": 0.1, "auc": 0.5})
    assert beats_constant_guess(data(y, ("a", "b")), {"accuracy": 0.6, "log_loss": 0.1, "auc": 0.51})


def test_one_class_and_nan_are_no_better():
    ones = np.ones(20, int)
    assert not beats_constant_guess(data(ones, ("a", "b")), two(np.full(20, 9.0), ones))
    y = np.repeat([0, 1], [10, 10])
    broken = two(np.append(np.where(y == 1, 9.0, -9.0)[:-1], np.nan), y)
    assert broken["accuracy"] == 0.95
    assert not beats_constant_guess(data(y, ("a", "b")), broken)
    assert not beats_constant_guess(data(y.astype(np.float32), ()), {"mse": np.nan})
    assert not beats_constant_guess(data(y.astype(np.float32), ()), {"mse": None})


def test_the_reason_names_both_figures():
    y = np.repeat([0, 1], [30, 10])
    assert no_better(data(y, ("a", "b")), {"log_loss": 0.7, "auc": 0.9}) == (
        "its log loss is 0.7, that of the prevalence is 0.5623 (it ranks, with an AUC of 0.9, but its risks are off)"
    )
    assert no_better(data(y, ("a", "b")), {"log_loss": 0.7, "auc": 0.5}).endswith("prevalence is 0.5623")
    assert no_better(data(y, ("a", "b")), {"log_loss": 0.5, "auc": 0.4}) == "its AUC is 0.4"
    assert "and 75.00% have the most common class" in no_better(data(y, ("a", "b", "c")), {"accuracy": 0.75})


@pytest.mark.parametrize(
    ("records", "area", "ranks"),
    [(4, 0.9, False), (40, 0.65, False), (4000, 0.5188, False), (4_000_000, 0.59, False), (4000, 0.61, True)],
)
def test_an_auc_near_one_half_is_not_called_a_ranking(records, area, ranks):
    """Nor is one that few test records do not tell from one half: its standard error for 4 records is 0.37."""
    y = np.repeat([0, 1], [3 * records // 4, records // 4])
    why = no_better(data(y, ("a", "b")), {"log_loss": 0.7, "auc": area})
    assert ("(it ranks, with" in why) == ranks
    assert (f"(it ranks hardly better than chance, with an AUC of {area:.4g})" in why) != ranks


@pytest.mark.parametrize(
    ("trust", "clients", "says"),
    [
        (Trust.UNTRUSTED_SERVER, 4, "raise epsilon, gather more records or use --trust secure-aggregation. "),
        (Trust.UNTRUSTED_SERVER, 1, "raise epsilon or gather more records. "),
        (Trust.SECURE_AGGREGATION, 4, "raise epsilon or gather more records. "),
    ],
)
def test_the_remedy_is_not_what_the_run_does_already(trust, clients, says):
    model = SimpleNamespace(entry=SimpleNamespace(network=False), options={})
    resolved = SimpleNamespace(model=model, source=SimpleNamespace(schema=object()), method_name="auto")
    plan = SimpleNamespace(privacy=SimpleNamespace(trust=trust), clients=clients, noiseless=False)
    told = remedy(SimpleNamespace(resolved=resolved, plan=plan))
    assert told.startswith(f"The noise may exceed the signal: {says}")
    assert told.endswith("Another run on the same data adds to the epsilon that is spent on them.")


def test_without_noise_the_remedy_does_not_blame_it():
    model = SimpleNamespace(entry=SimpleNamespace(network=False), options={})
    for schema in (object(), None):
        resolved = SimpleNamespace(model=model, source=SimpleNamespace(schema=schema), method_name="auto")
        told = remedy(
            SimpleNamespace(
                resolved=resolved,
                plan=SimpleNamespace(privacy=SimpleNamespace(trust=Trust.UNTRUSTED_SERVER), clients=4, noiseless=True),
            )
        )
        assert "no noise" in told
        assert "epsilon" not in told


@pytest.mark.parametrize("method", ["dp-class-means", "dp-statistics"])
def test_a_weak_recipe_of_one_round_is_not_blamed_on_epsilon(method):
    model = SimpleNamespace(entry=SimpleNamespace(network=False), options={})
    for schema in (object(), None):
        resolved = SimpleNamespace(model=model, source=SimpleNamespace(schema=schema), method_name=method)
        plan = SimpleNamespace(
            privacy=SimpleNamespace(trust=Trust.UNTRUSTED_SERVER), clients=4, noiseless=False, rounds=1
        )
        told = remedy(SimpleNamespace(resolved=resolved, plan=plan))
        assert told.startswith(f"{method} is a recipe of 1 round, which may be no better without noise")
        assert "raise epsilon" not in told
        assert "try --method auto" in told


def survivors(n, persons=None):
    y = np.where(np.arange(n) % 2, 1.0, -1.0) * (1 + np.arange(n))
    return SimpleNamespace(y_test=y, classes=(), unit=1.0, task="survival", person_test=persons)


@pytest.mark.parametrize(("records", "index", "by_chance"), [(40, 0.55, True), (4000, 0.55, False), (40, 0.9, False)])
def test_a_concordance_that_may_be_chance_is_called_so(records, index, by_chance):
    """Half of the records have the event: the standard error is 0.06 for 40 of them, and 0.006 for 4,000."""
    given = survivors(records)
    assert bool(hardly_better(given, {"concordance": index})) == by_chance
    assert no_better(given, {"concordance": index}) == ""
    assert hardly_better(given, {"concordance": 0.4}) == ""  # that is no better, and said already
    assert hardly_better(SimpleNamespace(task="quantity"), {"mse": 1.0}) == ""
    edge = 0.5 + 2 * survival.chance_error(given.y_test)
    assert hardly_better(given, {"concordance": edge - 1e-9})
    assert not hardly_better(given, {"concordance": edge + 1e-9})


def test_records_of_one_person_do_not_count_as_many():
    edge = 0.5 + 2 * survival.chance_error(survivors(40).y_test)
    assert not hardly_better(survivors(40, np.arange(40)), {"concordance": edge + 1e-9})
    assert hardly_better(survivors(40, np.arange(40) // 4), {"concordance": edge + 1e-9})
    assert not hardly_better(survivors(40, np.arange(40) // 4), {"concordance": 0.5 + 2 * (edge - 0.5) + 1e-9})


def test_a_language_model_is_compared_with_itself_before_training():
    texts = SimpleNamespace(y_test=np.zeros(3), classes=(), unit=1.0, task="sequence")
    assert beats_constant_guess(texts, {"perplexity": 9.0, "perplexity_before": 10.0})
    assert not beats_constant_guess(texts, {"perplexity": 10.0, "perplexity_before": 10.0})
    assert no_better(texts, {"perplexity": None, "perplexity_before": 10.0}) == (
        "its perplexity is not a number, that before training is 10"
    )
