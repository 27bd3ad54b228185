"""The search behind `tune`: Adam on a Lagrangian, and budgets met by bisection."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from moejax._typing import Array, Float, FloatScalar
from moejax.gating._layer_costs import LayerCosts
from moejax.gating._outcome import LARGEST, Data, Outcome, of_layers, original_time, outcome
from moejax.gating._relaxed_gate import Coefficients, GateForm


# Where searches begin, tried at once: softness of the makespan in times of a token, and the price
# of dispersion in times of the ray's, which is rarely the right one.
STARTS = ((0.7, 1.0), (2.0, 0.1))
_REPORTS = 10
_HALVINGS = 9
# The common factor of the prices is looked for within e^-reach .. e^reach of where they are: of the
# ray's, and of those that the search has found.
_FAR, _NEAR = 6.0, 1.5


class Static(NamedTuple):
    """What shapes the program."""

    form: GateForm
    measure: str
    per_layer: bool
    learning_rate: float
    steps: int
    batches_per_step: int


class Problem(NamedTuple):
    """What is read at every step."""

    data: Data
    temperature: FloatScalar


class _State(NamedTuple):
    logs: Float[Array, "3 layers"]  # log prices of makespan and dispersion, log softness
    moments: Any
    log_price: FloatScalar  # of the loss of fidelity
    average: Float[Array, "3 layers"]


@functools.partial(jax.jit, static_argnames="top_k")
def mean_gap(selection, top_k):
    """Mean over tokens of what the last choice is ahead of the next expert."""
    best = lax.top_k(selection, top_k + 1)[0]
    return jnp.maximum((best[..., -2] - best[..., -1]).mean(), jnp.finfo(best.dtype).tiny)


def coefficients(logs, form: GateForm) -> Coefficients:
    """Of logarithms [..., 3, layers]."""
    softness = jnp.exp(logs[..., 2, :]) if form.soft else jnp.zeros_like(logs[..., 2, :])
    return Coefficients(-jnp.exp(logs[..., 0, :]), -jnp.exp(logs[..., 1, :]), softness)


def run(
    problem: Problem,
    costs: LayerCosts,
    budgets: Float[Array, " budgets"],
    ray: Float[Array, "2"],
    static: Static,
    report: Callable[[int, int], None],
) -> tuple[Float[Array, "settings budgets 3 layers"], Outcome]:
    """Log coefficients and their outcome on the fit trace, for each of the settings in `costs`."""
    logs = _on_ray(problem, costs, budgets, ray, static)
    first = _fitted(logs, problem, costs, budgets, jnp.float32(_FAR), static)
    state = _State(
        first[0], _moments(first[0], static), jnp.full(logs.shape[:3], -2.3, logs.dtype), first[0]
    )
    report(0, static.steps)
    for done in range(0, static.steps, _REPORTS):
        many = min(_REPORTS, static.steps - done)
        state = _advance(state, problem, costs, budgets, jnp.int32(done), jnp.int32(many), static)
        jax.block_until_ready(state)
        report(done + many, static.steps)
    last = _fitted(state.average, problem, costs, budgets, jnp.float32(_NEAR), static)
    logs, found = jax.tree.map(lambda *x: jnp.concatenate(x, axis=2), first, last)
    return _fastest(logs, found, budgets, problem.data.scores.shape[0])


def judged(logs, problem: Problem, costs: LayerCosts, static: Static) -> Outcome:
    """Outcome [settings, budgets] of log coefficients, on the data of `problem`."""
    return jax.tree.map(lambda x: x[:, :, 0], _judged(logs[:, :, None], problem, costs, static))


def _everywhere(one: Callable[..., Any], given: Any, costs, budgets, problem: Problem) -> Any:
    """`one(given, costs of a setting, budget)` for each setting, budget and start, which are the
    leading axes of `given`. As many at once as keep arrays below `LARGEST`, the others after."""
    settings, number = costs.token_time.shape[0], budgets.shape[0]
    leading = lambda x: x.reshape(settings * number, *x.shape[2:])
    pairs = (
        jax.tree.map(leading, given),
        jax.tree.map(lambda x: jnp.repeat(x, number, axis=0), costs),
        jnp.tile(budgets, settings),
    )
    starts = jax.tree.leaves(given)[0].shape[2]
    at_once = max(1, LARGEST // (problem.data.size * starts))
    over_starts = jax.vmap(one, (0, None, None))
    found = lax.map(lambda pair: over_starts(*pair), pairs, batch_size=at_once)
    return jax.tree.map(lambda x: x.reshape(settings, number, *x.shape[1:]), found)


def _on_ray(problem, costs, budgets, ray, static: Static):
    """Logarithms [settings, budgets, starts, 3, layers or 1] of the ray's own coefficients."""
    width = problem.data.scores.shape[0] if static.per_layer else 1
    softness, dispersion = jnp.array(STARTS).T
    first = jnp.log(jnp.maximum(-ray, jnp.finfo(softness.dtype).tiny))
    shape = costs.token_time.shape[0], budgets.shape[0], len(STARTS)
    softness = jnp.log(softness * costs.token_time[:, None, None])
    rows = first[0], first[1] + jnp.log(dispersion), softness
    logs = jnp.stack([jnp.broadcast_to(row, shape) for row in rows], axis=-1)
    return jnp.broadcast_to(logs[..., None], (*logs.shape, width))


def _outcome(logs, problem: Problem, costs: LayerCosts, static: Static) -> Outcome:
    """Of one setting and one set of coefficients, [3, layers] or [3, 1]."""
    given = coefficients(_spread(logs, problem), static.form)
    original = original_time(problem.data, costs)
    return outcome(given, problem.data, costs, static.form, static.measure, original)


def _spread(logs, problem: Problem):
    return jnp.broadcast_to(logs, (3, problem.data.scores.shape[0]))


@functools.partial(jax.jit, static_argnames="static")
def _fitted(logs, problem, costs, budgets, reach, static: Static):
    """(log coefficients, outcome) where both prices are times the largest common factor that keeps
    the loss within the budget."""
    shift = jnp.array([1.0, 1.0, 0.0])[:, None]

    def one(logs, costs, budget):
        at = lambda log: logs + log * shift

        def halve(_, ends):
            low, high = ends
            middle = (low + high) / 2
            fits = _outcome(at(middle), problem, costs, static).loss <= budget
            return jnp.where(fits, middle, low), jnp.where(fits, high, middle)

        ends = -reach.astype(logs.dtype), reach.astype(logs.dtype)
        best = at(lax.fori_loop(0, _HALVINGS, halve, ends)[0])
        return best, _outcome(best, problem, costs, static)

    return _everywhere(one, logs, costs, budgets, problem)


def _optimizer(static: Static) -> optax.GradientTransformation:
    return optax.adam(optax.cosine_decay_schedule(static.learning_rate, static.steps, 0.1))


def _moments(logs, static: Static):
    """Adam's state for each of the leading axes."""
    one = _optimizer(static).init(logs[0, 0, 0])
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (*logs.shape[:3], *x.shape)), one)


@functools.partial(jax.jit, static_argnames="static")
def _advance(state, problem, costs, budgets, done, many, static: Static) -> _State:
    def one(state, costs, budget):
        def step(number, state):
            part = _part(problem, number, static)
            faster, truer, loss = _slopes(state.logs, part, costs, budget, static)
            log_price = jnp.where(number == 0, _balance(faster, truer), state.log_price)
            slope = faster + jnp.exp(log_price) * truer
            update, moments = _optimizer(static).update(slope, state.moments)
            logs = jnp.asarray(optax.apply_updates(state.logs, update))
            over = jnp.clip(jnp.log(jnp.maximum(loss, 1e-3 * budget) / budget), -1, 1)
            # The last third is averaged: the price swings around what the budget is worth.
            since = jnp.maximum(number + 1 - 2 * static.steps // 3, 0)
            average = jnp.where(
                since > 0, state.average + (logs - state.average) / jnp.maximum(since, 1), logs
            )
            return _State(logs, moments, log_price + 0.1 * over, average)

        return lax.fori_loop(done, done + many, step, state)

    return _everywhere(one, state, costs, budgets, problem)


def _part(problem: Problem, number, static: Static) -> Problem:
    """The batches that a step looks at: as many as asked for, all in turn."""
    data, many = problem.data, static.batches_per_step
    start = number * many % (data.scores.shape[1] // many * many)
    cut = lambda x: lax.dynamic_slice_in_dim(x, start, many, axis=1)
    scores, selection, slopes = jax.tree.map(cut, (data.scores, data.selection, data.slopes))
    return problem._replace(data=data._replace(scores=scores, selection=selection, slopes=slopes))


def _slopes(logs, problem: Problem, costs: LayerCosts, budget, static: Static):
    """(slope of log(time), slope of loss / budget, loss), slopes in the logarithms."""
    logs = _spread(logs, problem)
    free = 3 if static.form.soft else 2

    def both(logs):
        given = coefficients(logs, static.form)
        rest = problem.data, costs, static.form, static.measure, problem.temperature
        return jnp.stack(of_layers(given, *rest))

    def along(row):
        # Forward, and one coefficient of all layers at once: no layer sees another's.
        return jax.jvp(both, (logs,), (jnp.zeros_like(logs).at[row].set(1),))

    value, change = jax.vmap(along, out_axes=(None, 0))(jnp.arange(free))
    time, loss = value.sum(1)
    change = jnp.pad(change, ((0, 3 - free), (0, 0), (0, 0)))
    whole = change if static.per_layer else change.sum(2, keepdims=True)
    return whole[:, 0] / time, whole[:, 1] / budget, loss


def _balance(faster, truer):
    """Log price of the loss at which scaling both prices together neither helps nor hurts: then
    the first steps go where layers differ."""
    gain, cost = -faster[:2].sum(), truer[:2].sum()
    sane = (gain > 0) & (cost > 0)
    ratio = jnp.where(sane, gain, 0.1) / jnp.where(sane, cost, 1)
    return jnp.clip(jnp.log(ratio), -6, 3)


@functools.partial(jax.jit, static_argnames="layers")
def _fastest(logs, found: Outcome, budgets, layers: int):
    """For each budget the fastest candidate that keeps it, whatever budget it was searched for."""
    merged = lambda x: x.reshape(x.shape[0], -1, *x.shape[3:])
    logs, found = jax.tree.map(merged, (logs, found))

    def of_setting(logs, found):
        allowed = found.loss <= budgets[:, None]
        # Where none does (a budget that even the smallest prices break), the truest.
        time = jnp.where(allowed, found.time, jnp.inf)
        best = jnp.where(allowed.any(1), jnp.argmin(time, axis=1), jnp.argmin(found.loss))
        whole = jnp.broadcast_to(logs, (*logs.shape[:2], layers))
        return jax.tree.map(lambda x: x[best], (whole, found))

    return jax.vmap(of_setting)(logs, found)


@functools.partial(jax.jit, static_argnames="static")
def _judged(logs, problem, costs, static: Static) -> Outcome:
    one = lambda logs, costs, _: _outcome(logs, problem, costs, static)
    return _everywhere(one, logs, costs, jnp.zeros(logs.shape[1]), problem)
