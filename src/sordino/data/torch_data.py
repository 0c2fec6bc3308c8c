"""Records from `torch.utils.data`: one Dataset or DataLoader per client."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
)

from sordino.data.records import Records
from sordino.errors import SordinoError


def from_datasets(
    clients: Sequence[Dataset[Any] | DataLoader[Any]], *, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> Records:
    """The records of clients that are PyTorch data sets or loaders, each record read exactly once.

    A loader serves for what it reads, not for how it batches: minibatches are drawn by the plan, which accounts for
    them. Transforms are applied once, so that a record is the same in every round; random ones would be drawn once.

    A record that is read twice would count twice, beyond its clip. So items that subsets and concatenations take twice
    from one data set are refused, at one client or at two. Copies within a data set cannot be told from other records.

    Args:
      clients: one map-style Dataset, or one DataLoader over such, per client. An item is a pair of features and label.
        Features of any shape become one row.
      dtype: of the features.
      device: where the records are kept.

    Returns:
      The records, client by client in the order given.

    Raises:
      SordinoError: a client has no record, an item is not a pair, or a record is read twice or at random.

    Example:
      >>> from torch.utils.data import TensorDataset
      >>> parts = [TensorDataset(torch.rand(n, 1, 8, 8), torch.arange(n) % 2) for n in (5, 7)]
      >>> records = from_datasets(parts)
      >>> records.sizes, tuple(records.x.shape)
      ((5, 7), (12, 64))
    """
    if not len(clients):
        raise SordinoError("clients: there are none; give one Dataset or DataLoader per client.")
    seen: set[tuple[int, int]] = set()
    xs, ys = zip(*(_read(client, i, seen) for i, client in enumerate(clients)), strict=True)
    if len({x.shape[1:] for x in xs}) > 1:
        shapes = ", ".join(sorted({str(tuple(x.shape[1:])) for x in xs}))
        raise SordinoError(f"clients: their records have the shapes {shapes}; give all the same.")
    rows = torch.cat([x.reshape(len(x), -1) for x in xs])
    owner = np.repeat(np.arange(len(xs)), [len(x) for x in xs])
    return Records.of(rows, torch.cat(ys), owner, dtype=dtype, device=device)


def _read(client: Any, i: int, seen: set[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    """Features and labels of one client, in the order of its data set. `seen`: the origins of all items so far."""
    source, order = (client.dataset, _order(client, i)) if isinstance(client, DataLoader) else (client, None)
    if isinstance(source, IterableDataset) or not hasattr(source, "__len__") or not hasattr(source, "__getitem__"):
        raise SordinoError(
            f"clients: client {i} is a {type(source).__name__}, which has no fixed records; give a Dataset with "
            "__len__ and __getitem__."
        )
    where = range(len(source)) if order is None else order
    for k in where:
        if (origin := _origin(source, k)) in seen:
            raise SordinoError(
                f"clients: item {k} of client {i} is a record that was read before, here or at another client; a term "
                "that counts twice breaks the clip. Give each record to one client, once."
            )
        seen.add(origin)
    items = [source[k] for k in where]
    if not items:
        raise SordinoError(f"clients: client {i} has no record; leave it out.")
    if not all(isinstance(item, tuple | list) and len(item) == 2 for item in items):
        raise SordinoError(f"clients: an item of client {i} is not a pair (features, label); wrap the Dataset.")
    x = torch.stack([torch.as_tensor(features) for features, _ in items])
    y = torch.stack([torch.as_tensor(label).reshape(()) for _, label in items])
    return x, y


def _origin(source: Any, k: int) -> tuple[int, int]:
    """The data set that an item comes from, beneath subsets and concatenations, and its place there."""
    while True:
        k = int(k) % max(len(source), 1)  # -1 is the last one
        if isinstance(source, Subset):
            source, k = source.dataset, source.indices[k]
        elif isinstance(source, ConcatDataset):
            part = bisect_right(source.cumulative_sizes, k)
            source, k = source.datasets[part], k - (source.cumulative_sizes[part - 1] if part else 0)
        else:
            return id(source), k


def _order(loader: DataLoader[Any], i: int) -> Sequence[int] | None:
    """The records that a loader reads, each once; None for all. The order is that of the data set."""
    sampler: Any = loader.sampler
    plain = type(loader.batch_sampler).__module__.startswith("torch.utils.data") or loader.batch_sampler is None
    if plain and type(sampler) is SubsetRandomSampler and len(set(map(int, sampler.indices))) == len(sampler.indices):
        return sorted(map(int, sampler.indices))
    whole = type(sampler) is SequentialSampler or (
        type(sampler) is RandomSampler and not sampler.replacement and len(sampler) == len(loader.dataset)  # type: ignore[arg-type]
    )
    if plain and whole:
        return None
    raise SordinoError(
        f"clients: the loader of client {i} has a {type(sampler).__name__}, which may read a record twice or leave "
        "some out; a record that counts twice breaks the clip. Use shuffle=True or False, or a SubsetRandomSampler."
    )
