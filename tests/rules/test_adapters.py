"""Parts of theta, and the re-factorisation of B A: the same products, orthonormal rows, nothing else."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from sordino.core import Facts
from sordino.errors import SordinoError
from sordino.rules.adapters import DOWN, UP, facts_without, pieces, refactored, table, without

SHAPES = ((2, 5), (4, 2), (3,), (2, 3), (7, 2))  # A, B, a bias, A, B
FACTS = Facts(1, np.array([3]), 6, 1.0, 0.1, SHAPES, adapters=((0, 1), (3, 4)))
TENSORS = pieces(table(FACTS))
SIZE = 10 + 8 + 3 + 6 + 14


def products(theta):
    """B A of both adapters, and the bias."""
    a, b, _, c, d = (piece.of(theta) for piece in TENSORS)
    return b @ a, d @ c, theta[..., 18:21].double()


def drawn(*lead):
    return torch.randn(*lead, SIZE, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def low_rank():
    theta = drawn()
    theta[11:18:2] = theta[10:18:2]  # the columns of the first B are equal
    return theta


def at_the_start():
    """B = 0."""
    theta = drawn()
    for piece in TENSORS:
        theta[piece.where] *= piece.factor != UP
    return theta


@pytest.mark.parametrize("theta", [drawn(), drawn(3), low_rank(), at_the_start()])
def test_products_stay_and_a_becomes_orthonormal(theta):
    new = refactored(theta, TENSORS)
    for mine, other in zip(products(new), products(theta), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-12)
    for a, b in ((TENSORS[0], TENSORS[1]), (TENSORS[3], TENSORS[4])):
        rows, columns = a.of(new), b.of(new)
        torch.testing.assert_close(rows @ rows.mT, torch.eye(2).double().expand(*rows.shape[:-2], 2, 2))
        gram = columns.mT @ columns  # orthogonal columns, the longest first
        torch.testing.assert_close(gram, torch.diag_embed(gram.diagonal(dim1=-2, dim2=-1)), rtol=0, atol=1e-12)
        assert (gram[..., 0, 0] >= gram[..., 1, 1] - 1e-12).all()


def test_again_changes_nothing_but_signs():
    once = refactored(drawn(), TENSORS)
    torch.testing.assert_close(refactored(once, TENSORS).abs(), once.abs(), rtol=0, atol=1e-12)


def test_a_rank_above_the_outputs_is_served_and_above_the_inputs_refused():
    wide = pieces(table(Facts(1, np.array([3]), 6, 1.0, 0.1, ((3, 5), (2, 3)), adapters=((0, 1),))))
    theta = drawn()[:21]
    new = refactored(theta, wide)
    torch.testing.assert_close(wide[1].of(new) @ wide[0].of(new), wide[1].of(theta) @ wide[0].of(theta))
    torch.testing.assert_close(wide[0].of(new) @ wide[0].of(new).mT, torch.eye(3).double())
    tall = pieces(table(Facts(1, np.array([3]), 6, 1.0, 0.1, ((3, 2), (4, 3)), adapters=((0, 1),))))
    with pytest.raises(SordinoError, match="lora_rank"):
        refactored(theta[:18], tall)


def test_a_part_is_all_but_one_factor():
    assert without(TENSORS, DOWN).tolist() == [*range(10, 21), *range(27, 41)]
    assert without(TENSORS, UP).tolist() == [*range(10), *range(18, 27)]
    stored = pieces(table(FACTS).float())  # as a checkpoint keeps it
    assert stored == TENSORS
    part = facts_without(replace(FACTS, blocks=torch.arange(SIZE) // 6), UP, rounds=2)
    assert part.shapes == ((2, 5), (3,), (2, 3))
    assert part.rounds == 2
    assert part.blocks.unique().tolist() == list(range(int(part.blocks.max()) + 1))  # none is empty


def test_a_model_without_adapters_is_refused():
    with pytest.raises(SordinoError, match="no low-rank adapters"):
        table(Facts(1, np.array([3]), 6, 1.0, 0.1, SHAPES))
