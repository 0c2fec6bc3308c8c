"""Gradients of single examples from one backward pass.

The gradient of a layer's weights is a product of its input a and of the loss's gradient g with respect to its output.
Both are available in one backward pass over a batch. Autograd never computes a summed weight gradient. Instead a hook
passes (a, g) of every layer to its *rule*, which computes one gradient per example. If the product is larger than its
factors, only its norm is computed (`squares`), and the weighted sum over examples is one matrix product. A layer that
is `taped` needs no hook: it asks for the `tape` of the pass and reports its uses itself. Parameters that a module
without a rule owns directly, as a class token or the embeddings of positions, are spread: each example reads a copy of
its own, and autograd computes the gradients of the copies.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn import functional

from sordino.errors import SordinoError
from sordino.models import outer
from sordino.models.arithmetic import FLOAT32_TERMS, FLOAT64_TERMS

# (module, input, output gradient, examples) -> (parameter's name in the module, its gradient: examples x shape). While
# a rule runs, the module holds the parameters of the call. The trained ones are plain tensors, not `nn.Parameter`s.
GradientRule = Callable[[nn.Module, Tensor, Tensor, int], Iterable[tuple[str, Tensor]]]
BatchLoss = Callable[[Tensor, Tensor], Tensor]  # (outputs, labels) -> summed loss
Owned = list[tuple[nn.Module, dict[str, str]]]  # modules that own trained parameters: name in the module -> full name

WRITE_COST_THRESHOLD = 10  # multiplications that take as long as writing, measuring and summing one gradient entry
MAX_INPUT_NORM = 1e30  # of a layer's input
MOST_CHANNELS = 64  # of convolutions of a small network
FLOAT32_CHUNK_SQUARES = 512  # squares that are added in float32; their sums are added in float64
FLOAT64_CHUNK_EXAMPLES = 1024  # examples of one float64 product
FACTOR_CHUNK_NUMBERS = {"cpu": 2**20, "cuda": 2**26}  # numbers in the factors of one float64 product


class Mask(NamedTuple):
    """Dropout of a layer's input that its rule still has to apply, with the seed of the pass."""

    number: int  # of the layer
    rate: float


class Use(NamedTuple):
    """One use of a layer in a forward pass: its input a, and the loss's gradient g with respect to its output."""

    module: nn.Module
    names: dict[str, str]
    a: Tensor
    g: Tensor
    once: bool  # the parameters have no other use
    parts: outer.Factors | None = None  # a and g as `outer` reads them
    more: tuple[Tensor, ...] = ()  # what the rule of a `taped` module needs besides; the bias's gradient, with `parts`
    done: bool = False  # g is the gradient of the one named parameter for each example
    mask: Mask | None = None  # of a, for the rule of a `taped` module; the last of `more` is its seed


def trained(parameter: object) -> bool:
    """Whether a parameter belongs to the call. Frozen ones stay `nn.Parameter`s."""
    return isinstance(parameter, Tensor) and not isinstance(parameter, nn.Parameter)


def times(a: Tensor, b: Tensor) -> Tensor:
    """A batch of matrix products. A CPU gets contiguous factors: transposed ones can be thirty times slower."""
    return torch.bmm(a, b) if a.is_cuda else torch.bmm(a.contiguous(), b.contiguous())


def summed(z: Tensor, y: Tensor) -> Tensor:
    """The cross entropy, summed over examples."""
    return functional.cross_entropy(z.float() if z.dtype is torch.bfloat16 else z, y, reduction="sum")


# ------------------------------------------------------------------------------------------------------------ rules


def linear(module: Any, a: Tensor, g: Tensor, n: int) -> Iterator[tuple[str, Tensor]]:
    """g a^T, summed over positions. Windows or tokens in the first axis are positions too."""
    a, g = a.reshape(n, -1, a.shape[-1]), g.reshape(n, -1, g.shape[-1])
    if trained(module.weight):
        a = a.to(g.dtype)
        yield "weight", times(g.mT, a) if g.shape[1] > 1 else g.mT * a
    if trained(module.bias):
        yield "bias", g.sum(1) if g.shape[1] > 1 else g[:, 0]


def conv(module: Any, a: Tensor, g: Tensor, n: int) -> Iterator[tuple[str, Tensor]]:
    """The rule of a convolution, which is a linear layer on patches in each of its groups."""
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
    """The rule of an embedding: g is added to the row of each token."""
    ids, g = a.reshape(n, -1).long(), g.reshape(n, -1, g.shape[-1])
    if module.padding_idx is not None:
        g = g.masked_fill((ids == module.padding_idx).unsqueeze(-1), 0)
    words, width = module.weight.shape
    rows = (ids + words * torch.arange(n, device=ids.device).unsqueeze(-1)).flatten()
    yield "weight", g.new_zeros(n * words, width).index_add_(0, rows, g.flatten(0, 1)).reshape(n, words, width)


def layer_norm(module: Any, a: Tensor, g: Tensor, n: int) -> Iterator[tuple[str, Tensor]]:
    """The rule of a layer norm."""
    shape = module.normalized_shape
    if trained(module.weight):
        yield "weight", (functional.layer_norm(a.to(g.dtype), shape, eps=module.eps) * g).reshape(n, -1, *shape).sum(1)
    if trained(module.bias):
        yield "bias", g.reshape(n, -1, *shape).sum(1)


def channel_norm(module: Any, a: Tensor, g: Tensor, n: int) -> Iterator[tuple[str, Tensor]]:
    """The rule of group and instance norm: one scale and one shift per channel."""
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
    nn.Conv3d: conv,
    nn.Embedding: embedding,
    nn.LayerNorm: layer_norm,
    nn.GroupNorm: channel_norm,
    nn.InstanceNorm1d: channel_norm,
    nn.InstanceNorm2d: channel_norm,
    nn.InstanceNorm3d: channel_norm,
}


def patches(module: Any, a: Tensor) -> Tensor:
    """The patches of a convolution's input: rows x positions x entries."""
    kernel, sides = module.kernel_size, module._reversed_padding_repeated_twice
    if any(sides):
        a = functional.pad(a, sides, mode="constant" if module.padding_mode == "zeros" else module.padding_mode)
    for axis, (k, s, d) in enumerate(zip(kernel, module.stride, module.dilation, strict=True), 2):
        a = a.unfold(axis, d * (k - 1) + 1, s)[..., ::d]  # a view with one more trailing axis
    dims = len(kernel)
    a = a.movedim(1, 1 + dims)  # rows x positions x channels x kernel
    return a.reshape(len(a), math.prod(a.shape[1 : 1 + dims]), -1)


# ------------------------------------------------------------------------------------------------------- one pass


def owners(module: nn.Module, names: Iterable[str]) -> Owned:
    """The modules that own one of the named parameters. A tied parameter is listed under its first name.

    A module that is `by_parts` reads its parameters through modules of its own, which are listed instead.
    """
    requested = set(names)
    full_names = {id(p): name for name, p in module.named_parameters() if name in requested}
    owned: Owned = []
    for part in module.modules():
        mine = {local: full_names[id(p)] for local, p in part.named_parameters(recurse=False) if id(p) in full_names}
        if mine and not getattr(part, "by_parts", False):
            owned.append((part, mine))
    return owned


def supported(module: nn.Module, *, spread: bool = False) -> list[str]:
    """The modules whose trainable parameters no rule covers; empty if all are covered.

    Args:
      module: the module.
      spread: parameters whose first axis has length 1 may be spread over examples. Whether the module reads them so
        must be checked (`probe.agrees`).
    """
    odd = []
    for name, part in module.named_modules():
        if getattr(part, "by_parts", False):
            continue
        trainable = {key for key, p in part.named_parameters(recurse=False) if p.requires_grad}
        covered = type(part) in RULES
        if covered and type(part).__module__.startswith("torch.nn"):  # weight norm, for example, has other names
            covered = trainable <= {"weight", "bias"}
        if isinstance(part, nn.Embedding):  # these options read other examples, or write to the weights
            covered = covered and part.max_norm is None and not part.scale_grad_by_freq
        if spread and type(part) not in RULES:
            mine = (p for p in part.parameters(recurse=False) if p.requires_grad)
            covered = all(p.dim() > 1 and len(p) == 1 for p in mine)
        if trainable and not covered:
            odd.append(f"{name or 'the module itself'} ({type(part).__name__})")
    return odd


class Tape:
    """What a forward pass records for the backward pass. With a `seed`, masks of dropout follow from it."""

    def __init__(self, visit: Callable[[Use], None], owned: Owned, like: Tensor, seed: Tensor | None = None) -> None:
        self.seed = seed
        self.visit, self.names = visit, dict(owned)
        self.times: dict[str, int] = {}
        # Autograd sees no trained parameter. Every path to the loss starts at `root` or at another leaf.
        self.root = torch.empty(0, device=like.device, requires_grad=True)
        self.leaves = [self.root]
        self.spread: list[tuple[nn.Module, str, str, Tensor]] = []  # module, names and leaf
        self._cast: tuple[Tensor | None, Tensor | None] = None, None
        self._nothing: dict[torch.dtype, Tensor] = {}
        self.traced = get_proxy_mode() is not None  # the pass is traced, to be compiled
        self.module: nn.Module | None = None  # of the pass

    def nothing(self, kind: torch.dtype) -> Tensor:
        """The first argument of a product with beta = 0, which does not read it."""
        if kind not in self._nothing:
            self._nothing[kind] = torch.empty((), dtype=kind, device=self.root.device)
        return self._nothing[kind]

    def used(self, module: nn.Module) -> None:
        """Count a use of the module's parameters."""
        for name in self.names[module].values():
            self.times[name] = self.times.get(name, 0) + 1

    def report(
        self, module: nn.Module, a: Tensor, g: Tensor, more: tuple[Tensor, ...] = (), mask: Mask | None = None
    ) -> None:
        """Pass a use to the visitor."""
        names = self.names[module]
        once = all(self.times[name] == 1 for name in names.values())
        self.visit(Use(module, names, a, g, once, None, more, mask=mask))

    def cast(self, x: Tensor, kind: torch.dtype) -> Tensor:
        """x in another type, converted once if several layers in turn read it."""
        if x.dtype == kind:
            return x
        if self._cast[0] is not x:
            self._cast = x, x.to(kind)
        assert self._cast[1] is not None
        return self._cast[1]

    def hook(self, part: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any], out: Tensor) -> None:
        """The forward hook of a layer: registers a hook on its output for the backward pass."""
        a = (args[0] if args else next(iter(keywords.values()))).detach()
        version = a._version
        self.used(part)

        def back(g: Tensor) -> None:
            if a._version != version:
                raise SordinoError(self._overwritten(part))
            self.report(part, a, g.detach())

        if not out.requires_grad:
            self.leaves.append(out.requires_grad_())
        out.register_hook(back)  # type: ignore[no-untyped-call]

    def _overwritten(self, part: nn.Module) -> str:
        """Why the input of a layer is not what it was."""
        wholes = [each for each in self.module.modules() if compiled(each)] if self.module is not None else []
        inside = next((each for each in wholes if part in set(each.modules())), None)
        if inside is not None:
            kind = type(getattr(inside, "_orig_mod", inside)).__name__
            return (
                f"module: torch.compile lets {kind} reuse the memory of what {part} reads, which gradients of single "
                "examples need afterwards; pass the module without torch.compile. On a GPU, "
                "TorchModel(…, compile=True) compiles the passes."
            )
        return f"module: the input of {part} is overwritten in place; use an operation that returns a new tensor."

    def halve(self, part: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Convert a layer's input to the type of autocast, once for all layers that read it, as the layer would."""
        where = self.root.device.type
        if not args or not torch.is_autocast_enabled(where) or not isinstance(args[0], Tensor):
            return None
        return self.cast(args[0], torch.get_autocast_dtype(where)), *args[1:]

    def forward(self, module: nn.Module, x: Tensor, y: Tensor, loss: BatchLoss) -> Tensor:
        """The summed loss, with hooks on all layers that own trained parameters."""
        parts = [part for part in self.names if type(part) in RULES and not getattr(part, "taped", False)]
        handles: list[Any] = [part.register_forward_hook(self.hook, with_kwargs=True) for part in parts]
        handles += [part.register_forward_pre_hook(self.halve) for part in parts if RULES[type(part)] in (linear, conv)]
        before, _running.tape, self.module = tape(), self, module
        try:
            with torch.enable_grad():
                return loss(module(x), y)
        finally:
            _running.tape = before
            self._cast = None, None
            for handle in handles:
                handle.remove()

    def backward(self, total: Tensor) -> None:
        """Run the backward pass without autocast, because autograd's thread does not know its type."""
        if total.requires_grad:
            leaves = self.leaves + [leaf for *_, leaf in self.spread]
            with torch.autocast(total.device.type, enabled=False):
                found = torch.autograd.grad(total, leaves, allow_unused=True)[len(self.leaves) :]
            for (part, key, name, _), g in zip(self.spread, found, strict=True):
                if g is not None:
                    self.visit(Use(part, {key: name}, g, g, False, done=True))


def compiled(module: nn.Module) -> bool:
    """Whether `torch.compile` made the module, or was called on it in place."""
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


_running = threading.local()


def tape() -> Tape | None:
    """The tape of the pass that this thread runs, if any."""
    return getattr(_running, "tape", None)


@contextmanager
def placed(
    owned: Owned, params: dict[str, Tensor], notes: Tape | None = None, n: int = 1, channels_last: bool = False
) -> Iterator[None]:
    """In this context the modules hold the parameters of the call, including tied ones.

    For a tape, parameters of modules without a rule are spread over n examples, as leaves of autograd.
    """
    places = [(part, key, name, params[name].detach()) for part, names in owned for key, name in names.items()]
    before = [part._parameters[key] for part, key, *_ in places]
    try:
        for part, key, name, value in places:
            if notes is not None and type(part) not in RULES:
                value = value.expand(n, *value.shape[1:]).requires_grad_()
                notes.spread.append((part, key, name, value))
            if channels_last and isinstance(part, nn.Conv2d) and value.dim() == 4:
                value = laid_out(value)
            part._parameters[key] = value  # type: ignore[assignment]
        yield
    finally:
        for (part, key, *_), old in zip(places, before, strict=True):
            part._parameters[key] = old


def last_channels(module: nn.Module, like: Tensor) -> bool:
    """Whether channels come last in the memory of a CPU: for small networks that pool, and no others.

    Pooling is then six times as fast, and the gradient with respect to the input of a small convolution three times.
    Those of large ones are slower.
    """
    parts = list(module.modules())
    kernels = [part.weight for part in parts if isinstance(part, nn.Conv2d)]
    pools = any(isinstance(part, nn.MaxPool2d) for part in parts)
    return pools and not like.is_cuda and all(len(kernel) <= MOST_CHANNELS for kernel in kernels)


def laid_out(kernel: Tensor) -> Tensor:
    """A kernel with its channels last, which the output of the convolution and the layers after it then have too."""
    _, channels, height, width = kernel.shape
    strides = (channels * height * width, 1, width * channels, channels)  # `contiguous` ignores axes of length 1
    return kernel.new_empty_strided(kernel.shape, strides).copy_(kernel)


def sweep(
    module: nn.Module,
    params: dict[str, Tensor],
    x: Tensor,
    y: Tensor,
    loss: BatchLoss,
    visit: Callable[[Use], None],
    owned: Owned | None = None,
    seed: Tensor | None = None,
) -> None:
    """Visit every use of a layer with trained parameters, from the last to the first."""
    owned = owners(module, params) if owned is None else owned
    notes = Tape(visit, owned, x, seed)
    with placed(owned, params, notes, len(x), last_channels(module, x)):
        notes.backward(notes.forward(module, x, y, loss))


# ------------------------------------------------------------------------------------------- norms without products


def extent(use: Use, n: int) -> tuple[int, int, int]:
    """Positions, inputs and outputs of a layer that is a matrix product."""
    weight: Any = use.module.weight
    if hasattr(use.module, "kernel_size"):
        return use.g.numel() // (n * len(weight)), math.prod(weight.shape[1:]), len(weight)
    outputs, inputs = weight.shape[-2:]  # a leading axis of clients is possible
    return use.g.numel() // (n * outputs), inputs, outputs


def short(use: Use, n: int) -> bool:
    """Whether the norm is cheaper from positions x positions (|a a^T * g g^T|) than from the product itself."""
    if tokens(use, n):
        return True
    if not use.once or type(use.module) not in (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d):
        return False
    positions, inputs, outputs = extent(use, n)
    if getattr(use.module, "groups", 1) > 1:
        return False
    return (
        positions**2 * (inputs + outputs) + positions * inputs * outputs
        < (positions + WRITE_COST_THRESHOLD) * inputs * outputs
    )


def single(use: Use, n: int) -> bool:
    """Whether each example passes a linear layer once, as in a head. Its gradient then has rank one."""
    return use.once and RULES.get(type(use.module)) is linear and "weight" in use.names and extent(use, n)[0] == 1


def tokens(use: Use, n: int) -> bool:
    """Whether the rows of an embedding that an example reads are fewer than all rows, so that only they are stored."""
    return use.once and type(use.module) is nn.Embedding and use.a.numel() < n * len(use.module.weight)


def light(use: Use, n: int) -> bool:
    """Layers whose gradient has rank one, and embeddings."""
    return single(use, n) or tokens(use, n)


def half(use: Use, n: int) -> bool:
    """The same, and matrices in half precision, whose gradients `outer` computes twice and never stores."""
    return light(use, n) or (use.once and "weight" in use.names and outer.serves(use.module, use.g))


def prepared(use: Use, n: int) -> Use:
    """A use whose gradient is summed later, in the form in which it is stored until then."""
    if use.parts is not None:
        return use
    if tokens(use, n):
        return compact(use, n)
    if not single(use, n) and outer.serves(use.module, use.g):
        parts = outer.prepare(use.module, use.a, use.g, n)
        more = (parts.g.sum(1, dtype=torch.float32),) if "bias" in use.names else ()
        return use._replace(a=parts.a, g=parts.g, parts=parts, more=more)
    return use


def compact(use: Use, n: int) -> Use:
    """A use of an embedding, with one row of g per token of the example: rows of equal tokens are added up.

    The sum is at the first place of the token, and the other places are zero. It is a product of zeros and ones with g,
    so it depends on the example alone. It is what is measured and summed.
    """
    module: Any = use.module
    ids, g = use.a.reshape(n, -1).long(), use.g.reshape(n, -1, use.g.shape[-1])
    g = g.to(torch.promote_types(g.dtype, torch.float32))
    if module.padding_idx is not None:
        g = g.masked_fill((ids == module.padding_idx).unsqueeze(-1), 0)
    places = torch.arange(ids.shape[1], device=ids.device)
    first = (ids.unsqueeze(1) == ids.unsqueeze(2)).to(g.dtype).argmax(2)  # examples x positions
    return use._replace(a=ids, g=times((first.unsqueeze(1) == places.unsqueeze(1)).to(g.dtype), g))


def never(use: Use, n: int) -> bool:
    """False for every use."""
    return False


def factors(use: Use, n: int) -> tuple[Tensor, Tensor]:
    """a and g as examples x positions x entries."""
    positions, inputs, outputs = extent(use, n)
    if not hasattr(use.module, "kernel_size"):
        return use.a.reshape(n, positions, inputs), use.g.reshape(n, positions, outputs)
    return patches(use.module, use.a).reshape(n, positions, inputs), use.g.flatten(2).mT.reshape(n, positions, outputs)


def squares(use: Use, n: int) -> Tensor:
    """An upper bound on each example's squared norm |sum over p of g_p a_p^T|^2 (and |sum g_p|^2), in float64.

    For one position it is the product of two norms in float64. For several positions it is the sum over p, q of (a_p .
    a_q)(g_p . g_q), from Gram matrices in the type of g with unit roundoff u = eps / 2. The error of a scalar product
    of k numbers is at most k u |a_p| |a_q|, plus 2 k tiny at the end of the range. Summed over p and q, the error of
    the product of both is at most (inputs + outputs + 2) u whole, where whole = |a|^2 |g|^2 + p |g|^2 for weight and
    bias, plus 2 p tiny (inputs |g|^2 + outputs |a|^2 + p). The error of the bias is at most 2 p u whole. Twice the
    first is added, because terms may cancel: slack = (inputs + outputs + p) eps, which is 2e-5 for 64 inputs, 64
    outputs and 16 positions in float32. `whole` is itself an upper bound (`bound`). So the exact norm of what `total`
    sums is at most this bound. If that holds only because of overflow, the norm counts as infinite.

    An input so large that its bounded g would lose digits counts as infinite. Products in half precision and rows of an
    embedding are measured as they are summed (`outer.squares`, `bound`).
    """
    if use.parts is not None:
        return outer.squares(use.parts)
    if type(use.module) is nn.Embedding:
        return bound(use.g.flatten(1))
    a, g = factors(use, n)
    positions, inputs, outputs = extent(use, n)
    size = measure if positions == 1 else bound
    entries, ends = size(a.flatten(1)) if "weight" in use.names else None, size(g.flatten(1))
    whole = ends * float(positions * ("bias" in use.names))
    if entries is not None:
        entries = entries.masked_fill(entries > MAX_INPUT_NORM**2, math.inf)
        whole = whole + ends * entries
    if positions == 1:
        return whole
    computed = torch.zeros_like(whole)
    about = torch.finfo(g.dtype)
    if entries is not None:
        computed += times(a, a.mT).mul_(times(g, g.mT)).sum((1, 2), dtype=torch.float64)
        computed += 2 * positions * about.tiny * (inputs * ends + outputs * entries + positions)
    if "bias" in use.names:
        computed += measure(g.sum(1))
    computed = computed.masked_fill(~computed.isfinite(), math.inf)
    upper: Tensor = computed.clamp_min(0) + (inputs + outputs + positions) * about.eps * whole
    return upper


def total(use: Use, factor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The sum over the examples of each group of factor times gradient, in float64. Non-finite terms have factor zero.

    In float64, a, g and (for float32 numbers) factor times g are exact. A product of m examples adds K = m p terms, so
    its error is at most (K + 1) 2^-53 times the sum over examples of factor |a| |g|. Terms of one example may cancel,
    so the clip C itself does not bound this. But `squares` is at least slack |a|^2 |g|^2, so factor |a| |g| <= C /
    sqrt(slack). `short` accepts p positions only if p^2 (inputs + outputs) < 10 inputs outputs, so p^2 < 2.5 (inputs +
    outputs) and slack > 2^-23 p^2 / 2.5. The error is then below m p 2^-53 * m C * 4580 / p. Twice that, for two
    neighbours, is 1e-12 m^2 C, which is 1e-6 C for m = FLOAT64_CHUNK_EXAMPLES = 1024. One position cannot cancel: 2e-10
    C. If a and g are float64, slack is 2^29 times smaller and m = FLOAT32_TERMS: 6e-6 C. Products in half precision are
    summed by `outer.sums`, and rows of an embedding by `token_sums`.
    """
    groups, n = factor.shape
    if use.parts is not None:
        yield use.names["weight"], outer.sums(use.parts, factor)
        return
    if type(use.module) is nn.Embedding:
        yield use.names["weight"], token_sums(use, factor)
        return
    a, g = factors(use, groups * n)
    positions, inputs, outputs = extent(use, groups * n)
    entries = groups * positions * (inputs + outputs)
    most = FLOAT32_TERMS if g.dtype is torch.float64 else FLOAT64_CHUNK_EXAMPLES
    step = max(1, min(most, FACTOR_CHUNK_NUMBERS.get(a.device.type, FACTOR_CHUNK_NUMBERS["cpu"]) // max(1, entries)))
    sums: dict[str, Tensor] = {}
    for start in range(0, n, step):
        rows = slice(start, start + step)
        left, right = (_exact(t, groups, n, rows) for t in (a, g))
        right = right.mul_(factor[:, rows, None].expand(-1, -1, positions).reshape(groups, -1, 1))
        if "weight" in use.names:
            _accumulate(sums, use.names["weight"], torch.bmm(right.mT, left).flatten(1))
        if "bias" in use.names:
            _accumulate(sums, use.names["bias"], right.sum(1))
    yield from sums.items()


def token_sums(use: Use, factor: Tensor, out: Tensor | None = None) -> Tensor:
    """The sum of factor times row over each token of an embedding, in float64.

    A float32 factor times a float32 row is exact in float64. Each example adds at most one row other than zero to a
    token, so a number passes at most FLOAT64_TERMS additions before the sum of these examples is added: see
    `arithmetic.in_chunks`.

    Args:
      use: the use of the embedding.
      factor: groups x examples.
      out: zeros, one row for one group. Up to FLOAT64_TERMS examples are added there without a table of their own.

    Returns:
      The sums, or `out`.
    """
    (groups, n), (words, width) = factor.shape, use.module.weight.shape  # type: ignore[misc]
    ids, rows = use.a.view(groups, n, -1), use.g.view(groups, n, -1, width)
    if out is not None and groups == 1 and n <= FLOAT64_TERMS:
        part = rows.to(torch.float64, copy=True).nan_to_num_(0, 0, 0).mul_(factor[:, :, None, None])
        out.view(words, width).index_add_(0, ids.flatten(), part.flatten(0, 2))
        return out
    total = torch.zeros(groups, words * width, dtype=torch.float64, device=rows.device)
    start = words * torch.arange(groups, device=ids.device).view(-1, 1, 1)
    for first in range(0, n, FLOAT64_TERMS):
        k = slice(first, first + FLOAT64_TERMS)
        part = rows[:, k].to(torch.float64, copy=True).nan_to_num_(0, 0, 0).mul_(factor[:, k, None, None])
        sums = total.new_zeros(groups * words, width)
        total += sums.index_add_(0, (ids[:, k] + start).flatten(), part.flatten(0, 2)).view(groups, -1)
    return total if out is None else out.copy_(total)


def _exact(t: Tensor, groups: int, n: int, rows: slice) -> Tensor:
    """Some rows of each group in float64: groups x positions of all rows. NaN becomes 0, because 0 * NaN is NaN."""
    if rows.stop - rows.start < n:
        t = t.reshape(groups, n, -1, t.shape[-1])[:, rows]
    t = t.to(torch.float64, copy=True, memory_format=torch.contiguous_format)
    return t.view(groups, -1, t.shape[-1]).nan_to_num_(0, 0, 0)


def _accumulate(sums: dict[str, Tensor], name: str, part: Tensor) -> None:
    sums[name] = sums[name].add_(part) if name in sums else part


def measure(part: Tensor) -> Tensor:
    """Squared norms of rows in float64. This copies the rows, so it is for small ones.

    A sum of k squares is too small by a relative error of at most (k + 2) 2^-53: 1e-8 for 1e8 entries. SAFETY covers
    it.
    """
    norm: Tensor = torch.linalg.vector_norm(part.flatten(1), dim=1, dtype=torch.float64)
    return norm.square()


def joined(parts: list[Tensor]) -> Tensor:
    """Matrices side by side, padded with zero columns to a multiple of FLOAT32_CHUNK_SQUARES."""
    rest = -sum(part.shape[1] for part in parts) % FLOAT32_CHUNK_SQUARES
    return torch.cat([*parts, parts[0].new_zeros(len(parts[0]), rest)], 1)


def bound(rows: Tensor) -> Tensor:
    """Upper bounds on squared norms of rows, in float64, from one pass. Unlike `measure` this does not copy the rows.

    w = FLOAT32_CHUNK_SQUARES squares are added in float32 at least (u = 2^-24), and blocks of w squares in float64. For
    any order of additions, the squared norm of a block is too small by at most (w + 4) u of itself (w for the squares
    and their sum, 1 for the root, doubled by squaring), and each square by the smallest normal number. The function
    adds (w + 8) eps = 6.2e-5 of it, which is twice that. The remainder exceeds what 2e5 blocks, or 1e8 entries, lose in
    float64: 2e-11. A block whose squares overflow makes the norm of its row infinite.
    """
    kind = torch.promote_types(rows.dtype, torch.float32)
    width = rows.shape[1]
    whole = width - width % FLOAT32_CHUNK_SQUARES
    blocks = rows[:, :whole].reshape(len(rows), whole // FLOAT32_CHUNK_SQUARES, FLOAT32_CHUNK_SQUARES)  # a view
    squares: Tensor = torch.linalg.vector_norm(blocks, dim=2, dtype=kind).double().square().sum(1)
    if whole < width:
        squares = squares + torch.linalg.vector_norm(rows[:, whole:], dim=1, dtype=kind).double().square()
    about = torch.finfo(kind)
    return squares * (1 + (FLOAT32_CHUNK_SQUARES + 8) * about.eps) + width * about.tiny


# -------------------------------------------------------------------------------------------------------- results


def first_name(use: Use) -> str:
    """The full name of a parameter of the use; all of them belong to one layer."""
    return next(iter(use.names.values()))


def explicit(use: Use, n: int) -> Iterable[tuple[str, Tensor]]:
    """The gradients of single examples by the layer's rule, unless they are known."""
    if use.done:
        return [(next(iter(use.names)), use.g)]
    if use.more:
        use.module.factors, use.module.mask = use.more, use.mask  # type: ignore[assignment]
    return RULES[type(use.module)](use.module, use.a, use.g, n)


def layers(owned: Owned) -> list[tuple[str, ...]]:
    """The trained parameters of each layer. A layer is one module; modules that share a parameter are one layer."""
    found: list[tuple[str, ...]] = []
    for _, names in owned:
        mine = tuple(names.values())
        shared = [layer for layer in found if set(layer) & set(mine)]
        merged = tuple(dict.fromkeys(name for layer in (*shared, mine) for name in layer))
        at = found.index(shared[0]) if shared else len(found)
        found = [layer for layer in found if layer not in shared]
        found.insert(at, merged)
    return found


class Norms(NamedTuple):
    """Gradients of most uses, and squared norms of the uses in `later`, whose sum is still to be computed."""

    squares: Tensor  # layers x examples; one row if layers are not told apart
    gradients: dict[str, Tensor]
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
    run: Callable[..., None] | None = None,
    layer_of: Mapping[str, int] | None = None,
) -> Norms:
    """Norms of the uses that `apart` selects, and gradients of the others.

    Args:
      module: the module.
      params: the trained parameters by name.
      x: the rows.
      y: the labels.
      loss: the summed loss.
      owned: the modules that own the parameters, if known.
      apart: selects the uses of which only the norm is computed.
      room: tensors of zeros into which the rules of `taped` modules write their gradients.
      run: runs the pass, with the arguments of `sweep` and `apart`; by default `sweep` does.
      layer_of: the layer of each parameter, if each layer has a norm of its own.

    Returns:
      Norms and gradients.
    """
    n, room = len(x), room or {}
    rows = 1 if layer_of is None else 1 + max(layer_of.values())
    result = Norms(torch.zeros(rows, n, dtype=torch.float64, device=x.device), {}, [])

    def gather(name: str, part: Tensor) -> None:
        result.gradients[name] = result.gradients[name] + part if name in result.gradients else part

    def visit(use: Use) -> None:
        if not use.done and (use.parts is not None or apart(use, n)):
            use = prepared(use, n)
            if use.parts is not None and use.more:
                gather(use.names["bias"], use.more[0])
            result.squares[0 if layer_of is None else layer_of[first_name(use)]].add_(squares(use, n))
            result.later.append(use)
            return
        mine: dict[str, Tensor] = {}
        if room and use.once and getattr(use.module, "taped", False):
            mine = {key: room[name] for key, name in use.names.items() if name in room}
            use.module.room = mine  # type: ignore[assignment]
        for key, part in explicit(use, n):
            if not (name := use.names.get(key)):
                continue
            if name in room:
                if part is not mine.get(key):
                    room[name].add_(part.view_as(room[name]))
            else:
                gather(name, part)

    owned = owners(module, params) if owned is None else owned
    if run is None:
        sweep(module, params, x, y, loss, visit, owned)
    else:
        run(module, params, x, y, loss, visit, owned, apart)
    return result


class Room:
    """The layout of one matrix (examples x entries) with the gradients of all parameters of `taped` modules."""

    def __init__(self, owned: Owned, params: dict[str, Tensor]) -> None:
        mine = {name for part, names in owned if getattr(part, "taped", False) for name in names.values()}
        self.shapes = {name: p.shape for name, p in params.items() if name in mine}
        self.sizes = [shape.numel() for shape in self.shapes.values()]
        self.sizes.append(-sum(self.sizes) % FLOAT32_CHUNK_SQUARES)  # aligns the rows for fast kernels

    def make(self, n: int, like: Tensor, kind: torch.dtype) -> tuple[Tensor, dict[str, Tensor]]:
        rows = torch.zeros(n, sum(self.sizes), dtype=kind, device=like.device)
        parts = zip(self.shapes.items(), rows.split_with_sizes(self.sizes, 1), strict=False)  # the padding has no name
        return rows, {name: part.view(n, *shape) for (name, shape), part in parts}


def gradients(
    module: nn.Module, params: dict[str, Tensor], x: Tensor, y: Tensor, loss: BatchLoss, owned: Owned | None = None
) -> dict[str, Tensor]:
    """The gradients of every example by parameter name. Unused parameters are missing."""
    return norms_first(module, params, x, y, loss, owned, apart=never).gradients


def per_example(
    module: nn.Module, params: dict[str, Tensor], x: Tensor, y: Tensor, loss: BatchLoss, *, buffer: Tensor
) -> Tensor:
    """Write the gradients, examples x parameters in the order of `params`, to `buffer`, and return its rows."""
    by_name, start = gradients(module, params, x, y, loss), 0
    for name, value in params.items():
        part = buffer[: len(x), start : (start := start + value.numel())]
        part.copy_(by_name[name].flatten(1)) if name in by_name else part.zero_()
    return buffer[: len(x)]


def squared_norms(module: nn.Module, params: dict[str, Tensor], x: Tensor, y: Tensor, loss: BatchLoss) -> Tensor:
    """The squared norm of every example's gradient, in float64."""
    result = norms_first(module, params, x, y, loss)
    for part in result.gradients.values():
        result.squares.add_(measure(part))
    return result.squares[0]
