"""Coefficients found by gradient: the fastest layer that a budget of fidelity allows."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from moejax._checks import as_float, check_positive
from moejax._typing import Array, Bool, Float, FloatLike, FloatScalar, PRNGKeyArray
from moejax.gating._layer_costs import LayerCosts
from moejax.gating._outcome import FAVORITES_KEPT, LARGEST, Data, Outcome, check, make_data, outcome
from moejax.gating._relaxed_gate import Coefficients, GateForm
from moejax.gating._validate import check_whole


# Where a search begins: softness of the makespan in times of a token, tried at once.
SOFTNESS_STARTS = (0.7, 2.0)
_REPORTS = 10
_HALVINGS = 12
# The common factor of the prices is looked for within e^-_RANGE .. e^_RANGE of where they are.
_RANGE = 6.0


class Tuning(NamedTuple):
    """The result of `tune`. Fields: `coefficients`, each [*settings, budgets, layers]; `fit` and
    `heldout`, an `Outcome` each ([*settings, budgets]), the second None without a trace to judge
    on; `front`, True where no other budget is at once faster and truer, judged on `heldout` where
    there is one."""

    coefficients: Coefficients
    fit: Outcome
    heldout: Outcome | None
    front: Bool[Array, "*settings budgets"]


class _Static(NamedTuple):
    form: GateForm
    measure: str
    per_layer: bool
    learning_rate: float
    steps: int


class _Problem(NamedTuple):
    data: Data
    temperature: FloatScalar


class _State(NamedTuple):
    logs: Float[Array, "3 layers"]  # log prices of makespan and dispersion, log softness
    moments: Any
    log_price: FloatScalar  # of the loss of fidelity
    average: Float[Array, "3 layers"]


def tune(
    scores: Float[Array, "layers tokens experts"],
    share: Float[Array, "*layers experts nodes"],
    costs: LayerCosts,
    budgets: Any,
    *,
    batch: int,
    key: PRNGKeyArray,
    heldout: Float[Array, "layers tokens experts"] | None = None,
    measure: str = "mass",
    per_layer: bool = True,
    form: GateForm = FAVORITES_KEPT,
    ray: tuple[float, float] = (-3e4, -0.025),
    selection: Callable[[Array], Array] | None = None,
    layer_weight: Any = None,
    temperature: FloatLike | None = None,
    steps: int = 60,
    learning_rate: float = 0.15,
    progress: Callable[[int, int], None] | None = None,
) -> Tuning:
    """Coefficients that minimize the expected layer time within budgets of fidelity.

    Tokens are dealt to batches at random. From the point of the ray that the budget allows, Adam
    follows the Lagrangian log(time) + price * loss / budget, whose price rises while the loss is
    above budget; a last bisection over a common factor makes the fit trace meet the budget.

    **Arguments:**

    - `scores`: of the router on the trace to fit; of as many layers as coefficients are wanted.
    - `share`: [experts, nodes] of all layers, or with a leading axis of layers.
    - `costs`: `LayerCosts`; with a leading axis, settings that are tuned side by side (`jax.vmap`).
    - `budgets`: [budgets], losses of fidelity allowed on average over tokens, each above 0.
    - `batch`: tokens of a step (static); tokens beyond a multiple of it are left out.
    - `key`: of the deal.
    - `heldout`: scores of another trace, that the result is judged on.
    - `measure`: of the loss, one of `"mass"`, `"overlap"`, `"retention"`, `"kl"`: lost weight,
        lost choices, lost favorites, or nats (see `fidelity_loss`).
    - `per_layer`: coefficients for each layer, or one set for all.
    - `form`: the gate they are for (static).
    - `ray`: (r_comp, r_comm) whose multiples the search starts from.
    - `selection`: from scores to the selection scores that the gate compares, for instance
        `squared_weights`; default the scores themselves.
    - `layer_weight`: [layers], what a unit of loss in each layer counts; default 1 / layers each.
        The KL of the model's output per unit of each layer, where it is known, is what to put here.
    - `temperature`: of the surrogate gradient, in units of the selection scores; default the mean
        gap between the last chosen and the first not.
    - `steps`, `learning_rate`: of Adam, on logarithms of the coefficients.
    - `progress`: called with (steps done, steps).

    **Returns:** `Tuning`. **Raises:** `ValueError` for shapes that disagree, budgets or options out
    of range, and fewer tokens than a batch.

    Gradient: the search follows a surrogate (see `relaxed_gate`); all numbers returned are those of
    the exact gate, and have no gradient.
    """
    scores = jnp.asarray(scores)
    check("tune", scores, share, costs, batch, form, measure)
    budgets = jnp.atleast_1d(as_float(budgets))
    check_positive("tune", "budgets", budgets)
    check_whole("steps", steps, 1, np.inf)
    fit_key, heldout_key = jax.random.split(key)
    fit = make_data(scores, share, selection, layer_weight, batch, fit_key)
    gap = _mean_gap(fit.selection, costs.top_k) if temperature is None else as_float(temperature)
    static = _Static(form, measure, per_layer, float(learning_rate), steps)
    problem = _Problem(fit, gap)
    report = progress or (lambda done, total: None)

    settings = costs.token_time.shape
    flat = jax.tree.map(lambda x: x.reshape(-1), costs)
    state = _start(problem, flat, budgets, jnp.asarray(ray), static)
    start = state.logs
    report(0, steps)
    for done in range(0, steps, _REPORTS):
        many = min(_REPORTS, steps - done)
        state = _advance(state, problem, flat, budgets, jnp.int32(done), static, many)
        jax.block_until_ready(state)
        report(done + many, steps)
    logs, found = _finish(jnp.stack([start, state.average]), problem, flat, budgets, static)
    other = None
    if heldout is not None:
        judged = make_data(jnp.asarray(heldout), share, selection, layer_weight, batch, heldout_key)
        other = _judge(logs, _Problem(judged, gap), flat, static)
    back = lambda x: x.reshape(*settings, *x.shape[1:])
    named = jax.tree.map(back, _coefficients(logs, static.form))
    found, other = jax.tree.map(back, (found, other))
    return Tuning(named, found, other, _front(found if other is None else other))


@functools.partial(jax.jit, static_argnames="top_k")
def _mean_gap(selection, top_k):
    best = lax.top_k(selection, top_k + 1)[0]
    return jnp.maximum((best[..., -2] - best[..., -1]).mean(), jnp.finfo(best.dtype).tiny)


def _coefficients(logs, form: GateForm) -> Coefficients:
    softness = jnp.exp(logs[..., 2, :]) if form.soft else jnp.zeros_like(logs[..., 2, :])
    return Coefficients(-jnp.exp(logs[..., 0, :]), -jnp.exp(logs[..., 1, :]), softness)


def _outcome(logs, problem: _Problem, costs: LayerCosts, static: _Static) -> Outcome:
    """Of one setting and one set of coefficients, [3, layers] or [3, 1]."""
    logs = jnp.broadcast_to(logs, (3, problem.data.scores.shape[0]))
    given = _coefficients(logs, static.form)
    form, measure = static.form, static.measure
    return outcome(given, problem.data, costs, form, measure, problem.temperature)


def _everywhere(one: Callable[..., Any], given: Any, costs, budgets, problem: _Problem) -> Any:
    """`one(given, costs of a setting, budget)` for each setting and budget, of which `given` has
    leading axes. As many at once as keep arrays below `LARGEST`, the others after them."""
    settings, number = costs.token_time.shape[0], budgets.shape[0]
    leading = lambda x: x.reshape(settings * number, *x.shape[2:])
    pairs = (
        jax.tree.map(leading, given),
        jax.tree.map(lambda x: jnp.repeat(x, number, axis=0), costs),
        jnp.tile(budgets, settings),
    )
    starts = jax.tree.leaves(given)[0].shape[2]
    at_once = max(1, LARGEST // (problem.data.scores.size * starts))
    found = lax.map(lambda pair: one(*pair), pairs, batch_size=at_once)
    return jax.tree.map(lambda x: x.reshape(settings, number, *x.shape[1:]), found)


@functools.partial(jax.jit, static_argnames="static")
def _start(problem, costs, budgets, ray, static: _Static) -> _State:
    """States [settings, budgets, starts], on the ray, scaled until the budget is met."""
    layers = problem.data.scores.shape[0]
    width = layers if static.per_layer else 1
    starts = jnp.array(SOFTNESS_STARTS if static.form.soft else (1.0,))
    floor = jnp.finfo(starts.dtype).tiny

    def one(start, costs, budget):
        prices = jnp.log(jnp.maximum(-ray, floor))
        logs = jnp.concatenate([prices, jnp.log(start * costs.token_time)[None]])
        logs = jnp.broadcast_to(logs[:, None], (3, width))
        logs = _scaled(logs, problem, costs, budget, static)
        moments = _optimizer(static).init(logs)
        return _State(logs, moments, jnp.log(jnp.asarray(0.1, starts.dtype)), logs)

    given = jnp.broadcast_to(starts, (costs.token_time.shape[0], budgets.shape[0], *starts.shape))
    over = jax.vmap(one, (0, None, None))
    return _everywhere(over, given, costs, budgets, problem)


def _scaled(logs, problem, costs, budget, static: _Static):
    """Both prices times the largest common factor that keeps the loss within the budget."""
    shift = jnp.array([1.0, 1.0, 0.0])[:, None]
    at = lambda log: logs + log * shift

    def halve(_, ends):
        low, high = ends
        middle = (low + high) / 2
        fits = _outcome(at(middle), problem, costs, static).loss <= budget
        return jnp.where(fits, middle, low), jnp.where(fits, high, middle)

    ends = jnp.asarray(-_RANGE, logs.dtype), jnp.asarray(_RANGE, logs.dtype)
    return at(lax.fori_loop(0, _HALVINGS, halve, ends)[0])


def _optimizer(static: _Static) -> optax.GradientTransformation:
    return optax.adam(optax.cosine_decay_schedule(static.learning_rate, static.steps, 0.1))


@functools.partial(jax.jit, static_argnames=("static", "many"))
def _advance(state, problem, costs, budgets, done, static: _Static, many: int) -> _State:
    def one(state, costs, budget):
        def lagrangian(logs, log_price):
            found = _outcome(logs, problem, costs, static)
            value = jnp.log(found.time) + jnp.exp(log_price) * found.loss / budget
            return value, found.loss

        def step(state, number):
            slope, loss = jax.grad(lagrangian, has_aux=True)(state.logs, state.log_price)
            update, moments = _optimizer(static).update(slope, state.moments)
            logs = jnp.asarray(optax.apply_updates(state.logs, update))
            over = jnp.clip(jnp.log(jnp.maximum(loss, 1e-3 * budget) / budget), -1, 1)
            # The last third is averaged: the price swings around what the budget is worth.
            since = jnp.maximum(number - 2 * static.steps // 3, 0)
            average = jnp.where(
                since > 0, state.average + (logs - state.average) / jnp.maximum(since, 1), logs
            )
            return _State(logs, moments, state.log_price + 0.2 * over, average), None

        return lax.scan(step, state, done + 1 + jnp.arange(many))[0]

    return _everywhere(jax.vmap(one, (0, None, None)), state, costs, budgets, problem)


@functools.partial(jax.jit, static_argnames="static")
def _finish(candidates, problem, costs, budgets, static: _Static):
    """(log coefficients, outcome) [settings, budgets] of the best candidate that fits."""

    def one(candidates, costs, budget):
        def fitted(logs):
            logs = _scaled(logs, problem, costs, budget, static)
            return logs, _outcome(logs, problem, costs, static)

        logs, found = jax.vmap(fitted)(candidates)
        best = jnp.argmin(found.time)
        layers = problem.data.scores.shape[0]
        whole = jnp.broadcast_to(logs[best], (3, layers))
        return whole, jax.tree.map(lambda x: x[best], found)

    # [candidates, settings, budgets, starts, ...] to [settings, budgets, both]
    merged = jnp.moveaxis(candidates, 0, 2)
    merged = merged.reshape(*merged.shape[:2], -1, *merged.shape[4:])
    return _everywhere(one, merged, costs, budgets, problem)


@functools.partial(jax.jit, static_argnames="static")
def _judge(logs, problem, costs, static: _Static) -> Outcome:
    one = lambda logs, costs: _outcome(logs, problem, costs, static)
    over = jax.vmap(lambda logs, costs, _: one(logs, costs), (0, None, None))
    nothing = jnp.zeros(logs.shape[1])
    found = _everywhere(over, logs[:, :, None], costs, nothing, problem)
    return jax.tree.map(lambda x: x[:, :, 0], found)


def _front(found: Outcome) -> Bool[Array, "*settings budgets"]:
    time, loss = found.time, found.loss
    better = lambda x: x[..., None, :] <= x[..., :, None]
    strictly = (time[..., None, :] < time[..., :, None]) | (loss[..., None, :] < loss[..., :, None])
    return ~jnp.any(better(time) & better(loss) & strictly, axis=-1)
