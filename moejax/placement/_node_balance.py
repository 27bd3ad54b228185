"""Node Balance: the shares that minimize compute plus communication of the busiest nodes."""

from collections.abc import Sequence

import equinox as eqx
import jax
import jax.numpy as jnp

from moejax._checks import as_float
from moejax._status import Status, flag, merge
from moejax._typing import Array, Float, FloatLike, FloatScalar, IntScalar, PRNGKeyArray
from moejax.noc import Topology
from moejax.placement import _milp as milp
from moejax.placement._costs import NodeCosts, cost_status, statistics_status
from moejax.placement._costs import compute_bound as largest_load
from moejax.placement._node_checks import check_given, check_sizes, effort_of, limits_of
from moejax.placement._node_kernel import (
    Caps,
    Searched,
    node_price,
    node_search,
    simple_placements,
)
from moejax.placement._statistics import Statistics
from moejax.routing import NOT_ROUTED


class NodeBalance(eqx.Module):
    """A placement and how good it is. Times in s; NaN unless `status` is 0 or `STOPPED_EARLY`.

    - `share`: [experts, nodes]; rows sum to 1.
    - `comp_time`, `comm_time`: of the busiest node, one direction; of several scenarios, the mean.
    - `total`: comp_time + 2 comm_time, or the quantile of it over scenarios.
    - `bound`: no placement has a smaller total. For "search" that is perfect balance with the
        traffic of the busiest expert, for "milp" what the solver proved.
    - `gap`: total / bound - 1.
    - `curve`: [steps], the best total after every step of the search; one entry for "milp".
    - `status`: a `moejax.Status`.
    """

    share: Float[Array, "experts nodes"]
    comp_time: FloatScalar
    comm_time: FloatScalar
    total: FloatScalar
    bound: FloatScalar
    gap: FloatScalar
    curve: Float[Array, " steps"]
    status: IntScalar


def node_balance(
    statistics: Statistics | Sequence[Statistics],
    costs: NodeCosts,
    num_nodes: int,
    *,
    key: PRNGKeyArray,
    memory_factor: FloatLike | None = None,
    topology: Topology | None = None,
    compute_bound: bool = False,
    method: str = "search",
    quantile: FloatLike | None = None,
    num_chains: int | None = None,
    num_steps: int | None = None,
    time_limit: float = 60.0,
    relative_gap: float = 1e-4,
) -> NodeBalance:
    """Which share of each expert each node should hold.

    Minimizes comp + 2 comm of `evaluate` (HD-MoE, arXiv 2509.09420, Eq. 5-12; HDA-MoE, arXiv
    2609.08682, section V-B).

    **Arguments:**

    - `statistics`: of one layer, or a sequence of them: scenarios, all equally likely, such as
        traces of several tasks, or batches from `drawn_statistics`. What is best for the average
        traffic has every node at its limit and pays for each deviation; scenarios make it robust.
    - `costs`: `NodeCosts`.
    - `num_nodes`: static.
    - `memory_factor`: a node holds at most this times its equal share of the weights:
        sum_i share_ic <= memory_factor * experts / nodes. 1 can always be met, less never.
    - `topology`: a fat-tree adds the rows of its leaves, pods and core, and node c is endpoint c.
        Any other network adds nothing.
    - `compute_bound`: also keeps the expected load of every node at most `compute_bound` (Eq. 11).
    - `method`: "search", the default, is compiled, can be mapped with `jax.vmap` over layers and
        hardware, and proves nothing. "milp" is HiGHS on the host and reports its bound: exact over
        host sets for up to 10 experts (no fat-tree, no scenarios), else the formulation of the
        paper, which closes its gap for toy sizes only.
    - `quantile`: over scenarios, in [0, 1], to minimize instead of the mean; "search" only.
    - `num_chains`, `num_steps`: size of the search; "search" only.
    - `time_limit`, `relative_gap`: of "milp", in s and as total / bound - 1.

    **Returns:** `NodeBalance`. "milp" out of time returns its best with `Status.STOPPED_EARLY`.

    **Raises:** `ValueError` for values that `evaluate` refuses, caps below 1, sizes or limits that
    are not above 0, a topology of other size, an unknown method. Under tracing, wrong values are a
    `status`.
    """
    where = "node_balance"
    scenarios = [statistics] if isinstance(statistics, Statistics) else list(statistics)
    check_sizes(where, scenarios, num_nodes, topology, method)
    check_given(where, scenarios, costs, memory_factor, quantile, method)
    limits = limits_of(where, time_limit, relative_gap)
    effort = effort_of(where, num_chains, num_steps, method)
    stacked = _stack(scenarios)
    load_cap = as_float(largest_load(costs, num_nodes, stacked.top_k) if compute_bound else jnp.inf)
    factor = as_float(jnp.inf if memory_factor is None else memory_factor)
    if method == "milp":
        return _by_solver(stacked, costs, num_nodes, factor, load_cap, topology, limits)
    status = merge(
        *(statistics_status(scenario) for scenario in scenarios),
        cost_status(costs),
        flag(~(factor >= 1), Status.INFEASIBLE_MEMORY),
    )
    safe = lambda given, spare: jnp.where(status == Status.OK, given, spare)
    caps = Caps(
        safe(factor, jnp.inf), load_cap, as_float(jnp.nan if quantile is None else quantile)
    )
    found = node_search(
        jax.tree.map(lambda part: safe(part, jnp.zeros_like(part)), stacked),
        jax.tree.map(lambda part: safe(part, jnp.ones_like(part)), costs),
        caps,
        topology,
        num_nodes=num_nodes,
        capped=memory_factor is not None,
        key=key,
        **effort,
    )
    return _report(found, status)


def _by_solver(
    stacked: Statistics,
    costs: NodeCosts,
    num_nodes: int,
    factor: Array,
    load_cap: FloatScalar,
    topology: Topology | None,
    limits: milp.Limits,
) -> NodeBalance:
    solved = milp.solve(stacked, costs, float(factor), float(load_cap), num_nodes, topology, limits)
    if solved.share is not None:
        shares = [as_float(solved.share)]
    else:
        shares = simple_placements(stacked.frequency.mean(0), num_nodes, factor)
    # Priced by the same kernel as what the search finds.
    given = stacked, costs, Caps(factor, load_cap, as_float(jnp.nan)), topology
    found = min((node_price(share, *given) for share in shares), key=lambda each: each.total)
    bound = jnp.clip(as_float(solved.bound), found.bound, found.total)
    found = found._replace(bound=bound, curve=found.total[None])
    stopped = flag(jnp.asarray(not solved.finished), Status.STOPPED_EARLY)
    return _report(found, stopped)


def _report(found: Searched, status: IntScalar) -> NodeBalance:
    fine = (status == Status.OK) | (status == Status.STOPPED_EARLY)
    share, comp, comm, total, bound, curve = jax.tree.map(
        lambda part: jnp.where(fine, part, jnp.nan), found
    )
    gap = jnp.where(bound > 0, total / jnp.where(bound > 0, bound, 1.0) - 1, 0.0)
    gap = jnp.where(fine, gap, jnp.nan)
    return NodeBalance(share, comp, comm, total, bound, gap, curve, status)


def _stack(scenarios: list[Statistics]) -> Statistics:
    """Scenarios on a leading axis, groups padded to the same number."""
    room = max(one.groups.shape[-2] for one in scenarios)

    def padded(part: Array, fill: float) -> Array:
        more = room - part.shape[0]
        widths = [(0, more)] + [(0, 0)] * (part.ndim - 1)
        return jnp.pad(part, widths, constant_values=fill)

    return Statistics(
        jnp.stack([one.frequency for one in scenarios]),
        jnp.stack([padded(one.groups, NOT_ROUTED) for one in scenarios]),
        jnp.stack([padded(one.group_frequency, 0.0) for one in scenarios]),
    )
