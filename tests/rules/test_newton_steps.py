"""Newton steps beside a model: towards the optimum, and short where the noise hides the curvature."""

import torch

from sordino.rules.newton_steps import UncertaintyState, stepped

W = torch.tensor([0.8, -0.4, -0.5], dtype=torch.float64)


def released(w):
    """Gradient and Hessian of a softmax of two classes with parameters (0, w), whose truth is W."""
    u = torch.from_numpy(torch.quasirandom.SobolEngine(2, seed=0).draw(2048).double().numpy()) * 4 - 2
    u = torch.cat([u, torch.ones(len(u), 1, dtype=torch.float64)], 1)
    p, y = torch.sigmoid(u @ w), torch.sigmoid(u @ W)
    sign = torch.tensor([[1.0, -1.0], [-1.0, 1.0]], dtype=torch.float64)
    g = torch.einsum("ni,na->ia", u, torch.stack([y - p, p - y], 1)).flatten() / len(u)
    H = torch.einsum("n,ni,nj,ab->iajb", p * (1 - p), u, u, sign).reshape(6, 6) / len(u)
    point = torch.stack([-w / 2, w / 2], 1).flatten()
    return UncertaintyState(point, point, g, H, point[:0])


def after(w, damped, std=0.0):
    step = stepped(released(w), torch.tensor(std, dtype=torch.float64), damped).reshape(3, 2)
    return step[:, 1] - step[:, 0]


def test_a_shortened_step_from_risks_that_are_too_sure_goes_less_far_beyond_the_optimum():
    sure = 3 * W
    whole, short = after(sure, False), after(sure, True)
    assert (whole - W).norm() > (sure - W).norm(), "the mutant: a whole step is worse than none"
    assert (short - W).norm() < 0.7 * (sure - W).norm()


def test_two_steps_come_close():
    w = 1.8 * W
    for _ in range(2):
        w = after(w, True)
    assert (w - W).norm() < 0.1 * W.norm()


def test_steps_are_shorter_where_the_noise_is_larger():
    lengths = [float((after(1.5 * W, False, std) - 1.5 * W).norm()) for std in (0.0, 0.05, 0.5, 50.0)]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[-1] < 1e-2 * lengths[0]


def test_nothing_moves_if_nobody_took_part():
    state = released(W)._replace(gradient=W[:0])
    assert torch.equal(stepped(state, torch.tensor(0.0), True), state.point)
