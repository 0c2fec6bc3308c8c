"""The methods, one file per family, and their registry."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from sordino import plugins
from sordino.core import Method, Unit
from sordino.errors import SordinoError, nearest
from sordino.methods.adadps import adadps
from sordino.methods.adamw import fedadamw
from sordino.methods.adaptive import adambc, fedadam, fedyogi
from sordino.methods.auto import auto
from sordino.methods.boost import boost
from sordino.methods.bounds import Bound, declare
from sordino.methods.covariance import dp_fednew_fc, fedfc
from sordino.methods.disk import disk
from sordino.methods.fedavg import fedavg, fedavg_ls
from sordino.methods.fedgd import fedgd
from sordino.methods.fednew import dp_fednew, fednew
from sordino.methods.ftrl import ftrl
from sordino.methods.head import newton_head
from sordino.methods.localadamw import localadamw
from sordino.methods.newton import fedavg_gdp, fedhybrid, fednewton, fedsgd
from sordino.methods.one_round import class_means, statistics
from sordino.methods.prox import adafedprox
from sordino.methods.sam import fedsam
from sordino.methods.scaffold import scaffold
from sordino.methods.scaled import fedadam_scaled
from sordino.methods.sofim import sofim

_signature = functools.cache(inspect.signature)


class MethodEntry(NamedTuple):
    factory: Callable[..., Method]
    family: str
    paper: str
    units: tuple[Unit, ...] = (Unit.RECORD, Unit.CLIENT)  # that the factory builds for; see `protects`
    rounds: int = 70  # of a run that does not say
    fixed: bool = False  # it has these rounds and no others
    batch: tuple[str, ...] = ("lr",)  # options in which runs trained side by side may differ
    normalize: str = "none"  # of records, in a run that does not say
    model: str = "auto"  # that a run trains if it does not say
    bounds: Mapping[str, Bound] = MappingProxyType({})  # of every option: a site refuses one that is not declared

    @property
    def options(self) -> dict[str, Any]:
        """Name and default of every hyperparameter."""
        return {p.name: p.default for p in _signature(self.factory).parameters.values() if p.name != "unit"}

    @property
    def protects(self) -> tuple[Unit, ...]:
        """The units that can be asked for: a method for records also serves persons."""
        return tuple(unit for unit in Unit if (Unit.RECORD if unit is Unit.PERSON else unit) in self.units)

    def at(self, unit: Unit, **options: Any) -> Method:
        """The method for a unit.

        A method for records serves persons as it is: what its proofs call a record is one bounded term of a sum, and at
        person level the sums have one term per person (`core.Shard`), their divisors and samplers count persons.
        """
        if unit is not Unit.PERSON:
            return self.factory(unit=unit, **options)
        method = self.factory(unit=Unit.RECORD, **options)
        proves = frozenset((Unit.PERSON, trust) for proved, trust in method.proves if proved is Unit.RECORD)
        return method._replace(unit=Unit.PERSON, proves=proves)

    @property
    def summary(self) -> str:
        return (inspect.getdoc(self.factory) or "").partition("\n")[0]


STEP_OPTIONS, MOMENTS, FISHER = ("lr", "local_lr"), ("lr", "beta1", "beta2", "tau"), ("lr", "rho", "beta", "local_lr")
ESTIMATION_PAPER = "Statistical limits of DP federated M-estimation (arXiv 2605.18656)"

REGISTRY: dict[str, MethodEntry] = {
    "auto": MethodEntry(
        auto,
        "derived defaults",
        "this library; docs/methods.md",
        batch=(),
        normalize="record",
        bounds=declare(
            clips="clip radius",
            counts="intervals few_rounds minibatches",
            weights="prior doubt early_share covariance_share",
            choices="network centred",
        ),
    ),
    "dp-fedgd": MethodEntry(
        fedgd,
        "first order",
        "DP-FedSOFIM (arXiv 2601.09166), section 3.3; DP-FedNew (PoPETs 2025)",
        bounds=declare(clips="clip", step_sizes="lr", weights="tail quantile"),
    ),
    "dp-boost": MethodEntry(
        boost,
        "trees",
        "this library; docs/methods.md",
        rounds=60,
        model="trees",
        bounds=declare(clips="clip", step_sizes="lr", weights="damping"),
    ),
    "dp-fedsofim": MethodEntry(
        sofim,
        "second order, server side",
        "DP-FedSOFIM (arXiv 2601.09166)",
        batch=FISHER,
        bounds=declare(
            clips="clip",
            counts="warm_start ema_rounds rank steps",
            step_sizes="lr local_lr",
            weights="rho beta tail",
            choices="apply_to bias_correction ema_scale structure",
        ),
    ),
    "dp-fedadam": MethodEntry(
        fedadam,
        "adaptive server",
        "Reddi et al. 2021 (arXiv 2003.00295), under DP",
        batch=MOMENTS,
        bounds=declare(
            clips="clip", step_sizes="lr", weights="beta1 beta2 tau tail quantile", choices="bias_correction"
        ),
    ),
    "dp-fedyogi": MethodEntry(
        fedyogi,
        "adaptive server",
        "Reddi et al. 2021 (arXiv 2003.00295), under DP",
        batch=MOMENTS,
        bounds=declare(clips="clip", step_sizes="lr", weights="beta1 beta2 tau tail", choices="bias_correction"),
    ),
    "dp-adambc": MethodEntry(
        adambc,
        "adaptive server",
        "Tang et al. 2024 (arXiv 2312.14334)",
        batch=MOMENTS[:3],
        bounds=declare(clips="clip", step_sizes="lr", weights="beta1 beta2 floor decay tail"),
    ),
    "dp-fedadam-scaled": MethodEntry(
        fedadam_scaled,
        "adaptive server",
        "Ganesh et al. 2025 (arXiv 2507.01129)",
        batch=MOMENTS,
        bounds=declare(clips="clip", step_sizes="lr", weights="beta1 beta2 tau w tail"),
    ),
    "dp-disk": MethodEntry(
        disk,
        "adaptive server",
        "Zhang et al. 2025 (arXiv 2410.03883)",
        bounds=declare(clips="clip", step_sizes="lr", weights="kappa gamma beta1 beta2 tau tail", choices="optimizer"),
    ),
    "dp-fedavg": MethodEntry(
        fedavg,
        "local steps",
        "McMahan et al. 2017 (arXiv 1602.05629), under DP",
        batch=STEP_OPTIONS,
        bounds=declare(
            clips="clip", counts="steps", step_sizes="lr local_lr", weights="tail decay", choices="schedule noise_at"
        ),
    ),
    "dp-fedavg-ls": MethodEntry(
        fedavg_ls,
        "local steps, smoothing",
        "Liang et al. 2020 (arXiv 2005.00218)",
        batch=STEP_OPTIONS,
        bounds=declare(
            clips="clip",
            counts="steps",
            step_sizes="lr local_lr",
            weights="strength decay",
            choices="schedule noise_at",
        ),
    ),
    "dp-adafedprox": MethodEntry(
        adafedprox,
        "local steps",
        "Li et al. 2020 (arXiv 1812.06127)",
        batch=(*STEP_OPTIONS, "mu"),
        bounds=declare(
            clips="clip", counts="steps", step_sizes="lr local_lr", weights="mu decay", choices="schedule noise_at"
        ),
    ),
    "dp-scaffold": MethodEntry(
        scaffold,
        "local steps, control variates",
        "Noble et al. 2022 (arXiv 2111.09278)",
        batch=STEP_OPTIONS,
        bounds=declare(
            clips="clip", counts="steps", step_sizes="lr local_lr", weights="decay", choices="schedule warm_start"
        ),
    ),
    "dp-localadamw": MethodEntry(
        localadamw,
        "local AdamW",
        "DP-FedAdamW (arXiv 2602.19945), algorithm 2",
        (Unit.RECORD,),
        batch=(),
        bounds=declare(
            clips="clip", counts="steps", step_sizes="lr", weights="beta1 beta2 tau decay", choices="schedule"
        ),
    ),
    "dp-fedadamw": MethodEntry(
        fedadamw,
        "local AdamW",
        "DP-FedAdamW (arXiv 2602.19945)",
        (Unit.RECORD,),
        batch=(),
        bounds=declare(
            clips="clip",
            counts="steps",
            step_sizes="lr",
            weights="beta1 beta2 tau decay v_floor gamma",
            choices="schedule aggregate correct align",
        ),
    ),
    "dp-fedsam": MethodEntry(
        fedsam,
        "local steps, sharpness-aware",
        "Shi et al. 2023 (arXiv 2303.11242)",
        batch=STEP_OPTIONS,
        bounds=declare(
            clips="clip", counts="steps", step_sizes="lr local_lr", weights="rho decay", choices="schedule noise_at"
        ),
    ),
    "dp-adadps": MethodEntry(
        adadps,
        "local steps, public side information",
        "Li et al. 2022 (arXiv 2202.05963)",
        batch=STEP_OPTIONS,
        bounds=declare(
            clips="clip",
            counts="steps",
            step_sizes="lr local_lr",
            weights="beta eps decay",
            choices="schedule noise_at public",
        ),
    ),
    "dp-ftrl": MethodEntry(
        ftrl,
        "correlated noise",
        "Kairouz et al. 2021 (arXiv 2103.00039); banded: arXiv 2306.08153; inverse-root: arXiv 2505.12128",
        bounds=declare(
            clips="clip",
            counts="restart band inverse_band",
            step_sizes="lr",
            weights="momentum weight_decay tail",
            choices="mechanism honaker",
        ),
    ),
    "dp-fedfc": MethodEntry(
        fedfc,
        "second order, server side",
        "DP-FedNew (PoPETs 2025), algorithms 5 and 6",
        bounds=declare(clips="clip covariance_clip", step_sizes="lr", weights="gamma covariance_share"),
    ),
    "dp-class-means": MethodEntry(
        class_means,
        "one round",
        "noised class means, a common recipe; docs/methods.md",
        rounds=1,
        fixed=True,
        batch=("scale",),
        normalize="record",
        bounds=declare(clips="clip", weights="scale"),
    ),
    "dp-statistics": MethodEntry(
        statistics,
        "one round",
        "sufficient-statistics perturbation (Wang 2018, arXiv 1803.02596), for classes",
        rounds=1,
        fixed=True,
        batch=("ridge", "scale"),
        normalize="record",
        bounds=declare(clips="clip radius", weights="share ridge scale"),
    ),
    "fednew": MethodEntry(
        fednew,
        "second order, client side",
        "DP-FedNew (PoPETs 2025), section 3; without privacy",
        bounds=declare(step_sizes="lr", weights="alpha rho"),
    ),
    "dp-fednew": MethodEntry(
        dp_fednew,
        "second order, client side",
        "DP-FedNew (PoPETs 2025), algorithms 1 and 2",
        bounds=declare(
            clips="clip curvature_clip limit",
            step_sizes="lr",
            weights="alpha rho",
            choices="duals limit_by solver curvature",
        ),
    ),
    "dp-fednew-fc": MethodEntry(
        dp_fednew_fc,
        "second order, client side",
        "DP-FedNew (PoPETs 2025), section 5",
        bounds=declare(clips="clip covariance_clip limit", step_sizes="lr", weights="alpha rho", choices="duals"),
    ),
    "fedsgd": MethodEntry(
        fedsgd,
        "M-estimation",
        ESTIMATION_PAPER,
        (Unit.RECORD,),
        bounds=declare(clips="clip", step_sizes="lr", weights="tail"),
    ),
    "fedavg-gdp": MethodEntry(
        fedavg_gdp,
        "M-estimation",
        ESTIMATION_PAPER,
        (Unit.RECORD,),
        2,
        batch=("local_lr",),
        bounds=declare(clips="clip", counts="steps", step_sizes="local_lr", weights="decay", choices="schedule"),
    ),
    "fedhybrid": MethodEntry(
        fedhybrid,
        "M-estimation",
        ESTIMATION_PAPER,
        (Unit.RECORD,),
        51,
        batch=STEP_OPTIONS,
        bounds=declare(clips="clip", counts="local_steps", step_sizes="lr local_lr", weights="local_share"),
    ),
    "fednewton": MethodEntry(
        fednewton,
        "M-estimation",
        ESTIMATION_PAPER,
        (Unit.RECORD,),
        2,
        batch=("local_lr",),
        bounds=declare(
            clips="clip curvature_clip",
            counts="local_steps",
            step_sizes="local_lr",
            weights="local_share curvature_share floor step_cap",
        ),
    ),
    "fednewton-head": MethodEntry(
        newton_head,
        "M-estimation",
        ESTIMATION_PAPER + ", algorithm 5",
        (Unit.RECORD,),
        2,
        batch=("local_lr",),
        bounds=declare(
            clips="clip",
            counts="local_steps blocks",
            step_sizes="local_lr",
            weights="local_share curvature_share ridge damping",
        ),
    ),
}


def entry(name: str) -> MethodEntry:
    """The entry of a method of this package, or of another one by the entry point `sordino.methods` (`plugins`)."""
    if name in REGISTRY:
        return REGISTRY[name]
    others = plugins.found(plugins.METHODS)
    if plugins.OWN_MODEL.fullmatch(name):
        raise SordinoError(plugins.not_registered(name))
    if name not in others:
        raise SordinoError(f"method: '{name}' is unknown.{nearest(name, [*REGISTRY, *others])}")
    loaded = others[name].load()
    return (
        loaded
        if isinstance(loaded, MethodEntry)
        else MethodEntry(loaded, "external", others[name].about, (Unit.RECORD,))
    )


def build(name: str, unit: Unit | str = Unit.RECORD, **options: Any) -> Method:
    """Build a method by its name, for a unit, with some of its options set.

    Args:
        name: As `sordino methods` lists it.
        unit: `record`, `person` or `client`.
        options: The method's own options; the others keep their defaults.

    Returns:
        The method.

    Raises:
        SordinoError: The name, the unit or an option is unknown.

    Example:
        >>> build("dp-fedadam", lr=0.1).name
        'dp-fedadam'
    """
    registered = entry(name)
    if unit not in registered.protects:
        levels = " and ".join([", ".join(registered.protects[:-1]), registered.protects[-1]])
        raise SordinoError(f"unit: {name} exists at {levels} level, not '{unit}'.")
    for key in options:
        if key not in registered.options:
            raise SordinoError(f"{key}: {name} has no such option.{nearest(key, registered.options)}")
        if isinstance(options[key], str) and isinstance(registered.options[key], int | float):
            raise SordinoError(f"{key}: '{options[key]}' is a text; give a number, without quotes.")
    method = registered.at(Unit(unit), **options)
    method = method._replace(registered=(method.stages, method.proves))
    if name in REGISTRY:
        return method
    plugin = plugins.found(plugins.METHODS)[name]
    if method.name != name:
        raise SordinoError(f"method: {plugin.about} registers '{name}' and builds '{method.name}'; both must be equal.")
    return plugins.judged(method, plugin)


__all__ = ["REGISTRY", "MethodEntry", "build", "entry"]
