"""Fisher estimates of each structure against the dense inverse of rho I + F."""

import math

import numpy as np
import pytest
import torch

from sordino.core import Facts
from sordino.errors import SordinoError
from sordino.rules import fisher
from sordino.rules.structures import block, by_parameter, kronecker, matrices, rank_k, rank_one
from sordino.tree import tree_map

RHO = 0.4
SHAPES = ((3, 2), (4,), (2, 2, 3))
SIZE = sum(math.prod(shape) for shape in SHAPES)
STRUCTURES = ("rank-one", "rank-k", "block", "kronecker")


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def solved(F, v, rho=RHO):
    """(rho I + F)^-1 v, densely."""
    return torch.linalg.solve(rho * torch.eye(len(v), dtype=v.dtype) + F, v)


def dense(structure, m, shapes):
    """F itself; m is one vector, or the last k of them (rank-k)."""
    if structure == "rank-one":
        return torch.outer(m, m)
    if structure == "rank-k":
        return sum(torch.outer(each, each) for each in m) / len(m)
    parts = []
    for part, (rows, columns) in zip(torch.split(m, [a * b for a, b in shapes]), shapes, strict=True):
        M = part.reshape(rows, columns)
        if structure == "kronecker":
            parts.append(torch.kron(M @ M.T, M.T @ M / M.square().sum()))
        else:
            F = torch.zeros(rows, columns, rows, columns, dtype=m.dtype)
            for j in range(columns):
                F[:, j, :, j] = torch.outer(M[:, j], M[:, j])
            parts.append(F.reshape(rows * columns, rows * columns))
    return torch.block_diag(*parts)


def read(shapes, size=SIZE):
    return [tuple(pair) for pair in matrices(shapes, size).long().tolist()]


# ------------------------------------------------------------------------------------------------------- one by one


def test_rank_one_solves_the_dense_system():
    m, v = normal(7), normal(7, seed=1)
    torch.testing.assert_close(rank_one(m, v, RHO), solved(torch.outer(m, m), v))


@pytest.mark.parametrize("k", [1, 2, 4, 9])
def test_rank_k_solves_the_dense_system(k):
    """More vectors than dimensions, too."""
    past, v = normal(k, 7), normal(7, seed=1)
    F = dense("rank-k", past, ())
    torch.testing.assert_close(rank_k(past, v, RHO), solved(F, v), rtol=1e-11, atol=1e-12)  # rho is not float32
    assert not torch.allclose(rank_k(past, v, RHO), solved(k * F, v)) or k == 1, "the sum, not the mean"
    assert not torch.allclose(rank_k(past, v, 2 * RHO), solved(F, v))
    if k == 1:
        torch.testing.assert_close(rank_k(past, v, RHO), rank_one(past[0], v, RHO))


def test_rank_k_with_a_past_that_is_still_empty():
    past, v = torch.cat([torch.zeros(3, 7, dtype=torch.float64), normal(2, 7)]), normal(7, seed=1)
    torch.testing.assert_close(rank_k(past, v, RHO), solved(dense("rank-k", past, ()), v))
    torch.testing.assert_close(rank_k(0 * past, v, RHO), v / RHO, rtol=0, atol=0)


@pytest.mark.parametrize(("rows", "columns"), [(5, 3), (3, 5), (4, 4), (1, 6)])
@pytest.mark.parametrize("structure", ["block", "kronecker"])
def test_block_and_kronecker_solve_the_dense_system(structure, rows, columns):
    solve = {"block": block, "kronecker": kronecker}[structure]
    M, V = normal(rows, columns), normal(rows, columns, seed=1)
    want = solved(dense(structure, M.flatten(), [(rows, columns)]), V.flatten())
    torch.testing.assert_close(solve(M, V, RHO).flatten(), want)
    other = solved(dense("kronecker" if structure == "block" else "block", M.flatten(), [(rows, columns)]), V.flatten())
    assert not torch.allclose(want, other)
    one = torch.allclose(want, solved(torch.outer(M.flatten(), M.flatten()), V.flatten()))
    assert one is (structure == "kronecker" and min(rows, columns) == 1)


@pytest.mark.parametrize("solve", [block, kronecker])
def test_one_column_is_rank_one(solve):
    m, v = normal(6), normal(6, seed=1)
    got = solve(m.unsqueeze(-1), v.unsqueeze(-1), RHO).squeeze(-1)
    torch.testing.assert_close(got, rank_one(m, v, RHO))
    assert not torch.allclose(solve(m.view(3, 2), v.view(3, 2), RHO).flatten(), rank_one(m, v, RHO))


@pytest.mark.parametrize("solve", [block, kronecker])
def test_a_matrix_without_full_rank(solve):
    """Of rank one, and of zeros."""
    M, V = torch.outer(normal(4), normal(3, seed=2)), normal(4, 3, seed=1)
    structure = "block" if solve is block else "kronecker"
    want = solved(dense(structure, M.flatten(), [(4, 3)]), V.flatten())
    torch.testing.assert_close(solve(M, V, RHO).flatten(), want)
    torch.testing.assert_close(solve(0 * M, V, RHO), V / RHO, rtol=0, atol=0)


def test_a_kronecker_estimate_of_rank_one_is_the_outer_product():
    """M = a b^T: F = (a a^T |b|^2) (x) (b b^T |a|^2) / (|a| |b|)^2 = vec M vec M^T, the very rank-one estimate."""
    M, V = torch.outer(normal(4), normal(3, seed=2)), normal(4, 3, seed=1)
    torch.testing.assert_close(kronecker(M, V, RHO).flatten(), rank_one(M.flatten(), V.flatten(), RHO))


# ----------------------------------------------------------------------------------------------- several parameters


def test_the_last_axis_makes_the_columns():
    assert read(SHAPES) == [(3, 2), (4, 1), (4, 3)]
    assert read((), 7) == [(7, 1)]
    assert read(((),), 1) == [(1, 1)]


@pytest.mark.parametrize("structure", ["block", "kronecker"])
def test_each_parameter_has_its_own(structure):
    solve = by_parameter({"block": block, "kronecker": kronecker}[structure], matrices(SHAPES, SIZE))
    m, v = normal(SIZE), normal(SIZE, seed=1)
    torch.testing.assert_close(solve(m, v, RHO), solved(dense(structure, m, read(SHAPES)), v))
    whole = by_parameter({"block": block, "kronecker": kronecker}[structure], matrices((), SIZE))
    torch.testing.assert_close(whole(m, v, RHO), rank_one(m, v, RHO))
    assert not torch.allclose(solve(m, v, RHO), whole(m, v, RHO))


# ------------------------------------------------------------------------------------------------------- in the rule


def facts(shapes=SHAPES):
    return Facts(3, np.array([4, 5, 6]), 50, 3.0, 0.1, shapes)


def walk(rule, gs, shapes=SHAPES):
    theta = torch.zeros_like(gs[0])
    state, steps = rule.init(theta, facts(shapes), ()), []
    for t, g in enumerate(gs):
        step, state = rule.update(g, state, theta, t)
        steps.append(step)
    return torch.stack(steps)


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("apply_to", ["gradient", "momentum"])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_whole_run_against_dense_inverses(structure, apply_to, corrected):
    gs, beta, k = normal(7, SIZE), 0.8, 3
    m, past, want = torch.zeros(SIZE, dtype=torch.float64), [torch.zeros(SIZE, dtype=torch.float64)] * k, []
    for t, g in enumerate(gs):
        m = beta * m + (1 - beta) * g
        mhat = m / (1 - beta ** (t + 1)) if corrected else m
        past = [*past[1:], mhat]
        F = dense(structure, torch.stack(past) if structure == "rank-k" else mhat, read(SHAPES))
        want.append(solved(F, g if apply_to == "gradient" else mhat))
    options = {"rho": RHO, "beta": beta, "apply_to": apply_to, "bias_correction": corrected, "structure": structure}
    torch.testing.assert_close(walk(fisher(**options, rank=k), gs), torch.stack(want))
    others = [s for s in STRUCTURES if s != structure]
    for other in others:
        assert not torch.allclose(walk(fisher(**{**options, "structure": other}, rank=k), gs), torch.stack(want))


def test_one_vector_of_the_past_is_rank_one():
    gs = normal(7, SIZE)
    torch.testing.assert_close(
        walk(fisher(rho=RHO, structure="rank-k", rank=1), gs), walk(fisher(rho=RHO, structure="rank-one"), gs)
    )
    assert not torch.allclose(
        walk(fisher(rho=RHO, structure="rank-k", rank=2), gs), walk(fisher(rho=RHO, structure="rank-one"), gs)
    )


@pytest.mark.parametrize("structure", STRUCTURES)
def test_runs_are_a_leading_axis_and_so_is_rho(structure):
    gs, rhos = normal(5, 3, SIZE), torch.tensor([0.2, 0.7, 3.0], dtype=torch.float64)
    together = walk(fisher(rho=rhos.unsqueeze(-1), structure=structure), gs)
    for r in range(3):
        torch.testing.assert_close(together[:, r], walk(fisher(rho=float(rhos[r]), structure=structure), gs[:, r]))


@pytest.mark.parametrize("structure", STRUCTURES)
def test_warm_start_and_first_rounds_serve_every_structure(structure):
    gs = normal(6, SIZE)
    options = {"rho": RHO, "structure": structure}
    plain, full = gs / RHO, walk(fisher(**options), gs)
    faded = walk(fisher(**options, warm_start=4), gs)
    for t in range(6):
        part = min(1.0, t / 4)
        torch.testing.assert_close(faded[t], (1 - part) * plain[t] + part * full[t])
    late = walk(fisher(**options, ema_rounds=3), gs)
    torch.testing.assert_close(late[3:], full[3:], rtol=0, atol=0)
    assert not torch.allclose(late[:3], full[:3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_the_state_is_plain_tensors_of_one_kind(structure, dtype):
    """A checkpoint is cast as a whole: the shapes must survive float32."""
    rule, g = fisher(structure=structure), normal(SIZE).to(dtype)
    step, state = rule.update(g, rule.init(g, facts(), ()), g, 0)
    again, _ = rule.update(g, tree_map(lambda leaf: leaf.to(dtype), state), g, 1)
    expected, _ = rule.update(g, state, g, 1)
    assert step.dtype is dtype
    assert torch.equal(again, expected)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_every_inverse_shrinks(structure):
    """Eigenvalues of H between 0 and 1 / rho: no step is longer than |G| / rho, none goes uphill."""
    gs = 3 * normal(8, SIZE)
    for g, step in zip(gs, walk(fisher(rho=RHO, structure=structure), gs), strict=True):
        assert 0 < step @ g <= g @ g / RHO
        assert step.norm() <= g.norm() / RHO * (1 + 1e-12)


@pytest.mark.parametrize(
    ("bad", "message"),
    [({"structure": "blocks"}, r"structure: 'blocks' is unknown\. Did you mean 'block'\?"), ({"rank": 0}, "rank: 0")],
)
def test_bad_options_are_named(bad, message):
    with pytest.raises(SordinoError, match=message):
        fisher(**bad)
