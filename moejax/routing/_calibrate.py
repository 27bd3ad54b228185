"""Fitting a popularity family to statistics, published or measured, and judging the fit."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from moejax._typing import Array, Float, FloatLike, PRNGKeyArray
from moejax.models import MoEModel
from moejax.routing._calibrated import Calibration, Fit
from moejax.routing._expected import expected_bimodality
from moejax.routing._popularity import AbstractPopularity
from moejax.routing._statistics import Bimodality, bimodality, tokens_per_expert
from moejax.routing._synthesize import layer_log_popularity, sample_expert_ids
from moejax.routing._target import Target, mean_bimodality, measure
from moejax.routing._trace import RoutingTrace


def calibrate(
    shape: MoEModel | tuple[int, int],
    targets: Sequence[Target] | RoutingTrace,
    family: AbstractPopularity,
    *,
    key: PRNGKeyArray,
    steps: int = 200,
    learning_rate: FloatLike = 0.1,
    num_layers: int = 64,
    batches: Sequence[int] = (4, 16, 64),
    source: str = "",
) -> Calibration:
    """The parameters of `family` that bring its statistics closest to the targets. Host call.

    Adam descends on the squared error of the expected statistics, in the logarithm of the
    parameters, over the same popularity draws at every step. The expectation is approximate
    (`inclusion_probabilities`), so after one descent its error against sampled tokens is measured
    at those draws, taken off the targets, and the descent goes on. The returned `fits` are
    sampled afresh.

    **Arguments:**

    - `shape`: a model, or (num_experts, top_k).
    - `targets`: published numbers; or a trace to fit, measured by `measure` at `batches`.
    - `family`: its parameters are the starting point.
    - `steps`, `learning_rate`: of each of the two descents; the rate falls to zero over a descent.
    - `num_layers`: popularity draws to fit on. The verification draws four times as many.
    - `source`: kept in the result.

    **Raises:** `ValueError` for no targets, or a trace of another shape.
    """
    measure_key, fit_key, verify_key = jax.random.split(key, 3)
    router = _Router.of(shape)
    aims, values = _aims(targets, router, batches, key=measure_key)
    descend = functools.partial(
        _descend, aims=aims, router=router, num_layers=num_layers, steps=steps, key=fit_key
    )
    rough = descend(family, values, learning_rate)
    arguments = (rough, aims, router, num_layers)
    bias = _sampled(*arguments, key=fit_key) - _expected(*arguments, key=fit_key)
    fitted = descend(rough, values - bias, learning_rate)
    fits = _verify(fitted, aims, values, router, 4 * num_layers, key=verify_key)
    return Calibration(fitted, source, fits)


def judge(
    calibration: Calibration,
    targets: Sequence[Target] | RoutingTrace,
    shape: MoEModel | tuple[int, int],
    *,
    key: PRNGKeyArray,
    num_layers: int = 256,
    batches: Sequence[int] = (4, 16, 64),
) -> Calibration:
    """The same calibration with its `fits` against other targets, or a trace it has not seen.

    **Arguments:** as in `calibrate`; `num_layers` popularities are sampled, in chunks of 64.
    """
    measure_key, verify_key = jax.random.split(key)
    router = _Router.of(shape)
    aims, values = _aims(targets, router, batches, key=measure_key)
    fits = _verify(calibration.popularity, aims, values, router, num_layers, key=verify_key)
    return dataclasses.replace(calibration, fits=fits)


class _Aim(NamedTuple):
    """What is asked for. Its value stays outside, so that new values compile nothing anew."""

    batch: int
    statistic: str


class _Router(NamedTuple):
    num_experts: int
    top_k: int
    num_groups: int = 1
    top_groups: int = 1

    @classmethod
    def of(cls, shape: MoEModel | tuple[int, int]) -> "_Router":
        if not isinstance(shape, MoEModel):
            return cls(*shape)
        return cls(shape.num_experts, shape.top_k, shape.router.num_groups, shape.router.top_groups)


def _aims(
    targets, router: _Router, batches: Sequence[int], *, key
) -> tuple[tuple[_Aim, ...], Float[Array, " aims"]]:
    """Every number asked for and its value, those of a trace measured first."""
    if isinstance(targets, RoutingTrace):
        found = (targets.num_experts, targets.top_k)
        if found != router[:2]:
            raise ValueError(f"trace has (num_experts, top_k) = {found}, the model {router[:2]}")
        targets = measure(targets, batches, key=key)
    asked = [(t.batch, name, value) for t in targets for name, value in t.items()]
    if not asked:
        raise ValueError("no targets to fit or judge")
    values = jnp.asarray([value for _, _, value in asked], jnp.result_type(float))
    return tuple(_Aim(batch, name) for batch, name, _ in asked), values


def _pick(by_batch: dict[int, Bimodality], aims: tuple[_Aim, ...]) -> Float[Array, " aims"]:
    def one(aim: _Aim):
        statistics = by_batch[aim.batch]
        if aim.statistic == "share_le4":
            return statistics.share_1 + statistics.share_2 + statistics.share_3_4
        return getattr(statistics, aim.statistic)

    return jnp.stack([one(aim) for aim in aims])


@functools.partial(jax.jit, static_argnames=("aims", "router", "num_layers"))
def _expected(popularity, aims, router: _Router, num_layers: int, *, key):
    """Expected statistics, in the order of `aims`."""
    log_popularity = layer_log_popularity(popularity, router.num_experts, num_layers, key=key)
    layers = lambda batch: jax.vmap(lambda p: expected_bimodality(p, router.top_k, batch))
    batches = {aim.batch for aim in aims}
    return _pick({batch: mean_bimodality(layers(batch)(log_popularity)) for batch in batches}, aims)


@functools.partial(jax.jit, static_argnames=("aims", "router", "num_layers"))
def _sampled(popularity, aims, router: _Router, num_layers: int, *, key):
    """The same from tokens, at the same popularities. A batch is a prefix of any larger one."""
    batches = {aim.batch for aim in aims}
    num_experts, top_k = router[:2]
    ids = sample_expert_ids(
        popularity,
        num_experts,
        top_k,
        num_layers,
        max(batches),
        key=key,
        num_groups=router.num_groups,
        top_groups=router.top_groups,
    )
    count = lambda batch: tokens_per_expert(ids[:, :batch], num_experts)
    return _pick({batch: mean_bimodality(bimodality(count(batch))) for batch in batches}, aims)


@functools.partial(jax.jit, static_argnames=("aims", "router", "num_layers", "steps"))
def _descend(family, values, learning_rate, *, aims, router, num_layers, steps, key):
    optimizer = optax.adam(optax.cosine_decay_schedule(learning_rate, steps))

    def loss(logarithms):
        family = jax.tree.map(jnp.exp, logarithms)
        return jnp.sum((_expected(family, aims, router, num_layers, key=key) - values) ** 2)

    def step(carry, _):
        logarithms, state = carry
        updates, state = optimizer.update(jax.grad(loss)(logarithms), state)
        return (optax.apply_updates(logarithms, updates), state), None

    logarithms = jax.tree.map(jnp.log, family)
    (logarithms, _), _ = jax.lax.scan(step, (logarithms, optimizer.init(logarithms)), length=steps)
    return jax.tree.map(jnp.exp, logarithms)


_CHUNK = 64
"""Layers of one verification call, so that any number of layers is one compilation."""


def _verify(popularity, aims, values, router: _Router, num_layers: int, *, key) -> tuple[Fit, ...]:
    keys = jax.random.split(key, -(-num_layers // _CHUNK))
    mean = lambda statistics: np.mean(
        [statistics(popularity, aims, router, _CHUNK, key=key) for key in keys], axis=0
    )
    numbers = np.stack([values, mean(_expected), mean(_sampled)], axis=1).tolist()
    return tuple(Fit(*aim, *row) for aim, row in zip(aims, numbers))
