"""Load on nodes or links: the busiest resource is what a choice may raise."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moejax._checks import as_float
from moejax._status import Status, flag, is_traced, merge
from moejax._typing import Array, Float, FloatLike, FloatScalar, Int, IntScalar
from moejax.gating._cost_sources import AbstractCostSource, InLanes
from moejax.gating._resource_lanes import resource_lanes
from moejax.gating._validate import (
    check_coefficient,
    check_share,
    check_times,
    check_whole,
    share_status,
)


HOSTING_SHARE = 1e-6
"""A node holds a part of an expert when its share is above this (as in `moejax.placement`)."""


class ResourceLoads(AbstractCostSource):
    """Experts that keep resources busy; the busiest one is what a choice may raise.

    cost_i = weight * (max_r(load_r + time_ir) - max_r load_r) + fixed_i, with the load in s. The
    current maximum is the same for all experts: taking it off changes no order, and keeps the
    digits of the scores when the load is long.

    Fields: `time` [experts, resources] in s, of one token; `weight`, score units per s; `fixed`
    [experts], score units; `busy` [experts, most], the resources that each expert keeps busy, where
    those are few; `input_status`, what was wrong with the inputs of `nodes` or `links`.
    """

    time: Float[Array, "experts resources"]
    weight: FloatScalar
    fixed: Float[Array, " experts"]
    busy: Int[Array, "experts most"] | None
    input_status: IntScalar

    @classmethod
    def nodes(
        cls,
        share: Float[Array, "experts nodes"],
        *,
        token_time: FloatLike,
        r_comp: FloatLike,
        r_comm: FloatLike,
        max_hosts: int | None = None,
    ) -> "ResourceLoads":
        """Computation on the nodes and dispersion over them (HDA-MoE, arXiv 2609.08682, V-D).

        **Arguments:**

        - `share`: [experts, nodes], the part of each expert that each node holds; rows sum to 1.
        - `token_time`: s that one node takes for one token of one whole expert.
        - `r_comp`: score units per s of makespan, 0 or less.
        - `r_comm`: score units per node that holds a part of the expert, 0 or less.
        - `max_hosts`: at most so many entries of a row of `share` are not 0 (static). Where they
            are few, as with expert parallelism, only those nodes are looked at: the same choices,
            faster. Counted where `share` is known.

        **Returns:** a source whose load is [nodes] in s.

        **Raises:** `ValueError` for shares that are negative or do not sum to 1, a negative time, a
        positive coefficient; a status under tracing.
        """
        check_share(share)
        check_times("token_time", token_time, ())
        check_coefficient("r_comp", r_comp)
        check_coefficient("r_comm", r_comm)
        share, most = as_float(share), _most_busy("max_hosts", share, max_hosts)
        return _nodes(share, as_float(token_time), as_float(r_comp), as_float(r_comm), most)

    @classmethod
    def links(
        cls,
        traffic: Float[Array, "experts links"],
        bandwidth: Float[Array, " links"] | FloatLike,
        *,
        r_link: FloatLike,
        max_links: int | None = None,
    ) -> "ResourceLoads":
        """Occupancy of the busiest link of a network.

        **Arguments:**

        - `traffic`: [experts, links], bytes that one token of the expert puts on each link: what
            its nodes send, times the incidence of their routes.
        - `bandwidth`: bytes/s, one number or [links].
        - `r_link`: score units per s of the busiest link, 0 or less.
        - `max_links`: at most so many entries of a row of `traffic` are not 0 (static).

        **Returns:** a source whose load is [links] in s.

        **Raises:** `ValueError` for negative traffic, a bandwidth that is not above 0, a positive
        coefficient; a status under tracing.
        """
        if np.ndim(traffic) != 2 or 0 in np.shape(traffic):
            raise ValueError(f"traffic has shape {np.shape(traffic)}: allowed is [experts, links]")
        check_times("traffic", traffic, np.shape(traffic))
        if np.shape(bandwidth) not in ((), np.shape(traffic)[1:]):
            raise ValueError(
                f"bandwidth has shape {np.shape(bandwidth)}: allowed is () or "
                f"{np.shape(traffic)[1:]}"
            )
        if not is_traced(bandwidth) and not np.all(np.asarray(bandwidth) > 0):
            raise ValueError(f"bandwidth = {np.min(bandwidth):g}: allowed is above 0 B/s")
        check_coefficient("r_link", r_link)
        traffic, most = as_float(traffic), _most_busy("max_links", traffic, max_links)
        return _links(traffic, as_float(bandwidth), as_float(r_link), most)

    def initial_load(self) -> Float[Array, " resources"]:
        return jnp.zeros(self.time.shape[1], self.time.dtype)

    def cost(self, load: Float[Array, " resources"]) -> Float[Array, " experts"]:
        highest = jnp.max(load + self.time, axis=-1)
        return self.weight * (highest - jnp.max(load)) + self.fixed

    def update(
        self, load: Float[Array, " resources"], counts: Float[Array, " experts"]
    ) -> Float[Array, " resources"]:
        return load + _matmul(counts.astype(self.time.dtype), self.time)

    def status(self, load: Float[Array, " resources"]) -> IntScalar:
        bad = ~jnp.all((load >= 0) & (load < jnp.inf))
        return merge(self.input_status, flag(bad, Status.BAD_COST))

    def in_lanes(self, lanes: int) -> InLanes:
        return InLanes(*resource_lanes(self.time, self.weight, self.fixed, self.busy, lanes))


@functools.partial(jax.jit, static_argnames="most")
def _nodes(share, token_time, r_comp, r_comm, most) -> ResourceLoads:
    # Solvers leave entries a little below 0; the gate wants times that only add.
    time = jnp.maximum(share, 0) * token_time
    hosts = (share > HOSTING_SHARE).sum(-1).astype(time.dtype)
    return _build(time, -r_comp, -r_comm * hosts, most, share_status(share))


@functools.partial(jax.jit, static_argnames="most")
def _links(traffic, bandwidth, r_link, most) -> ResourceLoads:
    status = flag(~jnp.all(bandwidth > 0), Status.BAD_RATE)
    return _build(traffic / bandwidth, -r_link, jnp.zeros_like(traffic[:, 0]), most, status)


def _build(time, weight, fixed, most, status) -> ResourceLoads:
    sane = lambda x: jnp.all((x >= 0) & (x < jnp.inf))
    bad = ~(sane(time) & sane(weight) & sane(fixed))
    busy = None
    if most is not None:
        busy = jax.lax.top_k(jax.lax.stop_gradient(time), most)[1]
        missed = (time > 0).sum(-1) > most
        status = merge(status, flag(jnp.any(missed), Status.BAD_SHARE))
    return ResourceLoads(time, weight, fixed, busy, merge(status, flag(bad, Status.BAD_COST)))


def _most_busy(name: str, amount: Any, most: int | None) -> int | None:
    """How many resources of an expert need a look, or None where it had better be all."""
    resources = np.shape(amount)[1]
    if not is_traced(amount):
        found = int(np.max((np.asarray(amount) > 0).sum(-1)))
        if most is not None and found > most:
            raise ValueError(f"{name} = {most}: an expert has {found}")
        most = found
    if most is None or 4 * most > resources:
        return None
    check_whole(name, most, 1, resources)
    return most


def _matmul(rows, matrix):
    # A carried load has to be exact whatever precision a platform prefers for its products.
    return jnp.matmul(rows, matrix, precision=jax.lax.Precision.HIGHEST)
