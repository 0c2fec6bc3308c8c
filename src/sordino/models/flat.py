"""Any `torch.nn.Module` as a model over one flat theta, with gradients clipped example by example."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy, threshold

from sordino.core import SAFETY, Shard, SordinoError, nearest
from sordino.models import examples
from sordino.models.examples import Owned, Use, measure

MODES = ("auto", "tape", "two-pass", "vmap")
BUDGET = {"cpu": 2**29, "cuda": 2**33}  # bytes of a chunk's gradients and activations
ROOMY = 256  # examples of a chunk on a CPU: more would leave its caches
FEW, SMALL = 16, 2**20  # records and parameters up to which a call costs more than what it does


def summed(z: Tensor, y: Tensor) -> Tensor:
    """Cross entropy, summed over examples."""
    return cross_entropy(z.float() if z.dtype is torch.bfloat16 else z, y, reduction="sum")


class Flat:
    """`theta` strings together the parameters of `module` that require a gradient; the others stay as they are.

    A row of x is reshaped to `shape` before the module sees it. The modes give the same sum:

    - `tape`: one backward pass gives every example's gradient; they are held, measured and summed with their factors.
    - `two-pass`: the same pass, but of a layer with p positions, i entries in and o out only the norm is taken
      where that costs less (p^2 (i + o) + p i o < (p + MOVED) i o multiplications); a second pass over the layers
      then sums what the first kept of them. Nothing is drawn anew, so dropout is the same in both.
    - `vmap`: `torch.func`, one example at a time; slower, for modules that have no rule in `examples.RULES`.
    - `auto`: `vmap` where a rule is missing, and for many small clients, each with a theta of its own; else
      `two-pass` where it helps some layer; else `tape`.

    One record moves `clipped_sum` by at most `clip`: its gradient is multiplied by clip / norm, the norm of what is
    summed, if that is below 1; what is not finite is replaced by zero.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        shape: tuple[int, ...] | None = None,
        mode: str = "auto",
        chunk: int | None = None,
        blocks: Tensor | None = None,
        autocast: torch.dtype | None = None,
        classes: int | None = None,
        check: bool = True,
    ) -> None:
        if mode not in MODES:
            raise SordinoError(f"mode: '{mode}' is unknown.{nearest(mode, MODES)}")
        if mode == "two-pass" and autocast is not None:
            raise SordinoError("autocast: the norms of two-pass need all digits; use mode='tape', or no autocast.")
        if chunk is not None and chunk < 1:
            raise SordinoError(f"chunk: {chunk} examples at once; give 1 or more, or None.")
        self.module = module = copy.deepcopy(module)
        for part in module.modules():
            if isinstance(part, nn.modules.batchnorm._BatchNorm):
                raise SordinoError("module: batch norm mixes examples; convert it with group_norm(module).")
            if getattr(part, "inplace", False):  # what a layer was given is needed again
                part.inplace = False  # type: ignore[assignment]
        self._trained: dict[str, Tensor] = {name: p for name, p in module.named_parameters() if p.requires_grad}
        if not self._trained:
            raise SordinoError("module: no parameter requires a gradient; call requires_grad_() on what is trained.")
        self.shapes = tuple(tuple(p.shape) for p in self._trained.values())
        self._sizes = [p.numel() for p in self._trained.values()]
        self.size = sum(self._sizes)
        if blocks is not None and blocks.shape != (self.size,):
            raise SordinoError(f"blocks: {tuple(blocks.shape)}; give one number for each of {self.size} parameters.")
        self.blocks, self.autocast, self.chunk = blocks, autocast, chunk
        self.shape = shape or _given(module)
        self.features = math.prod(self.shape)
        first = next(iter(self._trained.values()))
        odd = examples.supported(module)
        if odd and mode in ("tape", "two-pass"):
            raise SordinoError(f"mode: '{mode}' has no rule for {', '.join(odd)}; use mode='vmap', or add to RULES.")
        owned = examples.owners(module, self._trained)
        self._copies = {(first.dtype, first.device): (module, owned)}
        self.grouped = not odd and all(getattr(part, "grouped", False) for part, _ in owned)
        self._train = True  # sums are taken as in training
        self._held = self._rest = 0  # numbers that one example keeps: gradients in two-pass, and all else
        self.random, self.outputs, advised = self._look(owned, ruled=not odd)
        if classes is not None and classes > self.outputs:
            raise SordinoError(f"classes: {classes}, but the module gives {self.outputs} outputs.")
        self.mode = advised if mode == "auto" else mode
        if check and not self._agrees():
            if mode != "auto":
                raise SordinoError(f"mode: gradients by '{mode}' differ from those of single examples; use 'vmap'.")
            self.mode, self.grouped = "vmap", False
            if not self._agrees():
                raise SordinoError("module: torch.func cannot follow it, nor can the rules; see examples.RULES.")
        self.few = 0  # records a group up to which groups with thetas of their own go through torch.func together
        if check and mode == "auto" and self.mode != "vmap" and not self.grouped and self.size <= SMALL:
            chosen, self.mode = self.mode, "vmap"
            self.few, self.mode = FEW * self._agrees(), chosen

    def init(self, generator: torch.Generator | None = None) -> Tensor:
        """The module's own parameters, as they were given."""
        return torch.cat([p.detach().flatten().float() for p in self._trained.values()]).clone()

    # ------------------------------------------------------------------------------------------------ what it says

    def logits(self, theta: Tensor, x: Tensor | np.ndarray) -> Tensor:
        x = torch.as_tensor(x).to(theta)
        if theta.dim() > 1:
            return torch.stack([self.logits(each, x[k] if x.dim() > 2 else x) for k, each in enumerate(theta)])
        rows = self._seen(x)
        with torch.no_grad():
            z = [self._outputs(theta, rows[k]) for k in parts(len(rows), self._rows(theta, self.mode))]
        return torch.cat(z).to(theta.dtype).reshape(*x.shape[:-1], -1)

    def loss(self, theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """Of one example."""
        return summed(self._outputs(theta, self._seen(x)), y.long().reshape(1))

    def predict(self, theta: Tensor, x: Tensor | np.ndarray) -> Tensor:
        """Class indices."""
        return self.logits(theta, x).argmax(-1)

    def scores(self, theta: Tensor, x: Tensor | np.ndarray) -> Tensor:
        """Probabilities of the classes."""
        return self.logits(theta, x).softmax(-1)

    def clipped_sum(self, theta: Tensor, shard: Shard, clip: float, scale: Tensor | None = None) -> Tensor:
        """Sum of gradients (times `scale`), each cut to norm at most `clip`: one record moves it by that at most."""
        x, y, mask = shard.x.to(theta), shard.y.to(theta.device).long(), shard.mask.to(theta)
        lead = torch.Size(())
        for t, own in ((theta, 1), (x, 2), (y, 1), (mask, 1), (theta if scale is None else scale, 1)):
            lead = torch.Size(np.broadcast_shapes(lead, t.shape[: t.dim() - own]))
        groups, n, apart = lead.numel(), x.shape[-2], theta.shape[:-1].numel() > 1
        x = x.expand(*lead, n, -1).reshape(groups, n, x.shape[-1])
        y, mask = (t.expand(*lead, n).reshape(groups, n) for t in (y, mask))
        theta = theta.expand(*lead, -1).reshape(groups, -1) if apart else theta.reshape(1, -1)
        if scale is not None:
            scale = scale.to(theta).expand(*lead, -1).reshape(groups, -1)
        # One theta, or layers that take several, or torch.func: all groups in one pass. Elsewhere one after another.
        mode = "vmap" if apart and n <= self.few else self.mode
        mode = "tape" if mode == "two-pass" and scale is not None else mode  # entries differ: the gradients are needed
        together = self.grouped or mode == "vmap" or (mode == "tape" and not apart)
        most, total = self._rows(theta, mode), theta.new_zeros(groups, self.size)
        for k in parts(groups, most if together else 1):
            mine = theta[k] if apart else theta
            each, rows = None if scale is None else scale[k], Shard(x[k], y[k], mask[k])
            if len(rows.x) == 1 and not x.is_cuda and not bool(rows.mask.all()):  # padding costs nothing
                here = rows.mask[0].nonzero()[:, 0]
                rows = Shard(rows.x[:, here], rows.y[:, here], rows.mask[:, here])
            for j in parts(rows.x.shape[1], max(1, most // len(rows.x))):
                self._add(mode, total[k], mine, Shard(rows.x[:, j], rows.y[:, j], rows.mask[:, j]), clip, each)
        return total.reshape(*lead, self.size)

    # ------------------------------------------------------------------------------------------------------ inside

    def _add(self, mode: str, total: Tensor, theta: Tensor, shard: Shard, clip: float, scale: Tensor | None) -> None:
        """To the total of each group: groups x records that fit into memory."""
        x, y, mask, _ = shard
        (groups, n), later = mask.shape, list[Use]()
        squares = torch.zeros(groups * n, dtype=torch.float64, device=x.device)
        if mode == "vmap":
            made = self._by_vmap(theta, x, y)
        else:
            module, owned = self._on(theta, training=self._train)
            params = self._split(theta[0] if len(theta) == 1 else theta)
            given = (module, params, self._seen(x), y.flatten(), summed, owned)
            with self._cast(theta):
                squares, made, later = examples.norms_first(*given, everywhere=mode == "tape")
        made = {name: part.to(theta.dtype).reshape(groups, n, -1) for name, part in made.items()}
        if scale is not None:
            scales = dict(zip(self._trained, scale.split_with_sizes(self._sizes, -1), strict=True))
            made = {name: part * scales[name].unsqueeze(1) for name, part in made.items()}
        for part in made.values():
            squares = squares + measure(part.flatten(0, 1))
        factor, fine = _factor(squares.reshape(groups, n), clip, mask)
        absent = None
        if x.is_cuda or not bool(fine.all()):  # 0 x nan is no 0
            absent = ~fine
            made = {name: part.masked_fill(absent.unsqueeze(-1), 0) for name, part in made.items()}
        sums = dict(zip(self._trained, total.split_with_sizes(self._sizes, -1), strict=True))
        for name, part in made.items():
            sums[name] += torch.bmm(factor.unsqueeze(1), part).squeeze(1)
        for use in later:
            for name, part in examples.total(use, n, factor[0], None if absent is None else absent[0]):
                sums[name][0] += part.flatten()

    def _by_vmap(self, theta: Tensor, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        module, _ = self._on(theta, training=self._train)

        def loss(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            with self._cast(theta), sdpa_kernel(SDPBackend.MATH):  # the others have no batched form
                return summed(functional_call(module, params, (self._seen(x),)), y.unsqueeze(0))

        each = vmap(grad(loss), (None, 0, 0), randomness="different")
        found: dict[str, Tensor]
        if len(theta) == 1:
            found = each(self._split(theta[0]), x.flatten(0, 1), y.flatten())
        else:
            found = vmap(each, (0, 0, 0), randomness="different")(self._split(theta), x, y)
        return found

    def _outputs(self, theta: Tensor, rows: Tensor) -> Tensor:
        with self._cast(theta):
            z: Tensor = functional_call(self._on(theta, training=False)[0], self._split(theta), (rows,))
        return z

    def _split(self, theta: Tensor) -> dict[str, Tensor]:
        """The parameters, by name; a leading axis stays."""
        pieces = zip(self._trained, theta.split_with_sizes(self._sizes, -1), self.shapes, strict=True)
        return {name: part.reshape(*theta.shape[:-1], *shape) for name, part, shape in pieces}

    def _seen(self, x: Tensor) -> Tensor:
        return x.reshape(-1, *self.shape)

    def _cast(self, theta: Tensor) -> Any:
        return torch.autocast(theta.device.type, self.autocast, enabled=self.autocast is not None)

    def _rows(self, theta: Tensor, mode: str) -> int:
        """Examples at once."""
        if self.chunk is not None:
            return self.chunk
        each = theta.element_size() * (self._rest + (self._held if mode == "two-pass" else self.size))
        fit = BUDGET.get(theta.device.type, BUDGET["cpu"]) // each
        return max(1, fit if theta.is_cuda else min(fit, ROOMY))

    def _on(self, theta: Tensor, *, training: bool) -> tuple[nn.Module, Owned]:
        """The module where theta is, frozen parameters and all; these keep their type if the trained ones do."""
        key = (theta.dtype, theta.device)
        if key not in self._copies:
            module = copy.deepcopy(self.module).to(theta.device)
            same = theta.dtype == next(iter(self._trained.values())).dtype
            module = module if same else module.to(theta.dtype)
            self._copies[key] = module, examples.owners(module, self._trained)
        module, owned = self._copies[key]
        if module.training != training:
            module.train(training)
        return module, owned

    def _look(self, owned: Owned, ruled: bool) -> tuple[bool, int, str]:
        """Two rows tried: is it random, how many outputs, which mode is best; and what an example takes of memory."""
        module = self.module
        first = next(iter(self._trained.values()))
        x, y = self._seen(_rows_like(2, self.features).to(first)), torch.zeros(2, dtype=torch.long, device=first.device)
        weights, saved = {p.data_ptr() for p in module.parameters()}, dict[int, int]()
        before = [buffer.clone() for buffer in module.buffers()]
        helps, wide = [False], [0]

        def visit(use: Use) -> None:
            short = examples.short(use, 2)
            helps[0] |= short
            if hasattr(use.module, "kernel_size"):
                wide[0] = max(wide[0], math.prod(examples.extent(use, 2)[:2]))  # of patches
            self._held += 0 if short else sum(self._trained[name].numel() for name in use.names.values())

        def keep(tensor: Tensor) -> Tensor:
            saved[tensor.data_ptr()] = 0 if tensor.data_ptr() in weights else tensor.numel() // 2
            return tensor

        module.train()
        kept = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
        with torch.random.fork_rng([first.device] if first.is_cuda else []), self._cast(first), kept:
            try:
                outs = [functional_call(module, self._trained, (x,)) for _ in range(2)]
            except (RuntimeError, IndexError, TypeError, ValueError) as error:
                raise SordinoError(f"shape: the module fails on rows of shape {self.shape}: {error}") from error
            try:
                examples.sweep(module, self._trained, x, y, summed, visit, owned if ruled else [])
            except (RuntimeError, SordinoError):
                ruled = False
        if any(not torch.equal(old, new) for old, new in zip(before, module.buffers(), strict=True)):
            raise SordinoError(
                "module: a buffer changes in training and would carry data past the clip; see group_norm."
            )
        if outs[0].dim() != 2 or len(outs[0]) != 2:
            raise SordinoError(f"module: gives {tuple(outs[0].shape)} for two rows; it must give a row of logits each.")
        self._rest = 2 * sum(saved.values()) + wide[0]
        better = helps[0] and self.autocast is None and not self.grouped
        return not torch.equal(*outs), outs[0].shape[1], ("two-pass" if better else "tape") if ruled else "vmap"

    def _agrees(self) -> bool:
        """Three rows in float64, dropout off: the sum of the chosen mode against autograd, a row at a time."""
        module = copy.deepcopy(self.module).double().train()
        for part in module.modules():
            if isinstance(part, nn.modules.dropout._DropoutNd):
                part.p = 0.0
            if isinstance(part, nn.MultiheadAttention):
                part.dropout = 0.0
        theta = torch.cat([p.detach().flatten().double() for p in self._trained.values()])
        # Moved a little: what starts at zero would hide what lies below it.
        theta += 0.01 * torch.randn(self.size, generator=torch.Generator().manual_seed(0)).to(theta)
        params = {name: part.requires_grad_() for name, part in self._split(theta).items()}
        x, y = _rows_like(3, self.features).to(theta), (torch.arange(3) % self.outputs).to(theta.device)

        def say(rows: Tensor) -> Tensor:
            z: Tensor = functional_call(module, params, (self._seen(rows),))
            return z

        self._train = not self.random or torch.equal(say(x), say(x))
        module.train(self._train)  # dropout of another make: compare as it predicts
        alone = [say(row) for row in x]
        with torch.no_grad():
            if not torch.allclose(torch.cat(alone), say(x), 1e-4, 1e-6):
                raise SordinoError(
                    "module: what it says of a row depends on the other rows, which no clip bounds; serve each alone."
                )
        rows = []
        for z, label in zip(alone, y, strict=True):
            loss = summed(z, label.reshape(1))
            found = torch.autograd.grad(loss, list(params.values()), allow_unused=True, materialize_grads=True)
            rows.append(torch.cat([part.flatten() for part in found]))
        each, weight = torch.stack(rows), torch.tensor([1.0, 0.7, 0.4]).to(theta)
        norms = each.norm(dim=1)
        clip = float(norms.median())
        want = each.T @ (weight * (clip / norms).clamp(max=1))
        copies, cast = self._copies, self.autocast
        self._copies = {(theta.dtype, theta.device): (module, examples.owners(module, self._trained))}
        self.autocast = None
        try:  # with and without a scale: two ways through two-pass
            scales = (None, torch.ones_like(theta))
            offs = [self.clipped_sum(theta, Shard(x, y, weight), clip, scale) - want for scale in scales]
        except (RuntimeError, SordinoError, TypeError):
            return False  # an operation that this mode cannot follow
        finally:
            self._copies, self.autocast, self._train = copies, cast, True
        pairs = [p for off in offs for p in zip(*(t.split_with_sizes(self._sizes) for t in (want, off)), strict=True)]
        return all(bool(off.norm() <= 1e-5 * part.norm() + 1e-7 * want.norm()) for part, off in pairs)


def parts(n: int, step: int) -> Iterator[slice]:
    return (slice(start, start + step) for start in range(0, n, step))


def _factor(squares: Tensor, clip: float, mask: Tensor) -> tuple[Tensor, Tensor]:
    """What each gradient is multiplied by, and which of them are finite."""
    norm = squares.sqrt()
    fine = torch.isfinite(norm)
    if not math.isfinite(clip):
        return fine.to(mask) * mask, fine
    bound = clip * (1 - SAFETY)
    factor = torch.where(fine, bound / norm.clamp_min(bound), 0.0).to(mask.dtype)
    # A factor below the normal range has too few digits to keep the bound: such a record counts as zero.
    return threshold(factor, torch.finfo(mask.dtype).tiny, 0.0) * mask, fine


def _rows_like(n: int, features: int) -> Tensor:
    """Rows for trying a module: positive, and token numbers 0 and 1 where it reads tokens."""
    x = 0.5 + 1.49 * torch.rand(n, features, generator=torch.Generator().manual_seed(1))
    x[:, 0] = 1 + x[:, 0] / 4
    return x


def _given(module: nn.Module) -> tuple[int, ...]:
    """The shape of a row, where the first layer says it."""
    first = next((part for part in module.modules() if not list(part.children())), None)
    if isinstance(first, nn.Linear):
        return (first.in_features,)
    raise SordinoError("shape: cannot tell what the module reads; give the shape of one row, as in (1, 28, 28).")


def group_norm(module: nn.Module) -> nn.Module:
    """A copy with group norm in place of batch norm: at most 32 groups, of 4 channels or more where these allow it."""
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        channels = module.num_features
        groups = next(k for k in range(max(1, min(32, channels // 4)), 0, -1) if channels % k == 0)
        made = nn.GroupNorm(groups, channels, eps=module.eps, affine=module.affine)
        if module.affine:
            made.weight, made.bias = copy.deepcopy((module.weight, module.bias))
        return made
    module = copy.deepcopy(module)
    for name, child in module.named_children():
        setattr(module, name, group_norm(child))
    return module
