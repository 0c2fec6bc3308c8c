"""Models by name: how to build each one, and which options it accepts.

A model is registered by a factory `factory(features, classes, *, …)`. Its keyword parameters are the options that a run
may set, except `seed` (of the first parameters) and `autocast` (the type of the forward and backward passes), which the
run decides. Factories raise `SordinoError` if features or classes do not fit.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from sordino import plugins
from sordino.errors import SordinoError, check_known, nearest
from sordino.lazy import torch
from sordino.models import images
from sordino.models.pretrained import LORA_VARIANTS, TRANSFORMERS
from sordino.settings import Declared, declared, typed

if TYPE_CHECKING:  # factories import what they build: names and options are known without torch
    from sordino.models.hazards import Hazards
    from sordino.models.linear import Linear
    from sordino.models.torch_model import TorchModel
    from sordino.models.trees import Trees

BuiltModel: TypeAlias = "Linear | Hazards | Trees | TorchModel"
# Models that learn the task of a schema; `auto` stands for the first.
OF_TASKS = {"count": ("poisson", "trees"), "survival": ("hazards",)}
LEAST_PREVALENCE = 1e-5  # of a class
MOST_SIDE = 1024  # pixels that images are resized to
NO_WEIGHTS = (
    "weights: causal-lora is whatever causal language model a folder holds; name one that save_pretrained wrote, as in "
    "--set weights=FOLDER."
)
FIXED = ("features", "classes", "seed", "autocast")  # parameters of a factory that are not options


@dataclass(frozen=True)
class ModelEntry:
    """One registered model."""

    factory: Callable[..., BuiltModel]
    summary: str
    reads: str = "numbers"  # what a row holds: numbers, an image, or the token ids of a text
    network: bool = True  # a network rather than a linear model
    shared_batch: bool = False  # whether several runs may train side by side
    adapters: bool = False  # it trains adapters, which are written in PEFT's format too
    causal: bool = False  # it learns the text itself, token by token: records have no labels
    needs_weights: bool = False  # it is whatever model a folder of weights holds

    @cached_property
    def options(self) -> dict[str, Declared]:
        """The options that a run may set, with type and default."""
        return declared(self.factory, skip=FIXED)

    @cached_property
    def accepts(self) -> frozenset[str]:
        """Every parameter of the factory, `seed` and `autocast` included."""
        return frozenset(declared(self.factory))

    def check_half(self, name: str) -> None:
        """Refuse dtype = bfloat16 for a model that is no network."""
        if not self.network:
            raise SordinoError(f"dtype: bfloat16 is for networks, not for model '{name}'; use float32.")


REGISTRY: dict[str, ModelEntry] = {}


def of_numbers() -> set[str]:
    """The models that learn counts or times by name; `auto` learns a quantity by its range."""
    return {name for names in OF_TASKS.values() for name in names}


def register(name: str, entry: ModelEntry) -> None:
    """Add a model under a new name."""
    if name in REGISTRY:
        raise SordinoError(f"model: '{name}' is registered already; choose another name.")
    REGISTRY[name] = entry


def entry(name: str) -> ModelEntry:
    """The model `name`, of this package, of another one by the entry point `sordino.models`, or of the user's own code
    (`sordino.plugins`)."""
    if name in REGISTRY:
        return REGISTRY[name]
    plugin = plugin_of(name)
    if plugin is None and plugins.OWN_MODEL.fullmatch(name):
        raise SordinoError(
            f"model: '{name}' is somebody's own code, of which no passed check is on record here; read it, and then "
            f"run `sordino check {name}`."
        )
    if plugin is None:
        own = " Code of your own is named as module:function, such as mynets:build." if "." in name else ""
        names = [*REGISTRY, *plugins.found(plugins.MODELS)]
        raise SordinoError(f"model: '{name}' is unknown.{own or nearest(name, names)}")
    loaded = plugin.load()
    if plugin.own and _builds_a_method(loaded):
        raise SordinoError(plugins.not_registered(name))
    if isinstance(loaded, torch.nn.Module) or not (isinstance(loaded, ModelEntry) or callable(loaded)):
        raise SordinoError(f"model: '{name}' is a {type(loaded).__name__}; name a function that builds a module.")
    known = loaded if isinstance(loaded, ModelEntry) else ModelEntry(loaded, f"from {plugin.about}")
    for option, about in known.options.items():
        if about.default is inspect.Parameter.empty:
            raise SordinoError(
                f"model: '{name}' is called with `features` and `classes`, and with options of its own, which have "
                f"defaults; '{option}' has none. Rename it to `classes` if it is the number of outputs, or give it a "
                "default."
            )
    return known


def _builds_a_method(loaded: Any) -> bool:
    """Whether code of the user's own is a method's factory or entry, which has the option `unit` and no `features`."""
    factory = getattr(loaded, "factory", loaded)
    options = inspect.signature(factory).parameters if callable(factory) else {}
    return "unit" in options and "features" not in options


def plugin_of(name: str) -> plugins.Plugin | None:
    """The package, or the user's own code, that brings the model; None for this package."""
    return None if name in REGISTRY else plugins.found(plugins.MODELS).get(name) or plugins.own_model(name)


def build(
    name: str, features: int, classes: int, *, seed: int = 0, autocast: torch.dtype | None = None, **options: Any
) -> BuiltModel:
    """A model by its name.

    Args:
      name: a key of `REGISTRY`; `auto` is softmax regression for classes and least squares for quantities. A run
        with a schema reads `auto` by its task (`OF_TASKS`).
      features: numbers per record.
      classes: number of classes; 0 where labels are quantities.
      seed: fixes the first parameters of a network.
      autocast: the type of a network's forward and backward passes.
      options: those of the model, as `entry(name).options` lists them.

    Returns:
      The model, whose `size` is the length of its parameter vector.

    Raises:
      SordinoError: an unknown name or option, or features and classes that do not fit.

    >>> build("softmax", 64, 10).size
    650
    """
    registered = entry(name)
    for key, value in options.items():
        if key not in registered.options:
            raise SordinoError(f"{key}: model {name} has no such option.{nearest(key, registered.options)}")
        options[key] = typed(key, value, registered.options[key].annotation)
    if autocast is not None:
        registered.check_half(name)
    decided = {"seed": seed, "autocast": autocast}
    make = partial(registered.factory, features, classes, **options)
    make = partial(make, **{key: value for key, value in decided.items() if key in registered.accepts})
    return make() if name in REGISTRY else _external(name, features, make, seed, autocast)


def _external(name: str, features: int, make: Callable[[], Any], seed: int, autocast: torch.dtype | None) -> BuiltModel:
    """A model from outside, which must be of a class whose clipped sums are proved, or a module, which becomes one.

    The first parameters follow from the public seed, whether or not the factory takes one.
    """
    from sordino.models.linear import Linear
    from sordino.models.torch_model import TorchModel

    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = make()
    except SordinoError:
        raise
    except Exception as error:
        raise SordinoError(
            f"model: '{name}' cannot be built ({type(error).__name__}: {error}). It is called with features and "
            "classes."
        ) from error
    model, shape = model if isinstance(model, tuple) and len(model) == 2 else (model, None)
    if isinstance(model, torch.nn.Module):
        model = TorchModel(model, shape=shape if shape is None else tuple(shape), autocast=autocast)
    if type(model) not in (Linear, TorchModel):
        raise SordinoError(
            f"model: '{name}' builds a {type(model).__name__}; return a torch.nn.Module, or a pair of it and the shape "
            "of a record, as in (module, (1, 28, 28))."
        )
    if autocast is not None and getattr(model, "autocast", None) is not autocast:
        raise SordinoError(
            f"dtype: model '{name}' builds a {type(model).__name__} that does not compute in bfloat16; return a "
            "module, or take `autocast` as an argument, or use float32."
        )
    if model.features != features:
        raise SordinoError(
            f"model: '{name}' reads rows of {model.features:,} numbers, but these have {features:,}; build it from "
            "its first argument."
        )
    return cast("Linear | TorchModel", model)


# ------------------------------------------------------------------------------------------------------ linear models


BALANCED = "balanced"  # class weights that make every class count the same


def balanced(prevalence: tuple[float, ...]) -> tuple[float, ...]:
    """Class weights as scikit-learn's `class_weight="balanced"`: 1 / (classes * share of the class).

    Args:
      prevalence: the share of each class; they need not sum to 1 exactly, because only ratios count.

    >>> balanced((0.75, 0.25))
    (0.6666666666666666, 2.0)
    """
    return tuple(1 / (len(prevalence) * share) if share > 0 else math.inf for share in prevalence)


def check_prevalence(prevalence: tuple[float, ...], classes: int) -> None:
    """Refuse shares of classes that are not one per class, above 0, with a sum of 1."""
    if len(prevalence) != classes:
        raise SordinoError(f"prevalence: {len(prevalence)} shares for {classes} classes; give one per class.")
    if not all(LEAST_PREVALENCE <= share < 1 for share in prevalence) or not 0.99 <= sum(prevalence) <= 1.01:
        raise SordinoError(
            f"prevalence: {list(prevalence)} must be shares of at least {LEAST_PREVALENCE:g}, one per class, with a "
            "sum of 1."
        )


def _linear(
    loss: str | None,
    features: int,
    classes: int,
    *,
    class_weights: tuple[float, ...] | str | None = None,
    prevalence: tuple[float, ...] | None = None,
) -> Linear:
    from sordino.models.linear import NUMERIC_LOSSES, Linear, Loss

    kind = Loss(loss) if loss else Loss.SOFTMAX if classes else Loss.SQUARES
    if (kind in NUMERIC_LOSSES) != (not classes):
        raise SordinoError(f"model: {kind} does not fit labels that are {'classes' if classes else 'quantities'}.")
    if kind is Loss.LOGISTIC and classes != 2:
        raise SordinoError(f"model: logistic is for two classes, but the data have {classes}; use softmax.")
    weights = None
    if prevalence is not None:
        check_prevalence(prevalence, classes)
    if isinstance(class_weights, str):
        if class_weights != BALANCED:
            raise SordinoError(
                f"class_weights: '{class_weights}' is unknown; write {BALANCED}, or one weight per class."
            )
        if prevalence is None:
            raise SordinoError(
                "class_weights: balanced needs the share of each class; where it is public, write prevalence = "
                "[0.9, 0.1] (of a table, under [target] in its schema). Where it is not, write find_prevalence = true "
                "under [target], and pay for noised counts by --private-statistics 0.05."
            )
        class_weights = balanced(prevalence)
    elif prevalence is not None and class_weights is not None:
        raise SordinoError("prevalence: it is for class_weights = balanced, and other weights are given; remove one.")
    if class_weights is not None:
        if len(class_weights) != classes:
            raise SordinoError(
                f"class_weights: {len(class_weights)} weights for {classes} classes; give one weight per class."
            )
        weights = torch.tensor(class_weights)
    return Linear(features, classes if kind is Loss.SOFTMAX else 1, kind, class_weights=weights)


def _add_linear(name: str, loss: str | None, summary: str) -> None:
    register(name, ModelEntry(partial(_linear, loss), summary, network=False, shared_batch=True))


_add_linear("auto", None, "softmax regression for classes, least squares for quantities")
_add_linear("softmax", "softmax", "softmax regression")
_add_linear("logistic", "logistic", "logistic regression for two classes")
_add_linear("squares", "squares", "least squares, for labels that are quantities")
_add_linear("poisson", "poisson", "Poisson regression, for labels that are counts")


def _hazards(features: int, classes: int, *, edges: tuple[float, ...] | None = None) -> Hazards:
    from sordino.models.hazards import Hazards

    if classes:
        raise SordinoError("model: hazards does not fit labels that are classes; it needs times until an event.")
    if edges is None:
        raise SordinoError(
            "edges: model hazards needs public edges of time; describe the table by a schema whose target has "
            'task = "survival".'
        )
    return Hazards(features, tuple(edges))


register(
    "hazards",
    ModelEntry(_hazards, "hazards in public intervals of time, for survival", network=False, shared_batch=True),
)


def _trees(
    features: int,
    classes: int,
    *,
    seed: int = 0,
    trees: int = 60,
    depth: int = 4,
    columns: int = 1,
    loss: str | None = None,
    widths: tuple[int, ...] | None = None,
) -> Trees:
    from sordino.models.linear import NUMERIC_LOSSES, Loss
    from sordino.models.trees import Trees

    if loss is not None and loss not in list(Loss):
        raise SordinoError(f"loss: '{loss}' is unknown.{nearest(loss, list(Loss))}")
    kind = Loss(loss) if loss else Loss.SOFTMAX if classes else Loss.SQUARES
    if (kind in NUMERIC_LOSSES) != (not classes):
        raise SordinoError(f"loss: {kind} does not fit labels that are {'classes' if classes else 'numbers'}.")
    return Trees(features, classes or 1, kind, trees, depth, columns, widths, seed)


register(
    "trees",
    ModelEntry(_trees, "trees with public splits, for dp-boost", network=False, shared_batch=True),
)


# ----------------------------------------------------------------------------------------------------------- networks


def _mlp(features: int, classes: int, *, seed: int = 0, autocast: torch.dtype | None = None) -> TorchModel:
    from sordino.models import nets

    _needs_classes("mlp", classes)
    return nets.build("mlp", features, classes, seed=seed, autocast=autocast)


def _image_net(
    name: str,
    features: int,
    classes: int,
    *,
    seed: int = 0,
    image: str | None = None,
    side: int | None = None,
    mean: tuple[float, ...] | None = None,
    std: tuple[float, ...] | None = None,
    autocast: torch.dtype | None = None,
) -> TorchModel:
    from sordino.models import nets
    from sordino.models.pixels import Pixels

    _needs_classes(name, classes)
    shape = image or images.usual(features)
    if shape is None:
        raise SordinoError(
            f"image: {name} reads images, and rows of {features:,} numbers are laid out in no known way (8 x 8, 28 x "
            f"28 and 32 x 32 x 3 are); {images.HOW}, or use mlp or a linear model."
        )
    if side is not None and not 1 <= side <= MOST_SIDE:
        raise SordinoError(f"side: {side} must lie between 1 and {MOST_SIDE} pixels.")
    found = images.fitting(name, shape, features)
    how = images.normalisation(found.channels, mean, std, images.Normalisation((0.0,), (1.0,)))
    pixels = Pixels(found, found.channels, side, how)
    return nets.build(name, features, classes, seed=seed, pixels=pixels, autocast=autocast)


register("mlp", ModelEntry(_mlp, "one hidden layer of 64 units"))
register("cnn", ModelEntry(partial(_image_net, "cnn"), "two convolutions and two linear layers", "image"))
register("resnet18-gn", ModelEntry(partial(_image_net, "resnet18-gn"), "ResNet-18 with group norm", "image"))


# ------------------------------------------------------------------------------------------------------- transformers


def _text_transformer(
    name: str,
    features: int,
    classes: int,
    *,
    seed: int = 0,
    autocast: torch.dtype | None = None,
    weights: str | None = None,
    lora_rank: int = 16,
    lora_alpha: float = 32.0,
    lora_dropout: float = 0.1,
    lora_variant: str = "lora",
    lora_every: int = 1,
    lora_targets: tuple[str, ...] | str | None = None,
) -> TorchModel:
    from sordino.models import transformers

    _needs_classes(name, classes)
    how = _adapters(lora_rank, lora_alpha, lora_dropout, lora_variant, lora_every, lora_targets)
    how |= {"length": features, "seed": seed, "autocast": autocast}
    with _keys_of_a_run():
        return transformers.build(name, classes=classes, weights=weights, **how)


def _image_transformer(
    name: str,
    features: int,
    classes: int,
    *,
    seed: int = 0,
    autocast: torch.dtype | None = None,
    weights: str | None = None,
    lora_rank: int = 16,
    lora_alpha: float = 32.0,
    lora_dropout: float = 0.1,
    lora_variant: str = "lora",
    lora_every: int = 1,
    lora_targets: tuple[str, ...] | str | None = None,
    image: str | None = None,
    mean: tuple[float, ...] | None = None,
    std: tuple[float, ...] | None = None,
) -> TorchModel:
    _needs_classes(name, classes)
    images.fitting(name, image, features)  # before weights are loaded
    from sordino.models import transformers

    how = _adapters(lora_rank, lora_alpha, lora_dropout, lora_variant, lora_every, lora_targets)
    how |= {"image": image, "mean": mean, "std": std, "seed": seed, "autocast": autocast}
    with _keys_of_a_run():
        return transformers.build(name, classes=classes, weights=weights, **how)


for _name, _kind in TRANSFORMERS.items():
    register(
        _name,
        ModelEntry(
            partial(_text_transformer if _kind.text else _image_transformer, _name),
            f"{_kind.model} with low-rank adapters",
            "text" if _kind.text else "image",
            shared_batch=True,
            adapters=True,
            needs_weights=not _kind.sizes,
        ),
    )


def _causal(
    features: int,
    classes: int,
    *,
    seed: int = 0,
    autocast: torch.dtype | None = None,
    weights: str | None = None,
    lora_rank: int = 16,
    lora_alpha: float = 32.0,
    lora_dropout: float = 0.1,
    lora_variant: str = "lora",
    lora_every: int = 1,
    lora_targets: tuple[str, ...] | str | None = None,
) -> TorchModel:
    if classes:
        raise SordinoError("model: causal-lora learns text and no classes; use sequence-lora, or leave label out.")
    if weights is None:
        raise SordinoError(NO_WEIGHTS)
    from sordino.models import causal

    how = _adapters(lora_rank, lora_alpha, lora_dropout, lora_variant, lora_every, lora_targets)
    with _keys_of_a_run():
        return causal.build(weights, length=features, seed=seed, autocast=autocast, **how)


register(
    "causal-lora",
    ModelEntry(
        _causal,
        "a causal language model (GPT-2 and the like) from a folder, with low-rank adapters",
        "text",
        adapters=True,
        causal=True,
        needs_weights=True,
    ),
)


def _adapters(
    rank: int, alpha: float, dropout: float, variant: str, every: int, targets: tuple[str, ...] | str | None
) -> dict[str, Any]:
    """The options of adapters as `transformers.build` names them. How A and B take turns is a matter of the method.

    Targets are the last parts of the names of layers, in one text with commas or one by one; None are Q, K and V.
    """
    check_known("lora_variant", variant, LORA_VARIANTS)
    if every != 1 and variant != "alternating":
        raise SordinoError(f"lora_every: {every} is for lora_variant = alternating, not {variant}; leave it out.")
    words = targets.split(",") if isinstance(targets, str) else targets
    names = None if words is None else tuple(word.strip() for word in words)
    if names is not None and not (names and all(names)):
        raise SordinoError(
            f"lora_targets: {targets!r} must name layers, as in lora_targets=query,value; without it, Q, K and V get "
            "adapters."
        )
    return {"rank": rank, "alpha": alpha, "dropout": dropout, "variant": variant, "targets": names}


@contextmanager
def _keys_of_a_run() -> Iterator[None]:
    """Errors inside name the key of a run, `lora_targets`, rather than the argument of `lora.adapt`."""
    try:
        yield
    except SordinoError as error:
        if str(error).startswith("targets:"):
            raise SordinoError(f"lora_{error}") from None
        raise


def _needs_classes(name: str, classes: int) -> None:
    if not classes:
        raise SordinoError(f"model: {name} predicts classes, but these labels are quantities; use squares or auto.")
