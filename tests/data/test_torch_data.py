"""One Dataset or DataLoader per client; every record is read once."""

import pytest
import torch
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from sordino.data.torch_data import from_datasets
from sordino.errors import SordinoError


def part(n, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.rand(n, 2, 3, generator=draw), torch.arange(n) % 2)


class Stream(IterableDataset):
    def __iter__(self):
        return iter([])


class Bare(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, k):
        return torch.zeros(3)


def test_loaders_and_data_sets_give_the_same_records():
    parts = [part(5, 1), part(7, 2)]
    plain = from_datasets(parts)
    loaders = [DataLoader(each, batch_size=3, shuffle=True, drop_last=True) for each in parts]
    shuffled = from_datasets(loaders)
    assert plain.sizes == shuffled.sizes == (5, 7)  # batches and what they drop do not matter
    assert torch.equal(plain.x, shuffled.x)
    assert torch.equal(plain.y, shuffled.y)
    assert torch.equal(plain.x[:5], parts[0].tensors[0].flatten(1))


def test_a_subset_is_what_the_loader_reads():
    data = part(6)
    records = from_datasets([DataLoader(data, sampler=SubsetRandomSampler([4, 1]))])
    assert torch.equal(records.x, data.tensors[0].flatten(1)[[1, 4]])


@pytest.mark.parametrize(
    ("clients", "message"),
    [
        ([], "clients: there are none"),
        ([DataLoader(part(4), sampler=WeightedRandomSampler([1.0] * 4, 8))], "may read a record twice"),
        ([DataLoader(part(4), sampler=RandomSampler(part(4), replacement=True))], "may read a record twice"),
        ([DataLoader(part(4), sampler=RandomSampler(part(4), num_samples=9))], "may read a record twice"),
        ([DataLoader(part(4), sampler=SubsetRandomSampler([1, 1]))], "may read a record twice"),
        ([DataLoader(part(4), batch_sampler=[[0, 0], [1]])], "may read a record twice"),
        ([Stream()], "client 0 is a Stream, which has no fixed records"),
        ([Bare()], "is not a pair"),
        ([part(3), TensorDataset(torch.rand(2, 5), torch.zeros(2))], r"have the shapes \(2, 3\), \(5,\)"),
        ([part(0)], "client 0 has no record"),
    ],
)
def test_what_is_not_every_record_once_is_refused(clients, message):
    with pytest.raises(SordinoError, match=message):
        from_datasets(clients)


ONE = part(4)


@pytest.mark.parametrize(
    "clients",
    [
        [Subset(ONE, [0, 1, 1])],  # as in oversampling
        [DataLoader(Subset(ONE, [2, 0, 2]))],
        [Subset(ONE, [3, -1])],
        [DataLoader(ONE, sampler=SubsetRandomSampler([3, -1]))],
        [ConcatDataset([ONE, ONE])],
        [ConcatDataset([part(2), Subset(ONE, [0])]), Subset(Subset(ONE, [1, 0]), [1])],
        [ONE, ONE],
    ],
)
def test_a_record_that_is_taken_twice_is_refused(clients):
    """Oversampled 11 times, one record moved a sum by 21 clips, where 2 were accounted for."""
    with pytest.raises(SordinoError, match="is a record that was read before"):
        from_datasets(clients)


def test_parts_of_one_data_set_are_its_records_once():
    joined = ConcatDataset([part(3, 1), ONE])
    records = from_datasets([Subset(joined, [0, 1, 5]), Subset(joined, [-1, 2, 3, 4])])
    assert records.sizes == (3, 4)
    assert torch.equal(records.x[2], ONE.tensors[0][2].flatten())
