"""The errors of this library, told apart by type. Nothing decides by the text of a message.

| type | who mends it |
|---|---|
| `SordinoError` | the user: a wrong option, file or data set |
| `WireError` | the sender: the bytes are not a message |
| `WrongShareError` | one site: its share in secure aggregation does not fit the others |
| `LedgerError` | the owner of the ledger: it cannot be read or written, or another run holds it |
| `RolledBackError` | the owner of a ledger or of a run's folder: it is an older copy of itself |
| `StoppedError` | the coordinator: a federated run stopped and can be started again |
| `Refused` | nobody: a site declines a message, with a code that the coordinator may know |
| `OverspentError` | nobody: the budget does not allow the release, or a method asked more than it declared |
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable

# What other libraries call an option or a key of a run, in small letters alone, and what it is called here.
SYNONYMS = {
    "learningrate": "lr",
    "stepsize": "lr",
    "batchsize": "batch",
    "epochs": "rounds",
    "iterations": "rounds",
    "maxgradnorm": "clip",
    "clipnorm": "clip",
    "clippingnorm": "clip",
    "noisemultiplier": "noise",
    "eps": "epsilon",
}


MOST_LISTED, FEW_LISTED = 20, 8  # names that a message lists; of more, the few that are nearest


def count(number: int, one: str, many: str = "") -> str:
    """A number and its noun, for messages.

    >>> count(1, "cell"), count(2000, "cell"), count(1, "person has", "persons have")
    ('1 cell', '2,000 cells', '1 person has')
    """
    return f"{number:,} {one if number == 1 else many or one + 's'}"


class SordinoError(ValueError):
    """A mistake that the user can correct. The message states the field, the value, the bound and the remedy.

    Example:
        >>> import sordino as so
        >>> so.Privacy(epsilon=-1.0)
        Traceback (most recent call last):
        ...
        sordino.errors.SordinoError: epsilon: -1.0 must lie in ...
    """


class WireError(SordinoError):
    """Bytes that are not a message of the agreed form."""


class LedgerError(SordinoError):
    """A ledger that cannot be read or written, or that another process holds."""


class RolledBackError(LedgerError):
    """A ledger that lacks rows which it once had, or a run's folder that lacks rounds or was copied: an older copy."""


class StoppedError(SordinoError):
    """A federated run that stopped between two rounds. Started again, it continues."""


class WrongShareError(SordinoError):
    """A share does not fit the others. `site` revealed it."""

    def __init__(self, site: str, message: str) -> None:
        super().__init__(message)
        self.site = site


class OverspentError(RuntimeError):
    """A local rule asked more of the data than its queries declare, or a budget cannot pay for a round.

    Example:
        >>> issubclass(OverspentError, RuntimeError)
        True
    """


class Refused(Exception):  # noqa: N818
    """A site declines a message. `code` is sent to the coordinator; `detail` stays in the site's own log."""

    def __init__(self, code: str, detail: str = "") -> None:
        super().__init__(f"{code}: {detail}")
        self.code, self.detail = code, detail


def closest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known name that was probably meant, or None.

    Args:
        name: What the user wrote.
        known: The names that exist.
        cutoff: How similar a name must be, from 0 to 1.

    >>> closest("digts", ["digits", "mnist"])
    'digits'
    >>> closest("learning_rate", ["clip", "lr"])
    'lr'

    Neither capitals nor the dashes of a flag count:

    >>> closest("DP-FedNew", ["dp-fednew"]), closest("weights", ["--clients"])
    ('dp-fednew', None)

    A name that lacks the prefix of the private methods is completed:

    >>> closest("fedgd", ["dp-fedgd", "fedsgd"])
    'dp-fedgd'

    If no spelling is similar, a name counts that begins with the word, or the word with it and `_`:

    >>> closest("trust_model", ["sizes", "trust"]), closest("coef", ["coefficients", "torch"])
    ('trust', 'coefficients')
    """
    bare = {_bare(each): each for each in sorted(known)}
    word = _bare(name)
    for meant in (word, f"dp-{word}", SYNONYMS.get(re.sub("[^a-z]", "", word))):
        if meant in bare:
            return bare[meant]
    begins = [each for each in bare if f"{word}_".startswith(f"{each}_") or (len(word) > 2 and each.startswith(word))]
    found = [*difflib.get_close_matches(word, bare, n=1, cutoff=cutoff), *begins]
    return bare[found[0]] if found else None


def _bare(name: str) -> str:
    """What of a name is compared: not the dashes of a flag, nor whether letters are capitals."""
    return name.lstrip("-").casefold()


def listed(names: Iterable[str], like: str = "") -> str:
    """Names for a message; of more than `MOST_LISTED` only some, and how many more there are.

    Args:
        names: What exists, in the order of the message.
        like: What the user wrote; of many names, those come first that are most like it.

    >>> listed(["age", "sex"])
    'age, sex'
    >>> listed(map(str, range(30)), like="2")
    '2, 12, 20, 21, 22, 23, 24, 25 and 22 more'
    """
    names = list(names)
    if len(names) <= MOST_LISTED:
        return ", ".join(names)
    near = difflib.SequenceMatcher(b=_bare(like))

    def likeness(name: str) -> float:
        near.set_seq1(_bare(name))
        return near.ratio()

    first = sorted(names, key=likeness, reverse=True)[:FEW_LISTED]
    return f"{', '.join(first)} and {len(names) - FEW_LISTED:,} more"


def only_in(ours: Collection[str], theirs: Collection[str], here: str, there: str) -> str:
    """What only one of two lists has, for messages; empty if both have the same names.

    >>> only_in(["north", "south"], ["north", "west"], "roster.toml", "federation.toml")
    'only roster.toml has south, and only federation.toml has west'
    """
    alone = {here: [name for name in ours if name not in theirs], there: [name for name in theirs if name not in ours]}
    return ", and ".join(f"only {where} has {listed(names)}" for where, names in alone.items() if names)


def nearest(name: str, known: Iterable[str]) -> str:
    """` Did you mean 'x'?`, or the names that there are where nothing is near, as `listed`.

    >>> nearest("digts", ["digits", "mnist"])
    " Did you mean 'digits'?"
    >>> nearest("zzz", ["digits", "mnist"])
    ' Known: digits, mnist.'
    """
    known = sorted(known)
    meant = closest(name, known)
    return f" Did you mean '{meant}'?" if meant else f" Known: {listed(known, name)}."


def check_known(name: str, value: object, known: Collection[str]) -> None:
    """Check that the value of an option is one of those that it may have.

    Args:
        name: The option.
        value: Its value.
        known: The values that it may have.

    Raises:
        SordinoError: It is another value; the message names the nearest one, or those that it may have.

    Example:
        >>> check_known("mode", "exact", ["exact", "fast"])
        >>> check_known("mode", "exakt", ["exact", "fast"])
        Traceback (most recent call last):
        ...
        sordino.errors.SordinoError: mode: 'exakt' is unknown. Did you mean 'exact'?
    """
    if value not in known:
        raise SordinoError(f"{name}: '{value}' is unknown.{nearest(str(value), known)}")
