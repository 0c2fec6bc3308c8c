"""torch and scipy, imported when something of them is used; and packages that only some commands need.

`import torch` takes seconds; building a method, calibrating its noise and checking a certificate need no tensor.
Modules that those share write `from sordino.lazy import Tensor, torch` in place of `import torch` and use both as
usual; the same holds for `scipy`, whose parts (`scipy.special`) are imported when they are used. A type checker sees
the packages themselves.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from sordino.errors import SordinoError

if TYPE_CHECKING:
    import scipy as scipy
    import torch as torch
    from torch import Tensor as Tensor
else:

    class _Package:
        """Stands for a package: every attribute is the package's own, looked up when it is used."""

        def __init__(self, package: str) -> None:
            self._package = package

        def __getattr__(self, name: str) -> Any:
            return getattr(__import__(self._package), name)  # as fast as an import statement

        def __dir__(self) -> list[str]:
            return dir(__import__(self._package))

    class _IsTensor(type):
        def __instancecheck__(cls, value: object) -> bool:
            """Before torch is imported nothing is a tensor."""
            tensor = getattr(sys.modules.get("torch"), "Tensor", None)
            return tensor is not None and isinstance(value, tensor)

    class Tensor(metaclass=_IsTensor):
        """Stands for `torch.Tensor` in annotations and in `isinstance`."""

    scipy, torch = _Package("scipy"), _Package("torch")


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


__all__ = ["Tensor", "optional", "scipy", "torch"]
