"""What a module does while it computes, as the checks of `probe` see it: its operations, and what they leave behind."""

from __future__ import annotations

import inspect
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

READS = {
    "numpy",
    "tolist",
    "__array__",
    "__dlpack__",
}  # methods of tensors that hand numbers to Python in other ways than `item`
# Operations that end the run with an error if the numbers of one row are not as they ask, such as a matrix without an
# inverse. Those whose names end in _ex do not, and return a number that says so instead.
RAISES = {
    *("_linalg_check_errors", "cholesky", "cholesky_inverse", "linalg_pinv", "linalg_eig", "linalg_lstsq"),
    *("_linalg_eigh", "_linalg_svd", "histc", "binary_cross_entropy", "bernoulli", "poisson", "normal"),
}
# Operations that take the form of a tensor and none of its numbers.
FORMS = {f"{what}_like" for what in ("empty", "full", "ones", "zeros", "rand", "randint", "randn")}
FORMS |= {f"new_{what}" for what in ("empty", "empty_strided", "full", "ones", "zeros")}


def _place(tensor: Tensor) -> int:
    """The memory of a tensor; views share it. A batch of `torch.func` or a sparse tensor has none of its own."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return id(tensor)


def _caller() -> str:
    """The line of code that calls PyTorch, in words."""
    frame, own = inspect.currentframe(), Path(__file__).parent
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.parent == own and path.name != Path(__file__).name:  # the checks themselves: no code of anybody else
            break
        if path.parent != own and not path.is_relative_to(Path(torch.__file__).parent):
            return f"line {frame.f_lineno} of {path.name}"
        frame = frame.f_back
    return "a layer of PyTorch"


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what may let rows meet although few rows do not show it.

    - `shapes`: operations whose products have as many rows as the data say: selections, and groups of rows. `index`
      alone may have a shape that is known beforehand: it selects by numbers, or by a mask.
    - `read`: where a number that follows from the rows becomes a number of Python, as in `if x.sum() > 0`; empty if
      nowhere. Which branch is taken, for all rows, may then depend on any of them.
    - `raises`: where an error depends on the numbers of the rows, and the operation; empty if nowhere. One row would
      then end the run for all.
    - `draws`: whether random numbers are drawn, and `generator`: whether from one that the module holds.

    Args:
      x: the rows. What is computed from them is followed by the memory in which it lies.
    """

    def __init__(self, x: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shapes: set[str] = set()
        self.draws = self.generator = False
        self.read = self.raises = ""
        self._from_rows: set[int] = set()
        self._weak: list[StorageWeakRef] = []
        self._follow(x)
        self._reads = _Reads(self)

    def follows(self, tensor: Any) -> bool:
        """Whether a tensor was computed from the rows."""
        return isinstance(tensor, Tensor) and _place(tensor) in self._from_rows

    def _follow(self, tensor: Tensor) -> None:
        """Note the memory of a tensor, so that nothing else counts as that memory after it is free.

        A weak reference keeps the number of the memory, and not the memory itself. Operations that PyTorch runs out of
        sight, as those of TorchScript, may otherwise take memory of the same number.
        """
        place = _place(tensor)
        if place not in self._from_rows:
            self._from_rows.add(place)
            if place != id(tensor):
                self._weak.append(StorageWeakRef(tensor.untyped_storage()))  # type: ignore[no-untyped-call]

    def __enter__(self) -> Self:
        self._reads.__enter__()  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._reads.__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, given = str(func), [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if name == "aten.index.Tensor":
            masks = (torch.bool, torch.uint8)
            selects = any(isinstance(index, Tensor) and index.dtype in masks for index in args[1])
        else:
            selects = torch.Tag.dynamic_output_shape in func.tags
        self.draws |= torch.Tag.nondeterministic_seeded in func.tags
        self.generator |= any(isinstance(leaf, torch.Generator) for leaf in tree_leaves((args, kwargs)))
        short = name.split(".")[1]
        follows = short not in FORMS and any(self.follows(tensor) for tensor in given)
        if short in RAISES and follows:
            self.raises = self.raises or f"{_caller()}: {short.strip('_')}"
        if torch.Tag.data_dependent_output in func.tags:  # as of item and equal
            self.read = self.read or (_caller() if follows else "")
        elif selects or "grouped_mm" in name:
            self.shapes.add(name)
        outputs, before = func(*args, **(kwargs or {})), {_place(tensor) for tensor in given}
        for tensor in tree_leaves(outputs):
            if isinstance(tensor, Tensor):
                if follows:
                    self._follow(tensor)
                elif _place(tensor) not in before:  # new memory, perhaps where something else lay
                    self._from_rows.discard(_place(tensor))
        return outputs


class _Reads(TorchFunctionMode):
    """Notes tensors of the rows that leave PyTorch, as in `x.numpy()`."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in READS and args and self.watch.follows(args[0]):
            self.watch.read = self.watch.read or _caller()
        return func(*args, **(kwargs or {}))


class Still(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Meanwhile every random number is a constant, the same one for each row and in each pass.

    So a pass in training mode can be compared with passes over single rows, with any kind of dropout. Attention runs by
    plain products meanwhile, because a fused kernel draws its masks out of sight.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._plain = ExitStack()

    def __enter__(self) -> Self:
        self._plain.enter_context(sdpa_kernel(SDPBackend.MATH))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._plain.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if name == "aten.native_dropout.default":
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        if name == "aten.rrelu_with_noise.default":
            args[1].copy_(torch.where(args[0] < 0, 0.25, 1.0))  # the slopes, which the backward pass reads
            return args[0] * args[1]
        outputs = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags and isinstance(outputs, Tensor):
            fraction = 0.5 if outputs.dtype.is_floating_point else 0
            outputs.fill_(1 if "bernoulli" in name else fraction)
        return outputs


class Replay:
    """Lets several passes draw the same numbers from PyTorch's generators."""

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        self._start = self.states()

    def states(self) -> list[Tensor]:
        """The states of the generators."""
        return [torch.get_rng_state()] + ([] if self._device is None else [torch.cuda.get_rng_state(self._device)])

    def rewind(self) -> None:
        """Begin again with the first number."""
        torch.set_rng_state(self._start[0])
        if self._device is not None:
            torch.cuda.set_rng_state(self._start[1], self._device)

    def leave(self) -> None:
        """Go on with other numbers than from the beginning."""
        seed = int(torch.randint(2**62, ()))
        torch.default_generator.manual_seed(seed)
        if self._device is not None:
            with torch.cuda.device(self._device):
                torch.cuda.manual_seed(seed)


def state(module: nn.Module) -> dict[str, Any]:
    """Numbers and tensors that a module holds besides buffers, and a sum of those in each parameter."""
    found: dict[str, Any] = {}
    for name, part in module.named_modules():
        for key, value in vars(part).items():
            full = f"{name}.{key}".lstrip(".")
            if type(value) is Tensor:
                found[full] = value.detach().clone()
            elif key != "training" and isinstance(value, bool | int | float | complex | np.ndarray):
                found[full] = np.array(value)
    for name, parameter in module.named_parameters():
        numbers = parameter.detach()
        numbers = torch.view_as_real(numbers) if numbers.is_complex() else numbers
        found[name] = torch.stack([numbers.sum(dtype=torch.float64), numbers.abs().sum(dtype=torch.float64)])
    return found


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """The names of what differs between two states of a module."""
    return [name for name in after if name not in before or not _same(before[name], after[name])]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and torch.equal(one.nan_to_num(), other.nan_to_num())
    return type(one) is type(other) and np.array_equal(one, other)
