"""Built-in records: the digits of the package, and a generator of heterogeneous clients."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np

from sordino.data.readers import Raw
from sordino.data.splits import apportion, generator, hold_out, parse_number
from sordino.errors import SordinoError, nearest

BUILT_IN = ("digits", "synthetic")


def digits() -> Raw:
    """1,797 handwritten digits of 8 x 8 pixels, scaled to [0, 1]."""
    with np.load(Path(__file__).with_name("digits.npz"), allow_pickle=False) as arrays:
        return Raw(arrays["x"] / np.float32(16), arrays["y"])


def synthetic(source: str, test_fraction: float, seed: int) -> Raw:
    """The heterogeneous generator of FedProx (Li et al. 2020, arXiv 1812.06127, section 5.1).

    Device k labels by argmax(W_k x + b_k), with W_k, b_k ~ N(u_k, 1) and u_k ~ N(0, alpha). Its x ~ N(v_k, Sigma), with
    v_k ~ N(B_k, 1), B_k ~ N(0, beta) and Sigma_jj = j^-1.2: beta sets how much the data differ. The second argument of
    N is a variance. Sizes follow 50 + lognormal(4, spread), rescaled to `records` in total (test part included).

    As published, alpha has no effect on the labels: u_k adds the same u_k (sum_j x_j + 1) to every logit, which does
    not change argmax. Devices disagree because each draws its own W_k.
    """
    alpha, beta, sizes = parse_synthetic(source)
    clients, features, classes = int(sizes["clients"]), int(sizes["features"]), int(sizes["classes"])
    rng = generator(seed, "synthetic")
    records = apportion(50 + np.exp(4 + sizes["spread"] * rng.standard_normal(clients)), int(sizes["records"]))
    deviation = np.arange(1, features + 1) ** -0.6
    x = np.empty((records.sum(), features), np.float32)
    y = np.empty(len(x), np.int64)
    for end, size in zip(records.cumsum(), records, strict=True):
        u, B = rng.normal(0, math.sqrt(alpha)), rng.normal(0, math.sqrt(beta))
        W, b = rng.normal(u, 1, (features, classes)), rng.normal(u, 1, classes)
        v = rng.normal(B, 1, features)
        client_x = v + deviation * rng.standard_normal((size, features))
        x[end - size : end], y[end - size : end] = client_x, (client_x @ W + b).argmax(1)
    site = np.repeat(np.arange(clients), records)
    out = hold_out(site, test_fraction, rng)
    return Raw(x[~out], y[~out], site[~out], x[out], y[out], tuple(map(str, range(classes))))


def parse_synthetic(source: str) -> tuple[float, float, dict[str, float]]:
    sizes: dict[str, float] = {"clients": 30, "features": 60, "classes": 10, "records": 20_000, "spread": 2.0}
    least = {"clients": 1, "features": 1, "classes": 2, "records": 2}
    example = "write for example synthetic(1,1) or synthetic(0.5,0.5,clients=30,records=20000)"
    form = re.fullmatch(r"synthetic\s*(?:\((.*)\)|:(.*))?", source)
    if form is None:
        raise SordinoError(f"data: '{source}' is malformed; {example}.")
    settings = [setting.strip() for setting in (form[1] or form[2] or "").split(",") if setting.strip()]
    level = []
    for setting in settings:
        key, equals, value = setting.rpartition("=")
        key = key.strip()
        if equals and key not in sizes:
            raise SordinoError(f"data: synthetic has no setting '{key}'.{nearest(key, sizes)}")
        number = parse_number(
            value, "source", f"'{setting}' in '{source}' is malformed; {example}", whole=isinstance(sizes.get(key), int)
        )
        if number < least.get(key, 0):
            raise SordinoError(f"data: '{setting}' in '{source}' is too small; the minimum is {least.get(key, 0)}.")
        if key == "spread" and number > 10:
            raise SordinoError(f"data: '{setting}' in '{source}' is too large; the maximum is 10.")
        if equals:
            sizes[key] = number
        else:
            level.append(number)
    if len(level) not in (0, 2):
        raise SordinoError(f"data: '{source}' needs both alpha and beta, or neither; {example}.")
    if sizes["records"] < 2 * sizes["clients"]:
        raise SordinoError(f"data: '{source}' has fewer than two records per client; raise records or lower clients.")
    alpha, beta = level or (1.0, 1.0)
    return alpha, beta, sizes
