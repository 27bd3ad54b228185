"""The messages that a map of nodes to endpoints is judged by, and the simulator's word on a map.

Messages here run between logical nodes. They are made once and sent under every map, so that maps
are compared on the same tokens and the same aggregators (common random numbers).
"""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from moejax._status import merge
from moejax._typing import Array, Float, FloatScalar, Int, PRNGKeyArray
from moejax.noc import (
    HOSTING_SHARE,
    Messages,
    Switching,
    Topology,
    expert_traffic,
    mirror,
    simulate,
    traffic_matrix,
)
from moejax.placement._statistics import Statistics


MODES: tuple[Switching, ...] = ("store_and_forward", "cut_through")
SPREAD = 6.0
"""Standard deviations beyond which no drawn batch is expected."""
ROOM = 256
"""Rooms are multiples of this or of an eighth of all messages that there could be, whichever is
more, so that layers and settings share a compilation."""
HOTTEST = 0.05
COLDEST = 0.0005
"""First and last temperature of annealing, in units of the start's score."""


class MapTimes(NamedTuple):
    """Means over batches for each kind of switching, in s: gather, the dispatch before it."""

    makespan: Float[Array, " modes"]
    dispatch: Float[Array, " modes"]
    status: Int[Array, " modes"]


def message_room(
    share: Float[Array, "*layers experts nodes"], statistics: Statistics, num_tokens: int
) -> int:
    """Room for the messages of a batch of drawn tokens, `max_messages` of `link_balance` (host).

    A token sends one message from each node that hosts one of its experts. The mean over the
    groups of the fullest layer and `SPREAD` standard deviations, rounded up.
    """
    hosts = np.asarray(share) > HOSTING_SHARE
    groups, weight = np.asarray(statistics.groups), np.asarray(statistics.group_frequency)
    layers = (hosts.reshape(-1, *hosts.shape[-2:]), groups.reshape(-1, *groups.shape[-2:]))
    most = 0.0
    for hosted, group, part in zip(*layers, weight.reshape(-1, weight.shape[-1])):
        touched = np.where((group >= 0)[..., None], hosted[group], False).any(1).sum(1)
        part = part / max(part.sum(), np.finfo(part.dtype).tiny)
        mean = part @ touched
        deviation = np.sqrt(part @ (touched - mean) ** 2)
        most = max(most, num_tokens * mean + SPREAD * np.sqrt(num_tokens) * deviation)
    all_messages = num_tokens * hosts.shape[-1]
    step = max(ROOM, all_messages // 8)
    return min(-(-int(most + 1) // step) * step, all_messages)


def drawn_messages(
    share: Float[Array, "experts nodes"],
    statistics: Statistics,
    batch_bytes: FloatScalar,
    num_batches: int,
    num_tokens: int,
    max_messages: int | None,
    key: PRNGKeyArray,
) -> Messages:
    """Gathers [batches, messages] of tokens with the experts of groups drawn by their frequency.

    `batch_bytes` is what one node sends for all tokens of a batch, in B.
    """
    reached = jnp.cumsum(statistics.group_frequency)
    shape = (2, num_batches, num_tokens)
    group_draw, slot_draw = jax.random.uniform(key, shape, reached.dtype)
    # A draw that rounds up to the whole belongs to the last group that occurs at all.
    last = jnp.searchsorted(reached, reached[-1])
    group = jnp.searchsorted(reached, group_draw * reached[-1], side="right")
    expert_ids = statistics.groups[jnp.minimum(group, last)]
    listed = jnp.cumsum(expert_ids >= 0, axis=-1)
    wanted = jnp.minimum(jnp.floor(slot_draw * listed[..., -1]) + 1, listed[..., -1])
    slot = jnp.argmax(listed == wanted[..., None], axis=-1)
    # Without a key the first expert listed aggregates; listing it again changes nothing else.
    first = jnp.take_along_axis(expert_ids, slot[..., None], -1)
    expert_ids = jnp.concatenate([first, expert_ids], axis=-1)

    def one(expert_ids):
        return expert_traffic(
            expert_ids,
            share,
            jnp.arange(share.shape[1]),
            bytes_per_token=batch_bytes / num_tokens,
            max_messages=max_messages,
        )

    return jax.vmap(one)(expert_ids)


def expected_messages(
    share: Float[Array, "experts nodes"],
    statistics: Statistics,
    batch_bytes: FloatScalar,
    max_messages: int | None,
) -> Messages:
    """The mean traffic as one batch [1, messages]: groups for tokens, experts sharing the part of
    the aggregator."""
    messages = expert_traffic(
        statistics.groups,
        share,
        jnp.arange(share.shape[1]),
        bytes_per_token=batch_bytes,
        weight=statistics.group_frequency,
        expected=True,
        max_messages=max_messages,
    )
    return jax.tree.map(lambda x: x[None], messages)


def node_traffic_matrix(messages: Messages, num_nodes: int) -> Float[Array, "batches nodes nodes"]:
    """B that each logical node sends to each other one, for each batch."""
    matrix = jax.vmap(lambda batch: traffic_matrix(batch, num_nodes))(messages)
    return jnp.where(jnp.eye(num_nodes, dtype=bool), 0, matrix)


def map_times(
    topology: Topology,
    messages: Messages,
    node_position: Int[Array, " nodes"],
    *,
    mirrored: bool,
    modes: tuple[Switching, ...] = MODES,
) -> MapTimes:
    """Simulates batches under a map. Unless `mirrored`, the dispatch is as long as the gather."""
    ends = lambda m: (m.source, m.destination)

    def one(batch):
        sent = eqx.tree_at(ends, batch, tuple(node_position[end] for end in ends(batch)))
        there = [simulate(topology, sent, switching=mode) for mode in modes]
        back = there
        if mirrored:
            back = [simulate(topology, mirror(sent), switching=mode) for mode in modes]
        time = lambda reports: jnp.stack([report.makespan for report in reports])
        status = [merge(a.status, b.status) for a, b in zip(there, back)]
        return MapTimes(time(there), time(back), jnp.stack(status))

    times = jax.vmap(one)(messages)
    return MapTimes(times.makespan.mean(0), times.dispatch.mean(0), times.status.max(0))


def climb(
    topology: Topology,
    messages: Messages,
    node_position: Int[Array, " nodes"],
    *,
    mirrored: bool,
    switching: Switching,
    swaps: int,
    key: PRNGKeyArray,
) -> Int[Array, " nodes"]:
    """The best map on a way of `swaps` random swaps, judged by the simulator each, that takes what
    is not slower and, less and less, what is slower."""

    def time(position):
        found = map_times(topology, messages, position, mirrored=mirrored, modes=(switching,))
        return (found.makespan + found.dispatch)[0]

    def swap(state, item):
        position, value, best, least = state
        two, allowed = item
        swapped = position.at[two].set(position[two[::-1]])
        new = time(swapped)
        accepted = new <= value + allowed
        position = jnp.where(accepted, swapped, position)
        value = jnp.where(accepted, new, value)
        better = value < least
        return (position, value, jnp.where(better, position, best), jnp.minimum(value, least)), None

    first = time(node_position)
    chance = jax.random.uniform(key, (swaps, 3), first.dtype, minval=1e-30)
    pairs = random_pairs(chance[:, :2], node_position.shape[0])
    allowed = -jnp.log(chance[:, 2]) * heat(jnp.linspace(0, 1, swaps)) * first
    state = (node_position, first, node_position, first)
    return jax.lax.scan(swap, state, (pairs, allowed))[0][2]


def heat(progress: Array) -> Array:
    """Temperature of annealing in units of the first score, for progress from 0 to 1."""
    return HOTTEST * (COLDEST / HOTTEST) ** progress


def random_pairs(chance: Float[Array, "swaps 2"], num_nodes: int) -> Int[Array, "swaps 2"]:
    """Two different nodes for each pair of numbers in [0, 1). A single node comes twice."""
    first, step = (chance * jnp.array([num_nodes, num_nodes - 1])).astype(jnp.int32).T
    # Rounding up may reach the upper end.
    first, step = jnp.minimum(first, num_nodes - 1), jnp.clip(step, 0, max(num_nodes - 2, 0))
    return jnp.stack([first, (first + 1 + step) % num_nodes], axis=1)
