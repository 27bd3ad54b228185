"""What no placement can undercut."""

import jax.numpy as jnp

from moejax._typing import FloatScalar
from moejax.placement._costs import (
    NodeCosts,
    check_unbatched,
    check_values,
    load_time,
    traffic_time,
)
from moejax.placement._estimate import TRANSFERS
from moejax.placement._node_problem import Problem, over_scenarios
from moejax.placement._statistics import Statistics
from moejax.placement._validate import check_count


def lp_bound(statistics: Statistics, costs: NodeCosts, num_nodes: int) -> FloatScalar:
    """The optimum of the linear relaxation of Node Balance, in s, in closed form.

    With Y_gc >= Z_ic >= P_ic for every expert i of group g and nothing whole, averaging a solution
    over all permutations of the nodes is a solution that is not worse. It has P = Z = Y =
    1 / nodes: perfect balance, and every token seems to touch one node only. Caps of memory and
    load and the inner rows of a fat-tree change nothing. `NodeBalance.bound` is never lower.

    **Raises:** `ValueError` as `evaluate`.
    """
    check_count("lp_bound", "num_nodes", num_nodes)
    check_unbatched(statistics, costs)
    check_values("lp_bound", statistics, costs)
    load = load_time(costs) * statistics.frequency.sum()
    traffic = TRANSFERS * traffic_time(costs) * statistics.group_frequency.sum()
    return (load + traffic) / num_nodes


def bound_of(problem: Problem, num_nodes: int) -> FloatScalar:
    """A scaled total that no placement undercuts: perfect balance, and as traffic of the busiest
    node what the linear relaxation has, or that of the busiest expert, which lies somewhere."""
    load = problem.frequency.sum(-1) / num_nodes
    # By groups rather than frequency: some groups may have been cut off.
    busiest = jnp.einsum("seg,sg->se", problem.member, problem.weight).max(-1)
    mass = jnp.maximum(busiest, problem.weight.sum(-1) / num_nodes)
    total = problem.load_cost * load + problem.traffic_cost * mass
    return over_scenarios(problem, total)
