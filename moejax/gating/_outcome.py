"""What coefficients do to a trace: the time of its layers, and what that costs in fidelity."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from moejax._checks import as_float, lookup
from moejax._status import is_traced
from moejax._typing import Array, Float, FloatScalar, PRNGKeyArray
from moejax.gating._fidelity import MEASURES, deal
from moejax.gating._functional import cost_aware_top_k, hardware_aware_top_k
from moejax.gating._layer_costs import LayerCosts
from moejax.gating._relaxed_gate import Coefficients, GateForm, relaxed_gate
from moejax.gating._run import GateResult
from moejax.gating._soft_makespan import SoftMakespan
from moejax.gating._validate import check_share, check_whole


FAVORITES_KEPT = GateForm(protect=1)
"""The published gate, but the strongest choice of a token stays."""


LARGEST = 2**23
"""Elements of an array of choices that is handled at once, which bounds memory. (Stacked choices of
many settings once came out wrong on the CPU, the cause not found; nothing is stacked now.)"""


class Outcome(NamedTuple):
    """What coefficients do to a trace, mean over batches. Fields: `time`, s of all layers with the
    gate's own time; `original_time`, s with original choices and no gate; `loss` of fidelity."""

    time: Float[Array, "..."]
    original_time: Float[Array, "..."]
    loss: Float[Array, "..."]

    @property
    def speedup(self) -> Float[Array, "..."]:
        """Original time over time."""
        return self.original_time / self.time


def tuned_gate(
    scores: Float[Array, "tokens experts"],
    share: Float[Array, "experts nodes"],
    costs: LayerCosts,
    coefficients: Coefficients,
    form: GateForm = FAVORITES_KEPT,
    **options: Any,
) -> GateResult:
    """The exact gate of one layer with coefficients that `tune` returned.

    **Arguments:**

    - `scores`, `share`, `costs`: as `tune`, of one layer and setting.
    - `coefficients`: of that layer, numbers.
    - `form`: the one they were tuned for (static).
    - `options`: of `hardware_aware_top_k`, for instance `combine` or `valid`.

    **Returns**, **raises**, gradient: as `hardware_aware_top_k`; `TypeError` for options that
    `costs` and `form` decide.
    """
    fixed: dict[str, Any] = dict(top_k=costs.top_k, protect=form.protect, chunk=form.chunk)
    fixed |= dict(include_future_original=form.ahead)
    rates = dict(r_comp=coefficients.r_comp, r_comm=coefficients.r_comm)
    rates |= dict(token_time=costs.token_time)
    if not form.soft:
        return hardware_aware_top_k(scores, share, **rates, **fixed, **options)
    source = SoftMakespan.nodes(share, softness=coefficients.softness, **rates)
    return cost_aware_top_k(scores, source, **fixed, **options)


class Data(NamedTuple):
    """A trace dealt to batches, on a placement."""

    scores: Float[Array, "layers batches batch experts"]
    selection: Float[Array, "layers batches batch experts"]
    share: Float[Array, "layers experts nodes"]
    layer_weight: Float[Array, " layers"]
    slopes: Float[Array, "layers batches batch samples experts"] | None = None

    @property
    def size(self) -> int:
        """Elements of the largest array that a candidate needs."""
        return self.scores.size * (1 if self.slopes is None else 2)


def judge(
    scores: Float[Array, "layers tokens experts"],
    share: Float[Array, "*layers experts nodes"],
    costs: LayerCosts,
    coefficients: Coefficients,
    *,
    batch: int,
    key: PRNGKeyArray,
    measure: str = "mass",
    form: GateForm = FAVORITES_KEPT,
    selection: Callable[[Array], Array] | None = None,
    layer_weight: Any = None,
    slopes: Float[Array, "samples layers tokens experts"] | None = None,
) -> Outcome:
    """What many settings of a gate do to a trace, side by side.

    **Arguments:** as `tune`, with

    - `costs`: of one setting.
    - `coefficients`: each [candidates, layers], or [candidates, 1] for all layers alike.
        `softness` counts where the form is `soft`.

    **Returns:** `Outcome`, each field [candidates]. No gradient.

    **Raises:** as `tune`.
    """
    scores = jnp.asarray(scores)
    layers = check("judge", scores, share, costs, batch, form, measure, slopes)
    if costs.token_time.ndim:
        raise ValueError("judge: costs of several settings: call it for each")
    data = make_data(scores, share, selection, layer_weight, batch, key, slopes)
    shape = (np.shape(coefficients.r_comp) or (1,))[0], layers
    _check_coefficients(coefficients, shape, form)
    given = jax.tree.map(lambda x: jnp.broadcast_to(as_float(x), shape), coefficients)
    return _judged(given, data, costs, form, measure)


def _check_coefficients(coefficients: Coefficients, shape: tuple[int, int], form: GateForm) -> None:
    for name, value in coefficients._asdict().items():
        if np.shape(value) not in ((), shape, (shape[0], 1)):
            raise ValueError(
                f"judge: {name} has shape {np.shape(value)}: allowed is {shape} or {(shape[0], 1)}"
            )
        if is_traced(value) or (name == "softness" and not form.soft):
            continue
        numbers = np.asarray(value, np.float64)
        sane = (numbers > 0) & (numbers < np.inf) if name == "softness" else numbers <= 0
        if not (sane & np.isfinite(numbers)).all():
            allowed = "above 0" if name == "softness" else "0 or less"
            raise ValueError(f"judge: {name} = {value}: allowed is finite, {allowed}")


@functools.partial(jax.jit, static_argnames=("form", "measure"))
def _judged(coefficients, data, costs, form, measure):
    original = original_time(data, costs)
    one = lambda c: outcome(c, data, costs, form, measure, original)
    # Some at a time: all choices of all candidates at once would be gigabytes, and arrays that
    # large were seen to come out wrong.
    return lax.map(one, coefficients, batch_size=max(1, LARGEST // data.size))


def check(owner: str, scores, share, costs, batch, form, measure, slopes) -> int:
    if scores.ndim != 3 or not jnp.issubdtype(scores.dtype, jnp.floating):
        raise ValueError(
            f"{owner}: scores is {scores.dtype}{list(scores.shape)}: allowed is floating [layers, "
            "tokens, experts]"
        )
    layers, tokens, experts = scores.shape
    if not is_traced(scores) and not bool(jnp.all(jnp.isfinite(scores))):
        raise ValueError(f"{owner}: scores are NaN or infinite somewhere: allowed is finite")
    shape = np.shape(share)
    if shape[:-1] not in ((experts,), (layers, experts)):
        raise ValueError(
            f"{owner}: share has shape {shape}: allowed is [{experts}, nodes] or [{layers}, "
            f"{experts}, nodes]"
        )
    for one in np.asarray(share).reshape(-1, *shape[-2:]):
        check_share(one)
    check_whole("batch", batch, 1, tokens, " (tokens)")
    check_whole("costs.top_k", costs.top_k, 1, experts - 1, " (one expert has to be left)")
    check_whole("protect", form.protect, 0, costs.top_k, " (top_k)")
    check_whole("chunk", form.chunk, 1, np.inf)
    lookup("measure", measure, MEASURES)
    if (measure == "model_kl") != (slopes is not None):
        raise ValueError(f"{owner}: slopes go with the measure 'model_kl', here it is {measure!r}")
    if slopes is not None and np.shape(slopes)[1:] != scores.shape:
        raise ValueError(
            f"{owner}: slopes has shape {np.shape(slopes)}: allowed is [samples, *{scores.shape}]"
        )
    if costs.token_time.ndim > 1:
        raise ValueError(f"{owner}: costs may have one leading axis, of settings")
    return layers


def make_data(
    scores, share, selection, layer_weight, batch: int, key: PRNGKeyArray, slopes=None
) -> Data:
    layers, tokens, _ = scores.shape
    # Nats of the model add up over layers, parts of choices are averaged.
    each = 1 / layers if slopes is None else 1.0
    weight = jnp.full(layers, each) if layer_weight is None else as_float(layer_weight)
    if weight.shape != (layers,):
        raise ValueError(f"layer_weight has shape {weight.shape}: allowed is {(layers,)}")
    share = jnp.broadcast_to(as_float(share), (layers, *np.shape(share)[-2:]))
    scores = scores.astype(jnp.promote_types(scores.dtype, jnp.float32))
    order = jax.random.permutation(key, tokens)
    selected = scores if selection is None else selection(scores)
    dealt = lambda x: deal(order, x, batch)
    if slopes is not None:
        slopes = dealt(jnp.moveaxis(jnp.asarray(slopes), 0, 2))
    return Data(dealt(scores), dealt(selected), share, weight, slopes)


def of_layers(
    coefficients: Coefficients,
    data: Data,
    costs: LayerCosts,
    form: GateForm,
    measure: str,
    temperature: FloatScalar,
) -> tuple[Float[Array, " layers"], Float[Array, " layers"]]:
    """(time, weighted loss) of each layer with coefficients [layers], mean over batches. Gradient:
    that of `relaxed_gate`; no layer depends on another's coefficients."""

    def one(scores, selection, slopes, share, coefficients):
        rest = coefficients, form, temperature, measure, slopes
        return relaxed_gate(scores, selection, share, costs, *rest)

    over = jax.vmap(jax.vmap(one, (0, 0, 0, None, None)))
    loss, time = over(data.scores, data.selection, data.slopes, data.share, coefficients)
    return time.mean(1), data.layer_weight * loss.mean(1)


def original_time(data: Data, costs: LayerCosts) -> FloatScalar:
    """s of all layers with the original choices and no gate, of one setting."""
    ids = lax.top_k(data.selection, costs.top_k)[1]
    return jax.vmap(jax.vmap(costs.layer_time, (0, None)))(ids, data.share).mean(1).sum()


def outcome(
    coefficients: Coefficients,
    data: Data,
    costs: LayerCosts,
    form: GateForm,
    measure: str,
    original: FloatScalar,
) -> Outcome:
    """Of one setting and one set of coefficients [layers]."""
    time, loss = of_layers(coefficients, data, costs, form, measure, jnp.ones(()))
    return Outcome(time.sum(), original, loss.sum())
