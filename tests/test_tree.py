"""Nested tuples of tensors, and the bytes they travel as."""

import json
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from sordino.errors import SordinoError
from sordino.tree import flatten, leaves, pack, rebuild, tree_map, unflatten, unpack

tensors = st.sampled_from([np.float32, np.float64, np.int64, np.bool_]).flatmap(
    lambda dtype: arrays(dtype, array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3)).map(
        lambda a: torch.from_numpy(np.array(a))
    )
)
trees = st.recursive(tensors, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=6)


def same(a, b):
    """The same nesting, and bit for bit the same tensors."""
    if isinstance(a, tuple) or isinstance(b, tuple):
        return isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b) and all(map(same, a, b))
    return a.dtype == b.dtype and a.shape == b.shape and a.numpy().tobytes() == b.numpy().tobytes()


@settings(deadline=None, max_examples=80, derandomize=True)
@given(trees)
def test_what_is_packed_comes_back(tree):
    assert same(unpack(pack(tree)), tree)


def test_the_comparison_sees_a_difference():
    tree = (torch.ones(2), (torch.zeros(3),))
    for other in ((torch.ones(2), torch.zeros(3)), (torch.ones(2), (torch.zeros(3).double(),)), (torch.ones(2), ())):
        assert not same(unpack(pack(tree)), other)


def test_gradients_do_not_travel():
    theta = torch.ones(3, requires_grad=True)
    assert not unpack(pack(theta * 2)).requires_grad


def damaged():
    data = pack((torch.arange(3.0), (torch.ones(2, dtype=torch.float64), ())))
    for i in range(0, len(data), 3):
        yield data, data[:i]
        yield data, data[:i] + bytes([data[i] ^ 0xFF]) + data[i + 1 :]


def test_damaged_bytes_are_refused():
    """Cut anywhere or with any byte turned over: refused, or (an unused field of the container) read as it was."""
    refused = 0
    for data, broken in damaged():
        try:
            assert same(unpack(broken), unpack(data))
        except SordinoError:
            refused += 1
    assert refused > 400


@pytest.mark.parametrize("data", [b"", b"no archive", b"PK\x03\x04"])
def test_something_else_is_refused(data):
    with pytest.raises(SordinoError, match="damaged"):
        unpack(data)


def test_a_lone_array_is_refused(tmp_path):
    np.save(tmp_path / "one.npy", np.ones(3))
    with pytest.raises(SordinoError, match="damaged"):
        unpack((tmp_path / "one.npy").read_bytes())


def test_a_skeleton_without_its_leaves_is_refused(tmp_path):
    np.savez(tmp_path / "a.npz", skeleton=np.array(json.dumps([0, 1])), leaf0=np.ones(2))
    with pytest.raises(SordinoError, match="leaf1"):
        unpack((tmp_path / "a.npz").read_bytes())


def test_nothing_is_unpickled(tmp_path):
    np.savez(tmp_path / "a.npz", skeleton=np.array("0"), leaf0=np.array([print], dtype=object), allow_pickle=True)
    with pytest.raises(SordinoError, match="damaged"):
        unpack((tmp_path / "a.npz").read_bytes())


def test_map_and_leaves_keep_the_order():
    tree = (torch.tensor(1.0), (torch.tensor(2.0), (), torch.tensor(3.0)))
    assert [leaf.item() for leaf in leaves(tree)] == [1, 2, 3]
    assert same(tree_map(torch.add, tree, tree), tree_map(lambda leaf: 2 * leaf, tree))
    with pytest.raises(ValueError, match="zip"):
        tree_map(torch.add, tree, tree[:1])


class Pair(NamedTuple):
    first: torch.Tensor
    rest: tuple


def test_named_tuples_survive_map_and_bytes():
    """Bytes hold plain tuples; a template gives the fields back, at every depth."""
    tree = Pair(torch.ones(2), (Pair(torch.zeros(1), ()), torch.ones(3)))
    doubled = tree_map(lambda leaf: 2 * leaf, tree)
    assert isinstance(doubled, Pair)
    assert isinstance(doubled.rest[0], Pair)
    plain = unpack(pack(tree))
    assert type(plain) is tuple
    again = unpack(pack(tree), tree)
    assert again.rest[0].first.tolist() == [0]
    assert same(again, tree)


def test_a_template_accepts_anything_where_it_has_nothing():
    tree = (torch.ones(2), (torch.zeros(1), torch.ones(1)))
    assert isinstance(rebuild(tree, Pair((), ())), Pair)
    assert rebuild(tree, ()) is tree
    assert rebuild(tree, torch.ones(1)) is tree


@pytest.mark.parametrize(
    ("tree", "problem"),
    [
        (torch.ones(2), "one tensor in place of first, rest"),
        ((torch.ones(2),), "1 parts in place of first, rest"),
        ((torch.ones(2), (), ()), "3 parts in place of first, rest"),
    ],
)
def test_a_tree_of_another_method_is_refused(tree, problem):
    with pytest.raises(SordinoError, match=problem):
        rebuild(tree, Pair((), ()))


def test_a_nesting_that_repeats_or_skips_a_leaf_is_refused():
    for skeleton in ([0, 0], [1], [0, 2], [True], ["0"], {"0": 0}, None):
        with pytest.raises(ValueError, match="missing"):
            unflatten(skeleton, lambda i: torch.ones(1))
    assert flatten((torch.ones(1), ())) == ([0, []], [torch.ones(1)])
