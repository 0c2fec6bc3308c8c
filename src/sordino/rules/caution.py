"""How careful the first step after one round of releases should be: the choice with the least expected loss.

A and a gradient G at zero are released together, and no later gradient corrects the first step. Eigenvalues of A below
the edge of its noise may be as large as the edge. A step that takes them to be so never goes too far, and often not far
enough. So several steps are compared, from that one to the one that takes them to be equal parts of the rest.

Near zero the loss is (1/2) tr theta^T H theta + tr g^T theta, H = scale A. Put into it, what was released would favour
steps that follow its noise. Stein's identity says by how much: for noise E of variance s^2 on a matrix X, the mean of
<E, F(X + E)> is that of s^2 times the divergence of F. For theta = -V diag(K) V^T G, with K a function of the noised
eigenvalues, it has a closed form, and the estimate is unbiased whatever A is.
"""

from __future__ import annotations

from sordino.lazy import Tensor, torch

CAUTIONS = (1.0, 0.7, 0.5, 0.35, 0.25, 0.15, 0.07, 0.0)  # of the edge, that hidden eigenvalues are at least


def noised_eigenvalues(A: Tensor, V: Tensor) -> Tensor:
    """The eigenvalues of a noised A along its eigenvectors, in float64."""
    vectors = V.double()
    return (vectors * (((A + A.transpose(-1, -2)).double() / 2) @ vectors)).sum(-2)


def expected_loss(K: Tensor, noised: Tensor, G: Tensor, scale: Tensor, std: Tensor, variance: Tensor) -> Tensor:
    """An unbiased estimate of the loss after the step -K G, without its constant.

    Args:
        K: Along the eigenvectors of the noised A, as a function of its eigenvalues.
        noised: Those eigenvalues, in increasing order.
        G: The noised gradient along the eigenvectors, eigenvectors by outputs.
        scale: The Hessian over A.
        std: Of the symmetric noise on the diagonal of A; beside it the noise has this over sqrt 2.
        variance: Of the noise on a number of G.

    Returns:
        One number per leading index.
    """
    K, G, scale, std, variance = (part.double() for part in (K, G, scale, std, variance))
    energy = G.square().sum(-1)
    slope = _slopes(K, noised)
    # d/dE of <E, theta theta^T> along all symmetric directions: Daletskii and Krein's derivative of K(A).
    divergence = (K * energy * (slope.diagonal(dim1=-2, dim2=-1) + slope.sum(-1))).sum(-1)
    square = (noised * K.square() * energy).sum(-1) - std.square().squeeze(-1) * divergence
    product = (K * energy).sum(-1) - variance.squeeze(-1) * G.shape[-1] * K.sum(-1)
    return scale[..., 0] * square / 2 - product


def _slopes(K: Tensor, noised: Tensor) -> Tensor:
    """Divided differences of K over the eigenvalues; on the diagonal the mean of those beside it; 0 in one row."""
    rows = noised.shape[-1]
    apart = noised.unsqueeze(-1) - noised.unsqueeze(-2)
    known = apart.abs() > 1e-12 * noised.abs().amax(-1)[..., None, None].clamp_min(1e-300)
    slope = torch.where(known, (K.unsqueeze(-1) - K.unsqueeze(-2)) / torch.where(known, apart, 1.0), 0.0)
    if rows == 1:
        return slope
    beside = slope.diagonal(1, -2, -1)
    left = torch.cat([beside[..., :1], beside], -1)
    right = torch.cat([beside, beside[..., -1:]], -1)
    return slope + torch.diag_embed((left + right) / 2)
