"""Low-rank adapters (LoRA): a frozen linear layer plus (alpha / rank) B A, where only A and B are trained.

A and B may have a leading axis of clients (`grouped`). Then each client owns an equal part of the rows, one client
after another, and all clients share one pass through the frozen layers.

With the variant `freeze-a`, A is frozen at its first value, which follows from a public seed, and only B is part of
theta (FFA-LoRA: Sun et al. 2024, arXiv 2403.12313). A message then holds nothing of A, and no noise is added to A.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sordino.errors import SordinoError, check_known
from sordino.foreign import printable
from sordino.models import outer
from sordino.models.per_example import RULES, Mask, Tape, linear, tape
from sordino.models.pretrained import LORA_VARIANTS

TARGETS = (
    *("query", "key", "value", "q_proj", "k_proj", "v_proj", "q_lin", "k_lin", "v_lin"),
    *("query_proj", "key_proj", "value_proj", "attn.q", "attn.k", "attn.v"),  # of DeBERTa-v2 and v3, and of MPNet
    *("qkv", "in_proj", "c_attn", "query_key_value", "qkv_proj", "Wqkv"),  # one layer for all three
)
HEAD_NAMES = ("classifier", "score", "head", "out_proj", "pre_classifier", "fc")
RATES = (
    "attention_dropout",
    "drop_prob",
    "dropout_prob",
    "dropout_p",
    "dropout",
    "attn_drop",
)  # dropout rates that modules store as plain numbers
PREFIX = "base_model.model."  # of all names in PEFT's files
CONFIG, WEIGHTS, PAGE = "adapter_config.json", "adapter_model.safetensors", "README.md"
BASE_SHA256 = "base_sha256"  # in the metadata of WEIGHTS
README = """\
---
base_model: {quoted}
library_name: peft
---
# Adapters for {name}

Low-rank adapters{heads}, in the format of PEFT. They fit one base alone:

- name: `{name}`
- class: `{parent_library}.{base_model_class}`
- SHA-256 of its parameters: `{sha256}`

PEFT compares none of these. `sordino.models.lora.load_peft` refuses a model with another base. The hash covers names,
shapes and float32 values of all parameters but adapters and head (`sordino.models.lora.base_sha256`).
"""


class GroupedLinear(nn.Module):
    """A linear layer. With a weight (clients, out, in) and a bias (clients, out), clients share the rows equally."""

    grouped = halves = True

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        # In float32 at least, so that trained parameters of a bfloat16 base keep their precision.
        self.weight = nn.Parameter(weight.detach().to(_kind(weight), copy=True))
        self.bias = None if bias is None else nn.Parameter(bias.detach().to(_kind(bias), copy=True))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        if weight.dim() == 2:
            return nn.functional.linear(x, weight, self.bias)
        rows = x.reshape(len(weight), -1, x.shape[-1])
        y = rows @ weight.mT if self.bias is None else torch.baddbmm(self.bias.unsqueeze(1), rows, weight.mT)
        return y.view(*x.shape[:-1], -1)


class Adapter(nn.Module):
    """A and B of one layer: x -> h = x A^T, and `onto`, which adds scale h B^T to the output of the frozen layer.

    In a pass for per-example gradients it is `taped`, by `_Adapted`. That stores the input of B and the gradient at its
    output (`factors`) for the rule. The rule writes into `room` if there is any. If A is frozen, it serves all clients.
    Of a traced pass, the rule drops entries of the input by itself (`mask`, and a seed among the factors).
    """

    grouped = taped = halves = True

    def __init__(self, A: Tensor, B: Tensor, scale: float, freeze_a: bool = False) -> None:
        super().__init__()
        self.lora_A, self.lora_B, self.scale = nn.Parameter(A, requires_grad=not freeze_a), nn.Parameter(B), scale
        self.freeze_a = freeze_a
        self.factors: tuple[Tensor, ...] | None = None
        self.mask: Mask | None = None
        self.room: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        A = self.lora_A
        if A.dim() == 2:
            return nn.functional.linear(x, A)
        return (x.reshape(len(A), -1, x.shape[-1]) @ A.mT).view(*x.shape[:-1], -1)

    def onto(self, out: Tensor, h: Tensor) -> Tensor:
        """out + scale h B^T, by one product."""
        B = self.lora_B
        if B.dim() == 2:
            y = torch.addmm(out.flatten(0, -2), h.flatten(0, -2), B.mT, alpha=self.scale)
        else:
            rows, each = (t.reshape(len(B), -1, t.shape[-1]) for t in (out, h))
            y = torch.baddbmm(rows, each, B.mT, alpha=self.scale)
        return y.view(out.shape)


class _Adapted(torch.autograd.Function):
    """A `LoRALinear` as one step of a taped pass: the rule of A and B is called with their factors.

    It makes half as many calls as autograd would, which matters if a GPU waits for the CPU.
    """

    @staticmethod
    def forward(ctx: Any, root: Tensor, x: Tensor, out: Tensor | None, layer: LoRALinear, notes: Tape) -> Tensor:
        adapter, kind = layer.adapter, x.dtype
        A, B = _as(adapter.lora_A, kind), _as(adapter.lora_B, kind)
        A = A.expand(len(B), -1, -1) if A.dim() < B.dim() else A  # a frozen A serves all clients
        ctx.weight = None
        if out is None:
            weight, bias = _matrix(layer.base)
            ctx.weight = _as(weight, kind)
            y = nn.functional.linear(x, ctx.weight, None if bias is None else _as(bias, kind))
        else:
            y = out.to(kind).clone(memory_format=torch.contiguous_format)
        rate = layer.dropout.p if layer.dropout.training else 0.0
        ctx.mask, ctx.rate, ctx.number, dropped = None, rate, None, x
        if rate and notes.seed is None:
            dropped, ctx.mask = torch.native_dropout(x, rate, True)
        else:
            ctx.save_for_backward(x)  # raises an error if it is overwritten
        if rate and notes.seed is not None:  # nothing is stored: the backward pass computes it again
            ctx.number = sum(notes.times.values())
            dropped = dropped_out(x, notes.seed, ctx.number, rate)
        h = _product(notes.nothing(kind), _rows(dropped, A), A.mT, adapter.scale)
        (add_product if notes.traced else _add)(y.view(*h.shape[:-1], -1), h, B.mT)
        notes.used(adapter)
        ctx.saved = dropped.detach() if ctx.mask is not None else None, h, A, B, adapter, notes
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (dropped, h, A, B, adapter, notes), mask, number, g = ctx.saved, ctx.mask, ctx.number, gradients[0]
        ctx.saved = ctx.mask = None  # frees memory, because autograd keeps the node longer
        x = ctx.saved_tensors[0].detach() if dropped is None else dropped
        # scale g B, which the gradient of x needs anyway
        up = _product(notes.nothing(g.dtype), _rows(g, B), B, adapter.scale)
        if number is None:
            notes.report(adapter, x, up, (h, g))
        else:
            notes.report(adapter, x, up, (h, g, notes.seed), Mask(number, ctx.rate))
        if not ctx.needs_input_grad[1]:
            return None, None, g if ctx.needs_input_grad[2] else None, None, None
        x_gradient = torch.mm(up, A) if A.dim() == 2 else torch.bmm(up, A).flatten(0, 1)
        if mask is not None:
            x_gradient = _undrop(x_gradient, mask.reshape(x_gradient.shape), 1 / (1 - ctx.rate))
        if number is not None:
            x_gradient = dropped_out(x_gradient, notes.seed, number, ctx.rate)
        if ctx.weight is not None and notes.traced:  # compiled, the sum is part of what reads it
            x_gradient = x_gradient + torch.mm(g.reshape(-1, g.shape[-1]), ctx.weight)
        elif ctx.weight is not None:
            x_gradient.addmm_(g.reshape(-1, g.shape[-1]), ctx.weight)
        return None, x_gradient.view(x.shape), g if ctx.needs_input_grad[2] else None, None, None


def dropped_out(x: Tensor, seed: Tensor, number: int, rate: float) -> Tensor:
    """Dropout whose mask is a function of the seed, so that it can be computed twice instead of being stored.

    The mask does not depend on records: privacy does not rest on it. A mixing function of 32 bits takes fewer
    instructions than a cipher. `outer_kernel.dropped_products` computes the same mask.

    Args:
      x: any tensor.
      seed: two random numbers of type int32.
      number: of the layer.
      rate: the share of entries that become zero.
    """
    h = (torch.arange(x.numel(), dtype=torch.int32, device=x.device) ^ seed[:1]) * 0x2C1B3C6D
    h = (h ^ (h >> 12 & 0xFFFFF)) + (seed[1:] ^ spread(number))
    h = (h ^ (h >> 15 & 0x1FFFF)) * 0x297A2D39
    return torch.where((h >= threshold(rate)).view(x.shape), x * (1 / (1 - rate)), 0.0)


_undrop = torch.ops.aten.native_dropout_backward.default


def threshold(rate: float) -> int:
    """The smallest random number of type int32 that keeps an entry."""
    return int(rate * 2**32) - 2**31


def spread(number: int) -> int:
    """The number of a layer as it enters the masks of its dropout."""
    return number * 0x27D4EB2F & 0x7FFFFFFF


def _as(t: Tensor, kind: torch.dtype) -> Tensor:
    return t if t.dtype is kind else t.to(kind)


def _rows(x: Tensor, like: Tensor) -> Tensor:
    """(rows, entries), or (clients, rows, entries) if there is one matrix per client."""
    return x.reshape(-1, x.shape[-1]) if like.dim() == 2 else x.reshape(len(like), -1, x.shape[-1])


def _product(nothing: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """scale a b. beta = 0 ignores the first argument; alpha saves a pass over the product."""
    return (torch.addmm if b.dim() == 2 else torch.baddbmm)(nothing, a, b, beta=0, alpha=scale)


def _add(out: Tensor, a: Tensor, b: Tensor) -> None:
    out.addmm_(a, b) if b.dim() == 2 else out.baddbmm_(a, b)


@torch.library.custom_op("sordino::add_product", mutates_args=("out",))
def add_product(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out += a b. The compiler would make `addmm_` a product with a copy of `out`; this stays in place."""
    _add(out, a, b)


def _matrix(base: nn.Module) -> tuple[Tensor, Tensor | None]:
    """The weight (out, in) and the bias of a linear layer."""
    weight, bias = base.weight, base.bias
    assert isinstance(weight, Tensor)
    assert not isinstance(bias, nn.Module)
    return (weight if isinstance(base, nn.Linear) else weight.mT), bias


class LoRALinear(nn.Module):
    """base(x) + (alpha / rank) dropout(x) A^T B^T; B starts at zero, so the first model equals the frozen one."""

    def __init__(
        self,
        base: nn.Module,
        rank: int = 16,
        alpha: float = 32.0,
        dropout: float = 0.1,
        generator: torch.Generator | None = None,
        freeze_a: bool = False,
    ) -> None:
        super().__init__()
        self.rank, self.alpha, self.dropout = rank, alpha, nn.Dropout(dropout)
        inputs, outputs = _sizes(base)
        weight = base.weight
        assert isinstance(weight, Tensor)
        bound = 1 / math.sqrt(inputs)  # as in PEFT: Kaiming with a = sqrt(5)
        A = torch.empty(rank, inputs).uniform_(-bound, bound, generator=generator).to(weight.device, _kind(weight))
        B = torch.zeros(outputs, rank, device=weight.device, dtype=_kind(weight))
        self.adapter, self.base = Adapter(A, B, alpha / rank, freeze_a), base.requires_grad_(False)
        # A base with another forward is called as it is.
        self._plain = type(base).__name__ == "Conv1D" or type(base).forward is nn.Linear.forward

    def forward(self, x: Tensor) -> Tensor:
        where, notes = x.device.type, tape()
        # One cast here instead of one per product that reads x.
        kind = torch.get_autocast_dtype(where) if torch.is_autocast_enabled(where) else x.dtype
        if notes is not None and self.adapter in notes.names:
            x = notes.cast(x, kind)
            out = None if self._plain else self.base(x)
            adapted: Tensor = _Adapted.apply(notes.root, x, out, self, notes)  # type: ignore[no-untyped-call]
            return adapted
        x = x.to(kind)
        h = self.adapter(self.dropout(x))
        return self.adapter.onto(self.base(x), h)

    def extra_repr(self) -> str:
        return f"rank={self.rank}, alpha={self.alpha:g}"


def _kind(weight: Tensor) -> torch.dtype:
    return torch.promote_types(weight.dtype, torch.float32)


def _linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"  # in GPT-2: a transposed linear layer


def _sizes(base: nn.Module) -> tuple[int, int]:
    if isinstance(base, nn.Linear):
        return base.in_features, base.out_features
    if _linear(base) and isinstance(base.weight, Tensor):
        return int(base.weight.shape[0]), int(base.weight.shape[1])
    raise SordinoError(f"targets: a {type(base).__name__} is not a linear layer; choose an nn.Linear.")


def low_rank(module: Any, x: Tensor, up: Tensor, n: int) -> Iterable[tuple[str, Tensor]]:
    """The rule of an adapter: dA = up^T x and dB = g^T h per example, with up = scale g B and h = scale x A^T.

    x is the input after dropout, unless a mask is given. Windows or tokens in the first axis are positions too. A
    frozen A has no gradient.
    """
    (h, g, *seed), mask, room = module.factors, module.mask, module.room
    module.factors, module.mask, module.room = None, None, {}
    x, up, h, g = (
        t if t.dim() == 3 and len(t) == n else t.reshape(n, t.numel() // (n * t.shape[-1]), t.shape[-1])
        for t in (x, up, h, g)
    )
    of_b = ("lora_B", torch.bmm(g.mT, _as(h, g.dtype), out=_fit(room.get("lora_B"), g)))
    if module.freeze_a:
        return (of_b,)
    x, into = _as(x, up.dtype), _fit(room.get("lora_A"), up)
    if mask is None:
        return ("lora_A", torch.bmm(up.mT, x, out=into)), of_b
    return ("lora_A", _dropped_product(up, x, seed[0], mask, into)), of_b


def _dropped_product(up: Tensor, x: Tensor, seed: Tensor, mask: Mask, out: Tensor | None) -> Tensor:
    """up^T dropout(x) per example; on a GPU by one kernel, which does not store dropout(x)."""
    number, rate = mask
    if up.dtype in outer.HALVES and up.shape[-1] <= outer.TILE and outer.by_kernel(up):
        out = up.new_empty(len(up), up.shape[-1], x.shape[-1]) if out is None else out
        words = spread(number), threshold(rate), 1 / (1 - rate)
        return outer.dropped_products(up.contiguous(), x.contiguous(), seed, *words, out)
    return torch.bmm(up.mT, dropped_out(x, seed, number, rate), out=out)


def _fit(room: Tensor | None, like: Tensor) -> Tensor | None:
    return room if room is not None and room.dtype == like.dtype else None


RULES[GroupedLinear] = linear
RULES[Adapter] = low_rank


# ------------------------------------------------------------------------------------------------------- adapting


def adapt(
    module: nn.Module,
    *,
    rank: int = 16,
    alpha: float = 32.0,
    dropout: float = 0.1,
    targets: Sequence[str] | None = None,
    head: Sequence[str] | None = None,
    seed: int = 0,
    variant: str = "lora",
) -> nn.Module:
    """Freeze a transformer, add adapters to its attention and train its head.

    Args:
      module: the transformer; it is changed.
      rank: of the adapters.
      alpha: the adapters are scaled by alpha / rank.
      dropout: of the adapters' inputs, in training mode. All other dropout is set to zero, because the base is frozen.
      targets: last parts of the names of the linear layers to adapt, such as "query" or "output.dense"; by default the
        projections to Q, K and V. Layers of the head are trained in full, and get no adapters.
      head: names, or last parts of names, of layers that are trained in full: a linear layer, or a module that contains
        some. By default these are called classifier, score, head, …, outside the attention. An empty list trains none.
      seed: of the first A.
      variant: one of `LORA_VARIANTS`. `freeze-a` trains B alone. The last two train what their method says
        (`methods.adapters.with_adapters`), and their modules are those of `lora`.

    Returns:
      The same module.

    Raises:
      SordinoError: an argument is out of its range, or no layer has the name of a target or of the head. Of `targets`,
        each must be the name of a layer.
    """
    if rank < 1 or not 0 <= dropout < 1 or not alpha > 0:
        raise SordinoError(
            f"rank {rank}, alpha {alpha}, dropout {dropout}: they must be at least 1, above 0, and within [0, 1)."
        )
    check_known("variant", variant, LORA_VARIANTS)
    module.requires_grad_(False)
    _still(module)
    linears = {name: m for name, m in module.named_modules() if _linear(m)}
    targeted = _targeted(module, linears, targets, head)
    trained = _heads(module, linears, targeted, head)
    generator = torch.Generator().manual_seed(seed)
    for name in targeted:
        _put(module, name, LoRALinear(linears[name], rank, alpha, dropout, generator, variant == "freeze-a"))
    for name in trained:
        layer = linears[name]
        assert isinstance(layer, nn.Linear)
        _put(module, name, GroupedLinear(layer.weight, layer.bias))
    return module


def _targeted(
    module: nn.Module, linears: dict[str, nn.Module], targets: Sequence[str] | None, head: Sequence[str] | None
) -> list[str]:
    """The linear layers that get adapters: those that end in a word of `targets`, without those of the head."""
    if targets is None:
        targeted = [name for name in linears if _last(name, TARGETS)]
        if not targeted:
            raise SordinoError(f"targets: no linear layer is named {', '.join(TARGETS)}. {_candidates(linears)}")
        return targeted
    tops = _head_names(module)
    outside = [name for name in linears if not (name.split(".")[0] in tops if head is None else _inside(name, head))]
    for word in targets or ("",):
        if not any(_last(name, (word,)) for name in outside):
            where = (
                " outside the head, which is trained in full," if any(_last(name, (word,)) for name in linears) else ""
            )
            raise SordinoError(f"targets: no linear layer{where} is named '{word}'. {_candidates(outside)}")
    return [name for name in outside if _last(name, targets)]


def _inside(name: str, words: Sequence[str]) -> bool:
    """Whether a layer is what one of the words names, or lies inside of it."""
    parts = name.split(".")
    return any(_last(".".join(parts[: k + 1]), words) for k in range(len(parts)))


def _head_names(module: nn.Module) -> tuple[str, ...]:
    """What a network calls its head. Published weights of DeBERTa lack the pooler, so that it starts at random."""
    return (*HEAD_NAMES, "pooler") if type(module).__name__.startswith("Deberta") else HEAD_NAMES


def _heads(
    module: nn.Module, linears: dict[str, nn.Module], targeted: Sequence[str], head: Sequence[str] | None
) -> list[str]:
    """The linear layers inside the modules that `head` names, without adapted ones."""
    words = _head_names(module) if head is None else tuple(head)
    if not words:
        return []
    names = dict(module.named_modules())
    if head is None:  # an attention also has an out_proj, and a layer may have an fc; the head comes after all of them
        layers = {name.rpartition(".")[0] for name in targeted}
        layers |= {re.split(r"\.\d+\.", name)[0] for name in targeted if re.search(r"\.\d+\.", name)}
        tops = [name for name in names if _last(name, words) and not any(name.startswith(f"{o}.") for o in layers)]
    else:
        tops = [name for name in names if _last(name, words)]
    heads = [
        name
        for name, m in linears.items()
        if isinstance(m, nn.Linear)
        and name not in targeted
        and any(name == t or name.startswith(f"{t}.") for t in tops)
    ]
    if not heads:
        raise SordinoError(f"head: nothing is named {', '.join(words)}. {_candidates(linears)} head=[] trains none.")
    return heads


def _last(name: str, words: Iterable[str]) -> bool:
    return any(name == word or name.endswith(f".{word}") for word in words)


def _candidates(linear: Iterable[str]) -> str:
    """The names of linear layers; those of numbered layers appear once."""
    names = dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in linear)
    return f"Linear layers here: {', '.join(names) or 'none'}."


def _still(module: nn.Module) -> None:
    """Turn off dropout in frozen parts: they then compute what they computed after training, without random numbers."""
    for m in module.modules():
        if isinstance(m, nn.modules.dropout._DropoutNd):
            m.p = 0.0
        for name in RATES:
            if isinstance(getattr(m, name, None), float):
                setattr(m, name, 0.0)


def _put(module: nn.Module, name: str, new: nn.Module) -> None:
    owner, _, last = name.rpartition(".")
    setattr(module.get_submodule(owner), last, new)


# ---------------------------------------------------------------------------------------------------- PEFT's files


def save_peft(folder: str | Path, model: Any, theta: Tensor) -> None:
    """Write theta in PEFT's format, so that `peft.PeftModel.from_pretrained(base, folder)` computes the same.

    The files name the base: its name (never a path of this machine), its class, and the hash of its parameters.

    Args:
      folder: where to write; it is created.
      model: the module that `adapt` returned, or a `TorchModel` around it.
      theta: the trained parameters.

    Raises:
      SordinoError: the model has no adapters, or theta does not fit.
    """
    from safetensors.torch import save_file

    module, places, fixed = _places(model)
    adapted = {name: m for name, m in module.named_modules() if isinstance(m, LoRALinear)}
    if not adapted:
        raise SordinoError("model: it has no adapters; adapt() adds them.")
    size = sum(math.prod(shape) for _, shape in places)
    if theta.shape != (size,):
        raise SordinoError(f"theta: its shape is {tuple(theta.shape)}, but the adapters need ({size},).")
    parts = torch.split(theta.detach().cpu().float(), [math.prod(shape) for _, shape in places])
    some = next(iter(adapted.values()))
    heads = [name for name, m in module.named_modules() if isinstance(m, GroupedLinear)]
    config = {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": base_name(module),
        "auto_mapping": base_of(module),
        "inference_mode": True,
        "r": some.rank,
        "lora_alpha": some.alpha,
        "lora_dropout": some.dropout.p,
        "bias": "none",
        "fan_in_fan_out": not isinstance(some.base, nn.Linear),
        "target_modules": [name.removeprefix(_inner(module)) for name in adapted],
        "modules_to_save": [name.removeprefix(_inner(module)) for name in heads] or None,
    }
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    tensors = {key: part.reshape(shape).contiguous() for (key, shape), part in zip(places, parts, strict=True)}
    name = printable(base_name(module))
    about = {"name": name, "quoted": json.dumps(name), "sha256": base_sha256(module), **base_of(module)}
    save_file(fixed | tensors, folder / WEIGHTS, metadata={"format": "pt", BASE_SHA256: about["sha256"]})
    text = README.format(**about, heads=" and a trained head" if heads else "")
    (folder / PAGE).write_text(text, encoding="utf-8")


def load_peft(folder: str | Path, model: Any) -> Tensor:
    """Read theta from files that `save_peft` or PEFT wrote.

    Args:
      folder: where the files are.
      model: the module that `adapt` returned, or a `TorchModel` around it.

    Returns:
      The trained parameters.

    Raises:
      SordinoError: a file is missing, or does not fit the model. Matrices that the model has frozen must be those of
        the file, and so must the parameters of its base, where `save_peft` wrote it: PEFT's own files say nothing of
        them.
    """
    from safetensors import safe_open
    from safetensors.torch import load_file

    module, places, fixed = _places(model)
    folder = Path(folder).expanduser()
    for file in (CONFIG, WEIGHTS):
        if not (folder / file).is_file():
            raise SordinoError(f"folder: '{folder}' has no {file}; name a folder that save_peft or PEFT wrote.")
    config, tensors = json.loads((folder / CONFIG).read_text(encoding="utf-8")), load_file(folder / WEIGHTS)
    some = next((m for m in module.modules() if isinstance(m, LoRALinear)), None)
    if some is None:
        raise SordinoError("model: it has no adapters; adapt() adds them.")
    written, here = config.get("auto_mapping") or {}, base_of(module)
    if written.get("base_model_class", here["base_model_class"]) != here["base_model_class"]:
        raise SordinoError(
            f"folder: its base is a {written['base_model_class']}, but the model is a {here['base_model_class']}; "
            "build the model of the folder."
        )
    with safe_open(folder / WEIGHTS, framework="pt") as store:
        trained_on = (store.metadata() or {}).get(BASE_SHA256)
    shapes = dict(places) | {key: tuple(value.shape) for key, value in fixed.items()}
    if (config["r"], config["lora_alpha"]) != (some.rank, some.alpha):
        raise SordinoError(
            f"folder: it has rank {config['r']} and alpha {config['lora_alpha']:g}, but the model has {some.rank} and "
            f"{some.alpha:g}; build the model with those of the folder."
        )
    wrong = [key for key, shape in shapes.items() if key not in tensors or tuple(tensors[key].shape) != shape]
    if wrong or len(tensors) != len(shapes):
        odd = wrong[0] if wrong else min(tensors.keys() - shapes.keys())
        raise SordinoError(f"folder: '{folder / WEIGHTS}' does not fit the model at {odd}.")
    if trained_on is not None and trained_on != (found := base_sha256(module)):
        raise SordinoError(
            f"folder: its base, {config.get('base_model_name_or_path')}, has parameters of SHA-256 {trained_on}, and "
            f"the base of the model {found}; build the model from the weights that the adapters were trained on."
        )
    if other := [key for key, value in fixed.items() if not torch.equal(tensors[key].float(), value)]:
        raise SordinoError(
            f"folder: its {other[0]} is not that of the model, which is frozen (freeze-a); build the model with the "
            "seed of the folder, or with variant='lora'."
        )
    return torch.cat([tensors[key].float().flatten() for key, _ in places])


def module_of(model: Any) -> nn.Module:
    """The module inside a `TorchModel`; a module is returned as it is."""
    module: nn.Module = model if isinstance(model, nn.Module) else model.module
    return module


def base_of(module: nn.Module) -> dict[str, str]:
    """The class that adapters belong to and its library, as PEFT's `auto_mapping` names them."""
    network = module.get_submodule("network") if _inner(module) else module
    return {"base_model_class": type(network).__name__, "parent_library": type(network).__module__}


def base_name(module: nn.Module) -> str:
    """What the base is called: its name at the hub, or the name of the folder that it was read from, without the path;
    the name of its class where it was read from neither."""
    network = module.get_submodule("network") if _inner(module) else module
    config = getattr(network, "config", None)
    known = str(getattr(config, "_name_or_path", "") or "")
    if getattr(config, "_commit_hash", None) and re.fullmatch(r"[\w.-]+/[\w.-]+", known):
        return known
    last = re.split(r"[/\\]", known.rstrip("/\\"))[-1]
    return last if last.strip(".") else type(network).__name__


def base_sha256(model: Any) -> str:
    """The hash of the base that adapters were put on: of names, shapes and float32 values of all parameters but those
    of adapters and head, sorted by name.

    Args:
      model: the module that `adapt` returned, or a `TorchModel` around it.

    Returns:
      The SHA-256.
    """
    module = module_of(model)
    modules = dict(module.named_modules())
    owned = [name for name, m in modules.items() if isinstance(m, Adapter | GroupedLinear)]
    digest = hashlib.sha256()
    for name, value in sorted(module.named_parameters()):
        owner, _, last = name.rpartition(".")
        if owner in owned:
            continue
        if isinstance(modules.get(owner.removesuffix(".base")), LoRALinear):
            owner = owner.removesuffix(".base")
        digest.update(f"{owner.removeprefix(_inner(module))}.{last} {tuple(value.shape)}\n".encode())
        digest.update(value.detach().cpu().float().contiguous().numpy().astype("<f4").tobytes())
    return digest.hexdigest()


def _inner(module: nn.Module) -> str:
    """The prefix of names in a model that wraps the transformer. PEFT's names start at the transformer."""
    return "network." if isinstance(getattr(module, "network", None), nn.Module) else ""


def _places(model: Any) -> tuple[nn.Module, list[tuple[str, tuple[int, ...]]], dict[str, Tensor]]:
    """The module; for every trained tensor, in the order of theta, its name in PEFT's files and its shape; and the
    frozen tensors of adapters by such a name."""
    module = module_of(model)
    owners = {name: m for name, m in module.named_modules() if isinstance(m, Adapter | GroupedLinear)}
    places, fixed = [], dict[str, Tensor]()
    for name, value in module.named_parameters():
        owner, _, last = name.rpartition(".")
        if owner not in owners:
            continue
        adapter = isinstance(owners[owner], Adapter)
        key = PREFIX + (f"{owner.removesuffix('adapter')}{last}.weight" if adapter else name).removeprefix(
            _inner(module)
        )
        if value.requires_grad:
            places.append((key, tuple(value.shape)))
        else:
            fixed[key] = value.detach().cpu().float().contiguous()
    return module, places, fixed
