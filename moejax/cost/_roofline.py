"""The roofline: what an operator computes and moves, and the time that the larger one takes."""

import equinox as eqx
import jax.numpy as jnp

from moejax._typing import FloatLike, FloatScalar
from moejax.hardware import AbstractPIM


class Work(eqx.Module):
    """What an operator does: `flops` (a multiply-add is two) and `bytes` moved. Scalars."""

    flops: FloatLike
    bytes: FloatLike

    def __add__(self, other: "Work") -> "Work":
        return Work(self.flops + other.flops, self.bytes + other.bytes)

    @property
    def arithmetic_intensity(self) -> FloatLike:
        """FLOP per byte moved."""
        return self.flops / self.bytes


def ridge_point(flops_per_s: FloatLike, bandwidth: FloatLike) -> FloatLike:
    """The arithmetic intensity, FLOP/B, above which a machine computes and below which it waits."""
    return flops_per_s / bandwidth


def attainable_flops_per_s(
    arithmetic_intensity: FloatLike, flops_per_s: FloatLike, bandwidth: FloatLike
) -> FloatScalar:
    """`min(peak, intensity * bandwidth)`, FLOP/s (Sieve, roofline figure)."""
    return jnp.minimum(flops_per_s, arithmetic_intensity * bandwidth)


def roofline_time(work: Work, flops_per_s: FloatLike, bandwidth: FloatLike) -> FloatScalar:
    """`max(flops / rate, bytes / bandwidth)` in s."""
    return jnp.maximum(work.flops / flops_per_s, work.bytes / bandwidth)


def pim_roofline_time(work: Work, pim: AbstractPIM) -> FloatScalar:
    """The same inside a memory stack, in s: what a scheduler believes before it has seen a time.

    `work` is that of one token. PIM reads its weights again for every token, so n tokens take n
    times as long and the arithmetic intensity stays that of one (Sieve, arXiv 2605.11277).
    """
    return roofline_time(work, pim.flops_per_s, pim.internal_bandwidth)
