"""Gradients of single examples from one backward pass.

The gradient of a layer's weights is a product of what went in, a, and the loss's gradient by what came out, g. Both
pass by in one backward sweep over a batch, in which autograd is never asked for a summed weight gradient: a hook hands
(a, g) of every layer to its *rule*, which gives one gradient an example. Where the product is larger than its factors,
only its norm is taken (`squares`), and the weighted sum over examples is one matrix product. A layer that is `taped`
needs no hook: it asks for the `tape` of the pass and reports its uses itself.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from sordino.errors import SordinoError
from sordino.models.arithmetic import FLOAT32_TERMS

# (module, input, output gradient, examples) -> (parameter's name in the module, its gradient: examples x shape). While
# a rule runs, the module holds the parameters of the call: the trained ones are plain tensors, no `nn.Parameter`s.
GradientRule = Callable[[nn.Module, Tensor, Tensor, int], Iterable[tuple[str, Tensor]]]
BatchLoss = Callable[[Tensor, Tensor], Tensor]  # (outputs, labels) -> summed loss
Owned = list[tuple[nn.Module, dict[str, str]]]  # modules that own trained parameters: name in the module -> full name

WRITE_COST_THRESHOLD = 10  # multiplications that take as long as writing, measuring and summing one gradient entry
MAX_INPUT_NORM = 1e30  # norm of a layer's input
FLOAT32_CHUNK_SQUARES = 512  # numbers whose squares are added before float64 takes over
FLOAT64_CHUNK_EXAMPLES = 1024  # examples of one product in float64
FACTOR_CHUNK_NUMBERS = {"cpu": 2**20, "cuda": 2**26}  # numbers of its factors


class Use(NamedTuple):
    """One use of a layer in a forward pass: what went in, and the gradient by what came out."""

    module: nn.Module
    names: dict[str, str]
    a: Tensor
    g: Tensor
    once: bool  # no other use of the same parameters


def trained(parameter: object) -> bool:
    """Is it one that the call was given? The frozen ones stay `nn.Parameter`s."""
    return isinstance(parameter, Tensor) and not isinstance(parameter, nn.Parameter)


def times(a: Tensor, b: Tensor) -> Tensor:
    """A batch of products. On a CPU from contiguous factors: transposed ones can be thirty times as slow."""
    return torch.bmm(a, b) if a.is_cuda else torch.bmm(a.contiguous(), b.contiguous())


def summed(z: Tensor, y: Tensor) -> Tensor:
    """Cross entropy, summed over examples."""
    return functional.cross_entropy(z.float() if z.dtype is torch.bfloat16 else z, y, reduction="sum")


# ------------------------------------------------------------------------------------------------------------ rules


def linear(module: Any, a: Tensor, g: Tensor, n: int) -> Iterator[tuple[str, Tensor]]:
    """g a^T, summed over positions. Windows or tokens folded into the first axis are positions too."""
    a, g = a.reshape(n, -1, a.shape[-1]), g.reshape(n, -1, g.shape[-1])
    if trained(module.weight):
        a = a.to(g.dtype)
        yield "weight", times(g.mT, a) if g.shape[1] > 1 else g.mT * a
    if trained(module.bias):
        yield "bias", g.sum(1) if g.shape[1] > 1 else g[:, 0]


def conv(module: Any, a: Tensor, g: Tensor, n: int) -> Iterator[tuple[str, Tensor]]:
    """A convolution is a linear layer on patches, in each of its groups."""
    g = g.flatten(2)
    if trained(module.weight):
        u, groups = patches(module, a.to(g.dtype)), module.groups
        if groups > 1:
            u = u.reshape(*u.shape[:2], groups, -1).transpose(1, 2).flatten(0, 1)
        weight = times(g.reshape(len(u), -1, g.shape[-1]), u).reshape(n, -1, *module.weight.shape)
        yield "weight", weight.sum(1) if weight.shape[1] > 1 else weight[:, 0]
    if trained(module.bias):
        yield "bias", g.reshape(n, -1, *g.shape[1:]).sum((1, 3))


def embedding(module: Any, a: Tensor, g: Tensor, n: int) -> Iterator[tuple[str, Tensor]]:
    ids, g = a.reshape(n, -1).long(), g.reshape(n, -1, g.shape[-1])
    if module.padding_idx is not None:
        g = g.masked_fill((ids == module.padding_idx).unsqueeze(-1), 0)
    words, width = module.weight.shape
    rows = (ids + words * torch.arange(n, device=ids.device).unsqueeze(-1)).flatten()
    yield "weight", g.new_zeros(n * words, width).index_add_(0, rows, g.flatten(0, 1)).reshape(n, words, width)


def layer_norm(module: Any, a: Tensor, g: Tensor, n: int) -> Iterator[tuple[str, Tensor]]:
    shape = module.normalized_shape
    if trained(module.weight):
        yield "weight", (functional.layer_norm(a.to(g.dtype), shape, eps=module.eps) * g).reshape(n, -1, *shape).sum(1)
    if trained(module.bias):
        yield "bias", g.reshape(n, -1, *shape).sum(1)


def channel_norm(module: Any, a: Tensor, g: Tensor, n: int) -> Iterator[tuple[str, Tensor]]:
    """Group and instance norm: one scale and one shift a channel."""
    shape = (n, -1, g.shape[1], math.prod(g.shape[2:]))
    if trained(module.weight):
        plain = functional.group_norm(a.to(g.dtype), getattr(module, "num_groups", a.shape[1]), eps=module.eps)
        yield "weight", (plain * g).reshape(shape).sum((1, 3))
    if trained(module.bias):
        yield "bias", g.reshape(shape).sum((1, 3))


RULES: dict[type[nn.Module], GradientRule] = {
    nn.Linear: linear,
    nn.Conv1d: conv,
    nn.Conv2d: conv,
    nn.Embedding: embedding,
    nn.LayerNorm: layer_norm,
    nn.GroupNorm: channel_norm,
    nn.InstanceNorm1d: channel_norm,
    nn.InstanceNorm2d: channel_norm,
}


def patches(module: Any, a: Tensor) -> Tensor:
    """Rows x positions x entries of a patch."""
    kernel, sides = module.kernel_size, module._reversed_padding_repeated_twice
    if any(sides):
        a = functional.pad(a, sides, mode="constant" if module.padding_mode == "zeros" else module.padding_mode)
    for axis, (k, s, d) in enumerate(zip(kernel, module.stride, module.dilation, strict=True), 2):
        a = a.unfold(axis, d * (k - 1) + 1, s)[..., ::d]  # a view: it grows a trailing axis
    dims = len(kernel)
    a = a.movedim(1, 1 + dims)  # rows x positions x channels x kernel
    return a.reshape(len(a), math.prod(a.shape[1 : 1 + dims]), -1)


# ------------------------------------------------------------------------------------------------------- one sweep


def owners(module: nn.Module, names: Iterable[str]) -> Owned:
    """Modules that own one of the named parameters; a tied one answers to the first of its names."""
    wanted = set(names)
    first = {id(p): name for name, p in module.named_parameters() if name in wanted}
    found: Owned = []
    for part in module.modules():
        mine = {own: first[id(p)] for own, p in part.named_parameters(recurse=False) if id(p) in first}
        if mine:
            found.append((part, mine))
    return found


def supported(module: nn.Module) -> list[str]:
    """Modules whose trainable parameters no rule covers; empty where the sweep serves all of them."""
    odd = []
    for name, part in module.named_modules():
        own = {key for key, p in part.named_parameters(recurse=False) if p.requires_grad}
        known = type(part) in RULES
        if known and type(part).__module__.startswith("torch.nn"):  # with weight norm and the like it has other names
            known = own <= {"weight", "bias"}
        if isinstance(part, nn.Embedding):  # both look across examples, or write to the weights
            known = known and part.max_norm is None and not part.scale_grad_by_freq
        if own and not known:
            odd.append(f"{name or 'the module itself'} ({type(part).__name__})")
    return odd


class Tape:
    """What a forward pass leaves for the backward one."""

    def __init__(self, visit: Callable[[Use], None], owned: Owned, like: Tensor) -> None:
        self.visit, self.names = visit, dict(owned)
        self.times: dict[str, int] = {}
        # Nothing is trained in autograd's eyes. What starts a path to the loss depends on `root`, or is a leaf itself.
        self.root = torch.empty(0, device=like.device, requires_grad=True)
        self.leaves = [self.root]
        self._cast: tuple[Tensor | None, Tensor | None] = None, None
        self._nothing: dict[torch.dtype, Tensor] = {}

    def nothing(self, kind: torch.dtype) -> Tensor:
        """A number that a product with beta = 0 does not read."""
        if kind not in self._nothing:
            self._nothing[kind] = torch.empty((), dtype=kind, device=self.root.device)
        return self._nothing[kind]

    def used(self, module: nn.Module) -> None:
        for name in self.names[module].values():
            self.times[name] = self.times.get(name, 0) + 1

    def report(self, module: nn.Module, a: Tensor, g: Tensor) -> None:
        names = self.names[module]
        self.visit(Use(module, names, a, g, all(self.times[name] == 1 for name in names.values())))

    def cast(self, x: Tensor, kind: torch.dtype) -> Tensor:
        """Once where several layers in turn read the same x."""
        if x.dtype == kind:
            return x
        if self._cast[0] is not x:
            self._cast = x, x.to(kind)
        assert self._cast[1] is not None
        return self._cast[1]

    def hook(self, part: nn.Module, args: tuple[Any, ...], words: dict[str, Any], out: Tensor) -> None:
        a = (args[0] if args else next(iter(words.values()))).detach()
        version = a._version
        self.used(part)

        def back(g: Tensor) -> None:
            if a._version != version:
                raise SordinoError(f"module: the input of {part} is overwritten in place; avoid that.")
            self.report(part, a, g.detach())

        if not out.requires_grad:
            self.leaves.append(out.requires_grad_())
        out.register_hook(back)  # type: ignore[no-untyped-call]

    def forward(self, module: nn.Module, x: Tensor, y: Tensor, loss: BatchLoss) -> Tensor:
        parts = [part for part in self.names if not getattr(part, "taped", False)]
        handles = [part.register_forward_hook(self.hook, with_kwargs=True) for part in parts]
        before, _running.tape = tape(), self
        try:
            with torch.enable_grad():
                return loss(module(x), y)
        finally:
            _running.tape = before
            self._cast = None, None
            for handle in handles:
                handle.remove()

    def backward(self, total: Tensor) -> None:
        """Without autocast: the thread in which autograd works would not know its type."""
        if total.requires_grad:
            with torch.autocast(total.device.type, enabled=False):
                torch.autograd.grad(total, self.leaves, allow_unused=True)


_running = threading.local()


def tape() -> Tape | None:
    """Of the pass that this thread is in, if any."""
    return getattr(_running, "tape", None)


@contextmanager
def placed(owned: Owned, params: dict[str, Tensor]) -> Iterator[None]:
    """Modules hold the parameters of the call; tied ones too."""
    places = [(part._parameters, own, params[name].detach()) for part, names in owned for own, name in names.items()]
    before = [home[own] for home, own, _ in places]
    try:
        for home, own, value in places:
            home[own] = value  # type: ignore[assignment]
        yield
    finally:
        for (home, own, _), old in zip(places, before, strict=True):
            home[own] = old


def sweep(
    module: nn.Module,
    params: dict[str, Tensor],
    x: Tensor,
    y: Tensor,
    loss: BatchLoss,
    visit: Callable[[Use], None],
    owned: Owned | None = None,
) -> None:
    """Visit every use of a layer with trained parameters, last to first."""
    owned = owners(module, params) if owned is None else owned
    with placed(owned, params):
        notes = Tape(visit, owned, x)
        notes.backward(notes.forward(module, x, y, loss))


# ------------------------------------------------------------------------------------------- norms without products


def extent(use: Use, n: int) -> tuple[int, int, int]:
    """Positions, entries in and entries out of a layer that is a matrix product."""
    weight: Any = use.module.weight
    if hasattr(use.module, "kernel_size"):
        return use.g.numel() // (n * len(weight)), math.prod(weight.shape[1:]), len(weight)
    made, given = weight.shape[-2:]  # clients may stand before
    return use.g.numel() // (n * made), given, made


def short(use: Use, n: int) -> bool:
    """Is the norm cheaper from positions x positions (|a a^T * g g^T|) than from the product itself?"""
    if not use.once or type(use.module) not in (nn.Linear, nn.Conv1d, nn.Conv2d):
        return False
    positions, given, made = extent(use, n)
    if getattr(use.module, "groups", 1) > 1:
        return False
    return positions**2 * (given + made) + positions * given * made < (positions + WRITE_COST_THRESHOLD) * given * made


def single(use: Use, n: int) -> bool:
    """A linear layer that each example passes once, such as a head: its gradient is of rank one."""
    return use.once and RULES.get(type(use.module)) is linear and "weight" in use.names and extent(use, n)[0] == 1


def never(use: Use, n: int) -> bool:
    return False


def factors(use: Use, n: int) -> tuple[Tensor, Tensor]:
    """a and g, examples x positions x entries."""
    positions, given, made = extent(use, n)
    if not hasattr(use.module, "kernel_size"):
        return use.a.reshape(n, positions, given), use.g.reshape(n, positions, made)
    return patches(use.module, use.a).reshape(n, positions, given), use.g.flatten(2).mT.reshape(n, positions, made)


def squares(use: Use, n: int) -> Tensor:
    """An upper bound of each example's squared norm |sum over p of g_p a_p^T|^2 (and |sum g_p|^2), in float64.

    One position: the product of two norms in float64. Several: the sum over p, q of (a_p . a_q)(g_p . g_q), from Gram
    matrices in the type of g, of unit roundoff u = eps / 2. A scalar product of k numbers is off by k u |a_p| |a_q|,
    and by 2 k tiny where it meets the end of the range. Summed over p and q, the error of the product of both is at
    most (given + made + 2) u whole, where whole = |a|^2 |g|^2 + p |g|^2 for weight and bias, plus
    2 p tiny (given |g|^2 + made |a|^2 + p); that of the bias at most 2 p u whole. Twice the first is added, as terms
    may cancel: slack = (given + made + p) eps, 2e-5 for 64 entries in, 64 out and 16 positions in float32, and whole is
    itself an upper bound (`bound`). The exact norm of what `total` sums is therefore below this one; where that holds
    only by overflow, the norm counts as infinite.

    An input so large that its bounded g would lose digits counts as infinite.
    """
    a, g = factors(use, n)
    positions, given, made = extent(use, n)
    size = measure if positions == 1 else bound
    entries, ends = size(a.flatten(1)) if "weight" in use.names else None, size(g.flatten(1))
    whole = ends * float(positions * ("bias" in use.names))
    if entries is not None:
        entries = entries.masked_fill(entries > MAX_INPUT_NORM**2, math.inf)
        whole = whole + ends * entries
    if positions == 1:
        return whole
    found = torch.zeros_like(whole)
    about = torch.finfo(g.dtype)
    if entries is not None:
        found += times(a, a.mT).mul_(times(g, g.mT)).sum((1, 2), dtype=torch.float64)
        found += 2 * positions * about.tiny * (given * ends + made * entries + positions)
    if "bias" in use.names:
        found += measure(g.sum(1))
    found = found.masked_fill(~found.isfinite(), math.inf)
    upper: Tensor = found.clamp_min(0) + (given + made + positions) * about.eps * whole
    return upper


def total(use: Use, factor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Sum over the examples of each group of factor times gradient, in float64; what is not finite has factor zero.

    a, g and, of float32 numbers, factor times g are exact in float64. A product of m examples adds K = m p terms, so it
    is off by at most (K + 1) 2^-53 times the sum over examples of factor |a| |g|. Terms of one example may
    cancel, so this is not bounded by the clip C itself; but `squares` is at least slack |a|^2 |g|^2, hence
    factor |a| |g| <= C / sqrt(slack). `short` lets p positions through only if p^2 (given + made) < 10 given made, so
    p^2 < 2.5 (given + made) and slack > 2^-23 p^2 / 2.5. The error is then below m p 2^-53 * m C * 4580 / p, and twice
    that for two neighbours is 1e-12 m^2 C: 1e-6 C for m = FLOAT64_CHUNK_EXAMPLES = 1024. One position cannot cancel:
    2e-10 C. Where a and g are float64 themselves, slack is 2^29 times smaller and m = FLOAT32_TERMS: 6e-6 C.
    """
    groups, n = factor.shape
    a, g = factors(use, groups * n)
    positions, given, made = extent(use, groups * n)
    entries = groups * positions * (given + made)
    most = FLOAT32_TERMS if g.dtype is torch.float64 else FLOAT64_CHUNK_EXAMPLES
    step = max(1, min(most, FACTOR_CHUNK_NUMBERS.get(a.device.type, FACTOR_CHUNK_NUMBERS["cpu"]) // max(1, entries)))
    found: dict[str, Tensor] = {}
    for start in range(0, n, step):
        rows = slice(start, start + step)
        left, right = (_exact(t, groups, n, rows) for t in (a, g))
        right = right.mul_(factor[:, rows, None].expand(-1, -1, positions).reshape(groups, -1, 1))
        if "weight" in use.names:
            _gather(found, use.names["weight"], torch.bmm(right.mT, left).flatten(1))
        if "bias" in use.names:
            _gather(found, use.names["bias"], right.sum(1))
    yield from found.items()


def _exact(t: Tensor, groups: int, n: int, rows: slice) -> Tensor:
    """Some rows of each group in float64, as groups x positions of all rows; 0 for NaN, as 0 * NaN would be NaN."""
    if rows.stop - rows.start < n:
        t = t.reshape(groups, n, -1, t.shape[-1])[:, rows]
    t = t.to(torch.float64, copy=True, memory_format=torch.contiguous_format)
    return t.view(groups, -1, t.shape[-1]).nan_to_num_(0, 0, 0)


def _gather(found: dict[str, Tensor], name: str, part: Tensor) -> None:
    found[name] = found[name].add_(part) if name in found else part


def measure(part: Tensor) -> Tensor:
    """Squared norms of rows, in float64, which copies them: for small ones.

    A sum of k squares falls short by at most (k + 2) 2^-53 of itself: 1e-8 for 1e8 entries, which SAFETY covers.
    """
    norm: Tensor = torch.linalg.vector_norm(part.flatten(1), dim=1, dtype=torch.float64)
    return norm.square()


def joined(parts: list[Tensor]) -> Tensor:
    """Side by side, filled up with zeros to a multiple of FLOAT32_CHUNK_SQUARES."""
    rest = -sum(part.shape[1] for part in parts) % FLOAT32_CHUNK_SQUARES
    return torch.cat([*parts, parts[0].new_zeros(len(parts[0]), rest)], 1)


def bound(rows: Tensor) -> Tensor:
    """Upper bounds of squared norms of rows, in float64, from one pass over them; `measure` would copy them first.

    w = FLOAT32_CHUNK_SQUARES squares are added in float32 at least (u = 2^-24), blocks of w in float64. In whatever
    order a block is added, its norm squared falls short by at most (w + 4) u of itself (w for the squares and their
    sum, 1 for the root, twice because it is squared again), and each square by the smallest normal number.
    (w + 8) eps = 6.2e-5 of
    it, twice that, is added; the rest of it exceeds what 2e5 blocks, or 1e8 entries, lose in float64: 2e-11. A block
    whose squares overflow makes its row's norm infinite.
    """
    kind = torch.promote_types(rows.dtype, torch.float32)
    width = rows.shape[1]
    whole = width - width % FLOAT32_CHUNK_SQUARES
    blocks = rows[:, :whole].reshape(len(rows), whole // FLOAT32_CHUNK_SQUARES, FLOAT32_CHUNK_SQUARES)  # a view
    found: Tensor = torch.linalg.vector_norm(blocks, dim=2, dtype=kind).double().square().sum(1)
    if whole < width:
        found = found + torch.linalg.vector_norm(rows[:, whole:], dim=1, dtype=kind).double().square()
    about = torch.finfo(kind)
    return found * (1 + (FLOAT32_CHUNK_SQUARES + 8) * about.eps) + width * about.tiny


# -------------------------------------------------------------------------------------------------------- results


class Norms(NamedTuple):
    """Squared norms of the uses in `later`, whose sum is still to be taken; elsewhere gradients were made."""

    squares: Tensor
    made: dict[str, Tensor]
    later: list[Use]


def norms_first(
    module: nn.Module,
    params: dict[str, Tensor],
    x: Tensor,
    y: Tensor,
    loss: BatchLoss,
    owned: Owned | None = None,
    *,
    apart: Callable[[Use, int], bool] = short,
    room: dict[str, Tensor] | None = None,
) -> Norms:
    """Norms of the uses that stand `apart`; gradients elsewhere.

    room: zeros, for the gradients of `taped` modules, whose rules write there instead.
    """
    n, room = len(x), room or {}
    found = Norms(torch.zeros(n, dtype=torch.float64, device=x.device), {}, [])

    def visit(use: Use) -> None:
        if apart(use, n):
            found.squares.add_(squares(use, n))
            found.later.append(use)
            return
        mine: dict[str, Tensor] = {}
        if room and use.once and getattr(use.module, "taped", False):
            mine = {own: room[name] for own, name in use.names.items() if name in room}
            use.module.room = mine  # type: ignore[assignment]
        for own, part in RULES[type(use.module)](use.module, use.a, use.g, n):
            if not (name := use.names.get(own)):
                continue
            if name in room:
                if part is not mine.get(own):
                    room[name].add_(part.view_as(room[name]))
            else:
                found.made[name] = found.made[name] + part if name in found.made else part

    sweep(module, params, x, y, loss, visit, owned)
    return found


class Room:
    """Where gradients of examples by `taped` modules' parameters stand in one matrix, examples x entries."""

    def __init__(self, owned: Owned, params: dict[str, Tensor]) -> None:
        mine = {name for part, names in owned if getattr(part, "taped", False) for name in names.values()}
        self.shapes = {name: p.shape for name, p in params.items() if name in mine}
        self.sizes = [shape.numel() for shape in self.shapes.values()]
        self.sizes.append(-sum(self.sizes) % FLOAT32_CHUNK_SQUARES)  # rows then start where kernels like it

    def make(self, n: int, like: Tensor, kind: torch.dtype) -> tuple[Tensor, dict[str, Tensor]]:
        rows = torch.zeros(n, sum(self.sizes), dtype=kind, device=like.device)
        parts = zip(
            self.shapes.items(), rows.split_with_sizes(self.sizes, 1), strict=False
        )  # what fills up has no name
        return rows, {name: part.view(n, *shape) for (name, shape), part in parts}


def gradients(
    module: nn.Module, params: dict[str, Tensor], x: Tensor, y: Tensor, loss: BatchLoss, owned: Owned | None = None
) -> dict[str, Tensor]:
    """Of every example, by parameter; one that was not used is missing."""
    return norms_first(module, params, x, y, loss, owned, apart=never).made


def per_example(
    module: nn.Module, params: dict[str, Tensor], x: Tensor, y: Tensor, loss: BatchLoss, *, buffer: Tensor
) -> Tensor:
    """Gradients, examples x parameters in the order of `params`, written to `buffer`."""
    found, start = gradients(module, params, x, y, loss), 0
    for name, value in params.items():
        part = buffer[: len(x), start : (start := start + value.numel())]
        part.copy_(found[name].flatten(1)) if name in found else part.zero_()
    return buffer[: len(x)]


def squared_norms(module: nn.Module, params: dict[str, Tensor], x: Tensor, y: Tensor, loss: BatchLoss) -> Tensor:
    """Of every example's gradient, in float64."""
    found = norms_first(module, params, x, y, loss)
    for part in found.made.values():
        found.squares.add_(measure(part))
    return found.squares
