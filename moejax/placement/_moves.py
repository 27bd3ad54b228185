"""Changes of a placement that Node Balance considers, and what they would do to the objective.

A move concerns the node that presses most, `source`, and one other node, so the soft maxima over
nodes are updated from the terms of these two.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from moejax._typing import Array, Float, FloatScalar, Int
from moejax.placement._fat_tree import row_price, tree_rows
from moejax.placement._node_problem import (
    Problem,
    count_hosted,
    hosting,
    node_loads,
    over_scenarios,
    priced_load,
    touched_mass,
)


class State(NamedTuple):
    """A placement with what makes the effect of a change cheap.

    `hosted` counts the experts of each group on each node, `mass` is the traffic that follows.
    `gain` and `loss` are the mass that a node newly touches when it begins to host an expert, and
    no longer touches when it gives up one.
    """

    share: Float[Array, "experts nodes"]
    hosted: Float[Array, "nodes scenarios groups"]
    mass: Float[Array, "nodes scenarios"]
    gain: Float[Array, "nodes experts scenarios"]
    loss: Float[Array, "nodes experts scenarios"]


class Pull(NamedTuple):
    """How the objective sees nodes at this step: soft maxima of `sharpness`, no interest in
    traffic below `floor`."""

    sharpness: FloatScalar
    floor: FloatScalar

    def terms(self, cost: Array, top: Array) -> Array:
        return jnp.exp(self.sharpness * (cost - top))

    def maximum(self, terms: Array, top: Array) -> Array:
        return jnp.log(jnp.maximum(terms, 1e-12)) / self.sharpness + top

    def priced_mass(self, problem: Problem, mass: Array) -> Array:
        return problem.traffic_cost * jnp.maximum(mass, self.floor)


class Sums(NamedTuple):
    """Loads and traffic of all nodes, and the terms of their soft maxima, [nodes, scenarios]."""

    load: Array
    mass: Array
    load_terms: Array
    mass_terms: Array
    load_top: Float[Array, " scenarios"]
    mass_top: Float[Array, " scenarios"]

    def at(self, scenarios: Array) -> "Sums":
        return jax.tree.map(lambda part: part[..., scenarios], self)

    def total(self, pull: Pull) -> Float[Array, " scenarios"]:
        load = pull.maximum(self.load_terms.sum(0), self.load_top)
        return load + pull.maximum(self.mass_terms.sum(0), self.mass_top)

    def after(
        self, problem: Problem, pull: Pull, source: Array, node: Array, load, mass
    ) -> tuple[Array, Array]:
        """Soft compute and communication once `source` and `node` have the given loads and masses,
        each a pair [..., scenarios] in which `node` is the last axis but one if it is an array."""
        loads = [priced_load(problem, part) for part in load]
        masses = [pull.priced_mass(problem, part) for part in mass]
        return (
            self._after(self.load_terms, self.load_top, pull, source, node, loads),
            self._after(self.mass_terms, self.mass_top, pull, source, node, masses),
        )

    @staticmethod
    def _after(terms: Array, top: Array, pull: Pull, source: Array, node: Array, costs) -> Array:
        rest = jnp.maximum(terms.sum(0) - terms[source] - terms[node], 0.0)
        return pull.maximum(rest + sum(pull.terms(cost, top) for cost in costs), top)


class Moves(NamedTuple):
    """`source` gives `give` of `leaving` to `node` and takes `take` of `entering`.

    `entering` is `leaving` where nothing comes back.
    """

    leaving: Int[Array, "*moves"]
    entering: Int[Array, "*moves"]
    node: Int[Array, "*moves"]
    give: Float[Array, "*moves"]
    take: Float[Array, "*moves"]


def state_of(problem: Problem, share: Float[Array, "experts nodes"]) -> State:
    count = count_hosted(problem, share)
    return State(share, count, *_count_tables(problem, count))


def _count_tables(problem: Problem, count: Float[Array, "nodes scenarios groups"]):
    """`mass`, `gain` and `loss` of some nodes."""
    mass_of = lambda groups: jnp.einsum(
        "seg,dsg->des", problem.member, jnp.where(groups, problem.weight, 0.0)
    )
    return touched_mass(problem, count), mass_of(count == 0), mass_of(count == 1)


def sums_of(problem: Problem, state: State, pull: Pull) -> Sums:
    load = node_loads(problem, state.share)
    priced, traffic = priced_load(problem, load), pull.priced_mass(problem, state.mass)
    tops = priced.max(0), traffic.max(0)
    terms = pull.terms(priced, tops[0]), pull.terms(traffic, tops[1])
    return Sums(load, state.mass, *terms, *tops)


class Columns(NamedTuple):
    """Shares and counts of the two nodes of a move, afterwards: first `source`, then the other."""

    share: Float[Array, "experts 2"]
    hosted: Float[Array, "2 scenarios groups"]
    mass: Float[Array, "2 scenarios"]


def columns_after(problem: Problem, state: State, source: Array, move: Moves) -> Columns:
    """The two nodes after a move, exactly."""
    nodes = jnp.stack([source, move.node])
    before = state.share[:, nodes]
    sign = jnp.array([-1.0, 1.0], before.dtype)
    after = before.at[move.leaving].add(sign * move.give)
    after = after.at[move.entering].add(-sign * move.take)
    after = jnp.where(hosting(after), after, 0.0)
    # At most two experts change on a node.
    touched = jnp.stack([move.leaving, move.entering])
    turned = hosting(after[touched]).astype(before.dtype) - hosting(before[touched])
    turned = turned.at[1].multiply(move.leaving != move.entering)
    count = state.hosted[nodes] + jnp.einsum("md,smg->dsg", turned, problem.member[:, touched])
    return Columns(after, count, touched_mass(problem, count))


def exact_score(
    problem: Problem,
    state: State,
    sums: Sums,
    pull: Pull,
    source: Array,
    node: Array,
    after: Columns,
) -> FloatScalar:
    """Soft objective after a move, in all scenarios and with the rows of a fat-tree."""
    load = node_loads(problem, after.share)
    comp, comm = sums.after(problem, pull, source, node, tuple(load), tuple(after.mass))
    if problem.tree is not None:
        count = state.hosted.at[jnp.stack([source, node])].set(after.hosted)
        comm = jnp.maximum(comm, _tree_cost(problem, count))
    return over_scenarios(problem, comp + comm)


def present_score(problem: Problem, state: State, sums: Sums, pull: Pull) -> FloatScalar:
    """`exact_score` as things are."""
    comp = pull.maximum(sums.load_terms.sum(0), sums.load_top)
    comm = pull.maximum(sums.mass_terms.sum(0), sums.mass_top)
    if problem.tree is not None:
        comm = jnp.maximum(comm, _tree_cost(problem, state.hosted))
    return over_scenarios(problem, comp + comm)


def _tree_cost(problem: Problem, count: Array) -> Float[Array, " scenarios"]:
    assert problem.tree is not None
    rows = tree_rows(problem.tree, count > 0, problem.weight)
    return problem.traffic_cost * row_price(rows)


def applied(
    problem: Problem, state: State, source: Array, node: Array, after: Columns, accepted: Array
) -> State:
    """The state after a move, or as it was."""
    nodes = jnp.stack([source, node])
    keep = lambda new, old: jnp.where(accepted, new, old)
    count = keep(after.hosted, state.hosted[nodes])
    mass, gain, loss = _count_tables(problem, count)
    return State(
        state.share.at[:, nodes].set(keep(after.share, state.share[:, nodes])),
        state.hosted.at[nodes].set(count),
        state.mass.at[nodes].set(mass),
        state.gain.at[nodes].set(gain),
        state.loss.at[nodes].set(loss),
    )
