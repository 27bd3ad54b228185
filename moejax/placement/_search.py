"""Node Balance of any number of experts: a local search on shares, many chains at once.

A step picks a node that presses on the objective and scores ways to relieve it: a transfer of one
of its experts, whole or in part, to another node, or an exchange for any expert there. The few best
are then evaluated exactly, and the best of them, with a little noise that is cooled down, is done.
The largest load and the largest traffic count as soft maxima that sharpen with time, so that there
is a slope where many nodes are at the limit. Each chain has its own `floor` of traffic below which
it does not care, because good placements at different traffic look different.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from moejax._typing import Array, Float, FloatScalar, PRNGKeyArray
from moejax.placement._moves import (
    Pull,
    State,
    applied,
    columns_after,
    exact_score,
    present_score,
    state_of,
    sums_of,
)
from moejax.placement._node_problem import Problem, evaluated, hosting, times_of
from moejax.placement._shares import best_share
from moejax.placement._shortlist import Dice, look, roll, shortlist


class Schedule(NamedTuple):
    """Sharpness of the soft maxima and size of the noise, at the first and the last step."""

    sharpness: tuple[float, float] = (50.0, 1000.0)
    noise: tuple[float, float] = (1e-2, 1e-4)

    def at(self, progress: Array) -> tuple[Array, Array]:
        between = lambda ends: ends[0] * (ends[1] / ends[0]) ** progress
        return between(self.sharpness), between(self.noise)


SCHEDULE = Schedule()


def step(
    problem: Problem,
    state: State,
    pull: Pull,
    noise: FloatScalar,
    dice: Dice,
    *,
    capped: bool,
) -> State:
    """One change of the placement, or none."""
    sums = sums_of(problem, state, pull)
    sight = look(problem, state, sums, pull, dice)
    moves, score = shortlist(problem, state, sums, pull, sight, dice, capped=capped)
    source = sight.source
    after = jax.vmap(lambda move: columns_after(problem, state, source, move))(moves)
    exact = jax.vmap(
        lambda node, columns: exact_score(problem, state, sums, pull, source, node, columns)
    )
    total = jnp.where(jnp.isfinite(score), exact(moves.node, after), jnp.inf)
    total -= noise * jnp.log(dice.shortlist)
    best = jnp.argmin(total)
    accepted = total[best] < present_score(problem, state, sums, pull) + noise
    node, columns = jax.tree.map(lambda part: part[best], (moves.node, after))
    return applied(problem, state, source, node, columns, accepted)


class Found(NamedTuple):
    """The best placement of every chain, its scaled total, and the best total after every step."""

    share: Float[Array, "chains experts nodes"]
    total: Float[Array, " chains"]
    curve: Float[Array, " steps"]


def search(
    problem: Problem,
    starts: Float[Array, "chains experts nodes"],
    floors: Float[Array, " chains"],
    *,
    num_steps: int,
    num_rounds: int,
    capped: bool,
    key: PRNGKeyArray,
) -> Found:
    """Anneals all chains `num_rounds` times, each time again from the best of the last round.

    With one scenario and no memory cap, the shares of the hosts found are made optimal after every
    round (`best_share`).
    """
    exact_shares = problem.frequency.shape[0] == 1 and not capped
    num_chains = starts.shape[0]
    # The best two placements start all chains of the next round.
    heirs = jnp.arange(num_chains) * min(2, num_chains) // num_chains

    def one_round(shares: Array, key: PRNGKeyArray) -> tuple[Array, Found]:
        run = lambda share, floor, key: _anneal(
            problem, share, floor, num_steps, capped=capped, key=key
        )
        best, curve = jax.vmap(run)(shares, floors, jax.random.split(key, num_chains))
        price = jax.vmap(lambda share: evaluated(problem, share).total)
        total = price(best)
        if exact_shares:
            polish = lambda share: best_share(hosting(share), problem.frequency[0])
            polished = jax.vmap(polish)(best)
            new_total = price(polished)
            best = jnp.where((new_total < total)[:, None, None], polished, best)
            total = jnp.minimum(new_total, total)
        curve = curve.min(0).at[-1].min(total.min())
        ranked = lax.top_k(-total, min(2, num_chains))[1]
        return best[ranked[heirs]], Found(best, total, curve)

    rounds = lax.scan(one_round, starts, jax.random.split(key, num_rounds))[1]
    found = jax.tree.map(lambda part: part.reshape(-1, *part.shape[2:]), rounds)
    return found._replace(curve=lax.cummin(found.curve))


def _anneal(
    problem: Problem,
    share: Float[Array, "experts nodes"],
    floor: FloatScalar,
    num_steps: int,
    *,
    capped: bool,
    key: PRNGKeyArray,
) -> tuple[Float[Array, "experts nodes"], Float[Array, " steps"]]:
    """One chain: the best share seen and the best total after every step."""

    total_of = lambda state: times_of(problem, state.share, state.mass, state.hosted).total

    def advance(carry, now):
        state, best, best_share = carry
        progress, dice = now
        sharpness, noise = SCHEDULE.at(progress)
        state = step(problem, state, Pull(sharpness, floor), noise, dice, capped=capped)
        total = total_of(state)
        better = total < best
        best_share = jnp.where(better, state.share, best_share)
        best = jnp.where(better, total, best)
        return (state, best, best_share), best

    state = state_of(problem, share)
    dice = roll(problem, share.shape[1], num_steps, key=key)
    progress = jnp.arange(num_steps) / num_steps
    (_, _, best_share), curve = lax.scan(advance, (state, total_of(state), share), (progress, dice))
    return best_share, curve
