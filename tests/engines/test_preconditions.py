"""An engine refuses a plan, a model and records that do not belong together, before it reads a record."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from sordino.core import Privacy, Unit
from sordino.data.records import Lazy, Records
from sordino.engines import reference, simulate
from sordino.errors import SordinoError
from sordino.methods import build
from sordino.models.linear import Linear
from sordino.models.torch_model import TorchModel
from sordino.privacy.mechanisms.random import Secure
from sordino.privacy.participation import Sampling
from sordino.privacy.plan import Plan
from tests.support import classified, plan_for

ENGINES = pytest.mark.parametrize("engine", [reference, simulate])
MODEL = Linear(3, 3)
WHOLE_CLIENTS = Unit.CLIENT


def refusal(engine, plan, model, records):
    with pytest.raises(SordinoError) as error:
        next(engine.run(plan, model, records, Secure()))
    return str(error.value)


@ENGINES
def test_a_plan_for_more_records_than_there_are_is_refused(engine):
    """Fixed minibatches of 64: with 2,000 declared records the noise would be a seventh of what 200 records need."""
    records = classified((200, 200))
    plan = replace(plan_for("dp-fedgd", (2000, 200)), sampling=Sampling.parse("fixed:64"))
    message = refusal(engine, plan, MODEL, records)
    for part in ("2000 records of client 0", "holds 200", "records.sizes"):
        assert part in message
    right = replace(plan, sizes=records.sizes)
    assert next(engine.run(right, MODEL, records, Secure())).t == 0, "the same plan runs with the true sizes"


@ENGINES
@pytest.mark.parametrize("sizes", [(4, 4), (4, 4, 4, 4)])
@pytest.mark.parametrize("unit", [Unit.RECORD, WHOLE_CLIENTS])
def test_the_number_of_clients_must_agree(engine, sizes, unit):
    message = refusal(engine, plan_for("dp-fedgd", sizes, unit=unit), MODEL, classified((4, 4, 4)))
    assert f"the plan has {len(sizes)} clients, but the records have 3" in message


@ENGINES
def test_where_whole_clients_are_hidden_their_sizes_may_differ_from_the_plan(engine):
    plan = plan_for("dp-fedgd", (5, 5, 5), unit=WHOLE_CLIENTS)
    assert next(engine.run(plan, MODEL, classified((5, 4, 6)), Secure())).t == 0


@ENGINES
def test_where_persons_are_protected_the_plan_counts_persons(engine):
    x, y, client = np.eye(6, 3), np.arange(6) % 3, np.array([0, 0, 0, 1, 1, 1])
    records = Records.of(x, y, client, person=np.array([0, 0, 1, 2, 2, 2]), per_person=2, dtype=torch.float64)

    def plan(sizes):
        privacy = Privacy(8.0, unit=Unit.PERSON, person_records=2)
        return Plan(build("dp-fedgd", Unit.PERSON), 2, sizes, privacy)

    assert records.sizes == (2, 1)
    assert next(engine.run(plan(records.sizes), MODEL, records, Secure())).t == 0
    assert "3 persons of client 0, but it holds 2" in refusal(engine, plan((3, 3)), MODEL, records)


def test_several_wrong_sizes_are_counted():
    assert "but it holds 4, and so for 1 more client." in refusal(
        simulate, plan_for("dp-fedgd", (5, 6, 5)), MODEL, classified((5, 4, 6))
    )


@ENGINES
def test_records_loaded_on_demand_are_held_to_the_plan_too(engine):
    part = (torch.zeros(4, 3, dtype=torch.float64), torch.zeros(4, dtype=torch.long))
    lazy = Lazy.of((4, 4), lambda i: part)
    assert "holds 4" in refusal(engine, plan_for("dp-fedgd", (4, 5)), MODEL, lazy)


@ENGINES
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_records_in_half_precision_are_refused(engine, dtype):
    """Their lengths would be rounded by more than the margin of the clip."""
    x, y, client = torch.ones(8, 3), torch.zeros(8, dtype=torch.long), np.arange(8) % 2
    whole = Records.of(x, y, client)
    for records in (replace(whole, x=x.to(dtype)), Lazy.of((4, 4), lambda i: (x[:4].to(dtype), y[:4]))):
        assert "convert it to torch.float32" in refusal(engine, plan_for("dp-fedgd", (4, 4)), MODEL, records)
    with pytest.raises(SordinoError, match=r"convert it to torch\.float32"):
        Records.of(x, y, client, dtype=dtype)


@ENGINES
def test_a_later_client_in_another_type_is_refused(engine):
    types = [torch.float64, torch.bfloat16]
    lazy = Lazy.of((4, 4), lambda i: (torch.ones(4, 3, dtype=types[i]), torch.zeros(4, dtype=torch.long)))
    assert "torch.bfloat16 at client 1" in refusal(engine, plan_for("dp-fedgd", (4, 4)), MODEL, lazy)


@ENGINES
@pytest.mark.parametrize(("name", "kind"), [("auto", "gram"), ("fednewton", "curvature")])
def test_a_method_that_needs_a_matrix_is_refused_with_a_network(engine, name, kind):
    records, model = classified((8, 8)), TorchModel(nn.Sequential(nn.Linear(3, 3)))
    message = refusal(engine, plan_for(build(name), records), model, records)
    assert message.startswith(f"method: {name} asks for a {kind} matrix, which TorchModel cannot compute")
    assert "use a linear model, dp-fednew with curvature = fisher, or a method such as" in message
    assert "dp-fedadam" in message
    assert next(engine.run(plan_for(build(name), records), MODEL, records, Secure())).t == 0


@ENGINES
def test_a_bare_module_is_no_model(engine):
    records = classified((8, 8))
    assert "TorchModel(module)" in refusal(engine, plan_for("dp-fedgd", records), nn.Linear(3, 3), records)
