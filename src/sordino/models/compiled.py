"""Forward and backward passes for per-example gradients, traced once per shape and compiled.

What is compiled returns tensors in memory: what each layer reads, the loss's gradient at what it returns, and gradients
of single examples where these are small. Norms, factors and sums are computed afterwards, from these very tensors, so
their arithmetic is the one that `arithmetic` proves.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from sordino.models import outer
from sordino.models.per_example import BatchLoss, Owned, Use, explicit, placed, prepared, sweep

MAX_TRACES = 8  # per model; other shapes run as they are


class Trace(NamedTuple):
    """A compiled pass, and which of its inputs and outputs belong to which use."""

    run: Callable[..., Any]
    uses: list[tuple[Use, list[int]]]
    random: bool  # it reads the seed of dropout


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
        apart: Callable[[Use, int], bool],
    ) -> None:
        """Visit every use of a layer with trained parameters, as `per_example.sweep` does.

        Uses that `apart` selects come in the form in which they are stored, and the others as gradients.
        """
        inputs = [*params.values(), x, y, torch.zeros(2, dtype=torch.int32, device=x.device)]
        autocast = torch.is_autocast_enabled(x.device.type) and torch.get_autocast_dtype(x.device.type)
        key = (autocast, module.training, apart, *((t.shape, t.dtype, t.device) for t in inputs))
        if key not in self._known:
            if len(self._known) >= MAX_TRACES:
                sweep(module, params, x, y, loss, visit, owned)
                return
            self._known[key] = _traced(module, list(params), inputs, loss, owned, apart)
        trace = self._known[key]
        if trace.random:
            inputs[-1].random_(-(2**31), 2**31)
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            tensors = [*inputs, *trace.run(*inputs)]
        with placed(owned, params):  # rules read them
            for use, places in trace.uses:
                a, g, *more = (tensors[k] for k in places)
                parts = None if use.parts is None else use.parts._replace(a=a, g=g)
                visit(use._replace(a=a, g=g, parts=parts, more=tuple(more)))


def _traced(
    module: nn.Module,
    names: list[str],
    inputs: list[Tensor],
    loss: BatchLoss,
    owned: Owned,
    apart: Callable[[Use, int], bool],
) -> Trace:
    found: list[tuple[Use, list[int]]] = []

    def run(*tensors: Tensor) -> list[Tensor]:
        *values, x, y, seed = tensors
        known = {_place(t): k for k, t in enumerate(tensors)}
        out: list[Tensor] = []

        def visit(use: Use) -> None:
            if not use.done and not getattr(use.module, "taped", False):
                if not apart(use, len(x)):
                    for key, part in explicit(use, len(x)):
                        if key in use.names:
                            keep(Use(use.module, {key: use.names[key]}, part, part, False, done=True))
                    return
                use = prepared(use, len(x))
            keep(use)

        def keep(use: Use) -> None:
            places = []
            for t in (use.a, use.g, *use.more):
                if _place(t) not in known:
                    known[_place(t)] = len(tensors) + len(out)
                    out.append(t)
                places.append(known[_place(t)])
            found.append((use, places))

        sweep(module, dict(zip(names, values, strict=True)), x, y, loss, visit, owned, seed)
        return out

    graph = make_fx(run)(*inputs)
    without_inputs(graph)
    stored = next(iter(graph.graph.find_nodes(op="output"))).args[0]
    parts = [(stored[k], use.parts) for use, (first, *_) in found if (k := first - len(inputs)) >= 0]
    without_activations(graph, [(a, each) for a, each in parts if each is not None and each.stride])
    nothing = torch.empty(0)
    uses = [(_emptied(use, nothing), places) for use, places in found]
    seed = graph.graph.find_nodes(op="placeholder")[-1]
    return Trace(compile_graph(graph), uses, bool(seed.users))


def without_inputs(graph: torch.fx.GraphModule) -> None:
    """Write gradients with respect to a convolution's input as transposed convolutions.

    The operator that autograd calls reads the input, too, though its values do not matter: it would be kept, in one
    more layout. The compiler also chooses the layout of convolutions, but not of that operator.
    """
    aten = torch.ops.aten

    def sides(t: torch.fx.Node) -> Any:
        known = getattr(graph, str(t.target)) if t.op == "get_attr" else t.meta["tensor_meta"]  # frozen, or computed
        return known.shape[2:]

    for node in graph.graph.find_nodes(op="call_function", target=aten.convolution_backward.default):
        g, a, weight, _, stride, padding, dilation, transposed, _, groups, wanted = node.args
        if transposed or list(wanted) != [True, False, False]:
            continue
        sizes = zip(*(sides(t) for t in (a, g, weight)), stride, padding, dilation, strict=True)
        rest = [i - ((o - 1) * s - 2 * p + d * (k - 1) + 1) for i, o, k, s, p, d in sizes]
        with graph.graph.inserting_before(node):
            words = (g, weight, None, stride, padding, dilation, True, rest, groups)
            found = graph.graph.call_function(aten.convolution.default, words)
        found.meta["tensor_meta"] = a.meta["tensor_meta"]
        for user in list(node.users):
            if user.args[1] == 0:
                user.replace_all_uses_with(found)
            graph.graph.erase_node(user)
        graph.graph.erase_node(node)
    graph.recompile()


def without_activations(graph: torch.fx.GraphModule, stored: list[tuple[torch.fx.Node, outer.Factors]]) -> None:
    """Let backward passes of ReLUs read which entries are positive from what a convolution stores of its input.

    The output of a ReLU, in float32, is then not kept until the backward pass. An entry so small that half precision
    rounds it to zero counts as zero.

    Args:
      graph: a traced pass.
      stored: inputs of convolutions in the layout of `outer`, and that layout.
    """
    aten = torch.ops.aten

    def call(f: Any, *args: Any, **words: Any) -> torch.fx.Node:
        return graph.graph.call_function(f, args, words)

    images = {}
    for a, parts in stored:
        source, step = _origin(a), parts.stride
        if source.target is not aten.relu.default or source in images:
            continue
        n, channels, lines, columns = source.meta["tensor_meta"].shape
        if list(a.meta["tensor_meta"].shape) == [n, step * step, lines // step * parts.width, channels]:
            with graph.graph.inserting_after(a):
                images[source] = kept = call(aten.clone.default, a, memory_format=torch.contiguous_format)
            a.replace_all_uses_with(kept, partial(operator.is_not, kept))  # memory of its own, not a view
            with graph.graph.inserting_after(kept):
                planes = call(aten.view.default, kept, [n, step, step, lines // step, parts.width, channels])
            with graph.graph.inserting_after(planes):
                inside = call(aten.slice.Tensor, planes, 4, 0, columns // step)
            with graph.graph.inserting_after(inside):
                image = call(aten.permute.default, inside, [0, 5, 3, 1, 4, 2])
            with graph.graph.inserting_after(image):
                images[source] = call(aten.reshape.default, image, [n, channels, lines, columns])
    for node in graph.graph.find_nodes(op="call_function", target=aten.threshold_backward.default):
        g, source, threshold = node.args
        if threshold != 0 or (source := _origin(source)) not in images:
            continue
        with graph.graph.inserting_before(node):
            found = call(aten.masked_fill.Scalar, g, call(aten.le.Scalar, images[source], 0), 0)
        found.meta["tensor_meta"] = node.meta["tensor_meta"]
        node.replace_all_uses_with(found)
        graph.graph.erase_node(node)
    graph.recompile()


def _origin(node: torch.fx.Node) -> torch.fx.Node:
    """The node whose entries this one holds, in another type or order."""
    aten = torch.ops.aten
    moves = (aten.detach, aten._to_copy, aten.permute, aten.view, aten.constant_pad_nd, aten.clone)
    while node.op == "call_function" and getattr(node.target, "overloadpacket", None) in moves:
        node = node.args[0]  # type: ignore[assignment]
    return node


def _place(t: Tensor) -> Hashable:
    """The memory of a tensor: several layers may read the same one, which is returned once."""
    return t.data_ptr(), t.shape, t.stride(), t.dtype


def _emptied(use: Use, nothing: Tensor) -> Use:
    parts = None if use.parts is None else use.parts._replace(a=nothing, g=nothing)
    return use._replace(a=nothing, g=nothing, parts=parts, more=())


def compile_graph(graph: torch.fx.GraphModule) -> Callable[..., Any]:
    """Compile a traced pass for its shapes."""
    run: Callable[..., Any] = torch.compile(graph, dynamic=False)
    return run
