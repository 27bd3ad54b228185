"""What GPU kernels reach of a roofline: a curve fitted to measured layers, and bands around it."""

from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
import numpy as np

from moejax._checks import as_float, check_non_negative, check_positive, check_range, lookup
from moejax._typing import Float, FloatLike, FloatScalar
from moejax.cost._roofline import Work


class GPUEfficiency(eqx.Module):
    """How far the kernels of a MoE layer on a GPU stay behind its roofline.

    `time = launch_time + (memory^s + compute^s)^(1/s)`, with the bytes at `bandwidth` and the FLOPs
    at `compute` of the peak. A sharpness s that grows approaches the roofline's maximum.

    **Arguments:**

    - `launch_time`: s that a layer takes whatever it does (kernel launches, sorting, combining).
    - `bandwidth`, `compute`: reached shares of the peaks, in (0, 1].
    - `sharpness`: 1 (memory and compute add up) or more.
    - `spill`: share of the activations inside experts that go through memory too, in [0, 1].

    **Raises:** `ValueError` naming field, value and what is allowed.
    """

    launch_time: FloatScalar = eqx.field(converter=as_float)
    bandwidth: FloatScalar = eqx.field(converter=as_float)
    compute: FloatScalar = eqx.field(converter=as_float)
    sharpness: FloatScalar = eqx.field(converter=as_float, default=64.0)
    spill: FloatScalar = eqx.field(converter=as_float, default=0.0)

    def __check_init__(self) -> None:
        owner = "GPUEfficiency"
        check_non_negative(owner, "launch_time", self.launch_time)
        check_range(owner, "sharpness", self.sharpness, 1.0, 1e6, open_low=False)
        check_range(owner, "spill", self.spill, 0.0, 1.0, open_low=False)
        for field in ("bandwidth", "compute"):
            check_range(owner, field, getattr(self, field), 0.0, 1.0, open_low=True)

    def join(self, memory_time: FloatLike, compute_time: FloatLike) -> FloatScalar:
        """Seconds of a layer whose bytes and FLOPs take these times at the rates reached."""
        memory_time, compute_time = as_float(memory_time), as_float(compute_time)
        longer = jnp.maximum(memory_time, compute_time)
        # Of the ratio, which never overflows; 1 keeps gradients finite where nothing is done.
        ratio = jnp.minimum(memory_time, compute_time) / jnp.where(longer > 0, longer, 1.0)
        ratio = jnp.maximum(ratio, 1e-6)
        return self.launch_time + longer * (1 + ratio**self.sharpness) ** (1 / self.sharpness)

    def time(self, work: Work, flops_per_s: FloatLike, bandwidth: FloatLike) -> FloatScalar:
        """Seconds of `work` on a GPU of these peaks, FLOP/s and B/s."""
        memory = work.bytes / (bandwidth * self.bandwidth)
        return self.join(memory, work.flops / (flops_per_s * self.compute))


# Least squares of relative errors over the 50 measured points: `fit_gpu_efficiency`, whose test
# finds these numbers again. Root mean square error 5.5 %; worst 18 % with 8 experts, whose weights
# stay in the cache between two runs of a benchmark, and 7.6 % with 16 or more.
_MEASURED: dict[str, float] = dict(
    launch_time=35.1e-6, bandwidth=0.847, compute=0.560, sharpness=2.74, spill=1.0
)
_FITTED = "fitted to MoE layers of Qwen3-30B-A3B on an RTX PRO 6000 (LLMServingSim, commit 5daddb2)"

GPU_EFFICIENCIES: dict[str, tuple[dict[str, float], str]] = {
    "roofline": (
        dict(launch_time=0.0, bandwidth=1.0, compute=1.0, sharpness=1e4),
        "the peaks of the data sheet, as Sieve (arXiv 2605.11277) simulates",
    ),
    "attacc": (
        dict(launch_time=0.0, bandwidth=0.85, compute=0.80),
        "shares of AttAcc's public simulator",
    ),
    "measured": (_MEASURED, _FITTED),
    "measured-no-launch": (
        _MEASURED | dict(launch_time=0.0),
        f"{_FITTED}, without its 35 us a layer, as if all kernels were launched ahead",
    ),
}
"""Fields of `GPUEfficiency` by name, with their source."""


def gpu_efficiency(name: str) -> GPUEfficiency:
    """One of `GPU_EFFICIENCIES`.

    **Raises:** `ValueError` suggesting the nearest name.
    """
    fields: dict[str, Any] = lookup("GPU efficiency", name, GPU_EFFICIENCIES)[0]
    return GPUEfficiency(**fields)


class GPUFit(NamedTuple):
    """A fitted efficiency, its seconds for every measured point, and how much faster than memory
    the cache delivers weights that fit into it."""

    efficiency: GPUEfficiency
    predicted: Float[np.ndarray, " points"]
    cache_speedup: float


def fit_gpu_efficiency(
    tokens: Any,
    experts: Any,
    seconds: Any,
    *,
    hidden: int,
    intermediate: int,
    top_k: int,
    flops_per_s: float,
    bandwidth: float,
    cache_bytes: float = 0.0,
    bits: float = 16.0,
) -> GPUFit:
    """Fits `GPUEfficiency` to measured times of one MoE layer, by least squares of log time.

    A benchmark that runs one layer again and again finds its weights in the cache where they fit;
    those points get a bandwidth of their own, which a model of many layers never sees.

    **Arguments:**

    - `tokens`, `experts`, `seconds`: [points]: tokens in the layer, distinct experts that they
        hit, and the time.
    - `hidden`, `intermediate`, `top_k`, `bits`: sizes of the layer and bits of every value.
    - `flops_per_s`, `bandwidth`, `cache_bytes`: peaks of the GPU in FLOP/s and B/s, and the size of
        its last cache.

    **Returns:** `GPUFit`.

    **Raises:** `ValueError` for arrays of different or fewer than six points, or numbers that are
    not positive.
    """
    from scipy.optimize import least_squares

    n, e, t = (np.asarray(column, float) for column in (tokens, experts, seconds))
    if not n.shape == e.shape == t.shape or n.ndim != 1 or n.size < 6:
        raise ValueError(
            f"fit_gpu_efficiency: tokens {n.shape}, experts {e.shape}, seconds {t.shape}: allowed "
            "is one shape [points] of at least 6"
        )
    positive = dict(tokens=n, experts=e, seconds=t, hidden=hidden, intermediate=intermediate)
    positive |= dict(top_k=top_k, flops_per_s=flops_per_s, bandwidth=bandwidth, bits=bits)
    for name, value in positive.items():
        check_positive("fit_gpu_efficiency", name, value)
    check_non_negative("fit_gpu_efficiency", "cache_bytes", cache_bytes)
    weights = e * 3.0 * hidden * intermediate * bits / 8
    values = n * top_k * (2.0 * hidden + 3.0 * intermediate) * bits / 8
    flops = 6.0 * n * top_k * hidden * intermediate
    cached = weights <= cache_bytes

    def predict(parameters):
        launch, share, compute, sharpness, speedup = np.exp(parameters)
        faster = np.where(cached, speedup, 1.0)
        memory = (weights / faster + values) / (bandwidth * share)
        busy = flops / (flops_per_s * compute)
        return launch + (memory**sharpness + busy**sharpness) ** (1 / sharpness)

    start = np.log([0.3 * np.min(t), 0.8, 0.6, 3.0, 2.0])
    found = least_squares(lambda parameters: np.log(predict(parameters) / t), start)
    launch, share, compute, sharpness, speedup = np.exp(found.x)
    efficiency = GPUEfficiency(
        launch, min(share, 1.0), min(compute, 1.0), max(sharpness, 1.0), True
    )
    return GPUFit(efficiency, predict(found.x), float(speedup))
