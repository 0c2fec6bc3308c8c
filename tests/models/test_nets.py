"""Networks by name."""

import functools

import pytest
import torch
from torch import nn

from sordino.core import Shard
from sordino.errors import SordinoError
from sordino.models import nets, per_example
from sordino.models.torch_model import TorchModel


@pytest.mark.parametrize(
    ("name", "features", "size"),
    [
        ("mlp", 20, 64 * 21 + 10 * 65),
        ("cnn", 784, 26010),
        ("cnn", 3072, 37274),
        ("cnn", 64, 9770),
    ],
)
def test_the_modes_of_a_network_agree(name, features, size):
    net = nets.build(name, features, 10)
    assert (net.size, net.outputs, net.random) == (size, 10, False)
    x, y = torch.randn(3, features), torch.tensor([0, 5, 9])
    sums = {}
    for net.mode in ("tape", "two-pass", "vmap"):
        sums[net.mode] = net.clipped_sum(net.init(), Shard(x, y, torch.ones(3)), 0.1)
    assert 0.1 < sums["tape"].norm() <= 0.3
    torch.testing.assert_close(sums["tape"], sums["vmap"], rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(sums["tape"], sums["two-pass"], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("shape", [(9,), (1, 8, 8), (1, 16, 16), (3, 16, 16)])
def test_networks_pass_the_check_of_construction(shape):
    module = nets.mlp(9, 3) if shape == (9,) else nets.cnn(shape, 3)
    assert TorchModel(module, shape=shape).mode != "vmap"


@functools.cache
def of_colours(name):
    """A network of 32 x 32 images, which construction checks for seconds."""
    return nets.build(name, 3072, 10)


def test_resnet_has_rules_for_all_layers_and_no_batch_norm():
    net = of_colours("resnet18-gn")
    assert net.size == 11_173_962
    assert per_example.supported(net.module) == []
    assert not any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in net.module.modules())
    small = TorchModel(nn.Sequential(nets.Block(4, 8, 2), nn.Flatten(), nn.Linear(128, 3)), shape=(4, 8, 8))
    assert small.mode != "vmap"


@pytest.mark.parametrize("name", ["cnn", "resnet18-gn"])
def test_colours_stand_innermost_in_rows_of_data(name):
    """The network agrees with one whose channels come first; reading rows as channels first is wrong."""
    net, first = of_colours(name), nets.build(name, 3072, 10, shape=(3, 32, 32))
    assert torch.equal(net.init(), first.init())
    images = torch.randn(2, 3, 32, 32)
    rows = images.permute(0, 2, 3, 1).flatten(1)
    want = first.logits(first.init(), images.flatten(1))
    torch.testing.assert_close(net.logits(net.init(), rows), want)
    assert not torch.allclose(net.logits(net.init(), images.flatten(1)), want, atol=1e-3)


def test_the_seed_alone_decides():
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    first = nets.build("cnn", 64, 10, seed=4).init()
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(2)
    assert torch.equal(nets.build("cnn", 64, 10, seed=4).init(), first)
    assert not torch.equal(nets.build("cnn", 64, 10, seed=5).init(), first)


@pytest.mark.parametrize(
    ("name", "features", "shape", "word"),
    [("cnnn", 64, None, "Did you mean 'cnn'"), ("cnn", 65, None, "channels"), ("cnn", 64, (1, 7, 7), "49")],
)
def test_features_that_a_network_cannot_read_are_refused(name, features, shape, word):
    with pytest.raises(SordinoError, match=word):
        nets.build(name, features, 10, shape=shape)
