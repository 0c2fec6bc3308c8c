"""torch, imported when something of it is used; and packages that only some commands need.

`import torch` takes seconds; building a method, calibrating its noise and checking a certificate need no tensor.
Modules that those share write `from sordino.lazy import Tensor, torch` in place of `import torch` and use both as
usual. A type checker sees torch itself.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from sordino.errors import SordinoError

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


def optional(module: str, extra: str, what: str) -> Any:
    """Import a package that is not installed with the core.

    Args:
      module: its import name, such as `dp_accounting`.
      extra: the extra of this package that installs it.
      what: what needs it; the error begins with it.

    Raises:
      SordinoError: it is not installed; the message holds the command that installs it.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != module.partition(".")[0]:
            raise
        package = module.partition(".")[0].replace("_", "-")
        raise SordinoError(f"{what} needs {package}, which is not installed: pip install 'sordino[{extra}]'.") from None


__all__ = ["Tensor", "optional", "torch"]
