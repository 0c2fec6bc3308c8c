"""Rows of pixels reach a network as the images that they are, or are refused."""

import json

import numpy as np
import pytest
import torch

from sordino.errors import SordinoError
from sordino.models import images, nets, registry
from sordino.models.images import Layout, Normalisation, layout
from sordino.models.pixels import Pixels
from sordino.models.torch_model import TorchModel
from sordino.training import run
from sordino.training.batch import run_many
from sordino.training.predict import load_run
from sordino.training.spec import Spec
from tests.support import tiers

VIT = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "patch_size": 4}
RUN = {"method": "dp-fedgd", "rounds": 1, "clients": 2, "seed": 1, "clip": 1.0, "lora_rank": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A ViT for 8 x 8 images with the file that says mean and std, as save_pretrained writes them."""
    transformers = pytest.importorskip("transformers", reason="pip install sordino[transformers]")
    where = tmp_path_factory.mktemp("vit")
    torch.manual_seed(0)
    config = transformers.ViTConfig(image_size=8, num_labels=3, **VIT)
    transformers.ViTForImageClassification(config).save_pretrained(where)
    said = {"image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.3, 0.4], "resample": 2, "do_normalize": True}
    (where / "preprocessor_config.json").write_text(json.dumps(said))
    return where


def pictures(n=30, side=8, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (n, side, side, 3), np.uint8)


def saved(path, x):
    np.savez(path, x=x, y=np.arange(len(x)) % 3)
    return str(path)


def theirs(folder, images):
    """What the network computes from images (n, 3, 8, 8) in [0, 1], normalised as its file says."""
    from transformers import ViTForImageClassification

    network = ViTForImageClassification.from_pretrained(folder).eval()
    mean, std = (torch.tensor(v).view(1, 3, 1, 1) for v in ([0.4, 0.5, 0.6], [0.2, 0.3, 0.4]))
    with torch.no_grad():
        return network((images - mean) / std).logits


@pytest.mark.parametrize("first", [False, True])
def test_a_folder_of_a_smaller_size_reads_images_and_not_scrambled_pixels(folder, tmp_path, first):
    x = pictures()
    data = saved(tmp_path / "x.npz", x.transpose(0, 3, 1, 2) if first else x)
    prepared = run.prepare(Spec.of({**RUN, "data": data, "model": "vit-base-lora", "weights": str(folder)}))
    rows = torch.from_numpy(prepared.dataset.x_test)
    ours = prepared.model.logits(prepared.model.init(), rows)
    upright = rows.view(-1, 3, 8, 8) if first else rows.view(-1, 8, 8, 3).permute(0, 3, 1, 2)
    torch.testing.assert_close(ours, theirs(folder, upright), rtol=1e-4, atol=1e-5)
    scrambled = rows.view(-1, 8, 8, 3).permute(0, 3, 1, 2) if first else rows.view(-1, 3, 8, 8)
    assert not torch.allclose(ours, theirs(folder, scrambled), atol=1e-3)
    assert prepared.resolved.spec.values()["image"] == ("3x8x8" if first else "8x8x3")


def test_images_of_another_size_are_resized(folder, tmp_path):
    data = saved(tmp_path / "x.npz", pictures(side=16))
    prepared = run.prepare(Spec.of({**RUN, "data": data, "model": "vit-base-lora", "weights": str(folder)}))
    rows = torch.from_numpy(prepared.dataset.x_test)
    small = torch.nn.functional.interpolate(
        rows.view(-1, 16, 16, 3).permute(0, 3, 1, 2), (8, 8), mode="bilinear", antialias=True
    )
    ours = prepared.model.logits(prepared.model.init(), rows)
    torch.testing.assert_close(ours, theirs(folder, small), rtol=1e-4, atol=1e-5)


def test_a_run_on_images_is_trained_and_predicts_from_bytes_and_pixels_alike(folder, tmp_path):
    x = pictures()
    spec = Spec.of({**RUN, "data": saved(tmp_path / "x.npz", x), "model": "vit-base-lora", "weights": str(folder)})
    out, prepared = tmp_path / "out", run.prepare(spec)
    run.start(prepared, out)
    run.finish(prepared, out, list(run.rounds(prepared, out)))
    model = load_run(out)
    got = model.predict_proba(x[:4])
    np.testing.assert_allclose(got, model.predict_proba(x[:4] / np.float32(255)), rtol=1e-5)
    assert run.prepare(run.reopen(out)).resolved.model.options["image"] == "8x8x3"
    (trained,) = run_many([spec])
    assert trained.theta.shape == prepared.model.init().shape


@pytest.mark.parametrize(
    ("x", "changes", "message"),
    [
        (pictures().reshape(30, -1) / 255, {}, "image: vit-base-lora must know how a row of 192 numbers is laid out"),
        (
            pictures().reshape(30, -1) / 255,
            {"image": "8x8x1"},
            "image: 8x8x1 holds 64 numbers, but these rows have 192",
        ),
        (pictures().reshape(30, -1) / 255, {"image": "8 by 8"}, "image: '8 by 8' is not the shape of an image"),
        (pictures().reshape(30, -1) / 255, {"image": "4x12x4"}, "no end may be the channels"),
        (pictures(), {"image": "3x8x8"}, "image: 3x8x8, but the records have the shape 8x8x3"),
        (pictures().reshape(30, 2, 2, 16, 3), {}, "reads images, but one record has the shape 2x2x16x3"),
        (pictures().reshape(30, -1), {"image": "8x8x3"}, r"pixels in \[0, 1\], and some numbers lie outside"),
        (pictures(), {"mean": [0.5, 0.5]}, "mean: .* one finite number per channel, and there are 3"),
        (pictures(), {"std": [0.0]}, r"std: \[0.0, 0.0, 0.0\] must be above 0"),
    ],
)
def test_what_is_not_an_image_of_the_network_is_refused(folder, tmp_path, x, changes, message):
    values = {**RUN, "data": saved(tmp_path / "x.npz", x), "model": "vit-base-lora", "weights": str(folder)}
    with pytest.raises(SordinoError, match=message):
        run.prepare(Spec.of({**values, **changes}))


def test_rows_that_are_normalised_already_are_read_as_they_are(folder, tmp_path):
    rows = np.random.default_rng(0).normal(size=(30, 192)).astype(np.float32)
    values = {"data": saved(tmp_path / "x.npz", rows), "model": "vit-base-lora", "weights": str(folder)}
    prepared = run.prepare(Spec.of({**RUN, **values, "image": "3x8x8", "mean": [0], "std": [1]}))
    from transformers import ViTForImageClassification

    x = torch.from_numpy(prepared.dataset.x_test)
    with torch.no_grad():
        want = ViTForImageClassification.from_pretrained(folder).eval()(x.view(-1, 3, 8, 8)).logits
    torch.testing.assert_close(prepared.model.logits(prepared.model.init(), x), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("32x32x3", Layout(32, 32, 3, False)),
        ("3x32x32", Layout(32, 32, 3, True)),
        ("28x28", Layout(28, 28, 1, False)),
        ("1x28x28", Layout(28, 28, 1, False)),  # the same row
        ((16, 8, 1), Layout(16, 8, 1, False)),
    ],
)
def test_shapes_say_where_the_channels_are(text, expected):
    assert layout(text) == expected


def test_either_end_may_not_hold_the_channels():
    with pytest.raises(SordinoError, match="either end may be the channels"):
        layout("3x8x3")


@pytest.mark.parametrize("name", tiers(["cnn", "resnet18-gn"], 1))  # both read pixels by `Pixels`
def test_small_networks_read_the_layout_of_the_data(name, monkeypatch):
    """Channels first and last give the same logits; the mutant reads one as the other."""
    last, first = (registry.build(name, 12 * 12 * 3, 3, image=text) for text in ("12x12x3", "3x12x12"))
    assert torch.equal(last.init(), first.init())
    x = torch.rand(2, 3, 12, 12)
    rows = x.permute(0, 2, 3, 1).flatten(1)
    torch.testing.assert_close(last.logits(last.init(), rows), first.logits(first.init(), x.flatten(1)))
    assert not torch.allclose(first.logits(first.init(), rows), first.logits(first.init(), x.flatten(1)), atol=1e-3)


def test_small_networks_resize_and_normalise():
    net = registry.build("cnn", 64, 3, side=16, mean=(0.5,), std=(0.25,))
    assert net.size == nets.build("cnn", 256, 3, shape=(1, 16, 16)).size
    with pytest.raises(SordinoError, match="side: 0 must lie between"):
        registry.build("cnn", 64, 3, side=0)
    with pytest.raises(SordinoError, match="image: cnn reads images, and rows of 5 numbers"):
        registry.build("cnn", 5, 3)


def test_pixels_keep_records_apart():
    """The check of construction tries outputs and gradients row by row; every step of `Pixels` is in it."""
    how = Normalisation((0.1, 0.2, 0.3), (0.5, 0.6, 0.7), "bicubic")
    pixels = Pixels(layout("6x10x1"), 3, 8, how)
    net = torch.nn.Sequential(pixels, torch.nn.Flatten(), torch.nn.Linear(192, 2))
    assert TorchModel(net, shape=pixels.shape).mode != "vmap"
    assert pixels(torch.rand(2, 6, 10, 1)).shape == (2, 3, 8, 8)
    with pytest.raises(SordinoError, match="reads 1 channel, and these images have 3"):
        Pixels(layout("8x8x3"), 1, 8, how)


def test_a_file_without_mean_is_refused(tmp_path):
    (tmp_path / "preprocessor_config.json").write_text('{"resample": 9, "image_mean": [0.5], "image_std": [0.5]}')
    with pytest.raises(SordinoError, match="does not say mean, std and resampling"):
        images.normalisation(3, None, None, Normalisation((0.5,), (0.5,)), tmp_path)
