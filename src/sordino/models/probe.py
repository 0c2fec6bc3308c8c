"""Checks of a module before it is trained: which mode fits it, and whether its per-example sums are correct."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from sordino.core import SAFETY, Shard
from sordino.errors import SordinoError, listed
from sordino.models import per_example, watch
from sordino.models.objective import Objective
from sordino.models.owners import Owners
from sordino.models.per_example import Owned, Use
from sordino.models.validation import unvalidated

# How far, of the largest output, those of one row may differ by its place and the number of rows.
LOOSE, LOOSE_HALVES = 0.01, 0.1
MEETS = (
    "module: its output for one row depends on the other rows{}, which no clip bounds; keep rows separate. The first "
    "axis is that of records, so recurrent layers and attention need batch_first=True."
)

NUMBERS_OF_ROWS = (3, 65, 1025)  # of passes that are compared
MOST_PRODUCTS = 2**28  # that these passes may compute; those of larger networks are followed without numbers
OTHER_OPERATIONS = (
    "module: it computes in another way for few rows than for many ({}), as in 'if len(x) > 3'. Checks take a few "
    "rows, so nothing is known of the passes that train; compute the same for every number of rows."
)
LOSS_MEETS = (
    "loss: that of one record depends on other records, which no clip bounds, as with weights from the classes of a "
    "batch; use its own row alone, and public weights."
)

SHARES = (
    "module: the gradient of one row at {} depends on the other rows, which no clip bounds: the layer reads something "
    "that serves all records, or has another axis before that of records. Freeze it, or leave it out of the targets of "
    "the adapters."
)
READ = (
    "module: something else than the call of its layer reads {}, as in functional.linear(x, layer.weight), and "
    "gradients of single examples would miss that. Call the layer itself, freeze the parameter, or leave check=False "
    "out: torch.func then serves the module where it can."
)


class FlatModel(Protocol):
    """What the checks need of a model whose parameters are one flat vector (`torch_model.TorchModel`)."""

    module: nn.Module
    trained: dict[str, Tensor]
    shape: tuple[int, ...]
    features: int
    size: int
    outputs: int
    random: bool
    grouped: bool
    autocast: torch.dtype | None
    objective: Objective

    def shaped(self, x: Tensor) -> Tensor: ...

    def cast(self, theta: Tensor) -> Any: ...

    def split(self, theta: Tensor) -> Mapping[str, Tensor]: ...

    def instead(self, module: nn.Module, theta: Tensor, training: bool) -> AbstractContextManager[None]: ...

    def clipped_sum(self, theta: Tensor, shard: Shard, clip: float, scale: Tensor | None = None) -> Tensor: ...


class Probed(NamedTuple):
    """What two rows reveal about a module."""

    random: bool  # a pass in training mode draws random numbers, as dropout does
    outputs: int
    mode: str  # the fastest mode that fits
    held: int  # numbers per example in the gradients that two-pass stores
    lasting: int  # the same on a GPU in half precision
    rest: int  # numbers per example of everything else


def probe(model: FlatModel, owned: Owned, ruled: bool) -> Probed:
    """Run two rows through the module.

    Args:
      model: the model.
      owned: the modules that own trained parameters.
      ruled: every layer has a rule in `per_example.RULES`.

    Returns:
      What the rows reveal.

    Raises:
      SordinoError: the module fails, does not return logits, or changes a buffer.
    """
    module, trained = model.module, model.trained
    first = next(iter(trained.values()))
    x, y = model.shaped(_rows_like(2, model.features).to(first)), model.objective.labels_of(torch.zeros(2), first)
    weights, saved = {tuple(sorted(p.shape)) for p in module.parameters()}, dict[int, int]()
    before, given = {name: buffer.clone() for name, buffer in module.named_buffers()}, x.clone()
    helps, wide, held, lasting = [False], [0], [0], [0]

    def visit(use: Use) -> None:
        short = per_example.short(use, 2)
        helps[0] |= short
        if hasattr(use.module, "kernel_size"):
            wide[0] = max(wide[0], math.prod(per_example.extent(use, 2)[:2]))  # of patches
        numbers = sum(trained[name].numel() for name in use.names.values())
        held[0] += 0 if short else numbers
        lasting[0] += 0 if per_example.half(use, 2) else numbers

    def keep(tensor: Tensor) -> Tensor:
        copied = tuple(sorted(tensor.shape)) in weights  # a parameter, or its copy in another type
        saved[tensor.data_ptr()] = 0 if copied else tensor.numel() // 2
        return tensor

    module.train()
    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with torch.random.fork_rng([first.device] if first.is_cuda else []), model.cast(first), hooks:
        try:
            returned = [functional_call(module, trained, (x,)) for _ in range(2)]
        except SordinoError:
            raise
        except (RuntimeError, IndexError, TypeError, ValueError) as error:
            raise SordinoError(f"shape: the module fails on rows of shape {model.shape}: {error}") from error
        if not torch.equal(x, given):
            raise SordinoError(
                "module: it overwrites the records that it reads, as x.mul_(2) or x -= 1 do; use an operation that "
                "returns a new tensor."
            )
        outs = [model.objective.read(each) for each in returned]
        if outs[0].dim() != 2 or len(outs[0]) != 2:
            raise SordinoError(
                f"module: it returns shape {tuple(outs[0].shape)} for two rows; it must return one row of logits each."
            )
        model.objective.check_losses(returned[0], y)
        try:
            per_example.sweep(module, trained, x, y, model.objective.total, visit, owned if ruled else [])
        except (RuntimeError, SordinoError):
            ruled = False
    after = dict(module.named_buffers())
    changed = [name for name in after if name not in before or not torch.equal(before[name], after[name])]
    if changed or len(before) != len(after):
        raise SordinoError(
            f"module: a buffer ({', '.join(changed[:3])}) changes in training and would carry data around the clip; "
            "see group_norm."
        )
    better = helps[0] and model.autocast is None and not model.grouped
    mode = ("two-pass" if better else "tape") if ruled else "vmap"
    rest = 2 * sum(saved.values()) + wide[0]
    return Probed(not torch.equal(*outs) or _draws(model, x), outs[0].shape[1], mode, held[0], lasting[0], rest)


def _draws(model: FlatModel, x: Tensor) -> bool:
    """Whether a pass in training mode draws random numbers. Their effect may not show in a few rows, as of a layer that
    is seldom left out, or of dropout below adapters that are zero."""
    with torch.no_grad(), torch.random.fork_rng([x.device] if x.is_cuda else []):
        replay = watch.Replay(x.device)
        before = replay.states()
        functional_call(model.module, model.trained, (x,))
        return not all(map(torch.equal, before, replay.states()))


def _moved(theta: Tensor) -> Tensor:
    """Parameters near theta: those that start at zero would hide the layers below them."""
    return theta + 0.01 * torch.randn(len(theta), generator=torch.Generator().manual_seed(0)).to(theta)


def check_apart(model: FlatModel) -> None:
    """Refuse a module in which what is computed of one row depends on other rows, even in the last digit.

    The proof of the clip needs this by assumption (P) of docs/proofs.md: shapes depend on public numbers alone, and
    nothing stays from earlier passes. Passes change what the other rows hold, and nothing else. No position and no
    shape changes, so that a library that rounds by position or by blocks returns the same bits; equality is asked for
    in the type of the run. Random numbers are constants meanwhile. The operations of one pass are searched for shapes
    and branches that depend on data, because few rows need not show what many would.

    Args:
      model: the model.

    Raises:
      SordinoError: a shape or a branch depends on data, an output changes with another row, with the place of the row
        or with the number of rows, or passes leave something behind.
    """
    first = next(iter(model.trained.values()))
    start = torch.cat([p.detach().flatten() for p in model.trained.values()])
    params, rows = dict(model.split(_moved(start))), _rows_like(3, model.features).to(first)
    training = model.module.training

    objective = model.objective

    def returned(x: Tensor, *, train: bool = True, rewind: bool = True, copied: bool = True) -> Any:
        if rewind:
            replay.rewind()
        model.module.train(train)  # some layers route or centre in training alone
        return functional_call(model.module, params, (model.shaped(x.clone() if copied else x),))

    def run(x: Tensor, *, train: bool = True, rewind: bool = True) -> Tensor:
        return objective.read(returned(x, train=train, rewind=rewind))

    def computed() -> list[set[str] | None]:
        """The operations of passes that are computed: for a small network that is faster than to follow forms."""
        if (
            rows[0].numel() * sum(part.numel() for part in model.module.parameters()) * sum(NUMBERS_OF_ROWS)
            > MOST_PRODUCTS
        ):
            return [None]
        found = []
        for number in NUMBERS_OF_ROWS:
            module = copy.deepcopy(model.module)  # nothing of such a pass may stay in the module

            def call(x: Tensor, module: nn.Module = module) -> Any:
                return functional_call(module, params, (model.shaped(x),))

            found.append(watch.computed_operations(call, rows, number))
        return found

    def operations(forms: FakeTensorMode | None) -> list[set[str] | None]:
        form: Callable[[Tensor], Tensor] = forms.from_tensor if forms else lambda part: part
        try:
            shared = {id(part): form(part) for part in (*model.module.parameters(), *model.module.buffers())}
            given = {name: form(part) for name, part in params.items()}
        except Exception:  # there are tensors that have no such form
            return [None]
        found = []
        for number in NUMBERS_OF_ROWS:
            module = copy.deepcopy(model.module, dict(shared))  # tensors without numbers must not stay in the module

            def call(x: Tensor, module: nn.Module = module) -> Any:
                return functional_call(module, given, (model.shaped(x),))

            found.append(watch.operations(call, rows, number, forms))
        return found

    def equal(one: Tensor, other: Tensor) -> bool:
        return torch.equal(one.nan_to_num(), other.nan_to_num())

    device = torch.random.fork_rng([first.device] if first.is_cuda else [])
    try:
        with torch.no_grad(), device, model.cast(first):
            replay = watch.Replay(first.device)
            before = run(rows)
            labels = _labels(model, returned(rows), first)
            held = watch.state(model.module, objective.each)
            steady = equal(before, run(rows))  # on a GPU kernels may add in any order
            if objective.each is not None:
                objective.losses(returned(rows), labels)
            kept = watch.changes(held, watch.state(model.module, objective.each))
            with (seen := watch.Watch(given := rows.clone())):
                whole = returned(given, copied=False)
                ends = replay.states()
                if objective.each is not None:
                    objective.losses(whole, labels)
            seeded = False
            if seen.draws:
                replay.leave()
                run(rows, rewind=False)
                seeded = any(map(torch.equal, ends, replay.states()))
            if objective.each is not None and not (seen.shapes or seen.read):
                mixed = [returned(mix) for keep, mix in _mixes(rows) if keep == 0]
                objective.check_apart(returned(rows), mixed, labels)
            with watch.Still() if model.random else nullcontext():
                still = run(rows) if model.random else before
                others = [(k, run(mix)) for k, mix in _mixes(rows)] + _wild(model, rows, run) if steady else []
                predicted, elsewhere = run(rows, train=False), run(_mixes(rows)[0][1], train=False)
                run(_mixes(rows)[0][1])  # other rows in training, of which nothing may show in evaluation
                carried = steady and not equal(predicted, run(rows, train=False))
                try:
                    alone = torch.cat([run(rows[:1]), run(rows[-1:])])
                except (RuntimeError, ValueError, IndexError) as error:
                    raise SordinoError(f"module: it fails on one row alone, so its rows meet: {error}") from error
                _check_seen(seen, seeded)
                if own := objective.each is not None or watch.own_code(model.module):
                    apart, losses_apart = _owned(returned, rows, labels, objective)
            meets = any(not equal(still[k], other[k]) for k, other in others)
            meets |= steady and not equal(predicted[0], elsewhere[0])
            few: set[str] | None = set()
            more: list[set[str] | None] = []
            if own and apart and losses_apart and not meets:  # otherwise it is refused already
                with sdpa_kernel(SDPBackend.MATH) if model.random else nullcontext():
                    few, *more = computed()
                    if None in (few, *more):  # it is large, or fails for other numbers of rows
                        few, *more = operations(watch.forms())
                    if None in (few, *more):  # it reads numbers of parameters, which a form does not have
                        few, *more = operations(None)
    finally:
        model.module.train(training)
    if not before.isfinite().any():
        raise SordinoError(
            "module: no output is finite for rows of numbers between 0.5 and 2, which are tokens 0 and 1. So it cannot "
            "be checked whether rows meet; let it have finite outputs for these rows."
        )
    again = kept or not (steady or first.is_cuda)
    if again or (carried and not meets):
        what = f"a second pass over the same rows with the same random numbers changed {listed(kept) or 'the outputs'}"
        if not again:
            what = "a pass over other rows in training changed the outputs in evaluation"
        raise SordinoError(
            f"module: {what}. What stays from earlier passes carries data around the clip, and random numbers that are "
            "not PyTorch's own (of NumPy, random or a torch.Generator) are not the run's; compute from the record "
            "alone, and draw with nn.Dropout or torch.rand."
        )
    if differ := {name for names in more for name in (few or set()) ^ (names or few or set())}:
        raise SordinoError(OTHER_OPERATIONS.format(", ".join(sorted(differ)[:3])))
    if own and not losses_apart:
        raise SordinoError(LOSS_MEETS)
    if (
        meets
        or (own and not apart)
        or _far(alone, still[[0, -1]], model.autocast is not None or before.dtype.itemsize < 4)
    ):
        raise SordinoError(MEETS.format(_where(model, rows, run)))


def _owned(returned: Callable[[Tensor], Any], rows: Tensor, labels: Tensor, objective: Objective) -> tuple[bool, bool]:
    """Whether rows stay apart in every operation of a pass, and records in every operation of the loss."""
    x, y = rows.clone(), labels.clone()
    with Owners() as owners:
        owners.mark(x)
        outputs = returned(x)
        apart = owners.apart(objective.read(outputs))
        if objective.each is None or not apart:
            return apart, True
        owners.mark(y)
        return apart, owners.apart(objective.losses(outputs, y))


def check_terms(model: FlatModel, owned: Owned, reads: bool = False) -> None:
    """Refuse a module whose gradient of one row, as its rules compute it, depends on other rows.

    Outputs that do not depend on other rows are not enough: a layer may read a table that serves all rows, or have its
    positions before its rows, and its rule then takes a part of what all rows give for that of one row. `agrees` finds
    this in float64. Here it is found in the type of the run, in which a layer may compute by another kernel.

    Args:
      model: the model.
      owned: the modules that own trained parameters.
      reads: whether the sum over the rows is compared with that of autograd, too, which sees all that reads a
        parameter. Rules see the calls of layers alone. `agrees` compares more exactly, in float64.

    Raises:
      SordinoError: a gradient of one row changes with other rows, with the layer whose gradient does; or something else
        than the call of its layer reads a parameter.
    """
    first = next(iter(model.trained.values()))
    start = torch.cat([p.detach().flatten() for p in model.trained.values()])
    params, rows = dict(model.split(_moved(start))), _rows_like(3, model.features).to(first)
    training, devices = model.module.training, [first.device] if first.is_cuda else []

    def gradients(x: Tensor) -> dict[str, Tensor]:
        x = model.shaped(x)
        return per_example.gradients(model.module, params, x, labels, model.objective.total, owned)

    model.module.train()
    try:
        with torch.random.fork_rng(devices), model.cast(first), watch.Still() if model.random else nullcontext():
            with torch.no_grad():
                labels = _labels(model, functional_call(model.module, params, (model.shaped(rows),)), first)
            before = gradients(rows)
            if reads:
                loose = LOOSE if model.autocast is None else LOOSE_HALVES
                leaves = {name: part.detach().requires_grad_() for name, part in params.items()}
                returned = functional_call(model.module, leaves, (model.shaped(rows),))
                whole = torch.autograd.grad(
                    model.objective.total(returned, labels), list(leaves.values()), allow_unused=True
                )
                if name := _missed(dict(zip(leaves, whole, strict=True)), before, None if model.random else loose):
                    raise SordinoError(READ.format(name))
            again = gradients(rows)
            steady = all(torch.equal(part.nan_to_num(), again[name].nan_to_num()) for name, part in before.items())
            for keep, mix in _mixes(rows):
                after = gradients(mix)
                for name, part in before.items():
                    one, other = part[keep].nan_to_num(), after[name][keep].nan_to_num()
                    same = torch.equal(one, other) if steady else not _far(other, one, model.autocast is not None)
                    if not same:
                        raise SordinoError(SHARES.format(name))
    except RuntimeError as error:
        raise SordinoError(
            f"module: gradients of single rows cannot be told apart ({str(error).splitlines()[0].rstrip('.')}). A "
            "trained layer reads something else than one row per record, first of all axes; freeze it, or leave it "
            "out of the targets of the adapters."
        ) from error
    finally:
        model.module.train(training)


def _missed(whole: dict[str, Tensor | None], each: dict[str, Tensor], loose: float | None) -> str:
    """The first parameter whose gradient no row has, or the sum over rows misses by more than this share; else empty.

    None if sums are not compared: adapters draw their masks in another way than a plain pass does.
    """
    known = {name: part.detach().float() for name, part in whole.items() if part is not None}
    largest = max((float(part.norm()) for part in known.values()), default=0.0)
    for name, part in known.items():
        if name not in each and part.any():
            return name
        if name not in each or loose is None:
            continue
        off = float((each[name].sum(0).float().view_as(part) - part).norm())
        if off > loose * (float(part.norm()) + loose * largest):
            return name
    return ""


def _labels(model: FlatModel, outputs: Any, like: Tensor) -> Tensor:
    """Labels for three rows that are in the support of the loss, if one of some choices is: a loss that is infinite
    shows nothing."""
    objective, usual = model.objective, torch.arange(3) % max(2, model.outputs)
    choices = [usual] if objective.labels == "classes" else [usual, usual + 1, 0.25 + usual / (2 * model.outputs)]
    labels = [objective.labels_of(choice, like) for choice in choices]
    return next((y for y in labels if objective.losses(outputs, y).isfinite().all()), labels[0])


def _check_seen(seen: watch.Watch, seeded: bool) -> None:
    """Refuse operations that let rows meet although few rows do not show it. seeded: the module seeds the generator."""
    if seen.shapes:
        raise SordinoError(
            f"module: the number of rows in {', '.join(sorted(seen.shapes))} depends on the data, as where a layer "
            "routes tokens to experts or selects rows by a mask. Rows then round differently with other records in the "
            "batch, which no clip bounds; use a module without experts, and torch.where in place of a mask."
        )
    if seen.read:
        raise SordinoError(
            f"module: it reads a number of its rows into Python ({seen.read}), as in 'if x.mean() > 0', x.item() or "
            "x.numpy(). What is computed of one row then depends on the others, which no clip bounds. Use torch.where, "
            "row by row; convert data before training; leave validate_args=True of a distribution out; in place of "
            "gaussian_nll_loss, take -torch.distributions.Normal(mean, var.sqrt()).log_prob(y); and for a Hugging Face "
            "network, make its mask with sordino.models.encoders.additive."
        )
    if seen.raises:
        raise SordinoError(
            f"module: an operation fails if the numbers of one row are not as it asks ({seen.raises}). One record then "
            "ends the run, which everybody sees and no clip bounds. Use torch.linalg.cholesky_ex, inv_ex or solve_ex, "
            "scale_tril= of a MultivariateNormal, binary_cross_entropy_with_logits, and rsample or torch.rand_like in "
            "place of torch.normal and torch.bernoulli; compute eigenvectors and singular vectors before training."
        )
    if seen.generator or seeded:
        raise SordinoError(
            "module: it seeds PyTorch's generator, or draws from one of its own. Its random numbers must be the run's, "
            "because who knows them knows who is in a batch; leave manual_seed and generator= out."
        )


def _mixes(rows: Tensor) -> list[tuple[int, Tensor]]:
    """Rows of which one stays, by its place, and all others change."""
    mixes = []
    for keep, others in ((0, torch.ones_like(rows)), (len(rows) - 1, rows.flip(-1)), (0, rows[:1].expand_as(rows))):
        mixes.append((keep, others.clone()))
        mixes[-1][1][keep] = rows[keep]
    return mixes


def _wild(model: FlatModel, rows: Tensor, run: Callable[[Tensor], Tensor]) -> list[tuple[int, Tensor]]:
    """The same with numbers that data may hold and tokens may not: negative, large, and not finite ones."""
    tokens = any(isinstance(part, nn.Embedding | nn.EmbeddingBag) for part in model.module.modules())
    if tokens or rows.is_cuda:  # on a GPU a token beyond the vocabulary ends the process
        return []
    found = []
    for keep, others in ((1, -rows), (2, 100 * rows), (1, torch.full_like(rows, math.nan))):
        mix = others.clone()
        mix[keep] = rows[keep]
        with suppress(RuntimeError, ValueError, IndexError, AssertionError, SordinoError):  # it refuses such numbers
            found.append((keep, run(mix)))
    return found


def _where(model: FlatModel, rows: Tensor, run: Callable[..., Tensor]) -> str:
    """Words for the first layer whose output for a row changes with other rows; none if no layer alone shows it."""
    names = {part: name for name, part in model.module.named_modules() if name}
    with torch.no_grad(), watch.Still():
        for (keep, mix), train in itertools.product(_mixes(rows), (True, False)):
            seen: list[list[tuple[str, Tensor]]] = []

            def hook(part: nn.Module, args: Any, out: Any, seen: list[list[tuple[str, Tensor]]] = seen) -> None:
                if isinstance(out, Tensor) and len(out) == len(rows):
                    seen[-1].append((names[part], out.clone()))

            handles = [part.register_forward_hook(hook) for part in names]
            try:
                for x in (rows, mix):
                    seen.append([])
                    run(x, train=train, rewind=False)
            finally:
                for handle in handles:
                    handle.remove()
            for (name, one), (_, other) in zip(*seen, strict=False):
                if one.shape == other.shape and not torch.equal(one[keep].nan_to_num(), other[keep].nan_to_num()):
                    return f", from layer '{name}' on"
    return ""


def _far(one: Tensor, other: Tensor, halves: bool) -> bool:
    """Whether outputs differ by more than rounding can explain."""
    most = (LOOSE_HALVES if halves else LOOSE) * float(other.abs().nan_to_num().max())
    return not torch.allclose(one, other, 0.0, most, equal_nan=True)


@unvalidated()
def agrees(model: FlatModel) -> bool:
    """Whether the sum of the chosen mode agrees with autograd row by row, on three rows in float64.

    Random numbers are constants meanwhile, so that passes in training mode can be compared."""
    module = copy.deepcopy(model.module).double().train()
    for part in module.modules():
        if isinstance(part, nn.modules.dropout._DropoutNd):
            part.p = 0.0
        if isinstance(part, nn.MultiheadAttention | nn.RNNBase):
            part.dropout = 0.0
    theta = _moved(torch.cat([p.detach().flatten().double() for p in model.trained.values()]))
    x, objective = _signed(model, module, theta), model.objective
    params = {name: part.requires_grad_() for name, part in model.split(theta).items()}

    def run(rows: Tensor) -> Any:
        return functional_call(module, params, (model.shaped(rows),))

    with watch.Still() if model.random else nullcontext():
        try:
            train = not model.random or torch.equal(*(objective.read(run(x)) for _ in range(2)))
            module.train(train)  # random numbers that stay random: compare in evaluation mode
            alone = [run(row) for row in x]
            with torch.no_grad():
                together = run(x)
                y = _labels(model, together, theta)
            rows = [_gradient(objective.total(z, k.reshape(1)), params) for z, k in zip(alone, y, strict=True)]
        except RuntimeError as error:
            raise SordinoError(
                "module: in float64, where gradients are compared with those of single records, it or its loss fails: "
                f"{str(error).splitlines()[0].rstrip('.')}. Convert with .to(x.dtype) rather than to a fixed type, "
                "also the weights of a loss, and leave out operations in place."
            ) from error
        with torch.no_grad():
            if not torch.allclose(torch.cat([objective.read(z) for z in alone]), objective.read(together), 1e-4, 1e-6):
                raise SordinoError(MEETS.format(""))
            each = torch.cat([objective.losses(z, label.reshape(1)) for z, label in zip(alone, y, strict=True)])
            if not torch.allclose(each, objective.losses(together, y), 1e-4, 1e-6):
                raise SordinoError(
                    "loss: that of one record depends on other records, which no clip bounds; use its own row alone."
                )
        each, weight = torch.stack(rows), torch.tensor([1.0, 0.7, 0.4]).to(theta)
        norms = each.norm(dim=1)
        clip = float(norms.median())
        want = each.T @ (weight * (clip * (1 - SAFETY) / norms).clamp(max=1))
        try:  # with and without a scale: two ways through two-pass
            with model.instead(module, theta, train):
                scales = (None, torch.ones_like(theta))
                offs = [model.clipped_sum(theta, Shard(x, y, weight), clip, scale) - want for scale in scales]
        except (RuntimeError, SordinoError, TypeError):
            return False  # this mode does not support an operation
    pairs = [p for off in offs for p in zip(*(model.split(t).values() for t in (want, off)), strict=True)]
    return all(bool(off.norm() <= 1e-5 * part.norm() + 1e-7 * want.norm()) for part, off in pairs)


def _gradient(loss: Tensor, params: Mapping[str, Tensor]) -> Tensor:
    """The gradient of one record by plain autograd."""
    gradients = torch.autograd.grad(loss, list(params.values()), allow_unused=True, materialize_grads=True)
    return torch.cat([(part.to_dense() if part.is_sparse else part).flatten() for part in gradients])


def _signed(model: FlatModel, module: nn.Module, theta: Tensor) -> Tensor:
    """Three rows with numbers of both signs, if the module reads them, because positive ones may hide a layer."""
    x = _rows_like(3, model.features).to(theta)
    signed = x * torch.tensor([1.0, -1.0]).to(x).repeat(model.features)[: model.features]
    if not any(isinstance(part, nn.Embedding | nn.EmbeddingBag) for part in module.modules()) and not x.is_cuda:
        with torch.no_grad(), suppress(RuntimeError, ValueError, IndexError, AssertionError, SordinoError):
            out = model.objective.read(functional_call(module, dict(model.split(theta)), (model.shaped(signed),)))
            return signed if out.isfinite().all() else x
    return x


def input_shape(module: nn.Module) -> tuple[int, ...]:
    """The shape of one row, read from the first layer."""
    first = next((part for part in module.modules() if not list(part.children())), None)
    if isinstance(first, nn.Linear):
        return (first.in_features,)
    raise SordinoError(
        "shape: the first layer does not determine the shape of a row; pass it, for example shape=(1, 28, 28). A "
        "function that builds a module for --model returns the pair (module, (1, 28, 28))."
    )


def _rows_like(n: int, features: int) -> Tensor:
    """Rows to try a module: positive numbers, which are token ids 0 and 1 for a module that reads tokens."""
    x = 0.5 + 1.49 * torch.rand(n, features, generator=torch.Generator().manual_seed(1))
    x[:, 0] = 1 + x[:, 0] / 4
    return x
