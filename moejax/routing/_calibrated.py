"""The stored popularity of each model: plain numbers, and where each comes from.

Found by `sweeps/routing_calibration.py`, which prints them; `Calibration` is also what `calibrate`
returns.
"""

from typing import NamedTuple

import equinox as eqx

from moejax.routing._popularity import AbstractPopularity, Dirichlet, LambdaTails


class Fit(NamedTuple):
    """One statistic of one batch size: what was asked for and what the family gives."""

    batch: int
    statistic: str
    target: float
    expected: float
    """From the binomial expectation that the fit descends on."""
    sampled: float
    """From synthetic tokens."""

    @property
    def error(self) -> float:
        """Sampled less target."""
        return self.sampled - self.target


class Calibration(eqx.Module):
    """A popularity family with its parameters, and what is known about how well they fit."""

    popularity: AbstractPopularity
    source: str = eqx.field(static=True)
    """Where the parameters come from, one line for people."""
    fits: tuple[Fit, ...] = eqx.field(static=True, default=())
    """Empty for stored parameters."""

    @property
    def worst_error(self) -> float:
        """Largest absolute `Fit.error`; NaN where nothing was measured."""
        return max((abs(fit.error) for fit in self.fits), default=float("nan"))


def calibrated(model_name: str) -> Calibration:
    """The popularity that stands for a model's routing, and where it comes from.

    **Arguments:**

    - `model_name`: a registry name. Any other name gets a default whose `source` says that it is
        not calibrated.

    **Returns:** a `Calibration` without `fits`; `judge` measures it.
    """
    if model_name in _BORROWED:
        lender, why = _BORROWED[model_name]
        parameters, _ = _FITTED[lender]
        return Calibration(LambdaTails(*parameters), f"borrowed from {lender} ({why})")
    if model_name in _FITTED:
        parameters, source = _FITTED[model_name]
        return Calibration(LambdaTails(*parameters), source)
    return Calibration(Dirichlet(_DEFAULT_CONCENTRATION), "uncalibrated default: Dirichlet(0.3)")


_DEFAULT_CONCENTRATION = 0.3
"""Amid the 0.15 to 0.9 that fit single batch sizes of Sieve's models."""

# Scale, left and right tail of `LambdaTails`; errors are of sampled statistics. Fitted to B <= 256
# tokens from unrelated sequences: nothing here knows about larger batches or a prefill.
_FITTED = {
    "qwen3-30b-a3b": (
        (2.984, 0.1609, 1.35),
        "fitted to Sieve Figs 3, 5 (B = 64, 256); worst error 0.01",
    ),
    "qwen3-30b-a3b-top4": (
        (10.42, 0.003862, 2.151),
        "fitted to Sieve Figs 3, 5 (B = 64, 256) as if they were of top-4; worst error 0.02",
    ),
    "qwen3-next-80b-a3b": (
        (1.848, 1.272, 0.7597),
        "fitted to Sieve Figs 3, 5 (B = 4, 64, 256); worst error 0.02",
    ),
    "gpt-oss-120b": (
        (2.302, 0.02733, 0.2962),
        "fitted to Sieve Figs 3, 5 (B = 64, 256); worst error 0.02",
    ),
    "gpt-oss-20b": (
        (1.149, 0.08819, 1.162),
        "fitted to decode traces (MMLU, MMLU-Pro and others); worst error 0.01, on GPQA 0.05",
    ),
    "mixtral-8x7b": (
        (0.626, 1.742, 1.726),
        "fitted to MT-Bench traces (six categories); worst error 0.02, on two others 0.02",
    ),
    "deepseek-v2-lite": (
        (0.6258, 0.4524, 0.4121),
        "fitted to ESFT traces (intent, law, summary); worst error 0.02, on translation 0.13",
    ),
    "olmoe-1b-7b": (
        (0.5967, 2.685, 0.3106),
        "fitted to OLMoE's expert counts (layers 0, 7, 15, six kinds of text); worst error 0.01",
    ),
}

_BORROWED = {
    "qwen3.5-397b-a17b": ("qwen3-next-80b-a3b", "same router shape"),
    "qwen3.5-35b-a3b": ("qwen3-next-80b-a3b", "same router family, fewer experts"),
    "mixtral-8x22b": ("mixtral-8x7b", "same router shape"),
    "deepseek-v3": ("deepseek-v2-lite", "same maker, other router: sigmoid and group-limited"),
    "qwen2-57b-a14b": ("olmoe-1b-7b", "same router shape, other maker"),
}
