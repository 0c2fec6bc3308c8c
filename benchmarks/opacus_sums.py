"""Opacus's clipped sums of gradients, for benchmarks that compare with it.

Both functions take a module whose trained parameters lie in layers that Opacus knows, one batch, a bound on the norm of
one example and the type of its autocast, if any. They return a function that computes one list of clipped sums.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

Sums = Callable[[], list[Tensor]]


def per_example(
    module: nn.Module, x: Tensor, y: Tensor, clip: float, mode: str = "hooks", autocast: torch.dtype | None = None
) -> Sums:
    """Gradients of single examples, clipped and summed as Opacus's optimizer does."""
    from opacus.grad_sample import wrap_model

    words = {} if mode == "ew" else {"strict": False}
    with torch.random.fork_rng():
        wrapped = wrap_model(module, grad_sample_mode=mode, batch_first=True, loss_reduction="sum", **words)
    params = [p for p in wrapped.parameters() if p.requires_grad]

    def sums() -> list[Tensor]:
        for p in params:
            p.grad_sample = p.grad = None
        _losses(wrapped, x, y, autocast).sum().backward()
        norms = torch.stack([p.grad_sample.reshape(len(x), -1).norm(2, dim=-1) for p in params], 1).norm(2, dim=1)
        factor = (clip / (norms + 1e-6)).clamp(max=1.0)
        return [torch.einsum("i,i...", factor.to(p.grad_sample.dtype), p.grad_sample) for p in params]

    return sums


def ghost(module: nn.Module, x: Tensor, y: Tensor, clip: float, autocast: torch.dtype | None = None) -> Sums:
    """Opacus's two backward passes: norms first, then the weighted loss."""
    from opacus.grad_sample import GradSampleModuleFastGradientClipping

    wrapped = GradSampleModuleFastGradientClipping(
        module, batch_first=True, loss_reduction="sum", max_grad_norm=clip, use_ghost_clipping=True, strict=False
    )
    params = [p for p in wrapped.parameters() if p.requires_grad]

    def sums() -> list[Tensor]:
        for p in params:
            p.grad = None
        wrapped.enable_hooks()
        losses = _losses(wrapped, x, y, autocast)
        losses.sum().backward(retain_graph=True)
        for p in params:
            p.grad = None
        factor = wrapped.get_clipping_coef()
        wrapped.disable_hooks()
        (factor * losses).sum().backward()
        return [p.grad for p in params if p.grad is not None]

    return sums


def _losses(module: nn.Module, x: Tensor, y: Tensor, autocast: torch.dtype | None) -> Tensor:
    with torch.autocast(x.device.type, autocast, enabled=autocast is not None, cache_enabled=False):
        z = module(x)
    return nn.functional.cross_entropy(z.float(), y, reduction="none")
