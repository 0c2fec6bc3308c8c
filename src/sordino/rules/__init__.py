"""Server rules: pure post-processing of the privatised aggregate, chainable."""

from sordino.rules.adaptive import adam, yogi
from sordino.rules.basic import average, chain, ema, heavy_ball, scale, shrink
from sordino.rules.fisher import fisher
from sordino.rules.kalman import estimate_covariance, kalman
from sordino.rules.public_step import public_step
from sordino.rules.smoothing import smooth

__all__ = [
    "adam",
    "average",
    "chain",
    "ema",
    "estimate_covariance",
    "fisher",
    "heavy_ball",
    "kalman",
    "public_step",
    "scale",
    "shrink",
    "smooth",
    "yogi",
]
