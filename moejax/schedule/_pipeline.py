"""The layers of one batch one after the other, as placed and with experts broadcast ahead."""

import functools
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from moejax._status import Status, is_traced, merge
from moejax._typing import Array, Float, FloatScalar, Int, IntLike, IntScalar, PRNGKeyArray
from moejax.noc import HOSTING_SHARE, Topology, expert_traffic, simulate
from moejax.routing import NOT_ROUTED, tokens_per_expert
from moejax.schedule._broadcast import broadcast_chunk
from moejax.schedule._costs import ScheduleCosts
from moejax.schedule._dispatch import STAYS, dispatch
from moejax.schedule._exposed import broadcast_makespan
from moejax.schedule._priority import priority
from moejax.schedule._validate import check_ids, check_shares


class LayerTimes(eqx.Module):
    """Seconds of each layer."""

    comp: Float[Array, " layers"]
    """Of the node with the most expert-tokens."""
    comm: Float[Array, " layers"]
    """Dispatch and gather, twice the simulated gather."""
    exposed: Float[Array, " layers"]
    """Waiting for a broadcast that the layer before was too short for."""

    @property
    def total(self) -> FloatScalar:
        """Of all layers together; attention and memory are not in it."""
        return (self.comp + self.comm + self.exposed).sum(-1)


class Schedule(eqx.Module):
    """One batch through all layers, static and dynamic. Times are NaN unless `status` is 0."""

    static: LayerTimes
    """As placed."""
    dynamic: LayerTimes
    """With the experts of `broadcast` on every node."""
    broadcast: Int[Array, "layers broadcasts"]
    """Experts broadcast before each layer, most urgent first; `routing.NOT_ROUTED` for none."""
    broadcast_time: Float[Array, " layers"]
    """T* of those, in s: what has to hide in the layer before. 0 for none."""
    visits: Float[Array, " layers"]
    """Share of the dispatched slots that run on a node which the token would not visit otherwise;
    their traffic is not counted."""
    status: IntScalar

    @property
    def speedup(self) -> FloatScalar:
        """Static over dynamic time of all layers."""
        return self.static.total / self.dynamic.total


def run_layers(
    expert_ids: Int[Array, "layers tokens top_k"],
    predicted_ids: Int[Array, "layers tokens top_k"],
    share: Float[Array, "layers experts nodes"],
    node_position: Int[Array, "layers nodes"],
    topology: Topology,
    costs: ScheduleCosts,
    *,
    max_broadcast: int,
    num_broadcast: IntLike | None = None,
    key: PRNGKeyArray | None = None,
    only_partners: bool = False,
    max_messages: int | None = None,
    chunks: int = 16,
) -> Schedule:
    """Times of one batch, layer by layer, with and without broadcasts ahead of the layers
    (HDA-MoE, arXiv 2609.08682, section V-C).

    Before each layer but the first, `priority` picks experts by the load that `predicted_ids`
    foresees; every node gets a copy of them, and `dispatch` spreads the tokens that really chose
    them. They cause no traffic between nodes. Layer time is that of the busiest node plus twice the
    simulated gather. The broadcast hides in the layer before, if its closed-form time T* is below
    that layer's (dynamic computation, communication and `costs.other_time`). If not, its messages
    go over the simulated network (`noc.broadcast`), and what they take beyond it is `exposed`.

    **Arguments:**

    - `expert_ids`: what the tokens chose; slots may be `routing.NOT_ROUTED`.
    - `predicted_ids`: what was expected, from `predict_transitions`, `predict_next_gate` or, for
        perfect prediction, `expert_ids` itself. Any number of choices a token. Layer 0 is not read.
    - `share`, `node_position`: the placement of each layer and the cells of its logical nodes.
    - `topology`: the network; its nodes are those of `share`.
    - `costs`: `ScheduleCosts`.
    - `max_broadcast`: experts copied before each layer, static.
    - `num_broadcast`: at most so many of them; may be traced. All by default.
    - `key`: draws the node that gathers each token; the same for both schedules. The first expert's
        by default.
    - `only_partners`: as `dispatch`, static.
    - `max_messages`: static room for the messages of a layer. As many as there are by default,
        under tracing tokens * nodes.
    - `chunks`: static number of chunks of a simulated broadcast.

    **Returns:** `Schedule`. Batches by `jax.vmap`.

    **Raises:** `ValueError` for shapes that disagree, ids out of range, bad shares, positions or
    costs. Under tracing these are a `status`.
    """
    owner = "run_layers"
    share, node_position = check_shares(owner, share, node_position, topology.num_nodes)
    num_experts = share.shape[1]
    ids = check_ids(owner, "expert_ids", expert_ids, num_experts, 3)
    predicted = check_ids(owner, "predicted_ids", predicted_ids, num_experts, 3)
    for name, other in (("predicted_ids", predicted.shape[:2]), ("share", share.shape[:1])):
        if other != ids.shape[: len(other)]:
            raise ValueError(
                f"{owner}: {name} has {other} layers (and tokens), expert_ids {ids.shape[:2]}"
            )
    costs.check(owner)
    if not isinstance(max_broadcast, int) or not 0 <= max_broadcast <= num_experts:
        raise ValueError(
            f"{owner}.max_broadcast = {max_broadcast!r}: allowed is 0 to {num_experts}"
        )
    if chunks < 1:
        raise ValueError(f"{owner}.chunks = {chunks}: allowed is 1 or more")
    if max_messages is None:
        max_messages = _room(ids, share)
    count = jnp.asarray(max_broadcast if num_broadcast is None else num_broadcast)
    static = _Static(max_broadcast, only_partners, max_messages, chunks, _most_hosts(share))
    return _run(ids, predicted, share, node_position, topology, costs, count, key, static)


class _Static(NamedTuple):
    """What is fixed before compilation."""

    max_broadcast: int
    only_partners: bool
    max_messages: int
    chunks: int
    roots: int


@functools.partial(jax.jit, static_argnames="static")
def _run(ids, predicted, share, position, topology, costs, count, key, static) -> Schedule:
    load = tokens_per_expert(predicted, share.shape[1]).at[0].set(0)
    pick = functools.partial(priority, max_broadcast=static.max_broadcast, num_broadcast=count)
    picked = jax.vmap(pick)(share, load)
    spread = jax.vmap(functools.partial(dispatch, only_partners=static.only_partners))
    placed = spread(ids, share, jnp.zeros_like(picked.chosen))
    moved = spread(ids, share, picked.chosen)
    stays = jnp.where(moved.node == STAYS, ids, NOT_ROUTED)
    gather = functools.partial(_gather, topology, costs, static.max_messages, key)
    layers = jnp.arange(ids.shape[0])
    comm, comm_status = jax.lax.map(gather, (layers, jnp.stack([ids, stays], 1), share, position))

    each = costs.flops_per_token / costs.flops_per_s
    comp = [each * found.load.max(-1) for found in (placed, moved)]
    before = jnp.roll(comp[1] + comm[:, 1] + costs.other_time, 1).at[0].set(0)
    needed = _broadcast_time(costs, (picked.experts != NOT_ROUTED).sum(-1), share.shape[2])
    wait = functools.partial(_wait, topology, costs, static)
    waits = (picked.experts, share, position, needed, before)
    exposed, wait_status = jax.lax.map(wait, waits)

    # What is wrong with the input also spoils the simulation: the cause comes first.
    cause = merge(costs.status, jnp.max(picked.status), jnp.max(moved.status))
    effect = merge(jnp.max(comm_status), jnp.max(wait_status))
    status = jnp.where(cause == Status.OK, effect, cause)
    slots = (moved.node != STAYS).sum((-2, -1))
    found = (
        LayerTimes(comp[0], comm[:, 0], jnp.zeros_like(exposed)),
        LayerTimes(comp[1], comm[:, 1], exposed),
        needed,
        moved.visits.sum((-2, -1)) / jnp.maximum(slots, 1),
    )
    # Over a dead link, times are infinite already.
    sane = (status == Status.OK) | (status == Status.DEAD_LINK)
    as_placed, dynamic, needed, visits = jax.tree.map(lambda x: jnp.where(sane, x, jnp.nan), found)
    return Schedule(as_placed, dynamic, picked.experts, needed, visits, status)


def _gather(topology, costs, max_messages, key, layer):
    """Times of dispatch and gather of one layer for each of several lists of its tokens' experts,
    and the status."""
    index, lists, share, position = layer
    draw = None if key is None else jax.random.fold_in(key, index)

    def one(ids):
        sent = expert_traffic(
            ids,
            share,
            position,
            bytes_per_token=costs.bytes_per_token,
            key=draw,
            max_messages=max_messages,
        )
        report = simulate(topology, sent)
        return 2 * report.makespan, report.status

    times, status = jax.lax.map(one, lists)
    return times, jnp.max(status)


def _broadcast_time(costs, sent, num_nodes):
    """T* of the experts sent before each layer; nothing takes no time."""
    args = (costs.expert_bytes, costs.alpha, costs.bandwidth, jnp.maximum(sent, 1), num_nodes)
    return jnp.where(sent > 0, broadcast_chunk(*args).time, 0)


def _wait(topology, costs, static, layer):
    """What the broadcast before one layer takes beyond the layer before, and the status."""
    experts, share, position, needed, before = layer

    def late():
        time, status = broadcast_makespan(
            topology,
            experts,
            share,
            position,
            costs.expert_bytes,
            chunks=static.chunks,
            roots=static.roots,
        )
        return jnp.maximum(time - before, 0), status

    in_time = lambda: (jnp.zeros_like(before), jnp.int32(Status.OK))
    if static.max_broadcast == 0:
        return in_time()
    return jax.lax.cond((needed == 0) | (needed < before), in_time, late)


def _room(ids: Array, share: Array) -> int:
    """Messages of the layer that has the most, rounded up so that few programs are compiled."""
    num_layers, tokens, _ = ids.shape
    nodes = share.shape[2]
    if is_traced(ids, share):
        return tokens * nodes
    hosts, listed = np.asarray(share) > HOSTING_SHARE, np.asarray(ids)
    most = 1
    for layer in range(num_layers):
        touched = hosts[layer][np.maximum(listed[layer], 0)] & (listed[layer] >= 0)[..., None]
        most = max(most, int(touched.any(1).sum()))
    return min(tokens * nodes, -(-most // 1024) * 1024)


def _most_hosts(share: Array) -> int:
    """Nodes that the parts of one expert lie on, at most."""
    if is_traced(share):
        return share.shape[2]
    return int((np.asarray(share) > HOSTING_SHARE).sum(-1).max())
