"""GPU and PIM side by side: the later of the two is what a choice may raise."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np

from moejax._checks import as_float
from moejax._status import Status, flag, merge
from moejax._typing import Array, Bool, Float, FloatLike, FloatScalar, IntScalar
from moejax.gating._cost_sources import AbstractCostSource
from moejax.gating._validate import check_coefficient, check_times


class PartitionTimes(AbstractCostSource):
    """A GPU and its PIM that work side by side; the later one is what a choice may raise.

    An expert with n tokens takes `gpu_time_by_tokens[n]` on the GPU (weights read once, so the
    first token is the dear one) or `pim_time_by_tokens[n]` in PIM, and stands where it is faster,
    PIM on a tie, unless `on_gpu` fixes its place. cost_i = -r_time * (max(GPU, PIM) with one more
    token for i - max(GPU, PIM) now): the marginal cost, below 0 where a token that moves an expert
    to the GPU relieves PIM.

    Fields: `pim_time_by_tokens`, `gpu_time_by_tokens` [max_tokens + 1] in s, entry 0 for no tokens;
    `r_time`, score units per s, 0 or less; `on_gpu` bool [experts]; `num_experts` is static. The
    load is [experts], tokens of each.
    """

    pim_time_by_tokens: Float[Array, " counts"]
    gpu_time_by_tokens: Float[Array, " counts"]
    r_time: FloatScalar
    on_gpu: Bool[Array, " experts"] | None
    num_experts: int = eqx.field(static=True)

    def __init__(
        self,
        pim_time_by_tokens: Float[Array, " counts"],
        gpu_time_by_tokens: Float[Array, " counts"],
        *,
        r_time: FloatLike,
        num_experts: int,
        on_gpu: Bool[Array, " experts"] | None = None,
    ):
        """**Raises:** `ValueError` for tables of different length or with negative times, a
        positive coefficient, `on_gpu` of another shape."""
        shape = np.shape(pim_time_by_tokens)
        if len(shape) != 1 or shape[0] < 2:
            raise ValueError(
                f"pim_time_by_tokens has shape {shape}: allowed is [max_tokens + 1], at least 2"
            )
        check_times("pim_time_by_tokens", pim_time_by_tokens, shape)
        check_times("gpu_time_by_tokens", gpu_time_by_tokens, shape)
        check_coefficient("r_time", r_time)
        if on_gpu is not None and np.shape(on_gpu) != (num_experts,):
            raise ValueError(f"on_gpu has shape {np.shape(on_gpu)}: allowed is ({num_experts},)")
        self.pim_time_by_tokens = as_float(pim_time_by_tokens)
        self.gpu_time_by_tokens = as_float(gpu_time_by_tokens)
        self.r_time = as_float(r_time)
        self.on_gpu = None if on_gpu is None else jnp.asarray(on_gpu, bool)
        self.num_experts = num_experts

    def initial_load(self) -> Float[Array, " experts"]:
        return jnp.zeros(self.num_experts, self.pim_time_by_tokens.dtype)

    def cost(self, load: Float[Array, " experts"]) -> Float[Array, " experts"]:
        gpu, pim = self._times(load)
        gpu_more, pim_more = self._times(load + 1)
        after = jnp.maximum(gpu.sum() - gpu + gpu_more, pim.sum() - pim + pim_more)
        return -self.r_time * (after - jnp.maximum(gpu.sum(), pim.sum()))

    def update(self, load, counts):
        return load + counts.astype(load.dtype)

    def status(self, load: Float[Array, " experts"]) -> IntScalar:
        sane = lambda x: jnp.all((x >= 0) & (x < jnp.inf))
        tables = sane(self.pim_time_by_tokens) & sane(self.gpu_time_by_tokens)
        last = self.pim_time_by_tokens.shape[0] - 1
        return merge(
            flag(~(tables & sane(-self.r_time)), Status.BAD_COST),
            flag(~jnp.all(load >= 0), Status.NEGATIVE_COUNT),
            flag(jnp.any(load > last), Status.COUNT_BEYOND_TABLE),
        )

    def _times(self, load):
        """Time of each expert on the GPU and in PIM; 0 where it does not stand."""
        # What would be one beyond the table costs as its last entry; `status` tells if it comes.
        index = jnp.clip(load, 0, self.pim_time_by_tokens.shape[0] - 1).astype(jnp.int32)
        pim, gpu = self.pim_time_by_tokens[index], self.gpu_time_by_tokens[index]
        here = gpu < pim if self.on_gpu is None else self.on_gpu
        return jnp.where(here, gpu, 0), jnp.where(here, 0, pim)
