"""Link Balance: which endpoint of the network each logical node becomes."""

import functools
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp

from moejax._checks import as_float, check_non_negative, lookup
from moejax._status import Status, flag, is_traced, merge
from moejax._typing import (
    Array,
    BoolScalar,
    Float,
    FloatLike,
    FloatScalar,
    Int,
    IntScalar,
    PRNGKeyArray,
)
from moejax.noc import SWITCHING, Switching, Topology
from moejax.placement._costs import (
    NodeCosts,
    _check_unbatched,
    _check_values,
    cost_status,
    statistics_status,
)
from moejax.placement._link_traffic import (
    MODES,
    climb,
    drawn_messages,
    expected_messages,
    map_times,
    node_traffic_matrix,
)
from moejax.placement._statistics import Statistics
from moejax.placement._swap_search import ROUND, SwapProblem, anneal, load, score, swap_problem
from moejax.placement._validate import (
    UNPLACED,
    check_count,
    check_position,
    check_share,
    position_status,
    share_status,
)


DISPATCH = {"double": False, "mirror": True}
TRAFFIC = {"sampled": False, "expected": True}
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


def link_balance(
    share: Float[Array, "experts nodes"],
    topology: Topology,
    statistics: Statistics,
    costs: NodeCosts,
    *,
    key: PRNGKeyArray,
    start: Int[Array, " nodes"] | None = None,
    switching: Switching = "store_and_forward",
    dispatch: Literal["double", "mirror"] = "double",
    traffic: Literal["sampled", "expected"] = "sampled",
    message_bytes: FloatLike | None = None,
    num_batches: int = 16,
    num_tokens: int | None = None,
    chains: int = 4,
    steps: int = 8000,
    polish: int = 0,
    max_messages: int | None = None,
) -> LinkBalance:
    """Maps the logical nodes of a placement to the endpoints of a network, one to one.

    The problem of HD-MoE (arXiv 2509.09420) and HDA-MoE (arXiv 2609.08682), section V, called Link
    Balance there. Batches of tokens are drawn once and are the same for every map. Several
    chains anneal over swaps on the time of the busiest link, then the simulator judges the best map
    of each, and the start, on batches of their own. Never worse than the start on these.

    **Arguments:**

    - `share`: [experts, nodes], rows sum to 1; as many nodes as the topology has endpoints (columns
        of zeros are idle nodes).
    - `topology`: any `moejax.noc.Topology`; its bandwidths count, `costs.bandwidth` does not.
    - `statistics`: of one layer, what batches are drawn from.
    - `costs`: read for `batch` and `bytes_per_token`.
    - `key`: draws batches and swaps.
    - `start`: a map to improve, default node n on endpoint n. One chain starts from it, the
        others at random.
    - `switching`: as in `moejax.noc.simulate`; decides the choice among candidates.
    - `dispatch`: ``"double"`` takes it to be as long as the gather, ``"mirror"`` routes it.
    - `traffic`: ``"sampled"`` minimizes the mean over drawn batches, ``"expected"`` the time
        of the mean traffic (one message for each group, sender and possible aggregator, so
        keep `max_groups` of the statistics small).
    - `message_bytes`: B of one partial result of a token; default `costs.bytes_per_token`. The
        papers' simulations take h, a quarter of the 4 h of their estimate.
    - `num_batches`: for the search, and as many again for the judgement.
    - `num_tokens`: of one batch, static; default `costs.batch`, rounded. Messages are scaled so
        that a batch carries the bytes of `costs.batch` tokens. Needed where costs are traced.
    - `chains`, `steps`: independent searches, and swaps that each tries (in rounds of 250).
    - `polish`: further swaps that the simulator itself decides on. Worth its time where long hop
        latencies make the makespan more than the time of the busiest link.
    - `max_messages`: static room for the messages of one batch, default tokens * nodes. Less room
        makes the judgement faster; too little is `Status.TOO_MANY_MESSAGES`.

    **Returns:** a `LinkBalance`. One compilation serves all layers, rates and keys; layers are
    batched by `jax.vmap` over `share`, `statistics` and `key`.

    **Raises:** `ValueError` for shapes that disagree, options that do not exist, counts below 1,
    and, eagerly, impossible shares, statistics, costs or a start that is no permutation. Under
    tracing these are a `status`.
    """
    where = "link_balance"
    share = as_float(share)
    check_share(where, share, statistics.num_experts)
    _check_unbatched(statistics, costs)
    _check_values(where, statistics, costs)
    num_nodes = share.shape[1]
    if num_nodes != topology.num_nodes:
        raise ValueError(
            f"{where}: share has {num_nodes} nodes, the {topology.kind} {topology.num_nodes} "
            "endpoints: allowed is as many (columns of zeros are idle nodes)"
        )
    start = jnp.arange(num_nodes) if start is None else jnp.asarray(start)
    check_position(where, start, num_nodes)
    if not is_traced(start) and jnp.any(start < 0):
        raise ValueError(f"{where}: start has a node without a place: allowed is a permutation")
    if message_bytes is None:
        message_bytes = costs.bytes_per_token
    check_non_negative(where, "message_bytes", message_bytes)
    for name, count in dict(num_batches=num_batches, chains=chains, steps=steps).items():
        check_count(where, name, count)
    lookup("switching", switching, SWITCHING)
    options = dict(
        mirrored=lookup("dispatch", dispatch, DISPATCH),
        expected=lookup("traffic", traffic, TRAFFIC),
        num_batches=num_batches,
        num_tokens=_tokens(costs, num_tokens),
        chains=chains,
        rounds=-(-steps // ROUND),
        polish_swaps=check_count(where, "polish", polish, low=0),
        polish_mode=switching if polish else MODES[0],
        max_messages=max_messages,
    )
    mode = jnp.int32(MODES.index(switching))
    bytes_and_start = as_float(message_bytes), start.astype(jnp.int32)
    found = _link_balance(
        share, topology, statistics, costs, *bytes_and_start, mode, key, **options
    )
    if not is_traced(found) and int(found.status) not in (Status.OK, Status.DEAD_LINK):
        raise ValueError(f"{where}: {Status(int(found.status)).message}")
    return found


def _tokens(costs: NodeCosts, num_tokens: int | None) -> int:
    if num_tokens is not None:
        return check_count("link_balance", "num_tokens", num_tokens)
    if is_traced(costs.batch):
        raise ValueError("link_balance: num_tokens must be given where costs are traced")
    return max(1, round(float(costs.batch)))


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
def _link_balance(
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
