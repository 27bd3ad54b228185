"""Random and quasi-random samples of a box."""

import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np

from moejax.sweep._axes import Axis
from moejax.sweep._values import is_number


METHODS = ("sobol", "random")


class Range:
    """An interval to sample from.

    **Arguments:**

    - `name`: as of an `Axis`.
    - `low`, `high`: its ends, finite.
    - `log`: whether equal factors are equally likely, rather than equal steps; both ends positive.
    - `whole`: whole numbers, both ends included.

    **Raises:** `ValueError` for an empty interval or one that `log` does not allow.
    """

    def __init__(
        self, name: str, low: float, high: float, *, log: bool = False, whole: bool = False
    ):
        if not (np.isfinite(low) and np.isfinite(high) and low < high):
            raise ValueError(
                f"Range {name!r}: {low} to {high}: allowed are finite ends, low < high"
            )
        if log and low <= 0:
            raise ValueError(f"Range {name!r}: {low} to {high}: with log, allowed is low > 0")
        self.name, self.low, self.high, self.log, self.whole = name, low, high, log, whole

    def at(self, share: np.ndarray) -> np.ndarray:
        """Values at shares in [0, 1) of the way from `low` to `high`."""
        low, high = (self.low, self.high + 1) if self.whole else (self.low, self.high)
        if self.log:
            values = np.exp(np.log(low) + share * (np.log(high) - np.log(low)))
        else:
            values = low + share * (high - low)
        return np.minimum(np.floor(values), self.high).astype(np.int64) if self.whole else values

    def describe(self) -> dict[str, Any]:
        """For the config."""
        return dict(name=self.name, low=self.low, high=self.high, log=self.log, whole=self.whole)


class Samples:
    """Points of a box: `samples` makes them."""

    def __init__(self, count: int, ranges: tuple[Range, ...], method: str, seed: int):
        self.count, self.ranges, self.method, self.seed = count, ranges, method, seed
        shares = _shares(count, len(ranges), method, seed)
        drawn = [made.at(share) for made, share in zip(ranges, shares.T)]
        # Whole numbers repeat: equal values have one code, as on any axis.
        unique = [np.unique(values, return_inverse=True) for values in drawn]
        self.axes = tuple(Axis(made.name, values) for made, (values, _) in zip(ranges, unique))
        self.codes = [codes.astype(np.int32).reshape(-1) for _, codes in unique]

    def describe(self) -> Any:
        """For the config: how they were made, and what came out."""
        ranges = [made.describe() for made in self.ranges]
        same = dict(count=self.count, method=self.method, seed=self.seed)
        return {"samples": ranges, **same, "content": [axis.content() for axis in self.axes]}

    def changed(self, changes: Mapping[str, Any]) -> "Samples":
        """Other ends for some ranges: `name: (low, high)`, a tuple: a list would be values."""
        ranges = []
        for made in self.ranges:
            ends = changes.get(made.name, (made.low, made.high))
            if not (isinstance(ends, tuple) and len(ends) == 2 and all(map(is_number, ends))):
                raise ValueError(f"{made.name} is sampled: allowed are its two ends, low:high")
            ranges.append(Range(made.name, *ends, log=made.log, whole=made.whole))
        return Samples(self.count, tuple(ranges), self.method, self.seed)


def samples(count: int, *ranges: Range, method: str = "sobol", seed: int = 0) -> Samples:
    """`count` points of the box of `ranges`, each a configuration.

    **Arguments:**

    - `method`: `"sobol"`, scrambled and low in discrepancy, of which powers of two are best
        balanced; or `"random"`.
    - `seed`: of the scrambling or of the numbers.

    **Raises:** `ValueError` for no points, no ranges, or an unknown method.
    """
    if count < 1 or not ranges:
        raise ValueError(f"samples: count = {count}, {len(ranges)} ranges: allowed is 1 and more")
    if method not in METHODS:
        raise ValueError(f"samples: method = {method!r}: allowed are {', '.join(METHODS)}")
    return Samples(count, ranges, method, seed)


def _shares(count: int, dimensions: int, method: str, seed: int) -> np.ndarray:
    """[count, dimensions] in [0, 1)."""
    rng = np.random.default_rng(seed)
    if method == "random":
        return rng.random((count, dimensions))
    # Only here: it takes a while to import.
    from scipy.stats import qmc

    options: dict[str, Any] = {_generator_name(qmc.Sobol): rng}
    sobol = qmc.Sobol(dimensions, scramble=True, **options)
    return sobol.random_base2((count - 1).bit_length())[:count]


def _generator_name(sobol: Any) -> str:
    """Versions of SciPy call it differently."""
    return "rng" if "rng" in inspect.signature(sobol).parameters else "seed"
