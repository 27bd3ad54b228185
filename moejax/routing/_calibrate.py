"""Fitting a popularity family to statistics, published or measured, and judging the fit."""

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from moejax._typing import Array, Float, FloatLike, PRNGKeyArray
from moejax.models import MoEModel
from moejax.routing._batch import decode_batch
from moejax.routing._calibrated import Calibration, Fit
from moejax.routing._expected import expected_bimodality
from moejax.routing._popularity import AbstractPopularity
from moejax.routing._statistics import Bimodality, bimodality, tokens_per_expert
from moejax.routing._synthesize import layer_log_popularity, sample_expert_ids
from moejax.routing._trace import RoutingTrace


STATISTICS = ("share_1", "share_2", "share_3_4", "share_le4", "share_more", "active")
"""What a `Target` may ask for: the fields of `Bimodality`, and `share_le4`, the share with N <= 4
(memory-bound in Sieve)."""


@dataclasses.dataclass(frozen=True)
class Target:
    """Statistics of batches of one size, averaged over layers and batches; `None` is not asked for.

    **Arguments:**

    - `batch`: tokens in the batch.
    - the others: as in `STATISTICS`, between 0 and 1.

    **Raises:** `ValueError` for a batch below 1, a value outside [0, 1], or nothing asked for.
    """

    batch: int
    share_1: float | None = None
    share_2: float | None = None
    share_3_4: float | None = None
    share_le4: float | None = None
    share_more: float | None = None
    active: float | None = None

    def __post_init__(self):
        if operator.index(self.batch) < 1:
            raise ValueError(f"Target.batch = {self.batch}: allowed is at least 1")
        if not self.items():
            raise ValueError(f"Target asks for nothing; name one of {', '.join(STATISTICS)}")
        for statistic, value in self.items():
            if not 0 <= value <= 1:
                raise ValueError(f"Target.{statistic} = {value}: allowed is [0, 1]")

    def items(self) -> list[tuple[str, float]]:
        """The statistics asked for, with their values."""
        values = {name: getattr(self, name) for name in STATISTICS}
        return [(name, float(value)) for name, value in values.items() if value is not None]


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
    if isinstance(targets, RoutingTrace):
        router.check(targets)
        targets = measure(targets, batches, key=measure_key)
    aims = _flat(targets)
    values = jnp.asarray([aim.value for aim in aims], jnp.result_type(float))
    descend = functools.partial(
        _descend, aims=aims, router=router, num_layers=num_layers, steps=steps, key=fit_key
    )
    rough = descend(family, values, learning_rate)
    arguments = (rough, aims, router, num_layers)
    bias = _sampled(*arguments, key=fit_key) - _expected(*arguments, key=fit_key)
    fitted = descend(rough, values - bias, learning_rate)
    fits = _verify(fitted, aims, router, 4 * num_layers, key=verify_key)
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

    **Arguments:** as in `calibrate`; `num_layers` popularities are sampled.
    """
    measure_key, verify_key = jax.random.split(key)
    router = _Router.of(shape)
    if isinstance(targets, RoutingTrace):
        router.check(targets)
        targets = measure(targets, batches, key=measure_key)
    fits = _verify(calibration.popularity, _flat(targets), router, num_layers, key=verify_key)
    return dataclasses.replace(calibration, fits=fits)


def measure(
    trace: RoutingTrace, batches: Sequence[int], *, key: PRNGKeyArray, num_draws: int = 64
) -> list[Target]:
    """The `Bimodality` of a trace as targets: the mean over layers and `num_draws` decode batches.

    Batches above the number of sequences use sequences more than once (`decode_batch`).
    """

    def one(batch: int) -> Target:
        draw = lambda key: decode_batch(trace, batch, key=key, reuse=batch > trace.num_sequences)
        ids = jax.lax.map(draw, jax.random.split(key, num_draws))
        means = _means(bimodality(tokens_per_expert(ids, trace.num_experts)))
        return Target(batch, **{name: float(value) for name, value in means._asdict().items()})

    return [one(batch) for batch in batches]


class _Aim(NamedTuple):
    batch: int
    statistic: str
    value: float


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

    def check(self, trace: RoutingTrace) -> None:
        found = (trace.num_experts, trace.top_k)
        if found != self[:2]:
            raise ValueError(f"trace has (num_experts, top_k) = {found}, the model {self[:2]}")


def _flat(targets: Sequence[Target]) -> tuple[_Aim, ...]:
    aims = tuple(_Aim(t.batch, *item) for t in targets for item in t.items())
    if not aims:
        raise ValueError("no targets to fit or judge")
    return aims


def _means(statistics: Bimodality) -> Bimodality:
    return Bimodality(*(jnp.mean(value) for value in statistics))


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
    return _pick({batch: _means(layers(batch)(log_popularity)) for batch in batches}, aims)


@functools.partial(jax.jit, static_argnames=("aims", "router", "num_layers"))
def _sampled(popularity, aims, router: _Router, num_layers: int, *, key):
    """The same from tokens, at the same popularities. A batch is a prefix of any larger one."""
    batches = {aim.batch for aim in aims}
    num_experts, top_k, *groups = router
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
    return _pick({batch: _means(bimodality(count(batch))) for batch in batches}, aims)


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


def _verify(popularity, aims, router: _Router, num_layers: int, *, key) -> tuple[Fit, ...]:
    arguments = (popularity, aims, router, num_layers)
    expected = np.asarray(_expected(*arguments, key=key))
    sampled = np.asarray(_sampled(*arguments, key=key))
    return tuple(Fit(*aim, float(e), float(s)) for aim, e, s in zip(aims, expected, sampled))
