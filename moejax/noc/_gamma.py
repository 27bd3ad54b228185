"""How much slower the network is than the linear estimate: the slope gamma, from a trace."""

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from moejax._checks import check_non_negative
from moejax._status import is_traced
from moejax._typing import Array, Float, FloatLike, FloatScalar, Int, IntScalar, PRNGKeyArray
from moejax.noc._communication import (
    ESTIMATED_BYTES_PER_ELEMENT,
    SIMULATED_BYTES_PER_ELEMENT,
    estimate,
    token_bytes,
)
from moejax.noc._simulate import simulate
from moejax.noc._topology import Topology
from moejax.noc._traffic import HOSTING_SHARE, expert_traffic
from moejax.noc._traffic_checks import check_traffic


BATCH_SIZES = range(256, 640, 2)
"""The 192 batch sizes of the published calibration."""

BATCHES_AT_ONCE = 8
ROOM_STEP = 512


class GammaFit(eqx.Module):
    """A straight line through simulated over estimated times.

    - `slope`: gamma; multiply an `estimate` by it. `intercept`: s, which the papers drop.
    - `r_squared`: share of the variance that the line explains.
    - `estimated`, `simulated`: [samples] s, the points.
    - `status`: the worst one of all simulations. Bad points make the line NaN.
    """

    slope: FloatScalar
    intercept: FloatScalar
    r_squared: FloatScalar
    estimated: Float[Array, " samples"]
    simulated: Float[Array, " samples"]
    status: IntScalar


def calibrate_gamma(
    topology: Topology,
    expert_ids: Int[Array, "tokens top_k"],
    share: Float[Array, "experts nodes"],
    node_position: Int[Array, " nodes"],
    *,
    hidden_size: FloatLike,
    key: PRNGKeyArray,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    bandwidth: FloatLike | None = None,
    estimated_bytes: FloatLike = ESTIMATED_BYTES_PER_ELEMENT,
    simulated_bytes: FloatLike = SIMULATED_BYTES_PER_ELEMENT,
    max_messages: int | None = None,
    **options: Any,
) -> GammaFit:
    """Fits gamma of one layer: t_simulated = gamma * t_estimated (HD-MoE, arXiv 2509.09420, Eq. 3;
    HDA-MoE, arXiv 2609.08682, section IV).

    For each batch size, draws so many tokens of the layer without replacement; x is their linear
    `estimate`, y the simulated makespan of their gather with random aggregators. Ordinary least
    squares with an intercept. The papers use a random split of experts over nodes and random
    positions, and count 4 B an element in x but 1 B in y, so their gamma holds a factor of 1/4.

    **Arguments:**

    - `expert_ids`, `share`, `node_position`: of one layer, as in `expert_traffic`.
    - `hidden_size`: elements of a token's vector.
    - `key`: draws the batches and the aggregators.
    - `batch_sizes`: static, at least two different ones, none above the tokens of the trace.
    - `bandwidth`: B/s in the estimate. Default: the fastest link that leaves an endpoint.
    - `estimated_bytes`, `simulated_bytes`: B an element in x and in y.
    - `max_messages`: static room for the messages of one batch. Default: what the draws need, or
        under tracing one for each token and node.
    - `options`: of `simulate`.

    **Returns:** `GammaFit`.

    **Raises:** `ValueError` for a trace shorter than the largest batch, batch sizes that allow no
    line, and as `expert_traffic` and `simulate`.
    """
    sizes = _check_sizes(batch_sizes, jnp.shape(expert_ids)[0])
    check_traffic(expert_ids, share, node_position, 1.0, None)
    check_non_negative("calibrate_gamma", "hidden_size", hidden_size)
    if bandwidth is None:
        bandwidth = _endpoint_bandwidth(topology)
    tables = jnp.asarray(expert_ids), jnp.asarray(share), jnp.asarray(node_position)
    batches = _draw(tables[0], jnp.asarray(sizes), key, int(sizes.max()))
    if max_messages is None and not is_traced(batches, tables):
        max_messages = _room(batches, tables[1])
    bytes = token_bytes(hidden_size, estimated_bytes), token_bytes(hidden_size, simulated_bytes)
    points = _points(topology, batches, *tables[1:], key, bytes, bandwidth, max_messages, options)
    return _fit(*points)


def _check_sizes(batch_sizes: Sequence[int], num_tokens: int) -> np.ndarray:
    sizes = np.asarray(list(batch_sizes))
    if len(np.unique(sizes)) < 2 or sizes.min() < 1:
        raise ValueError(f"batch_sizes = {batch_sizes}: allowed are two or more sizes above 0")
    if sizes.max() > num_tokens:
        raise ValueError(
            f"batch_sizes go up to {sizes.max()}: allowed is {num_tokens}, the tokens of the trace"
        )
    return sizes


@jax.jit
def _endpoint_bandwidth(topology: Topology) -> FloatScalar:
    leaving = topology.links[:, 0] < topology.num_nodes
    return jnp.max(jnp.where(leaving, topology.link_bandwidth, 0), initial=0)


@eqx.filter_jit
def _draw(expert_ids, sizes, key, largest: int) -> Int[Array, "samples largest top_k"]:
    """One batch for each size, padded with -1 to the largest."""

    def one(item):
        sample, size = item
        order = jax.random.permutation(_key_of(key, sample)[0], expert_ids.shape[0])
        drawn = expert_ids[order[:largest]].astype(jnp.int32)
        return jnp.where((jnp.arange(largest) < size)[:, None], drawn, -1)

    # One after the other: shuffling a trace is quick, a copy of it for each sample is large.
    return jax.lax.map(one, (jnp.arange(sizes.shape[0]), sizes))


def _key_of(key: PRNGKeyArray, sample: IntScalar) -> PRNGKeyArray:
    """Two keys of one sample, for its tokens and for their aggregators."""
    return jax.random.split(jax.random.fold_in(key, sample))


def _room(batches: Int[Array, "samples largest top_k"], share) -> int:
    """Room for the messages of the largest batch, in steps so that layers share a compilation."""
    hosts = np.asarray(share) > HOSTING_SHARE
    hosts = np.append(hosts, np.zeros((1, hosts.shape[1]), bool), axis=0)
    ids = np.asarray(batches)
    needed = max(int(hosts[np.where(i < 0, -1, i)].any(axis=1).sum()) for i in ids)
    return max(1, -(-needed // ROOM_STEP)) * ROOM_STEP


@eqx.filter_jit
def _points(topology, batches, share, position, key, bytes, bandwidth, max_messages, options):
    """Estimated and simulated time of every batch, and the status of its simulation."""
    estimated_bytes, simulated_bytes = bytes

    def one(item):
        sample, ids = item
        aggregators = _key_of(key, sample)[1]
        messages = expert_traffic(
            ids,
            share,
            position,
            bytes_per_token=simulated_bytes,
            key=aggregators,
            max_messages=max_messages,
        )
        report = simulate(topology, messages, **options)
        guess = estimate(
            ids, share, hidden_size=1.0, bandwidth=bandwidth, bytes_per_element=estimated_bytes
        )
        return guess, report.makespan, report.status

    samples = jnp.arange(batches.shape[0])
    return jax.lax.map(one, (samples, batches), batch_size=BATCHES_AT_ONCE)


@jax.jit
def _fit(estimated, simulated, status) -> GammaFit:
    """Ordinary least squares. Centered first: in s, the squares are tiny and nearly alike."""
    mean_x, mean_y = jnp.mean(estimated), jnp.mean(simulated)
    x, y = estimated - mean_x, simulated - mean_y
    slope = jnp.sum(x * y) / jnp.sum(x * x)
    explained = jnp.sum(x * y) ** 2 / (jnp.sum(x * x) * jnp.sum(y * y))
    intercept = mean_y - slope * mean_x
    return GammaFit(slope, intercept, explained, estimated, simulated, jnp.max(status))
