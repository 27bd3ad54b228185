"""Changes of a placement that Node Balance considers, and what they would do to the objective.

A move concerns the node that presses most, `source`, and one other node, so the soft maxima over
nodes are updated from the terms of these two.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from moejax._typing import Array, Float, FloatScalar, Int, PRNGKeyArray
from moejax.placement._costs import HOSTING_SHARE
from moejax.placement._fat_tree import row_price, tree_rows
from moejax.placement._node_problem import (
    Problem,
    count_hosted,
    hosting,
    node_loads,
    over_scenarios,
    priced_load,
    scenario_weights,
    touched_mass,
)


SLOTS = 8
"""Experts of `source` that may leave in one step."""
PARTNERS = 16
"""Other nodes that are looked at in one step."""
SCORED = 4
"""Scenarios by which moves are shortlisted; those on the list are evaluated in all."""
SHORTLIST = 32


class Dice(NamedTuple):
    """The random numbers of a step, uniform in (0, 1)."""

    nodes: Float[Array, " nodes"]
    experts: Float[Array, " experts"]
    partners: Float[Array, " nodes"]
    scenarios: Float[Array, " scenarios"]
    shortlist: Float[Array, " moves"]
    proposals: Float[Array, " proposals"]


def roll(problem: Problem, num_nodes: int, num_steps: int, *, key: PRNGKeyArray) -> Dice:
    """The dice of all steps, on a leading axis: one draw compiles faster than one a step."""
    num_scenarios, num_experts = problem.frequency.shape
    proposals = 2 * min(SLOTS, num_experts) * min(PARTNERS, num_nodes)
    sizes = (num_nodes, num_experts, num_nodes, num_scenarios, min(SHORTLIST, proposals))
    sizes += (proposals if problem.tree is not None else 0,)
    dtype = problem.frequency.dtype
    # Never 0, so that logarithms are finite.
    dice = jax.random.uniform(key, (num_steps, sum(sizes)), dtype, minval=1e-6)
    return Dice(*jnp.split(dice, np.cumsum(sizes)[:-1], axis=1))


def gumbel(dice: Array) -> Array:
    """Gumbel noise from uniform dice."""
    return -jnp.log(-jnp.log(dice))


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


class Sight(NamedTuple):
    """What a step looks at: the leaving experts of `source`, some partners, some scenarios."""

    source: Int[Array, ""]
    slots: Int[Array, " slots"]
    partners: Int[Array, " partners"]
    scenarios: Int[Array, " scored"]
    weights: Float[Array, " scored"]


def look(problem: Problem, state: State, sums: Sums, pull: Pull, dice: Dice) -> Sight:
    """Draws a node, the busier the likelier, and who may take part in a move."""
    num_nodes = state.share.shape[1]
    weights = scenario_weights(problem, sums.total(pull))
    pressure = (sums.load_terms / sums.load_terms.sum(0)) @ weights
    pressure += (sums.mass_terms / sums.mass_terms.sum(0)) @ weights
    source = jnp.argmax(jnp.log(pressure + 0.1 / num_nodes) + gumbel(dice.nodes))
    some = lambda score, count: lax.top_k(score, min(count, score.shape[0]))[1]
    slots = some(hosting(state.share[:, source]) + dice.experts, SLOTS)
    partners = some(dice.partners, PARTNERS)
    if weights.shape[0] > SCORED:
        scenarios = some(jnp.log(weights + 1e-12) + gumbel(dice.scenarios), SCORED)
        return Sight(source, slots, partners, scenarios, jnp.full(SCORED, 1 / SCORED))
    return Sight(source, slots, partners, jnp.arange(weights.shape[0]), weights)


def shortlist(
    problem: Problem,
    state: State,
    sums: Sums,
    pull: Pull,
    sight: Sight,
    dice: Dice,
    *,
    capped: bool,
) -> tuple[Moves, Float[Array, " moves"]]:
    """The `SHORTLIST` most promising moves and their scores, infinite where impossible.

    Scores are of the scenarios in sight, and take the traffic that two exchanged experts share for
    moved twice.
    """
    scorer = _Scorer(problem, state, sums.at(sight.scenarios), pull, sight)
    proposals = [scorer.transfers(), scorer.exchanges(capped)]
    moves, score = jax.tree.map(
        lambda *parts: jnp.concatenate([part.ravel() for part in parts]), *proposals
    )
    count = min(SHORTLIST, score.shape[0])
    if problem.tree is None:
        best = lax.top_k(-score, count)[1]
    else:
        # Scores know nothing of the rows of a tree: half of the list is drawn at random.
        lot = jnp.where(jnp.isfinite(score), dice.proposals, -1.0)
        best = [lax.top_k(-score, count // 2)[1], lax.top_k(lot, count - count // 2)[1]]
        best = jnp.concatenate(best)
    return jax.tree.map(lambda part: part[best], moves), score[best]


class _Scorer(NamedTuple):
    problem: Problem
    state: State
    sums: Sums
    pull: Pull
    sight: Sight

    def transfers(self) -> tuple[Moves, Array]:
        """[slots, partners]: an expert to a node, the best of four amounts."""
        source, slots, partners, _, weights = self.sight
        load = self.sums.load @ weights
        frequency = self._frequency()[slots]
        rate = jnp.maximum(frequency @ weights, 1e-9)[:, None]
        held = self.state.share[slots, source][:, None]
        room = jnp.maximum(self.problem.memory_cap - self.state.share.sum(0), 0.0)[partners]
        gap = load[source] - load[partners]
        amounts = [held, gap / 2 / rate, (load.mean() - load[partners]) / rate]
        amounts += [(load[source] - load.mean()) / rate]
        shape = (len(slots), len(partners))
        give = jnp.stack([jnp.broadcast_to(amount, shape) for amount in amounts])
        give = jnp.clip(give, 0.0, jnp.minimum(held, room))
        gain, loss = self._marginals()
        gone = (held - give <= HOSTING_SHARE)[..., None]
        change = give[..., None] * frequency[:, None]
        score = self._score(change, jnp.where(gone, -loss[:, None], 0.0), gain)
        score = jnp.where((give > HOSTING_SHARE) & (partners != source), score, jnp.inf)
        pick = _best_variant(score)
        leaving, node = jnp.meshgrid(slots, partners, indexing="ij")
        give = pick(give)
        return Moves(leaving, leaving, node, give, jnp.zeros_like(give)), pick(score)

    def exchanges(self, capped: bool) -> tuple[Moves, Array]:
        """[slots, partners]: an expert to a node, for the best expert and amount in return."""
        source, slots, partners, _, _ = self.sight
        state, num_experts = self.state, self.problem.num_experts
        held = state.share[slots, source][:, None, None]
        there = state.share[:, partners]
        give, take = self._amounts(held, there, capped)
        gain, loss = self._marginals()
        frequency = self._frequency()
        change = frequency[slots][:, None, None] * give[..., None]
        change = change - frequency[:, None] * take[..., None]
        enters = ~hosting(state.share[:, source])[:, None, None]
        gain_here = jnp.where(enters, self._scored(state.gain[source])[:, None], 0.0)
        loss_there = self._scored(state.loss[partners]).swapaxes(0, 1)
        gone_here, gone_there = (
            (part <= HOSTING_SHARE)[..., None] for part in (held - give, there - take)
        )
        here = gain_here - jnp.where(gone_here, loss[:, None, None], 0.0)
        arriving = gain[:, None] - jnp.where(gone_there, loss_there, 0.0)
        score = self._score(change, here, arriving)
        score = jnp.where(self._possible(give, take), score, jnp.inf)
        # [variants, slots, experts, partners]: the best of variants and experts.
        flat = lambda part: jnp.moveaxis(jnp.broadcast_to(part, score.shape), 2, 1).reshape(
            -1, len(slots), len(partners)
        )
        pick = _best_variant(flat(score))
        expert = jnp.arange(num_experts)[:, None]
        leaving, node = jnp.meshgrid(slots, partners, indexing="ij")
        found = Moves(leaving, pick(flat(expert)), node, pick(flat(give)), pick(flat(take)))
        return found, pick(flat(score))

    def _amounts(self, held: Array, there: Array, capped: bool) -> tuple[Array, Array]:
        """What goes and comes back, [variants, slots, experts, partners]: all for all, all for what
        levels both loads, and, where memory is short, equal parts."""
        source, slots, partners, _, weights = self.sight
        load = self.sums.load @ weights
        gap = load[source] - load[partners]
        rate = self._frequency() @ weights
        out, back = rate[slots][:, None, None], rate[:, None]
        level = (out * held - gap / 2) / jnp.maximum(back, 1e-9)
        pairs = [(held, there), (held, jnp.clip(level, 0.0, there))]
        if capped:
            least, slope = jnp.minimum(held, there), out - back
            even = gap / 2 / jnp.where(jnp.abs(slope) > 1e-9, slope, 1e-9)
            even = jnp.clip(even, 0.0, least)
            pairs += [(least, least), (even, even)]
        stack = lambda parts: jnp.stack([jnp.broadcast_to(part, level.shape) for part in parts])
        give, take = zip(*pairs, strict=True)
        return stack(give), stack(take)

    def _possible(self, give: Array, take: Array) -> Array:
        source, slots, partners, _, _ = self.sight
        kept, cap = self.state.share.sum(0), self.problem.memory_cap
        growth = give - take
        other = (slots[:, None] != jnp.arange(self.problem.num_experts))[..., None]
        fits = (kept[partners] + growth <= cap) & (kept[source] - growth <= cap)
        some = (take > HOSTING_SHARE) & (give > HOSTING_SHARE)
        return fits & some & other & (partners != source)

    def _frequency(self) -> Float[Array, "experts scored"]:
        return self.problem.frequency[self.sight.scenarios].T

    def _scored(self, part: Array) -> Array:
        return part[..., self.sight.scenarios]

    def _marginals(self) -> tuple[Array, Array]:
        """Mass that partners gain with each slot [slots, partners, scored], mass that `source`
        loses with it [slots, scored]."""
        source, slots, partners, _, _ = self.sight
        state = self.state
        new = ~hosting(state.share[slots][:, partners])[..., None]
        gain = self._scored(state.gain[partners][:, slots]).swapaxes(0, 1)
        return jnp.where(new, gain, 0.0), self._scored(state.loss[source][slots])

    def _score(self, load: Array, here: Array, there: Array) -> Array:
        """Soft objective once `load` has gone from `source` to partners, and their masses have
        changed by `here` and `there`."""
        source, _, partners, _, weights = self.sight
        sums = self.sums
        loads = sums.load[source] - load, sums.load[partners] + load
        masses = sums.mass[source] + here, sums.mass[partners] + there
        comp, comm = sums.after(self.problem, self.pull, source, partners, loads, masses)
        return (comp + comm) @ weights


def _best_variant(score: Float[Array, "variants *moves"]):
    """Picks from arrays like `score` what belongs to the lowest score along the first axis."""
    best = jnp.argmin(score, axis=0)[None]
    return lambda part: jnp.take_along_axis(part, best, axis=0)[0]


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
