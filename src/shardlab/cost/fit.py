"""α and β of a link, fitted to measured times."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..specs import LinkSpec
from ..specs.check import number


@dataclass(frozen=True)
class Fit:
    """`alpha` seconds a message, `beta` bytes a second; `residuals`, (fitted − measured) / measured, one a sample."""

    alpha: float
    beta: float
    residuals: tuple[float, ...]

    def seconds(self, nbytes: float) -> float:
        """Seconds that a message of so many bytes takes by this fit."""
        return self.alpha + nbytes / self.beta

    def link(self, name: str) -> LinkSpec:
        """The fit as a link of that name; without `alpha` where the fit has 0."""
        return LinkSpec(name=name, per_direction=self.beta, alpha=self.alpha or None,
                        source=f"fitted to {len(self.residuals)} measured times")


def fit(samples: Iterable[tuple[float, float]]) -> Fit:
    """The α ≥ 0 and β that come closest to t = α + n/β for these (bytes n, seconds t), by the squares of relative
    errors, so that a short message weighs as much as a long one.

    Raises ValueError on fewer than two sizes, on times that are not above 0, and where times don't grow with bytes.
    """
    points = [(float(nbytes), number("seconds", seconds)) for nbytes, seconds in samples]
    sizes = sorted({nbytes for nbytes, _ in points})
    if len(sizes) < 2 or not all(0 <= nbytes < float("inf") for nbytes in sizes):
        raise ValueError(f"α and β take messages of two sizes at least, not of {sizes} bytes: measure more sizes")
    # (α + n/β)/t should be 1: columns u = 1/t and v = n/t, and the normal equations of α u + (1/β) v = 1
    u, v = [1 / t for _, t in points], [n / t for n, t in points]
    uu, uv, vv = (sum(a * b for a, b in zip(x, y, strict=True)) for x, y in ((u, u), (u, v), (v, v)))
    determinant = uu * vv - uv * uv
    alpha, per_byte = (sum(u) * vv - sum(v) * uv) / determinant, (sum(v) * uu - sum(u) * uv) / determinant
    if alpha < 0:
        alpha, per_byte = 0.0, sum(v) / vv
    if per_byte <= 0:
        raise ValueError(f"the times don't grow from {sizes[0]:,.0f} to {sizes[-1]:,.0f} bytes, so nothing says what a "
                         "byte costs: measure larger sizes")
    return Fit(alpha, 1 / per_byte, tuple((alpha + n * per_byte) / t - 1 for n, t in points))
