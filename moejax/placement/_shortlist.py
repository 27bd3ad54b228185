"""Which moves of Node Balance are worth an exact look: scores of many at once."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from moejax._typing import Array, Float, Int, PRNGKeyArray
from moejax.noc import HOSTING_SHARE
from moejax.placement._moves import Moves, Pull, State, Sums
from moejax.placement._node_problem import Problem, hosting, scenario_weights


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
