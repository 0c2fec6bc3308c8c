"""The form of a certificate: which fields it may have, and what each may hold.

A program that reads `6.9` rounds as 6, or `true` as 1, sees another certificate than a person does; a field that no
version writes can say anything; NaN and infinity pass comparisons or end them in an error. A bound that is infinite,
as the clip of a run without noise may be, is null.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

MOST_NUMBER = 10**15  # of whole numbers: far more than records of a client, or rows of a ledger


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and 0 <= int(value) <= MOST_NUMBER


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value) and float(value) >= 0


def _is_span(value: Any) -> bool:
    return _is_number(value) or (isinstance(value, list) and len(value) == 2 and all(map(_is_number, value)))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _are(fits: Callable[[Any], bool], least: int = 0) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list | tuple) and len(value) >= least and all(map(fits, value))


def _or_null(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or fits(value)


def _are_two(value: Any) -> bool:
    return _are(_is_whole)(value) and len(value) == 2


_KINDS: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    (
        "a text",
        _is_text,
        "sordino unit person.choice adjacency trust method execution sampler.clients sampler.records "
        "sampler.amplification sampler.schedule divisor noise_source queries[].query queries[].mechanism "
        "queries[].bound queries[].clipping groups[].clients groups[].releases[].query groups[].releases[].sampler "
        "groups[].releases[].mechanism spec_sha256 model_sha256 metrics_sha256 curve_sha256 adapter_sha256 "
        "statement_sha256 card_sha256 schema_sha256 code_sha256 ledger.head signature.algorithm signature.key "
        "signature.signer signature.value site.name site.data",
    ),
    ("a list of texts", _are(_is_text), "reasons client_names assumes numerics groups[].rounds"),
    ("true or false", _is_flag, "certified queries[].semidefinite queries[].stream queries[].carried"),
    (
        "a whole number",
        _is_whole,
        "format person.records person.clients rounds clients queries[].calls queries[].joint queries[].dimension "
        "queries[].factor.inverse_band queries[].factor.rounds worst_client groups[].count groups[].releases[].times "
        "secure.dropouts secure.colluders secure.honest secure.masks.edge secure.masks.shares secure.masks.near "
        "secure.masks.committee secure.masks.quorum ledger.rows site.client site.rounds",
    ),
    ("a whole number or null", _or_null(_is_whole), "records test_records"),
    (
        "a finite number of at least 0",
        _is_number,
        "delta guess cohort noise client_noise queries[].step queries[].factor.momentum queries[].factor.decay "
        "groups[].releases[].std groups[].releases[].rate",
    ),
    (
        "a finite number of at least 0, or null",
        _or_null(_is_number),
        "epsilon mu epsilon_asked epsilon_at.* groups[].mu groups[].epsilon secure.epsilon_server site.epsilon "
        "site.delta site.spent clip queries[].clip groups[].releases[].sensitivity",
    ),
    ("a number, or the least and the largest", _is_span, "groups[].own_std.* groups[].influence.*"),
    ("two whole numbers or null", _or_null(_are_two), "groups[].records"),
    ("a list of whole numbers or null", _or_null(_are(_is_whole, 1)), "groups[].sizes"),
    ("a list of finite numbers", _are(_is_number, 1), "queries[].factor.diagonals"),
    ("null or fields of its own", lambda value: value is None, "person secure"),
    ("empty or a list of entries", lambda value: value == [], "groups[].releases"),
)
FORM = {path: (words, fits) for words, fits, paths in _KINDS for path in paths.split()}
_KEYED = ("epsilon_at", "groups[].own_std", "groups[].influence")


def misfits(cert: Mapping[str, Any]) -> Iterator[str]:
    """What in a certificate is not of its form, in words; nothing if all of it is.

    Fields that are missing are not told: whoever needs one finds out.
    """
    for path, value in _parts(cert, ""):
        words, fits = FORM.get(path, ("", None))
        if fits is None:
            yield f"{path}: no certificate of this format has that field, or has it in this form"
        elif not fits(value):
            yield f"{path}: it must be {words}, not {str(value)[:40]!r}"


def _parts(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The parts of a document that have no named parts, with their paths."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            name = "*" if path in _KEYED else str(key)
            yield from _parts(part, f"{path}.{name}" if path else name)
    elif isinstance(value, Sequence) and not isinstance(value, str) and value and isinstance(value[0], Mapping):
        for part in value:
            yield from _parts(part, f"{path}[]")
    else:
        yield path, value
