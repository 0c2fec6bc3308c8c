from __future__ import annotations

import gzip
import json
import struct
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from sordino.cli import main
from sordino.data.backbones import NETWORKS, SmallResNet, extract, network, prepared, script
from sordino.data.sources import load
from sordino.errors import SordinoError

RNG = np.random.default_rng(1)
SIZES = {  # features, parameters as published, without the classifying layer
    "resnet20": (64, 0.27e6),
    "resnet44": (64, 0.66e6),
    "resnet50": (2048, 23.5e6),
    "vgg16": (512, 14.7e6),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_have_their_published_sizes(name: str) -> None:
    module = NETWORKS[name]().eval()
    width, count = SIZES[name]
    assert sum(p.numel() for p in module.parameters()) == pytest.approx(count, rel=0.01)
    with torch.inference_mode():
        assert module(torch.zeros(2, 3, 32, 32)).shape == (2, width)
        assert module(torch.zeros(1, 3, 64, 64)).shape == (1, width)


def test_state_dicts_carry_torchvisions_names() -> None:
    """A few that are easy to get wrong, and how many there are."""
    resnet, vgg = NETWORKS["resnet50"]().state_dict(), NETWORKS["vgg16"]().state_dict()
    assert len(resnet) == 53 * 6  # a convolution and the five tensors of its batch norm
    assert resnet["conv1.weight"].shape == (64, 3, 7, 7)
    assert resnet["layer1.0.downsample.0.weight"].shape == (256, 64, 1, 1)
    assert resnet["layer2.0.downsample.1.running_var"].shape == (512,)
    assert resnet["layer3.5.conv2.weight"].shape == (256, 256, 3, 3)
    assert resnet["layer4.2.conv3.weight"].shape == (2048, 512, 1, 1)
    assert "layer4.1.downsample.0.weight" not in resnet
    assert len(vgg) == 13 * 7
    assert vgg["features.0.weight"].shape == (64, 3, 3, 3)
    assert vgg["features.7.bias"].shape == (128,)
    assert vgg["features.40.weight"].shape == (512, 512, 3, 3)
    assert vgg["features.41.running_mean"].shape == (512,)


def test_the_bottlenecks_stride_is_in_the_middle() -> None:
    block = NETWORKS["resnet50"]().layer2[0]  # type: ignore[union-attr, index]
    assert block.conv1.stride == (1, 1)
    assert block.conv2.stride == (2, 2)


def test_shortcuts_without_weights_keep_every_second_pixel() -> None:
    block = SmallResNet(3).layer2[0].eval()
    nn.init.zeros_(block.bn2.weight)  # the branch says nothing: what comes out is the shortcut
    x = torch.rand(1, 16, 8, 8)
    with torch.inference_mode():
        y = block(x)
    torch.testing.assert_close(y[:, 8:24], x[:, :, ::2, ::2])
    assert y[:, :8].abs().max() == y[:, 24:].abs().max() == 0


# ----------------------------------------------------------------------------------------------------------- extract


def test_batches_do_not_change_features() -> None:
    torch.manual_seed(0)
    module = SmallResNet(3)
    images = RNG.integers(0, 256, (7, 32, 32, 3), np.uint8)
    heard: list[int] = []
    all_ = extract(module, images, 7)
    parts = extract(module, images, 3, progress=heard.append)
    back = extract(module, images[::-1], 2)[::-1]
    assert all_.shape == (7, 64)
    assert all_.dtype == np.float32
    assert heard == [3, 3, 1]
    np.testing.assert_allclose(parts, all_, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(back, all_, rtol=1e-4, atol=1e-5)
    assert not module.training


def test_grey_images_are_padded_to_three_channels_of_32() -> None:
    images = torch.full((2, 28, 28, 1), 255, dtype=torch.uint8)
    x = prepared(images, (0.5,), (0.25,), None, "cpu")
    assert x.shape == (2, 3, 32, 32)
    assert (x[:, :, 2:30, 2:30] == 2).all()
    assert (x[:, :, :2] == -2).all()
    assert (x[..., 30:] == -2).all()
    x = prepared(images, (0.0, 0.5, 1.0), (1.0, 1.0, 1.0), 64, "cpu")
    assert x.shape == (2, 3, 64, 64)
    torch.testing.assert_close(x[0, :, 5, 5], torch.tensor([1.0, 0.5, 0.0]))


def test_modules_that_do_not_fit_are_named() -> None:
    images = np.zeros((3, 32, 32, 3), np.uint8)
    with pytest.raises(SordinoError, match=r"module: it fails on input \(3, 3, 32, 32\)"):
        extract(nn.Linear(5, 2), images)
    with pytest.raises(SordinoError, match="not all finite"):
        extract(nn.Flatten(), images, std=(0.0,))
    with pytest.raises(SordinoError, match="no images"):
        extract(nn.Flatten(), images[:0])


# ----------------------------------------------------------------------------------------------------------- weights


@pytest.mark.parametrize("form", ["plain", "wrapped", "safetensors", "projection"])
def test_weights_load_and_the_classifier_is_ignored(tmp_path: Path, form: str) -> None:
    torch.manual_seed(1)
    module = SmallResNet(3, projection=form == "projection")
    state = {**module.state_dict(), "fc.weight": torch.zeros(10, 64), "fc.bias": torch.zeros(10)}
    path = tmp_path / ("w.safetensors" if form == "safetensors" else "w.pt")
    if form == "safetensors":
        save_file(state, path)
    elif form == "wrapped":
        torch.save({"state_dict": {f"module.{key}": value for key, value in state.items()}, "epoch": 3}, path)
    else:
        torch.save({key: value for key, value in state.items() if not key.endswith("num_batches_tracked")}, path)
    images = RNG.integers(0, 256, (2, 32, 32, 3), np.uint8)
    np.testing.assert_array_equal(extract(network("resnet20", path), images), extract(module, images))


class Ran:
    def __reduce__(self) -> Any:
        return (exec, ("raise SystemExit('a pickle ran code')",))


def test_weights_that_do_not_fit(tmp_path: Path) -> None:
    path = tmp_path / "w.pt"
    with pytest.raises(SordinoError, match=r"network: 'resnet21' is unknown. Did you mean 'resnet20'"):
        network("resnet21", path)
    with pytest.raises(SordinoError, match="weights: there is no file"):
        network("resnet20", path)
    state = SmallResNet(3).state_dict()
    torch.save({key: value for key, value in state.items() if key != "layer2.1.conv1.weight"}, path)
    with pytest.raises(SordinoError, match=r"w.pt' lacks layer2.1.conv1.weight; give the weights of a resnet20"):
        network("resnet20", path)
    torch.save(SmallResNet(7).state_dict(), path)
    with pytest.raises(SordinoError, match=r"brings layer1.3.conv1.weight, .* more, which resnet20 has not"):
        network("resnet20", path)
    torch.save({**state, "conv1.weight": torch.zeros(16, 1, 3, 3)}, path)
    with pytest.raises(SordinoError, match=r"conv1.weight in .* has shape \(16, 1, 3, 3\), where resnet20 has"):
        network("resnet20", path)
    for bad in (Ran(), nn.Linear(1, 1), [1, 2]):
        torch.save(bad, path)
        with pytest.raises(SordinoError, match="state dict"):
            network("resnet20", path)
        with pytest.raises(SordinoError, match="is not TorchScript"):
            script(path)
    for name in ("w.pt", "w.safetensors"):
        (tmp_path / name).write_bytes(b"junk")
        with pytest.raises(SordinoError, match="weights: "):
            network("resnet20", tmp_path / name)
    with pytest.raises(SordinoError, match="is not TorchScript"):
        script(path)


# ------------------------------------------------------------------------------------------------------- the command


@pytest.fixture
def mnist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Ten training and four test images in MNIST's files."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("SORDINO_DATA", raising=False)
    folder = tmp_path / "raw"
    folder.mkdir()
    for part, count in (("train", 10), ("t10k", 4)):
        images, labels = RNG.integers(0, 256, (count, 28, 28), np.uint8), np.arange(count, dtype=np.uint8) % 2
        for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
            head = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
            (folder / f"{part}-{kind}-ubyte.gz").write_bytes(gzip.compress(head + array.tobytes()))
    return folder


def call(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    status = main(["features", *map(str, words)])
    return status, *capsys.readouterr()


def test_features_command(tmp_path: Path, mnist: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights, out, stats = tmp_path / "w.safetensors", tmp_path / "f.npz", tmp_path / "s.npz"
    save_file(SmallResNet(3).state_dict(), weights)
    words = ("--data", "mnist", "--data-dir", mnist, "--network", "resnet20", "--weights", weights, "--out", out)
    status, text, err = call(capsys, *words, "--stats", stats, "--batch", 3, "--json")
    assert status == 0, err
    found = json.loads(text)
    assert (found["features"], found["train"], found["test"]) == (64, 10, 4)
    assert "mnist" in err
    with np.load(stats) as public:
        assert public["cov"].shape == (64, 64)
        assert public["n"] == 10
    data = load(str(out), public_stats=stats)
    assert data.x_train.shape == (10, 64)
    assert data.y_test.tolist() == [0, 1, 0, 1]
    np.testing.assert_allclose(data.x_train.mean(0), 0, atol=1e-3)
    status, text, _ = call(capsys, *words)
    assert status == 0
    assert "64 features each by resnet20" in text
    assert str(out) in text


def test_features_command_with_a_module_of_ones_own(
    tmp_path: Path, mnist: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "net.pt", tmp_path / "f.npz"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.save(torch.jit.script(nn.Sequential(nn.AvgPool2d(8), nn.Flatten())), str(path))
    words = ("--data", "mnist", "--data-dir", mnist, "--module", path, "--out", out)
    status, _, err = call(capsys, *words, "--mean", "0", "--std", "1")
    assert status == 0, err
    data, raw = load(str(out)), load("mnist", data_dir=mnist)
    assert data.x_train.shape == (10, 48)
    padded = np.pad(raw.x_train.reshape(10, 28, 28), ((0, 0), (2, 2), (2, 2)))
    np.testing.assert_allclose(data.x_train[:, 0], padded[:, :8, :8].mean((1, 2)), rtol=1e-5)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--network", "resnet20"], "--network: give --network and --weights, or --module alone"),
        (["--network", "resnet20", "--module", "m.pt"], "give --network and --weights, or --module"),
        (["--module", "m.pt", "--out", "f.csv"], "--out: 'f.csv' should end in .npz"),
        (["--module", "m.pt", "--out", "nowhere/f.npz"], "--out: there is no directory"),
        (["--module", "m.pt", "--stats", "s.txt"], "--stats: 's.txt' should end in .npz"),
        (["--module", "m.pt", "--batch", "0"], "--batch: 0 must be at least 1"),
        (["--module", "m.pt", "--device", "tpu"], "--device: 'tpu' is unknown"),
        (["--module", "m.pt", "--mean", "a,b"], "--mean: 'a,b' must be numbers"),
        (["--module", "m.pt", "--std", "0"], "--std: '0' must be positive numbers"),
        (["--module", "m.pt", "--data", "a9a"], "--data: 'a9a' is not a set of images"),
        (["--module", "m.pt"], "module: there is no file 'm.pt'"),
        (["--network", "resnet20", "--weights", "w.pt"], "weights: there is no file 'w.pt'"),
    ],
)
def test_features_command_errors(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    status, out, err = call(capsys, "--data", "mnist", "--out", "f.npz", *words)
    assert (status, out) == (2, "")
    assert err.startswith(f"sordino: {message.split(':')[0]}") or message in err
    assert message in err
    assert "Traceback" not in err


def test_no_cuda_is_said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    _, _, err = call(capsys, "--data", "mnist", "--module", "m.pt", "--out", "f.npz", "--device", "cuda")
    assert "--device: 'cuda' is not available" in err


def test_help_warns_of_statistics(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        call(capsys, "--help")
    text = " ".join(capsys.readouterr().out.split())
    assert "Use it for PUBLIC data only" in text
