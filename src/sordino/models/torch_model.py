"""Any `torch.nn.Module` as a model over one flat theta, with gradients clipped example by example."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import threshold

from sordino.core import FLAT_CLIPPING, SAFETY, Blend, Clipping, Shard
from sordino.errors import SordinoError, check_known
from sordino.models import outer, per_example, probe, watch
from sordino.models.arithmetic import FLOAT32_TERMS, blank, exact_arithmetic, in_chunks, row_sums
from sordino.models.attention import by_linear_layers
from sordino.models.compiled import Passes
from sordino.models.cuda_graphs import GraphCache
from sordino.models.linear import Loss
from sordino.models.objective import EachLoss, Objective
from sordino.models.per_example import RULES, Owned, Room, Use, bound, linear, measure
from sordino.models.recurrent import unroll
from sordino.models.validation import unvalidated

MODES = ("auto", "tape", "two-pass", "vmap")
CPU_CHUNK_BYTES = 2**29  # gradients and activations of one chunk
DEVICE_SHARE = 4  # a chunk takes at most this part of an accelerator's memory: one of so many
ROWS_MULTIPLE = 32  # rows of a compiled or captured pass
CPU_CHUNK_EXAMPLES = 256  # a larger chunk leaves the caches
ACCELERATOR_CHUNK_FACTOR = 64  # an accelerator takes this many times the CPU's chunk
MAX_CHUNK_EXAMPLES = 2**14  # on any device: see `arithmetic.in_chunks`
NO_GRADIENTS = (
    "Write it with layers that have a rule (nn.Linear, nn.Conv1d to nn.Conv3d, nn.Embedding, nn.RNN, nn.LSTM, nn.GRU "
    "and norms, but not subclasses of them) and without activation checkpointing, or freeze it with "
    "requires_grad_(False)."
)
RECORDS_THRESHOLD, PARAMETERS_THRESHOLD = 16, 2**20  # below these the overhead of a call exceeds its work


class Turns:
    """Lets one thread at a time compute, because a pass keeps parameters and hooks in the module. A copy of a model has
    turns of its own."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def __deepcopy__(self, memo: dict[int, Any]) -> Turns:
        return Turns()

    def __reduce__(self) -> tuple[type[Turns], tuple[()]]:
        return Turns, ()


def rounded(shard: Shard) -> Shard:
    """With padding up to a multiple of ROWS_MULTIPLE rows.

    Poisson minibatches differ in size, and each shape costs a compilation and a graph.
    """
    more = -shard.x.shape[-2] % ROWS_MULTIPLE

    def padded(t: Tensor) -> Tensor:
        inner = t.dim() - shard.mask.dim()  # axes behind that of the rows
        return nn.functional.pad(t, (*(0, 0) * inner, 0, more))

    length = None if shard.length is None else padded(shard.length)
    return Shard(padded(shard.x), padded(shard.y), padded(shard.mask), length, shard.per_person)


class Place(NamedTuple):
    """The module on one device and in one type."""

    module: nn.Module
    owned: Owned
    room: Room
    halves: bool  # all trained parameters are read in the type of autocast


class Block(NamedTuple):
    """Gradients of single examples in some columns of theta."""

    where: slice | Tensor  # the columns
    part: Tensor  # examples x columns
    layer: int = 0  # the row of its norms


class TorchModel:
    """A `torch.nn.Module` as a model. `theta` is the concatenation of all parameters that require a gradient.

    All modes compute the same sum:

    - `tape`: one backward pass computes the gradients of all examples. They are stored, measured and summed with their
      factors.
    - `two-pass`: the same pass, but for a layer with p positions, i inputs and o outputs only the norm is computed if
      that is cheaper (p^2 (i + o) + p i o < (p + WRITE_COST_THRESHOLD) i o multiplications). A second pass over these
      layers sums their stored factors. Nothing is drawn again, so dropout is the same in both passes.
    - `vmap`: `torch.func`, one example at a time. It is slower, for modules without a rule in `per_example.RULES`.
    - `auto`: `vmap` if a rule is missing, and for many small clients with different thetas; otherwise `two-pass` if it
      helps some layer; otherwise `tape`.

    One record moves `clipped_sum` by at most `clip`, in the arithmetic that runs. Its gradient is multiplied by clip (1
    - SAFETY) / norm if that is below 1, with the norm of what is summed. `core.Clipping` names two other laws: each
    layer has a bound and a norm of its own, or the factor is clip (1 - SAFETY) / (norm + gamma). A gradient that is not
    finite, or whose norm overflows, is replaced by zero. The term of a position depends only on the record there and on
    theta: shapes, chunks and operations never depend on data or masks. Sums are float64; `arithmetic` has the proof of
    their bound.

    On a GPU, and with autocast, gradients are collected in one matrix (measured and summed in one pass each), and
    gradients of rank one, as of a head, are not computed explicitly. On a GPU with autocast, gradients of linear layers
    and convolutions are computed twice, for the norm and for the sum, and never stored (`outer`).

    Args:
      module: the network; it is copied. Batch norm is refused, because it mixes examples.
      shape: of one record; a row of x is reshaped to it. By default it follows from the first layer.
      mode: one of `MODES`.
      chunk: examples per pass; by default as many as fit.
      blocks: the block of every parameter, for methods with block-wise means.
      autocast: the type of the forward and backward passes.
      classes: the number of classes, checked against the outputs of the module.
      check: compare the sums of the mode with single-example gradients once, in float64.
      capture: on a GPU, replay `clipped_sum` as a CUDA graph per combination of shapes and clip. This keeps the memory
        of a call allocated.
      loss: (what the module returns, labels) -> one loss per record; by default the cross entropy. What the module
        returns may be a tensor, a dict, a tuple or a NamedTuple.
      output: the key or index of the part that predicts, if the module does not return one tensor.
      labels: `classes`, or `numbers` with a loss of your own. The first number of a row then predicts.
      compile: on a GPU, compile the forward and backward passes, once per combination of shapes (`compiled`).

    Raises:
      SordinoError: an argument is out of its range, or the module mixes examples or cannot be differentiated.
    """

    serves_persons = True
    serves_blends = True

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
        capture: bool = False,
        compile: bool = False,
        loss: EachLoss | None = None,
        output: str | int | None = None,
        labels: str = "classes",
    ) -> None:
        self._turns = Turns()
        self.objective = Objective(loss, output, labels)
        self.objective.check()
        if loss is not None and not check:
            raise SordinoError("check: a loss of your own is compared with that of single records; leave check out.")
        self.kind = Loss.SOFTMAX if labels == "classes" else Loss.SQUARES
        check_known("mode", mode, MODES)
        if mode == "two-pass" and autocast is not None:
            raise SordinoError("autocast: two-pass needs norms in full precision; use mode='tape', or no autocast.")
        if not isinstance(module, nn.Module):
            raise SordinoError(f"module: a {type(module).__name__} is not a torch.nn.Module.")
        if shape is not None and not (isinstance(shape, tuple) and all(isinstance(k, int) for k in shape)):
            raise SordinoError(f"shape: {shape!r} must be a tuple of whole numbers, as in (20,) or (3, 32, 32).")
        if chunk is not None and chunk < 1:
            raise SordinoError(f"chunk: {chunk} must be at least 1, or None.")
        self.module = module = _copied(module)
        self.trained: dict[str, Tensor] = {name: p for name, p in module.named_parameters() if p.requires_grad}
        if not self.trained:
            raise SordinoError(
                "module: no parameter requires a gradient; call requires_grad_() on the trained parameters."
            )
        self.shapes = tuple(tuple(p.shape) for p in self.trained.values())
        self._sizes = [p.numel() for p in self.trained.values()]
        self.size = sum(self._sizes)
        if blocks is not None and blocks.shape != (self.size,):
            raise SordinoError(
                f"blocks: the shape {tuple(blocks.shape)} must be ({self.size},), one number per parameter."
            )
        self.blocks, self.autocast, self.chunk = blocks, autocast, chunk
        self.shape = shape or probe.input_shape(module)
        self.features = math.prod(self.shape)
        first = next(iter(self.trained.values()))
        odd = per_example.supported(module, spread=check)
        if odd and mode in ("tape", "two-pass"):
            raise SordinoError(f"mode: '{mode}' has no rule for {', '.join(odd)}; use mode='auto' or mode='vmap'.")
        owned = per_example.owners(module, self.trained)
        self._copies = {(first.dtype, first.device): self._place(module)}
        self._columns: dict[Any, slice | Tensor] = {}
        self._bounds: dict[Any, Tensor] = {}
        self.layers = tuple(per_example.layers(owned))  # the trained parameters of each layer, by name
        self._lean = autocast is not None
        self._graphs, self._passes = GraphCache() if capture else None, Passes() if compile else None
        self.grouped = not odd and all(getattr(part, "grouped", False) for part, _ in owned)
        self._train = True  # sums are taken as in training
        self.random, self.outputs, advised, self._held, self._lasting, self._rest = probe.probe(
            self, owned, ruled=not odd
        )
        if self.outputs < 2 and labels == "classes":
            raise SordinoError(
                f"module: it has {self.outputs} output; classes need at least 2 outputs, one per class: end it with a "
                "layer such as nn.Linear(n, 2)."
            )
        if classes is not None and classes > self.outputs and labels == "classes":
            raise SordinoError(
                f"classes: {classes} must be at most {self.outputs}, the number of outputs of the module."
            )
        self._compared = check
        self._form = watch.form(module, loss)
        probe.check_apart(self)
        self.mode = advised if mode == "auto" else mode
        if check and not probe.agrees(self):
            self._fall_back(mode, odd)
        if self.mode != "vmap":
            probe.check_terms(self, owned, reads=not check)
        if self.mode == "vmap" and autocast is not None and not self._serves_half(first):
            raise SordinoError(
                f"autocast: torch.func ('vmap') cannot compute gradients in {str(autocast).removeprefix('torch.')} of "
                f"this module ({', '.join(odd) or 'no rule fits it'}); use float32, or freeze these parameters."
            )
        # Up to so many records per group, groups with different thetas go through torch.func together.
        self.vmap_records = 0
        if check and mode == "auto" and self.mode != "vmap" and not self.grouped and self.size <= PARAMETERS_THRESHOLD:
            chosen, self.mode = self.mode, "vmap"
            self.vmap_records, self.mode = RECORDS_THRESHOLD * probe.agrees(self), chosen
            if autocast is not None and not self._serves_half(first, groups=2):
                self.vmap_records = 0  # torch.func does not serve it in this type

    def accelerate(self) -> None:
        """From now on do what `compile` and `capture` say."""
        self._graphs, self._passes = self._graphs or GraphCache(), self._passes or Passes()

    def check_unchanged(self) -> None:
        """Check the module again if it, its loss or what PyTorch does in this process changed since the last check.

        Hooks, modes, layers and functions may be exchanged after the first check, and so may numbers that own code
        reads. Engines call this before each round.

        Raises:
          SordinoError: what is computed of one record depends on others now, or another sum than before is computed.
        """
        with self._turns:
            form = watch.form(self.module, self.objective.each)
            if form == self._form:
                return
            try:
                probe.check_apart(self)
                if self._compared and not probe.agrees(self):
                    raise SordinoError("module: gradients differ from those of single examples.")
                if self.mode != "vmap":
                    probe.check_terms(self, self._place(self.module).owned, reads=not self._compared)
            except SordinoError as error:
                raise SordinoError(
                    "module: it, its loss, or a hook or mode of PyTorch changed after the model was built, and it no "
                    f"longer passes the checks: {error}"
                ) from error
            self._form = form

    def _fall_back(self, mode: str, odd: list[str]) -> None:
        """Take torch.func where the chosen mode computes other gradients than those of single examples."""
        if mode == "vmap":
            raise SordinoError(
                "mode: torch.func ('vmap') cannot compute the gradient of single examples of this module. "
                f"{NO_GRADIENTS}"
            )
        if mode != "auto":
            raise SordinoError(f"mode: gradients by '{mode}' differ from those of single examples; use 'vmap'.")
        self.mode, self.grouped = "vmap", False
        if not probe.agrees(self):
            raise SordinoError(
                f"module: the gradient of single examples of {', '.join(odd) or 'it'} cannot be computed. "
                f"{NO_GRADIENTS}"
            )

    @cached_property
    def adapters(self) -> tuple[tuple[int, int], ...]:
        """Which tensors of theta are the A and the B of each low-rank adapter (`lora`), by number; both are trained."""
        numbers = {name: k for k, name in enumerate(self.trained)}
        pairs = [(k, numbers.get(f"{name[:-1]}B")) for name, k in numbers.items() if name.endswith("lora_A")]
        return tuple((a, b) for a, b in pairs if b is not None)

    def init(self, generator: torch.Generator | None = None) -> Tensor:
        """The parameters of the module that was passed in."""
        return torch.cat([p.detach().flatten().float() for p in self.trained.values()]).clone()

    # ---------------------------------------------------------------------------------------- predictions and sums

    def logits(self, theta: Tensor, x: Tensor | np.ndarray) -> Tensor:
        x = torch.as_tensor(x).to(theta)
        if theta.dim() > 1:
            return torch.stack([self.logits(each, x[k] if x.dim() > 2 else x) for k, each in enumerate(theta)])
        rows = self.shaped(x)
        with torch.no_grad():
            z = [
                self.objective.read(self._outputs(theta, rows[k]))
                for k in parts(len(rows), self._rows(theta, self.mode))
            ]
        return torch.cat(z).to(theta.dtype).reshape(*x.shape[:-1], -1)

    def loss(self, theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """The loss of one example."""
        outputs, label = self._outputs(theta, self.shaped(x)), self.objective.labels_of(y, theta).reshape(1)
        with unvalidated():
            return self.objective.total(outputs, label)

    def predict(self, theta: Tensor, x: Tensor | np.ndarray) -> Tensor:
        """The predicted classes, as indices; or the predicted numbers."""
        z = self.logits(theta, x)
        return z.argmax(-1) if self.objective.labels == "classes" else z[..., 0]

    def scores(self, theta: Tensor, x: Tensor | np.ndarray) -> Tensor:
        """The probabilities of the classes; or the predicted numbers."""
        z = self.logits(theta, x)
        return z.softmax(-1) if self.objective.labels == "classes" else z[..., 0]

    def check_clipping(self, clipping: Clipping) -> None:
        """Refuse bounds of layers that are not one per layer."""
        if clipping.layers and len(clipping.layers) != len(self.layers):
            names = ", ".join(layer[0] for layer in self.layers[:8])
            raise SordinoError(
                f"clipping: {len(clipping.layers)} bounds for {len(self.layers)} layers "
                f"({names}{' …' if len(self.layers) > 8 else ''}); give one per layer, or write per-layer alone."
            )

    def clipped_sum(
        self,
        theta: Tensor,
        shard: Shard,
        clip: float,
        scale: Tensor | None = None,
        clipping: Clipping = FLAT_CLIPPING,
        blend: Blend | None = None,
    ) -> Tensor:
        """The sum of gradients (times `scale`), each clipped to norm `clip`: one record moves it by at most `clip`.

        Args:
          theta: the parameters; leading axes are groups.
          shard: the records.
          clip: bound on the norm of one record's gradient.
          scale: a factor per parameter, applied before the clip.
          clipping: how a gradient is brought within the clip.
          blend: a second point, whose gradient is added to a record's before the clip.

        Returns:
          The sum in float64.
        """
        self.check_clipping(clipping)
        clipping = clipping if math.isfinite(clip) else FLAT_CLIPPING  # without a clip all laws are the same
        if theta.is_cuda and (self._graphs or self._passes) is not None and shard.per_person == 1:
            shard = rounded(shard)
        x, y, mask = shard.x.to(theta), self.objective.labels_of(shard.y, theta), shard.mask.to(theta)
        scale = None if scale is None else scale.to(theta)
        with self._turns, exact_arithmetic(theta.device, own_code=True):
            if self._graphs is not None and theta.is_cuda and shard.per_person == 1 and blend is None:
                return self._graphs(self._sum, (theta, x, y, mask, scale), clip, clipping)
            return self._sum(theta, x, y, mask, scale, clip, clipping, per_person=shard.per_person, blend=blend)

    def count_sum(self, theta: Tensor, shard: Shard, scale: Tensor) -> Tensor:
        """Add 1/2 for every record whose gradient times `scale` has norm at most 1, and -1/2 for every other."""
        x, y, mask = shard.x.to(theta), self.objective.labels_of(shard.y, theta), shard.mask.to(theta)
        with self._turns, exact_arithmetic(theta.device, own_code=True):
            return self._sum(theta, x, y, mask, scale.to(theta), 1.0, count=True, per_person=shard.per_person)

    def fisher_sum(self, theta: Tensor, shard: Shard, clip: float) -> Tensor:
        """The sum of g g^T over gradients g of the last linear layer, each clipped to Frobenius norm `clip`.

        Products of float32 numbers are exact in float64, so the error of a chunk of m records is at most m 2^-53 times
        the sum of its norms: m^2 2^-53 <= 2^-25 clips, because m <= MAX_CHUNK_EXAMPLES.
        """
        if shard.per_person > 1:
            raise SordinoError("unit: a Fisher sum of a network's head is not proved per person; use a linear model.")
        x, y, mask = shard.x.to(theta), self.objective.labels_of(shard.y, theta), shard.mask.to(theta)
        lead, theta, x, y, mask, _ = _spread(theta, x, y, mask, None)
        last, most = self._last(), self._rows(theta, "tape")
        groups, n, size = len(x), x.shape[1], sum(math.prod(self.shapes[k]) for k in range(-last, 0))
        total = torch.zeros(groups, size, size, dtype=torch.float64, device=theta.device)
        apart = len(theta) > 1
        small = apart and n <= self.vmap_records  # as in `clipped_sum`, one pass serves many thetas
        together = max(1, most // max(1, n)) if small or not apart else 1

        def add(k: slice, into: Callable[[], Tensor], j: slice) -> None:
            at, rows, labels = theta[k] if apart else theta, x[k, j], y[k, j]
            if small:
                g = self._by_last_of_each(at, rows, labels)
            else:
                g = self._by_last(at[0], rows.flatten(0, 1), labels.flatten()).view(*labels.shape, -1)
            squares = measure(g.flatten(0, 1)).view(1, *g.shape[:-1])
            factor, fine = _factors(squares, math.sqrt(clip) * (1 - SAFETY), mask[k, j].sqrt())
            g = (torch.where(fine.unsqueeze(-1), g, 0.0) * factor[0].unsqueeze(-1)).double()
            into().add_(g.mT @ g)

        with self._turns, exact_arithmetic(theta.device, own_code=True):
            for k in parts(groups, together):
                in_chunks(partial(total.__getitem__, k), n, most, partial(add, k))
        return total.reshape(*lead, size, size)

    # --------------------------------------------------------------------------------------------------- internals

    def _sum(
        self,
        theta: Tensor,
        x: Tensor,
        y: Tensor,
        mask: Tensor,
        scale: Tensor | None,
        clip: float,
        clipping: Clipping = FLAT_CLIPPING,
        count: bool = False,
        per_person: int = 1,
        blend: Blend | None = None,
    ) -> Tensor:
        lead, theta, x, y, mask, scale = _spread(theta, x, y, mask, scale)
        groups, n, apart = len(x), x.shape[1], len(theta) > 1
        if blend is not None:
            other = blend.theta.to(theta)
            blend = blend._replace(theta=(other.expand(*lead, -1) if apart else other).reshape_as(theta))
        # Small groups use torch.func, because launching kernels would cost more than computing.
        mode = (
            "vmap" if apart and n <= self.vmap_records * (ACCELERATOR_CHUNK_FACTOR if x.is_cuda else 1) else self.mode
        )
        # A scale per entry, the mean over a person's records and a blend need the gradients themselves.
        explicit = scale is not None or per_person > 1 or blend is not None
        mode = "tape" if mode == "two-pass" and explicit else mode
        # All groups go through one pass with one theta, with layers that take several thetas, or with torch.func.
        together = self.grouped or mode == "vmap" or (mode == "tape" and not apart)
        most = self._rows(theta, mode)

        @cache
        def total() -> Tensor:
            return torch.zeros(groups, 1 if count else self.size, dtype=torch.float64, device=theta.device)

        def of_groups(k: slice) -> Tensor:
            return total()[k]

        def add(k: slice, into: Callable[[], Tensor], j: slice) -> None:
            rows = Shard(x[k, j], y[k, j], mask[k, j], None, per_person)
            each = None if scale is None else scale[k]
            other = blend._replace(theta=blend.theta[k]) if blend is not None and apart else blend
            self._add(mode, into, theta[k] if apart else theta, rows, clip, clipping, each, count, j.start == 0, other)

        for k in parts(groups, most if together else 1):
            step = max(1, most // len(x[k]))
            step = step - step % FLOAT32_TERMS if step > FLOAT32_TERMS else step
            in_chunks(partial(of_groups, k), n, -(-step // per_person) * per_person, partial(add, k))
        return total().reshape(*lead, -1)

    def _add(
        self,
        mode: str,
        into: Callable[[], Tensor],
        theta: Tensor,
        shard: Shard,
        clip: float,
        clipping: Clipping,
        scale: Tensor | None,
        count: bool = False,
        fresh: bool = False,
        blend: Blend | None = None,
    ) -> None:
        """Add the clipped gradients of groups x records, which fit into memory, to the total of each group.

        The total is asked for after the pass. If it is `fresh`, it is zero, and sums may be written to it directly.
        """
        x, y, mask, _, per_person = shard
        layer_of = self._layer_of if clipping.law == "per-layer" else None
        (groups, n), later, half = mask.shape, list[Use](), (x.is_cuda or self._lean) and per_person == 1
        lean = half and layer_of is None  # gathered gradients have one norm
        squares = torch.zeros(len(self.layers) if layer_of else 1, groups * n, dtype=torch.float64, device=x.device)
        blocks: list[Block] = []
        if blend is not None:
            gradients = self._blended(mode, theta, blend, x, y)
        elif mode == "vmap":
            gradients = self._by_vmap(theta, x, y)
        else:
            here, room = self._on(theta, training=self._train), dict[str, Tensor]()
            kind = self.autocast if self.autocast and theta.dtype is torch.float32 else theta.dtype
            apart: Callable[[Use, int], bool] = per_example.short if mode == "two-pass" else per_example.never
            if half and scale is None:
                apart = self._apart(x) if mode == "tape" else apart
            if lean and scale is None:
                gathered, room = here.room.make(groups * n, x, kind)
                blocks += [Block(self._where(tuple(room), x), gathered)] if room else []
            params = self.split((theta[0] if len(theta) == 1 else theta).to(kind if here.halves else theta.dtype))
            with self.cast(theta):
                squares, gradients, later = per_example.norms_first(
                    *(here.module, params, self.shaped(x), y.flatten(), self.objective.total, here.owned),
                    apart=apart,
                    room=room,
                    run=self._passes if x.is_cuda else None,
                    layer_of=layer_of,
                )
        gradients = {
            name: _unshared(gradients[name].reshape(groups * n, -1), x) for name in self.trained if name in gradients
        }
        if per_person > 1:  # from here on, one gradient per person
            assert not later  # norms of single records must not decide
            filled = (mask > 0).view(-1, per_person, 1)
            gradients = {name: _of_persons(part.to(theta.dtype), filled) for name, part in gradients.items()}
            mask, n = shard.person_weights(), n // per_person
            squares = squares[:, : groups * n]
        if lean and gradients:
            blocks.append(Block(self._where(tuple(gradients), x), per_example.joined(list(gradients.values()))))
        else:
            row = layer_of or dict.fromkeys(gradients, 0)
            blocks += [Block(self._where((name,), x), g.to(theta.dtype), row[name]) for name, g in gradients.items()]
        if scale is not None:
            blocks = [b._replace(part=_times(scale[:, b.where], b.part.to(theta.dtype), n)) for b in blocks]
        for _, part, layer in blocks:
            squares[layer] += bound(part)
        total = into()
        if count:
            total += (((squares[0] <= clip**2).view(groups, n).to(mask) - 0.5) * mask).sum(1, keepdim=True)
            return
        most = self._most(clip, clipping, x.device) if layer_of else clip * (1 - SAFETY)
        factors, fine = _factors(squares.reshape(-1, groups, n), most, mask, clipping.gamma)
        for where, part, layer in blocks:
            summand = _row_sums(factors[layer], part.reshape(groups, n, -1), fine, theta.dtype)
            width = len(where) if isinstance(where, Tensor) else where.stop - where.start
            _add_to(total, where, summand[:, :width])
        for use in later:
            place, factor = self._span(use), factors[layer_of[per_example.first_name(use)] if layer_of else 0]
            if use.parts is not None and place is not None:
                outer.sums(use.parts, factor, out=total[:, place], add=not fresh)
                continue
            if place is not None and fresh and groups == 1:
                per_example.token_sums(use, factor, out=total[:, place])
                continue
            for name, summand in per_example.total(use, factor):
                _add_to(total, self._where((name,), x), summand)

    @cached_property
    def _layer_of(self) -> dict[str, int]:
        """The layer of each trained parameter."""
        return {name: k for k, layer in enumerate(self.layers) for name in layer}

    def _most(self, clip: float, clipping: Clipping, device: torch.device) -> Tensor:
        """The bounds that are enforced on the layers: layers x 1 x 1, in float64."""
        key = clip, clipping, device
        if key not in self._bounds:
            bounds = torch.tensor(clipping.bounds(clip * (1 - SAFETY), len(self.layers)), dtype=torch.float64)
            self._bounds[key] = bounds.view(-1, 1, 1).to(device)
        return self._bounds[key]

    def _apart(self, like: Tensor) -> Callable[[Use, int], bool]:
        """Which gradients are not stored in mode `tape`."""
        return per_example.half if self.autocast is not None and outer.pays(like) else per_example.light

    def _serves_half(self, like: Tensor, groups: int = 1) -> bool:
        """Whether a sum over two rows runs in the type of autocast, for one theta or for groups with thetas of their
        own."""
        x, y = torch.ones(2, self.features, device=like.device), torch.zeros(2, dtype=torch.long, device=like.device)
        theta = self.init().to(like.device)
        theta = theta if groups == 1 else theta.expand(groups, -1)
        try:
            with torch.random.fork_rng([like.device] if like.is_cuda else []):
                self.clipped_sum(theta, Shard(x, y, torch.ones(2, device=like.device)), 1.0)
        except RuntimeError:
            return False
        return True

    def _span(self, use: Use) -> slice | None:
        """The columns of the weight of a use that `outer` sums, or of an embedding."""
        if use.parts is None and type(use.module) is not nn.Embedding:
            return None
        place = self._where((use.names["weight"],), use.g)
        return place if isinstance(place, slice) else None

    def _by_vmap(self, theta: Tensor, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        module = self._on(theta, training=self._train).module

        def loss(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            with self.cast(theta), sdpa_kernel(SDPBackend.MATH):  # the other kernels have no batched form
                return self.objective.total(functional_call(module, params, (self.shaped(x),)), y.unsqueeze(0))

        each = vmap(grad(loss), (None, 0, 0), randomness="different")
        gradients: dict[str, Tensor]
        if len(theta) == 1:
            gradients = each(self.split(theta[0]), x.flatten(0, 1), y.flatten())
        else:
            gradients = vmap(each, (0, 0, 0), randomness="different")(self.split(theta), x, y)
        return gradients

    def _blended(self, mode: str, theta: Tensor, blend: Blend, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """The weighted sum of every record's gradients at two points."""

        def gradients(at: Tensor) -> dict[str, Tensor]:
            if mode == "vmap":
                return self._by_vmap(at, x, y)
            here, params = self._on(at, training=self._train), self.split(at[0] if len(at) == 1 else at)
            with self.cast(at):
                _, parts, later = per_example.norms_first(
                    *(here.module, params, self.shaped(x), y.flatten(), self.objective.total, here.owned),
                    apart=per_example.never,
                )
            assert not later  # every gradient is stored: it is measured after both are added
            return parts

        if self.autocast is not None:
            raise SordinoError("dtype: the sum of gradients at two points is computed in float32; leave dtype out.")
        (here, there), first, second = blend.weights, gradients(theta), gradients(blend.theta)
        return {name: here * part.to(theta) + there * second[name].to(theta) for name, part in first.items()}

    def _outputs(self, theta: Tensor, rows: Tensor) -> Any:
        with self._turns, self.cast(theta):
            return functional_call(self._on(theta, training=False).module, self.split(theta), (rows,))

    def split(self, theta: Tensor) -> dict[str, Tensor]:
        """The parameters by name; leading axes stay."""
        pieces = zip(self.trained, theta.split_with_sizes(self._sizes, -1), self.shapes, strict=True)
        return {name: part.reshape(*theta.shape[:-1], *shape) for name, part, shape in pieces}

    def shaped(self, x: Tensor) -> Tensor:
        """Rows in the shape that the module reads."""
        if x.shape[-1] != self.features:
            shape = " x ".join(map(str, self.shape))
            raise SordinoError(
                f"model: it reads rows of {shape} = {self.features:,} numbers, but these have {x.shape[-1]:,}."
            )
        return x.reshape(-1, *self.shape)

    @contextmanager
    def cast(self, theta: Tensor) -> Iterator[None]:
        """The context of the forward pass, with or without autocast."""
        with torch.autocast(theta.device.type, self.autocast, enabled=self.autocast is not None), unvalidated():
            yield

    def _rows(self, theta: Tensor, mode: str) -> int:
        """How many examples one pass takes."""
        if self.chunk is not None:
            return min(self.chunk, MAX_CHUNK_EXAMPLES)
        held = self._held if mode == "two-pass" else self.size
        if mode == "tape" and self._apart(theta) is per_example.half:
            held = self._lasting
        each = theta.element_size() * (self._rest + held)
        fit = _chunk_bytes(theta.device) // max(1, each)
        return max(1, min(fit, MAX_CHUNK_EXAMPLES if theta.is_cuda else CPU_CHUNK_EXAMPLES))

    def _on(self, theta: Tensor, *, training: bool) -> Place:
        """The module on the device of theta. Frozen parameters keep their type if the trained ones do."""
        key = (theta.dtype, theta.device)
        if key not in self._copies:
            module = copy.deepcopy(self.module).to(theta.device)
            same = theta.dtype == next(iter(self.trained.values())).dtype
            self._copies[key] = self._place(module if same else module.to(theta.dtype))
        here = self._copies[key]
        if here.module.training != training:
            here.module.train(training)
        return here

    def _place(self, module: nn.Module) -> Place:
        owned = per_example.owners(module, self.trained)
        halves = all(getattr(part, "halves", False) for part, _ in owned)
        return Place(module, owned, Room(owned, self.trained), halves)

    @contextmanager
    def instead(self, module: nn.Module, theta: Tensor, training: bool) -> Iterator[None]:
        """In this context the model uses another module with the same parameters, without autocast. For a check."""
        before = self._copies, self.autocast, self._train, self._graphs, self._passes
        self._copies = {(theta.dtype, theta.device): self._place(module)}
        self.autocast, self._train, self._graphs, self._passes = None, training, None, None
        try:
            yield
        finally:
            self._copies, self.autocast, self._train, self._graphs, self._passes = before

    def _where(self, names: tuple[str, ...], like: Tensor) -> slice | Tensor:
        """The columns of theta that hold the named parameters, in their order."""
        key = names, like.device
        if key not in self._columns:
            ends = np.cumsum(self._sizes)
            spans = {
                name: range(int(b) - k, int(b)) for name, k, b in zip(self.trained, self._sizes, ends, strict=True)
            }
            columns = np.concatenate([spans[name] for name in names])
            gaps = columns[-1] - columns[0] + 1 > len(columns)
            whole = slice(int(columns[0]), int(columns[-1]) + 1)
            self._columns[key] = torch.from_numpy(columns).to(like.device) if gaps else whole
        return self._columns[key]

    def _last(self) -> int:
        """The number of parameters of the last linear layer: one or two."""
        names = list(self.trained)
        for part, full_names in self._place(self.module).owned:
            ordered = [full_names[key] for key in ("weight", "bias") if key in full_names]
            if "weight" in full_names and names[-len(ordered) :] == ordered and RULES.get(type(part)) is linear:
                return len(ordered)
        raise SordinoError(
            "module: its last trained parameters must belong to a linear layer; others have no Fisher sum."
        )

    def _by_last(self, theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """The gradients of examples in the last linear layer, weight before bias, from its input and output."""
        here, passes = self._on(theta, training=self._train), list[tuple[Tensor, Tensor]]()
        part, names = next(pair for pair in here.owned if list(self.trained)[-1] in pair[1].values())

        def hook(part: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
            passes.append((args[0].detach(), out.detach().requires_grad_()))
            return passes[-1][1]

        handle = part.register_forward_hook(hook)
        try:
            with per_example.placed(here.owned, self.split(theta)), self.cast(theta), torch.enable_grad():
                loss = self.objective.total(here.module(self.shaped(x)), y)
        finally:
            handle.remove()
        _check_once([out for _, out in passes], len(x))
        a, r = passes[0][0].to(theta.dtype), torch.autograd.grad(loss, passes[0][1])[0].to(theta.dtype)
        return _outer(r, a, "bias" in names)

    def _by_last_of_each(self, theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """As `_by_last`, of groups with thetas of their own, by `torch.func`: groups x examples x parameters."""
        here = self._on(theta, training=self._train)
        part, names = next(pair for pair in here.owned if list(self.trained)[-1] in pair[1].values())

        def loss(shift: Tensor, params: dict[str, Tensor], x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            passes: list[tuple[Tensor, Tensor]] = []

            def hook(part: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
                passes.append((args[0], out))
                return out + shift

            handle = part.register_forward_hook(hook)
            try:
                with self.cast(theta), sdpa_kernel(SDPBackend.MATH):
                    total = self.objective.total(
                        functional_call(here.module, params, (self.shaped(x),)), y.unsqueeze(0)
                    )
            finally:
                handle.remove()
            _check_once([out for _, out in passes], 1)
            return total, passes[0][0][0]

        each = vmap(grad(loss, has_aux=True), (None, None, 0, 0), randomness="different")
        shift = theta.new_zeros(self.trained[names["weight"]].shape[0])
        r, a = vmap(each, (None, 0, 0, 0), randomness="different")(shift, self.split(theta), x, y)
        return _outer(r.to(theta.dtype), a.to(theta.dtype), "bias" in names)


def _check_once(outputs: list[Tensor], records: int) -> None:
    """Refuse a last layer that does not return one row per record, in one call."""
    if len(outputs) != 1 or outputs[0].dim() != 2 or len(outputs[0]) != records:
        raise SordinoError("module: its last linear layer must read each record exactly once to have a Fisher sum.")


def _outer(r: Tensor, a: Tensor, bias: bool) -> Tensor:
    """The gradients of a linear layer with inputs a and gradients r of its outputs, weight before bias."""
    weight = (r.unsqueeze(-1) * a.unsqueeze(-2)).flatten(-2)
    return torch.cat([weight, r], -1) if bias else weight


def _chunk_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return CPU_CHUNK_BYTES
    return int(torch.cuda.get_device_properties(device).total_memory) // DEVICE_SHARE


def parts(n: int, step: int) -> Iterator[slice]:
    """Slices of at most `step` of n rows."""
    return (slice(start, start + step) for start in range(0, n, step))


def _spread(theta: Tensor, x: Tensor, y: Tensor, mask: Tensor, scale: Tensor | None) -> tuple[Any, ...]:
    """The leading axes, and all tensors with one axis of groups instead. A single theta may serve all groups."""
    lead = torch.Size(())
    for t, axes in ((theta, 1), (x, 2), (y, 1), (mask, 1), (theta if scale is None else scale, 1)):
        lead = torch.Size(np.broadcast_shapes(lead, t.shape[: t.dim() - axes]))
    groups, n, apart = lead.numel(), x.shape[-2], theta.shape[:-1].numel() > 1
    x = x.expand(*lead, n, -1).reshape(groups, n, x.shape[-1])
    y, mask = (t.expand(*lead, n).reshape(groups, n) for t in (y, mask))
    theta = theta.expand(*lead, -1).reshape(groups, -1) if apart else theta.reshape(1, -1)
    scale = None if scale is None else scale.expand(*lead, -1).reshape(groups, -1)
    return lead, theta, x, y, mask, scale


def _times(scale: Tensor, part: Tensor, n: int) -> Tensor:
    """Each row times the scale of its group."""
    rows = part[:, : scale.shape[1]].reshape(len(scale), n, scale.shape[1])
    return (rows * scale.unsqueeze(1)).flatten(0, 1)


def _add_to(total: Tensor, where: slice | Tensor, summand: Tensor) -> None:
    if isinstance(where, slice):
        total[:, where].add_(summand)  # unlike +=, which copies the columns once more
    else:
        total.index_add_(1, where, summand)


def _of_persons(part: Tensor, filled: Tensor) -> Tensor:
    """The gradient of every person: the sum over its records. Rows without a record count as zero in any case."""
    return torch.where(filled, part.view(*filled.shape[:2], -1), 0.0).sum(1)


def _row_sums(factor: Tensor, rows: Tensor, fine: Tensor, kind: torch.dtype) -> Tensor:
    """The sum of factor times row in float64. Factors of rows that are not fine are zero."""
    if kind is torch.float32 and outer.by_kernel(rows):
        return outer.weighted_rows(factor, rows)
    rows = blank(rows.flatten(0, 1), fine.flatten()).view(rows.shape).to(torch.promote_types(kind, torch.float32))
    return row_sums(factor.to(rows.dtype), rows)


def _unshared(part: Tensor, x: Tensor) -> Tensor:
    """A copy if the tensor shares memory with the data, which must not change."""
    return part.clone() if part.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() else part


def _factors(squares: Tensor, most: float | Tensor, mask: Tensor, gamma: float = 0.0) -> tuple[Tensor, Tensor]:
    """The factor of each layer of each gradient, and which gradients are finite in all layers.

    The quotient is rounded once to the type of the mask: by 2^-24 in float32, which SAFETY covers.

    Args:
      squares: squared norms, layers x groups x examples.
      most: the bound that is enforced on a norm, or one per layer (layers x 1 x 1).
      mask: of the examples.
      gamma: if above zero, the factor is most / (norm + gamma), also for gradients shorter than the bound.
    """
    norm = squares.sqrt()
    fine = torch.isfinite(norm).all(0)
    if isinstance(most, float) and not math.isfinite(most):
        return (fine.to(mask) * mask).unsqueeze(0), fine
    factor = most / (norm + gamma if gamma else norm.clamp_min(most))
    factor = torch.where(fine, factor, 0.0).to(mask.dtype)
    # A factor below the normal range has too few digits to keep the bound, so such a record counts as zero.
    return threshold(factor, torch.finfo(mask.dtype).tiny, 0.0) * mask, fine


def _copied(module: nn.Module) -> nn.Module:
    """A copy that keeps the inputs of its layers; modules that mix examples or have no parameters yet are refused."""
    if any(nn.parameter.is_lazy(t) for t in (*module.parameters(), *module.buffers())):
        raise SordinoError("module: a lazy layer has no parameters yet; run the module on one batch before.")
    if isinstance(module, torch.jit.ScriptModule | nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise SordinoError(
            f"module: a {type(module).__name__} hides its layers; pass the module that it was made of"
            f"{'.' if isinstance(module, torch.jit.ScriptModule) else ', which is its .module.'}"
        )
    try:
        module = copy.deepcopy(module)
    except (RuntimeError, TypeError) as error:
        raise SordinoError(
            f"module: it cannot be copied: {str(error).splitlines()[0].rstrip('.')}. Weight norm is "
            "torch.nn.utils.parametrizations.weight_norm; other computed tensors are made in forward."
        ) from error
    unroll(module)
    by_linear_layers(module)
    for name, part in module.named_modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            raise SordinoError(
                f"module: batch norm{f' ({name})' if name else ''} mixes examples; convert the module with "
                "sordino.models.torch_model.group_norm(module)."
            )
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.max_norm is not None:
            raise SordinoError(
                f"module: {name} has max_norm, which overwrites the rows of the tokens that occur; leave max_norm out."
            )
        if getattr(part, "inplace", False):  # the backward pass needs the inputs of layers
            part.inplace = False
    odd = [name for name, p in module.named_parameters() if p.requires_grad and not p.is_floating_point()]
    if odd:
        raise SordinoError(f"module: {odd[0]} is not real; keep its real and imaginary part as two parameters.")
    kinds = {str(p.dtype).removeprefix("torch.") for p in module.parameters() if p.requires_grad}
    if len(kinds) > 1:
        raise SordinoError(
            f"module: its trained parameters have the types {' and '.join(sorted(kinds))}; give them one, as with "
            "module.float(), and compute in half precision with autocast=torch.bfloat16."
        )
    return module


def group_norm(module: nn.Module) -> nn.Module:
    """A copy of a module with group norm instead of batch norm: at most 32 groups, of at least 4 channels if possible.

    Args:
      module: the module.

    Returns:
      The copy. Scales and shifts keep their values.
    """
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        channels = module.num_features
        groups = next(k for k in range(max(1, min(32, channels // 4)), 0, -1) if channels % k == 0)
        norm = nn.GroupNorm(groups, channels, eps=module.eps, affine=module.affine)
        if module.affine:
            norm.weight, norm.bias = copy.deepcopy((module.weight, module.bias))
        return norm
    module = copy.deepcopy(module)
    for name, child in module.named_children():
        setattr(module, name, group_norm(child))
    return module
