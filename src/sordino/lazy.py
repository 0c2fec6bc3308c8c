"""torch, imported when something of it is used.

`import torch` takes seconds; building a method, calibrating its noise and checking a certificate need no tensor.
Modules that those share write `from sordino.lazy import Tensor, torch` in place of `import torch` and use both as
usual. A type checker sees torch itself.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch as torch
    from torch import Tensor as Tensor
else:

    class _Torch:
        """Stands for the module: every attribute is torch's own, looked up when it is used."""

        def __getattr__(self, name: str) -> Any:
            import torch as loaded

            return getattr(loaded, name)

        def __dir__(self) -> list[str]:
            import torch as loaded

            return dir(loaded)

    class _IsTensor(type):
        def __instancecheck__(cls, value: object) -> bool:
            """Before torch is imported nothing is a tensor."""
            tensor = getattr(sys.modules.get("torch"), "Tensor", None)
            return tensor is not None and isinstance(value, tensor)

    class Tensor(metaclass=_IsTensor):
        """Stands for `torch.Tensor` in annotations and in `isinstance`."""

    torch = _Torch()

__all__ = ["Tensor", "torch"]
