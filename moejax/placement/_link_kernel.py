"""The traced part of Link Balance: draws, anneals, and lets the simulator choose."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp

from moejax._status import Status, flag, merge
from moejax._typing import Array, BoolScalar, Float, FloatScalar, Int, IntScalar, PRNGKeyArray
from moejax.noc import Switching, Topology
from moejax.placement._costs import NodeCosts, cost_status, statistics_status
from moejax.placement._link_traffic import (
    climb,
    drawn_messages,
    expected_messages,
    map_times,
    node_traffic_matrix,
)
from moejax.placement._statistics import Statistics
from moejax.placement._swap_search import SwapProblem, anneal, load, score, swap_problem
from moejax.placement._validate import UNPLACED, position_status, share_status


SAME = 1e-5
"""Relative difference up to which two simulated times are taken to be equal."""


class LinkBalance(eqx.Module):
    """What `link_balance` returns. Times in s.

    - `node_position`: int [nodes], endpoint of each logical node. -1 where input was bad.
    - `makespan`: simulated time of one gather with it, the mean over the batches it was judged on.
    - `comm_time`: of dispatch and gather, which was minimized.
    - `start_makespan`, `start_comm_time`: of the map that the search started from.
    - `curve`: [chains, rounds + 1], time of the busiest link in dispatch and gather, for the best
        map so far on the batches of the search, at the start and after every 250 swaps.
    - `candidates`: int [candidates, nodes], the start, the best map of each chain and, with
        `polish`, the best of these polished.
    - `candidate_makespan`, `candidate_comm_time`: [2, candidates], under store-and-forward and
        under cut-through switching.
    - `status`: a `moejax.Status`. Times are NaN where input was bad, infinite for a dead link.
    """

    node_position: Int[Array, " nodes"]
    makespan: FloatScalar
    comm_time: FloatScalar
    start_makespan: FloatScalar
    start_comm_time: FloatScalar
    curve: Float[Array, "chains points"]
    candidates: Int[Array, "candidates nodes"]
    candidate_makespan: Float[Array, "modes candidates"]
    candidate_comm_time: Float[Array, "modes candidates"]
    status: IntScalar

    @property
    def ranking_changes(self) -> BoolScalar:
        """Whether two candidates change their order between the two kinds of switching."""
        times = self.candidate_comm_time
        gap = times[..., :, None] - times[..., None, :]
        side = jnp.where(jnp.abs(gap) > SAME * times[..., :, None], jnp.sign(gap), 0)
        return jnp.any(side[..., 0, :, :] * side[..., 1, :, :] < 0, axis=(-1, -2))

    @property
    def switching_regret(self) -> Float[Array, "modes"]:
        """Relative time lost, under each kind of switching, with the best map of the other one."""
        times = self.candidate_comm_time
        other = jnp.argmin(times, axis=-1)[..., ::-1, None]
        least = times.min(-1)
        lost = jnp.take_along_axis(times, other, -1)[..., 0] - least
        return jnp.where(lost > 0, lost / least, 0)


@functools.partial(
    jax.jit,
    static_argnames=(
        "mirrored",
        "expected",
        "num_batches",
        "num_tokens",
        "chains",
        "rounds",
        "polish_swaps",
        "polish_mode",
        "max_messages",
    ),
)
def link_search(
    share: Array,
    topology: Topology,
    statistics: Statistics,
    costs: NodeCosts,
    message_bytes: Array,
    start: Array,
    mode: Array,
    key: PRNGKeyArray,
    *,
    mirrored: bool,
    expected: bool,
    num_batches: int,
    num_tokens: int,
    chains: int,
    rounds: int,
    polish_swaps: int,
    polish_mode: Switching,
    max_messages: int | None,
) -> LinkBalance:
    draw_key, search_key, polish_key = jax.random.split(key, 3)
    batch_bytes = costs.batch * message_bytes
    if expected:
        fitted = judged = expected_messages(share, statistics, batch_bytes, max_messages)
    else:
        sizes = (2 * num_batches, num_tokens, max_messages)
        both = drawn_messages(share, statistics, batch_bytes, *sizes, draw_key)
        fitted = jax.tree.map(lambda x: x[:num_batches], both)
        judged = jax.tree.map(lambda x: x[num_batches:], both)
    traffic = node_traffic_matrix(fitted, share.shape[1])
    problem = swap_problem(topology, share, traffic, mirrored=mirrored)
    maps, curve = _chains(problem, start, chains, rounds, search_key)
    if polish_swaps:
        best = maps[jnp.argmin(curve[:, -1])]
        better = climb(
            topology,
            fitted,
            best,
            mirrored=mirrored,
            switching=polish_mode,
            swaps=polish_swaps,
            key=polish_key,
        )
        maps = jnp.concatenate([maps, better[None]])
    candidates = jnp.concatenate([start[None], maps])
    # One after the other: together they would need much memory.
    judge = lambda position: map_times(topology, judged, position, mirrored=mirrored)
    makespan, dispatch, simulated = (x.T for x in jax.lax.map(judge, candidates))
    comm_time = makespan + dispatch
    best = jnp.argmin(jnp.where(jnp.isnan(comm_time[mode]), jnp.inf, comm_time[mode]))
    wrong = merge(
        share_status(share),
        statistics_status(statistics),
        cost_status(costs),
        position_status(start),
        flag(jnp.any(start < 0), Status.BAD_POSITION),
        flag(~((message_bytes >= 0) & (message_bytes < jnp.inf)), Status.NEGATIVE_BYTES),
        flag(~(statistics.group_frequency.sum() > 0), Status.EMPTY_BATCH),
    )
    sent = simulated[mode, best]
    fine = (wrong == Status.OK) & ((sent == Status.OK) | (sent == Status.DEAD_LINK))
    time = lambda value: jnp.where(fine, value, jnp.nan)
    place = lambda value: jnp.where(fine, value, UNPLACED)
    return LinkBalance(
        node_position=place(candidates[best]),
        makespan=time(makespan[mode, best]),
        comm_time=time(comm_time[mode, best]),
        start_makespan=time(makespan[mode, 0]),
        start_comm_time=time(comm_time[mode, 0]),
        curve=time(curve if mirrored else 2 * curve),
        candidates=place(candidates),
        candidate_makespan=time(makespan),
        candidate_comm_time=time(comm_time),
        status=merge(wrong, sent),
    )


def _chains(
    problem: SwapProblem, start: Array, chains: int, rounds: int, key: PRNGKeyArray
) -> tuple[Int[Array, "chains nodes"], Float[Array, "chains points"]]:
    """The best map of each chain and the course of its score. The first chain starts at `start`."""
    at_random, search = jax.random.split(key)
    order = jnp.argsort(jax.random.uniform(at_random, (chains - 1, start.shape[0])), axis=1)
    starts = jnp.concatenate([start[None], start[order]])
    score_of = lambda position: score(load(problem, position))
    first = jax.vmap(score_of)(starts)
    run = lambda start, key: anneal(problem, start, first[0], rounds, key)
    maps, curve = jax.vmap(run)(starts, jax.random.split(search, chains))
    return maps, jnp.concatenate([first[:, None], curve], axis=1)
