"""A makespan without blind spots: every node pushes, the more the busier it is."""

import jax
import jax.numpy as jnp

from moejax._checks import as_float, check_positive
from moejax._status import Status, flag, merge
from moejax._typing import Array, Float, FloatLike, FloatScalar, IntScalar
from moejax.gating._cost_sources import AbstractCostSource
from moejax.gating._resource_loads import HOSTING_SHARE
from moejax.gating._validate import check_coefficient, check_share, check_times, share_status


class SoftMakespan(AbstractCostSource):
    """Nodes that pay for a soft maximum of their loads, `smooth_makespan`, instead of the hard one.

    cost_i = -r_comp * (M(load + time_i) - M(load)) - r_comm * N_i, where M is the smooth makespan
    with temperature `softness`, and N_i is the number of nodes that hold a part of i.

    The published cost (`ResourceLoads.nodes`, its limit for no softness) is blind below the busiest
    node and where two tie for it, and takes the first tokens of a batch as if no more came. This
    one sees all nodes, and with `include_future_original` where they will end: then only choices on
    nodes that end up busy pay.

    Fields: `time` [experts, nodes] in s of one token; `price` score units per s; `softness` in s;
    `fixed` [experts] score units; `input_status`.
    """

    time: Float[Array, "experts nodes"]
    price: FloatScalar
    softness: FloatScalar
    fixed: Float[Array, " experts"]
    input_status: IntScalar

    @classmethod
    def nodes(
        cls,
        share: Float[Array, "experts nodes"],
        *,
        token_time: FloatLike,
        softness: FloatLike,
        r_comp: FloatLike,
        r_comm: FloatLike = 0.0,
    ) -> "SoftMakespan":
        """**Arguments:** as `ResourceLoads.nodes`, and

        - `softness`: s, above 0; one or two `token_time` is a good start. Half of a whole expert's
            time and less is as hard as makes no difference.

        **Raises:** `ValueError` for shares that do not sum to 1, negative times, positive
        coefficients, no softness; a status under tracing.
        """
        check_share(share)
        check_times("token_time", token_time, ())
        check_times("softness", softness, ())
        check_positive("SoftMakespan", "softness", softness)
        check_coefficient("r_comp", r_comp)
        check_coefficient("r_comm", r_comm)
        return _nodes(*(as_float(x) for x in (share, token_time, softness, r_comp, r_comm)))

    def initial_load(self) -> Float[Array, " nodes"]:
        return jnp.zeros(self.time.shape[1], self.time.dtype)

    def cost(self, load: Float[Array, " nodes"]) -> Float[Array, " experts"]:
        return self.price * soft_increase(load, self.time, self.softness) + self.fixed

    def update(
        self, load: Float[Array, " nodes"], counts: Float[Array, " experts"]
    ) -> Float[Array, " nodes"]:
        added = jnp.matmul(
            counts.astype(load.dtype), self.time, precision=jax.lax.Precision.HIGHEST
        )
        return load + added

    def status(self, load: Float[Array, " nodes"]) -> IntScalar:
        bad = ~jnp.all((load >= 0) & (load < jnp.inf))
        return merge(self.input_status, flag(bad, Status.BAD_COST))


def soft_increase(
    load: Float[Array, " nodes"], time: Float[Array, "experts nodes"], softness: FloatScalar
) -> Float[Array, " experts"]:
    """s that the smooth makespan grows by with one more token of each expert.

    T log(sum_c exp((load_c + time_ic) / T) / sum_c exp(load_c / T)), never as a difference of two
    large numbers. Exact gradient.
    """
    before = jax.nn.log_softmax((load - jnp.max(load)) / softness)
    # Nodes that get nothing keep their part of the sum; the others' grows.
    return softness * jax.nn.logsumexp(before + time / softness, axis=-1)


@jax.jit
def _nodes(share, token_time, softness, r_comp, r_comm) -> SoftMakespan:
    time = jnp.maximum(share, 0) * token_time
    hosts = (share > HOSTING_SHARE).sum(-1).astype(time.dtype)
    sane = lambda x: jnp.all((x >= 0) & (x < jnp.inf))
    bad = ~(sane(time) & sane(-r_comp) & sane(-r_comm) & sane(softness) & (softness > 0))
    status = merge(share_status(share), flag(bad, Status.BAD_COST))
    return SoftMakespan(time, -r_comp, softness, -r_comm * hosts, status)
