"""Forward and backward passes for per-example gradients, traced once per shape and compiled.

Only the pass itself is compiled: it returns what each layer reads, and the loss's gradient at what it returns. Norms,
factors and sums are computed afterwards from these tensors, so their arithmetic is the one that `arithmetic` proves.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from sordino.models.per_example import BatchLoss, Owned, Use, placed, sweep

MAX_TRACES = 8  # per model; other shapes run as they are


class Trace(NamedTuple):
    """A compiled pass, and which of its inputs and outputs belong to which use."""

    run: Callable[..., Any]
    uses: list[tuple[Use, list[int]]]


class Passes:
    """One compiled pass per combination of shapes and types."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Trace] = {}

    def __call__(
        self,
        module: nn.Module,
        params: dict[str, Tensor],
        x: Tensor,
        y: Tensor,
        loss: BatchLoss,
        visit: Callable[[Use], None],
        owned: Owned,
    ) -> None:
        """Visit every use of a layer with trained parameters, as `per_example.sweep` does."""
        inputs = [*params.values(), x, y]
        autocast = torch.is_autocast_enabled(x.device.type) and torch.get_autocast_dtype(x.device.type)
        key = (autocast, module.training, *((t.shape, t.dtype, t.device) for t in inputs))
        if key not in self._known:
            if len(self._known) >= MAX_TRACES:
                sweep(module, params, x, y, loss, visit, owned)
                return
            self._known[key] = _traced(module, list(params), inputs, loss, owned)
        trace = self._known[key]
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            tensors = [*inputs, *trace.run(*inputs)]
        with placed(owned, params):  # rules read them
            for use, places in trace.uses:
                a, g, *more = (tensors[k] for k in places)
                visit(use._replace(a=a, g=g, more=tuple(more)))


def _traced(module: nn.Module, names: list[str], inputs: list[Tensor], loss: BatchLoss, owned: Owned) -> Trace:
    found: list[tuple[Use, list[int]]] = []

    def run(*tensors: Tensor) -> list[Tensor]:
        *values, x, y = tensors
        known = {id(t): k for k, t in enumerate(tensors)}
        out: list[Tensor] = []

        def visit(use: Use) -> None:
            places = []
            for t in (use.a, use.g, *use.more):
                if id(t) not in known:
                    known[id(t)] = len(tensors) + len(out)
                    out.append(t)
                places.append(known[id(t)])
            found.append((use, places))

        sweep(module, dict(zip(names, values, strict=True)), x, y, loss, visit, owned)
        return out

    graph = make_fx(run)(*inputs)
    nothing = torch.empty(0)
    uses = [(use._replace(a=nothing, g=nothing, more=()), places) for use, places in found]
    return Trace(compile_graph(graph), uses)


def compile_graph(graph: torch.fx.GraphModule) -> Callable[..., Any]:
    """Compile a traced pass for its shapes."""
    run: Callable[..., Any] = torch.compile(graph, dynamic=False)
    return run
