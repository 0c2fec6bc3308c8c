"""Settings as people write them: TOML files, `key=value` on the command line, and values checked by declared type."""

from __future__ import annotations

import inspect
import math
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from sordino import files
from sordino.errors import SordinoError

_WORDS = {"str": "a text", "int": "a whole number", "bool": "true or false", "float": "a number"}


class Declared(NamedTuple):
    """One setting that a function takes: the annotation of its parameter, and its default."""

    annotation: str
    default: Any


def declared(function: Callable[..., Any], skip: tuple[str, ...] = ()) -> dict[str, Declared]:
    """The keyword parameters of a function as settings. One without an annotation has the type of its default.

    >>> def build(features: int, *, width: int = 64): ...
    >>> declared(build, skip=("features",))["width"].default
    64
    >>> declared(lambda width=64: ...)["width"].annotation
    'int'
    """

    def annotation(p: inspect.Parameter) -> str:
        if p.annotation is p.empty:
            return type(p.default).__name__
        return p.annotation if isinstance(p.annotation, str) else inspect.formatannotation(p.annotation)

    parameters = inspect.signature(function).parameters.values()
    return {
        p.name: Declared(annotation(p), p.default)
        for p in parameters
        if p.name not in skip and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    }


def read_toml(path: str | Path, what: str = "spec") -> dict[str, Any]:
    """The keys of a TOML file. Errors begin with `what`, the setting that named the file."""
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except FileNotFoundError:
        raise files.absent(what, path) from None
    except IsADirectoryError:
        raise SordinoError(f"{what}: '{path}' is a directory; name a TOML file.") from None
    except PermissionError:
        raise SordinoError(f"{what}: this user cannot read '{path}'; change its permissions.") from None
    except UnicodeDecodeError as error:
        raise SordinoError(f"{what}: '{path}' is not TOML ({error}); save it as UTF-8.") from None
    except tomllib.TOMLDecodeError as error:
        where = re.search(r"line (\d+)", str(error))
        line = Path(path).read_text(encoding="utf-8").split("\n")[int(where[1]) - 1] if where else ""
        hint = "; a name with other characters than A-Z, a-z, 0-9, _ and - needs quotes" * line.startswith("[")
        raise SordinoError(f"{what}: '{path}' is not TOML ({error}{hint}).") from None


def parse_setting(text: str) -> tuple[str, Any]:
    """`key=value`. The value is read as TOML, or else as a plain text.

    >>> parse_setting("lr=0.5")
    ('lr', 0.5)
    """
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise SordinoError(f"--set: '{text}' must have the form key=value, for example --set lr=0.5.")
    try:
        return key.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key.strip(), value.strip()


def typed(key: str, value: Any, annotation: str, *, infinite: bool = False) -> Any:
    """A setting as its declared type.

    Args:
      key: the setting, for errors.
      value: as TOML or the command line gives it.
      annotation: `str`, `int`, `float`, `bool`, `tuple[int, ...]`, `tuple[float, ...]`, `tuple[str, ...]` or `dict[…]`,
        with or without `| str` and `| None`. Where None is allowed, the text `none` means None.
      infinite: whether an infinite number is allowed.

    Raises:
      SordinoError: the value does not have the type.

    >>> typed("rounds", 70, "int | None")
    70
    """
    wanted = annotation.replace(" | None", "")
    if wanted != annotation and (value is None or value == "none"):
        return None
    if wanted.endswith(" | str"):
        if isinstance(value, str):
            return value
        wanted = wanted.removesuffix(" | str")
    if wanted == "str" and isinstance(value, str | int | float) and not isinstance(value, bool):
        return str(value)
    if wanted == "bool" and isinstance(value, bool):
        return value
    if wanted == "int" and isinstance(value, int) and not isinstance(value, bool):
        return value
    if wanted == "float":
        return _number(key, value, infinite)
    if wanted.startswith("tuple[str") and isinstance(value, list | tuple) and all(isinstance(v, str) for v in value):
        return tuple(value)
    if wanted.startswith("tuple[float") and isinstance(value, list | tuple):
        return tuple(_number(key, part, infinite) for part in value)
    if wanted.startswith("tuple[int") and isinstance(value, list | tuple):
        return tuple(typed(key, part, "int") for part in value)
    if wanted.startswith("dict") and isinstance(value, dict):
        return {str(k): v for k, v in value.items()}
    lists = "a list of texts" if "str" in wanted else "a list of numbers"
    kind = _WORDS.get(wanted, lists if wanted.startswith("tuple") else "a table, such as { 3 = 0.5 }")
    raise SordinoError(f"{key}: {value!r} must be {kind}.")


def _number(key: str, value: Any, infinite: bool) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise SordinoError(f"{key}: {value!r} must be a number.")
    try:
        number = float(value)
    except ValueError:
        raise SordinoError(f"{key}: '{value}' must be a number.") from None
    if math.isnan(number) or (math.isinf(number) and not infinite):
        raise SordinoError(f"{key}: {number} must be a finite number.")
    return number
