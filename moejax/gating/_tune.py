"""Coefficients found by gradient: the fastest layer that a budget of fidelity allows."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moejax._checks import as_float, check_positive
from moejax._typing import Array, Bool, Float, FloatLike, PRNGKeyArray
from moejax.gating import _search as search
from moejax.gating._layer_costs import LayerCosts
from moejax.gating._outcome import FAVORITES_KEPT, Outcome, check, make_data
from moejax.gating._relaxed_gate import Coefficients, GateForm
from moejax.gating._validate import check_whole


class Tuning(NamedTuple):
    """The result of `tune`. Fields: `coefficients`, each [*settings, budgets, layers]; `fit` and
    `heldout`, an `Outcome` each ([*settings, budgets]), the second None without a trace to judge
    on; `front`, True where no other budget is at once faster and truer, judged on `heldout` where
    there is one."""

    coefficients: Coefficients
    fit: Outcome
    heldout: Outcome | None
    front: Bool[Array, "*settings budgets"]


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
    slopes: Float[Array, "samples layers tokens experts"] | None = None,
    temperature: FloatLike | None = None,
    steps: int = 60,
    learning_rate: float = 0.15,
    batches_per_step: int | None = None,
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
        lost choices, lost favorites, or nats of the router (see `fidelity_loss`); or `"model_kl"`,
        nats of the model's text, which needs `slopes` and knows no `heldout`.
    - `per_layer`: coefficients for each layer, or one set for all.
    - `form`: the gate they are for (static).
    - `ray`: (r_comp, r_comm), both below 0, whose multiples the search starts from.
    - `selection`: from scores to the selection scores that the gate compares, for instance
        `squared_weights`; default the scores themselves.
    - `layer_weight`: [layers], what a unit of loss in each layer counts; default 1 / layers each,
        and 1 each with `"model_kl"`.
    - `slopes`: of the fit trace, as `weight_slopes` finds them.
    - `temperature`: of the surrogate gradient, in units of the selection scores; default the mean
        gap between the last chosen and the first not.
    - `steps`, `learning_rate`: of Adam, on logarithms of the coefficients.
    - `batches_per_step`: how many of the batches each step looks at, in turn (static); default all.
    - `progress`: called with (steps done, steps).

    **Returns:** `Tuning`. **Raises:** `ValueError` for shapes that disagree, budgets or options out
    of range, and fewer tokens than a batch.

    Gradient: the search follows a surrogate (see `relaxed_gate`); all numbers returned are those of
    the exact gate, and have no gradient.
    """
    scores = jnp.asarray(scores)
    check("tune", scores, share, costs, batch, form, measure, slopes)
    budgets = jnp.atleast_1d(as_float(budgets))
    check_positive("tune", "budgets", budgets)
    check_whole("steps", steps, 1, np.inf)
    check_positive("tune", "learning_rate", learning_rate)
    if temperature is not None:
        check_positive("tune", "temperature", temperature)
    if np.shape(ray) != (2,) or not all(-np.inf < rate < 0 for rate in ray):
        raise ValueError(f"tune: ray = {ray}: allowed is (r_comp, r_comm), both below 0")
    if slopes is not None and heldout is not None:
        raise ValueError("tune: 'model_kl' of a heldout trace needs its slopes: see judge")
    if heldout is not None:
        heldout = jnp.asarray(heldout)
        check("tune, heldout", heldout, share, costs, batch, form, measure, slopes)
        if heldout.shape[0] != scores.shape[0]:
            raise ValueError(
                f"tune, heldout: scores of {heldout.shape[0]} layers: allowed is {scores.shape[0]}"
            )
    fit_key, heldout_key = jax.random.split(key)
    fit = make_data(scores, share, selection, layer_weight, batch, fit_key, slopes)
    batches = fit.scores.shape[1]
    if batches_per_step is None:
        batches_per_step = batches
    check_whole("batches_per_step", batches_per_step, 1, batches, " (batches)")
    gap = search.mean_gap(fit.selection, costs.top_k) if temperature is None else temperature
    static = search.Static(form, measure, per_layer, float(learning_rate), steps, batches_per_step)
    problem = search.Problem(fit, as_float(gap))
    settings = costs.token_time.shape
    flat = jax.tree.map(lambda x: x.reshape(-1), costs)
    start = jnp.asarray(ray)
    logs, found = search.run(problem, flat, budgets, start, static, progress or (lambda *_: None))
    other = None
    if heldout is not None:
        judged = make_data(heldout, share, selection, layer_weight, batch, heldout_key)
        other = search.judged(logs, problem._replace(data=judged), flat, static)
    back = lambda x: x.reshape(*settings, *x.shape[1:])
    named = jax.tree.map(back, search.coefficients(logs, static.form))
    found, other = jax.tree.map(back, (found, other))
    return Tuning(named, found, other, _front(found if other is None else other))


def _front(found: Outcome) -> Bool[Array, "*settings budgets"]:
    time, loss = found.time, found.loss
    better = lambda x: x[..., None, :] <= x[..., :, None]
    strictly = (time[..., None, :] < time[..., :, None]) | (loss[..., None, :] < loss[..., :, None])
    return ~jnp.any(better(time) & better(loss) & strictly, axis=-1)
