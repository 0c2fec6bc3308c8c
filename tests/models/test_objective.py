"""Losses of single records, dict outputs and several outputs, against a loop over single examples."""

import sys
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from sordino.core import Shard
from sordino.data.records import Records
from sordino.engines import reference, simulate
from sordino.errors import SordinoError
from sordino.methods import build
from sordino.models import objective as objective_module
from sordino.models.objective import Objective
from sordino.models.torch_model import TorchModel
from sordino.privacy.mechanisms.random import Seeded
from sordino.training.evaluate import evaluate
from tests import support

sys.path.insert(0, str(Path(__file__).parent))
from test_torch_model import MODES, clipped, flat_theta

N = 6


class Parts(NamedTuple):
    rebuilt: Tensor
    logits: Tensor
    given: Tensor


class Several(nn.Module):
    """Two heads: one predicts a class, one rebuilds the record."""

    def __init__(self, form):
        super().__init__()
        self.form, self.body = form, nn.Linear(5, 4)
        self.logits, self.rebuilt = nn.Linear(4, 3), nn.Linear(4, 5)

    def forward(self, x):
        z = self.body(x).tanh()
        parts = Parts(self.rebuilt(z), self.logits(z), x)
        return {"dict": parts._asdict(), "tuple": tuple(parts), "named": parts, "tensor": parts.logits}[self.form]


def both(out, y):
    """Cross entropy, and the error of what was rebuilt."""
    rebuilt, logits, given = out.values() if isinstance(out, dict) else out
    return functional.cross_entropy(logits, y, reduction="none") + (rebuilt - given).square().sum(-1)


def squares(z, y):
    return (z[:, 0] - y).square()


def by_loop(net, x, y, loss):
    params = [p for p in net.parameters() if p.requires_grad]
    rows = []
    for k in range(len(x)):
        found = torch.autograd.grad(loss(net(x[k : k + 1]), y[k : k + 1]).sum(), params, materialize_grads=True)
        rows.append(torch.cat([part.flatten() for part in found]))
    return torch.stack(rows)


def data(dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(N, 5, generator=generator, dtype=dtype), torch.arange(N) % 3


def made(form="dict"):
    with torch.random.fork_rng():
        torch.manual_seed(2)
        return Several(form).double()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("form", "output"), [("dict", "logits"), ("tuple", 1), ("named", "logits"), ("named", 1)])
def test_a_loss_reads_all_outputs(form, output, mode):
    net, (x, y), weight = made(form), data(), torch.linspace(1, 0.2, N).double()
    model = TorchModel(net, shape=(5,), mode=mode, chunk=4, loss=both, output=output)
    rows, theta = by_loop(net, x, y, both), flat_theta(net)
    clip = float(rows.norm(dim=1).median())
    have = model.clipped_sum(theta, Shard(x, y, weight), clip)
    torch.testing.assert_close(have, clipped(rows, clip, weight), rtol=1e-9, atol=1e-12)
    assert model.predict(theta, x).tolist() == made("tensor")(x).argmax(-1).tolist()
    one = model.loss(theta, x[0], y[0])
    torch.testing.assert_close(one, both(net(x[:1]), y[:1])[0])


def test_a_dict_without_a_loss_is_read_by_its_part():
    net, (x, y) = made("dict"), data()
    model, plain = TorchModel(net, shape=(5,), output="logits"), TorchModel(made("tensor"), shape=(5,))
    theta, shard = flat_theta(net), Shard(x, y, torch.ones(N).double())
    torch.testing.assert_close(model.clipped_sum(theta, shard, 0.5), plain.clipped_sum(theta, shard, 0.5))
    unused = model.split(model.clipped_sum(theta, shard, 0.5))["rebuilt.weight"]
    assert (unused == 0).all()


@pytest.mark.parametrize("mode", MODES)
def test_numbers_are_learned_by_a_loss(mode):
    net = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    x, _ = data()
    y = x[:, 0] * 1.5
    model = TorchModel(net, mode=mode, loss=squares, labels="numbers")
    rows, theta = by_loop(net, x, y, squares), flat_theta(net)
    clip = float(rows.norm(dim=1).median())
    have = model.clipped_sum(theta, Shard(x, y, torch.ones(N).double()), clip)
    torch.testing.assert_close(have, clipped(rows, clip, torch.ones(N).double()), rtol=1e-9, atol=1e-12)
    assert torch.equal(model.predict(theta, x), model.logits(theta, x)[:, 0])


def test_engines_agree_and_a_run_with_numbers_is_evaluated():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 5, generator=generator, dtype=torch.float64)
    records = Records.of(x.numpy(), x[:, 0].numpy(), torch.arange(60).numpy() % 3, dtype=torch.float64)
    model = TorchModel(
        nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1)).double(), loss=squares, labels="numbers"
    )
    plan = support.plan_for(build("dp-fedadam", lr=0.05), records, rounds=4, batch="poisson:8")
    theta = model.init().double()
    slow = list(reference.run(plan, model, records, Seeded(1), theta=theta))
    fast = list(simulate.run(plan, model, records, Seeded(1), theta=theta, shares=True))
    for a, b in zip(slow, fast, strict=True):
        torch.testing.assert_close(a.model, b.model, rtol=1e-9, atol=1e-9)
    assert set(evaluate(model, slow[-1].model, x, x[:, 0])) == {"mse", "r2"}


@pytest.mark.filterwarnings("ignore:mkldnn_matmul")  # of CPUs without bfloat16
def test_a_loss_reads_float32_in_half_precision():
    seen = set()

    def watched(out, y):
        seen.update(part.dtype for part in out.values())
        return both(out, y)

    model = TorchModel(made().float(), shape=(5,), loss=watched, output="logits", autocast=torch.bfloat16)
    x, y = data(torch.float32)
    seen.clear()
    model.clipped_sum(model.init(), Shard(x, y, torch.ones(N)), 1.0)
    assert seen == {torch.float32}


REFUSED = [
    ({}, "returns a dict with 'rebuilt', 'logits', 'given'; name .* output='rebuilt'"),
    ({"output": "logit"}, "'logit' is not a tensor"),
    ({"output": "logits", "loss": lambda out, y: both(out, y).mean()}, r"returns \(\) for 2 records.*reduction='none'"),
    ({"output": "logits", "loss": lambda out, y: both(out, y) - both(out, y).mean()}, "depends on other records"),
    ({"output": "logits", "loss": lambda out, y: out["missing"]}, "fails on 2 records: KeyError"),
    ({"output": "logits", "loss": both, "check": False}, "leave check out"),
    ({"output": "logits", "labels": "numbers"}, "labels that are numbers have no default"),
    ({"output": "logits", "labels": "texts"}, "labels: 'texts' is unknown"),
]


@pytest.mark.parametrize(("options", "word"), REFUSED)
def test_refusals_name_the_remedy(options, word):
    with pytest.raises(SordinoError, match=word):
        TorchModel(made(), shape=(5,), **options)


def each(z, y):
    return functional.cross_entropy(z, y, reduction="none")


def balanced(z, y):
    """Weights from the classes of the batch. They are all 1 if each class is there once, or one record alone."""
    counts = functional.one_hot(y, z.shape[1]).sum(0)
    return (len(y) / (counts > 0).sum() / counts.clamp(min=1))[y] * each(z, y)


def without_outliers(z, y):
    losses = each(z, y)
    return losses * (losses.detach() <= 10 * losses.detach().mean())


def centred(z, y):
    return each(z - 1e-6 * z.detach().mean(0), y)


def selected(z, y):
    return torch.zeros(len(y), dtype=z.dtype).index_put((y.nonzero()[:, 0],), each(z[y > 0], y[y > 0]))


def focal(z, y):
    return (1 - torch.exp(-each(z, y))) ** 2 * each(z, y)


@pytest.mark.parametrize(
    ("loss", "word"),
    [
        (balanced, "loss: that of one record depends on other records"),
        (without_outliers, "loss: that of one record depends on other records"),
        (centred, "loss: that of one record depends on other records"),
        (selected, "number of rows in aten"),
        (focal, ""),
    ],
)
def test_a_loss_that_reads_other_records_is_refused(loss, word):
    """Single records and one record of each class have the right gradients, so comparing those is not enough."""
    if not word:
        assert TorchModel(made("tensor").float(), shape=(5,), loss=loss).outputs == 3
        return
    with pytest.raises(SordinoError, match=word):
        TorchModel(made("tensor").float(), shape=(5,), loss=loss)


class Probabilities(nn.Sequential):
    """Outputs between 0 and 1, and a loss that takes no others."""

    def __init__(self):
        super().__init__(nn.Linear(5, 3), nn.Sigmoid())

    @staticmethod
    def loss(p, y):
        target = functional.one_hot(y, p.shape[1]).to(p.dtype)
        return -(target * p.log() + (1 - target) * (1 - p).log()).sum(1)


def test_a_loss_of_probabilities_is_served_and_checked():
    torch.manual_seed(1)
    assert TorchModel(Probabilities(), loss=Probabilities.loss).outputs == 3

    def without_outliers(p, y):
        losses = Probabilities.loss(p, y)
        return losses * (losses.detach() <= 1.2 * losses.detach().mean())

    with pytest.raises(SordinoError, match="loss: that of one record depends on other records"):
        TorchModel(Probabilities(), loss=without_outliers)


def test_weights_of_a_loss_in_a_fixed_type_are_told_in_a_sentence():
    loss = nn.CrossEntropyLoss(weight=torch.ones(3), reduction="none")
    with pytest.raises(SordinoError, match=r"its loss fails: .*\w\. Convert with .*the weights of a loss"):
        TorchModel(made("tensor").float(), shape=(5,), loss=loss)


def test_one_tensor_has_no_parts():
    with pytest.raises(SordinoError, match="the module returns one tensor; leave output out"):
        TorchModel(made("tensor"), shape=(5,), output="logits")


class Prototypes(nn.Module):
    """Beside the logits, one row per class, of which there are as many as the check has records."""

    def __init__(self, classes, form=dict):
        super().__init__()
        self.form, self.body, self.prototypes = form, nn.Linear(5, classes), nn.Parameter(torch.randn(classes, 4))

    def forward(self, x):
        return self.form(logits=self.body(x), prototypes=self.prototypes)


class Attributes(OrderedDict):
    """Its items are attributes too, as those of a ModelOutput."""

    def __init__(self, *args, **parts):
        super().__init__(*args, **parts)
        self.__dict__.update(self)

    def __setitem__(self, key, part):
        super().__setitem__(key, part)
        self.__dict__[key] = part


@pytest.mark.parametrize("rows", range(2, 9))
def test_parts_that_belong_to_no_record_are_left_alone(rows):
    def loss(out, y):
        return each(out["logits"], y) + 0.1 * out["prototypes"][y].square().sum(1)

    def centred_too(out, y):
        return loss(out, y) + (out["logits"] - out["logits"].mean(0)).square().sum(1)

    torch.manual_seed(0)
    objective, y = Objective(loss, "logits"), torch.arange(rows) % rows
    shared, first = torch.randn(rows, 4), torch.randn(1, rows)
    outputs, *mixed = (
        {"logits": torch.cat([first, torch.randn(rows - 1, rows)]), "prototypes": shared} for _ in range(3)
    )
    objective.check_apart(outputs, mixed, y)
    with pytest.raises(SordinoError, match="depends on other records"):
        objective._replace(each=centred_too).check_apart(outputs, mixed, y)
    assert TorchModel(Prototypes(rows), shape=(5,), output="logits", loss=loss).outputs == rows


@pytest.mark.parametrize("form", [Attributes, SimpleNamespace])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loss_reads_the_attributes_of_what_the_module_returns(form, dtype):
    outputs = form(logits=torch.randn(4, 3, dtype=dtype), words="kept")
    objective, y = Objective(lambda out, y: each(out.logits, y), "logits"), torch.tensor([0, 1, 2, 0])
    kept = objective_module._widened(outputs)
    assert type(kept) is form
    assert (kept.logits.dtype, kept.words) == (torch.float32, "kept")
    assert outputs.logits.dtype == dtype, "the module's own is not changed"
    objective.check_losses(outputs, y)
    mixed = form(logits=torch.cat([outputs.logits[:1], torch.randn(3, 3, dtype=dtype)]), words="kept")
    objective.check_apart(outputs, [mixed], y)
    with pytest.raises(SordinoError, match="depends on other records"):
        objective._replace(each=lambda out, y: centred(out.logits, y)).check_apart(outputs, [mixed], y)


def test_a_model_output_keeps_its_type():
    generic = pytest.importorskip("transformers.modeling_outputs")
    outputs = generic.SequenceClassifierOutput(logits=torch.randn(4, 3, dtype=torch.bfloat16))
    kept = objective_module._widened(outputs)
    assert type(kept) is type(outputs)
    assert kept.logits.dtype == kept["logits"].dtype == torch.float32
    assert outputs.logits.dtype == torch.bfloat16
