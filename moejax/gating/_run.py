"""One batch through the gate: what a call means once its options are checked."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from moejax._checks import lookup
from moejax._status import Status, merge
from moejax._typing import Array, Bool, BoolScalar, Float, FloatScalar, Int, IntScalar
from moejax.gating import _validate as validate
from moejax.gating._combine import COMBINE, Combine, combine_weights
from moejax.gating._cost_sources import AbstractCostSource
from moejax.gating._groups import GROUP_SCORES, GroupScore, groups_on_offer
from moejax.gating._lanes import in_lanes
from moejax.gating._select import Problem, greedy, in_order, unchoosable
from moejax.routing import NOT_ROUTED


class GateResult(eqx.Module):
    """What a gate chose for a batch of tokens.

    Fields: `expert_ids` int32 [tokens, top_k] by falling adjusted score, ties lower id, and
    `NOT_ROUTED` for padding; `weights` [tokens, top_k] for combining the experts' outputs, 0 for
    padding; `node_load`, the load that all choices leave behind: [nodes] in s, or what another
    cost source keeps; `status`. Where the status is not okay all ids are `NOT_ROUTED` and all
    floats NaN.

    Gradients: `weights` exactly in `scores` at fixed choices. `node_load` exactly in the costs
    (`share`, `token_time`, `initial_load`) at fixed choices, zero in `scores`. The choices have
    none, so nothing here has a gradient in the coefficients: for those there are surrogates.
    """

    expert_ids: Int[Array, "tokens top_k"]
    weights: Float[Array, "tokens top_k"]
    node_load: Any
    status: IntScalar


class Options(NamedTuple):
    """What shapes the program, hashable so that `jax.jit` can key on it."""

    top_k: int
    protect: int
    chunk: int
    combine: Combine
    num_groups: int
    top_groups: int
    group_score: GroupScore
    include_future_original: bool

    def check(self, num_experts: int) -> None:
        validate.check_whole("num_groups", self.num_groups, 1, num_experts)
        validate.check_whole("top_groups", self.top_groups, 1, self.num_groups)
        if num_experts % self.num_groups:
            raise ValueError(
                f"num_groups = {self.num_groups} does not divide {num_experts} experts"
            )
        on_offer = self.top_groups * (num_experts // self.num_groups)
        validate.check_whole("top_k", self.top_k, 1, on_offer, " (the experts on offer)")
        validate.check_whole("protect", self.protect, 0, self.top_k, " (top_k)")
        validate.check_whole("chunk", self.chunk, 1, np.inf)
        lookup("combine rule", self.combine, COMBINE)
        lookup("group score", self.group_score, dict.fromkeys(GROUP_SCORES))


class Inputs(NamedTuple):
    scores: Float[Array, "tokens experts"]
    selection: Float[Array, "tokens experts"] | None
    extra: Float[Array, "..."] | None
    valid: Bool[Array, " tokens"]
    load: Any
    enabled: BoolScalar
    max_rows: IntScalar | None
    scaling: FloatScalar


@eqx.filter_jit
def run(inputs: Inputs, source: AbstractCostSource, options: Options, axis_name: Any) -> GateResult:
    whole = inputs if axis_name is None else _gathered(inputs, axis_name)
    expert_ids, load, status = _select(whole, source, options)
    if axis_name is not None:
        load, status = _of_first_shard((load, status), axis_name)
        rows = inputs.scores.shape[0]
        start = lax.axis_index(axis_name) * rows
        expert_ids = lax.dynamic_slice_in_dim(expert_ids, start, rows)
    scores = jnp.where(inputs.valid[:, None], _widened(inputs.scores), 0)
    chosen = jnp.take_along_axis(scores, jnp.maximum(expert_ids, 0), axis=1)
    broken = ~jnp.all(jnp.isfinite(jnp.where(expert_ids < 0, 0, chosen)))
    weight_status = validate.score_status(broken)
    if axis_name is not None:
        weight_status = lax.pmax(weight_status, axis_name)
    status = jnp.where(status == Status.OK, weight_status, status)
    weights = combine_weights(chosen, options.combine, inputs.scaling.astype(chosen.dtype))
    weights = jnp.where(expert_ids < 0, 0, weights)
    fine = status == Status.OK
    spoil = lambda x: jnp.where(fine, x, jnp.nan)
    return GateResult(
        jnp.where(fine, expert_ids, NOT_ROUTED), spoil(weights), jax.tree.map(spoil, load), status
    )


def _select(inputs: Inputs, source: AbstractCostSource, options: Options):
    """(expert ids, final load, status) of one batch."""
    valid = inputs.valid
    score = _widened(inputs.scores if inputs.selection is None else inputs.selection)
    score = jnp.where(valid[:, None], lax.stop_gradient(score), 0)
    # The platform's top_k would put -0 behind 0; here they tie. And a NaN is not to lose unseen: as
    # the highest score it is chosen, and found.
    score = _nan_highest(jnp.where(score == 0, 0, score))
    if options.num_groups > 1:
        groups = options.num_groups, options.top_groups, options.group_score
        score = jnp.where(groups_on_offer(score, *groups), score, -jnp.inf)
    penalized = inputs.enabled
    if inputs.max_rows is not None:
        penalized &= valid.sum() <= inputs.max_rows
    adjusted = score
    if inputs.extra is not None:
        extra = jnp.where(penalized, _widened(lax.stop_gradient(inputs.extra)), 0)
        adjusted = _nan_highest(jnp.where(valid[:, None], score - extra, 0))
    start = _start(source, inputs.load)
    cost = jax.eval_shape(lambda source, load: source.cost(load), source, start)
    if cost.shape != score.shape[1:]:
        raise ValueError(
            f"scores has {score.shape[1]} experts, the costs of the source {cost.shape}"
        )
    problem = Problem(
        adjusted,
        valid,
        lax.top_k(score, options.protect)[1],
        lax.top_k(score, options.top_k)[1] if options.include_future_original else None,
        penalized,
        *lax.stop_gradient((source, start)),
    )
    choice = in_lanes(lambda p: greedy(p, options.top_k, options.chunk), problem)
    bad = jnp.any(valid & unchoosable(choice, adjusted.dtype))
    expert_ids = in_order(choice) if options.protect else choice.expert_ids
    expert_ids = jnp.where(valid[:, None], expert_ids, NOT_ROUTED)
    # Costs that make no sense are why no score does.
    costs = merge(source.status(start), source.status(choice.load))
    status = jnp.where(costs == Status.OK, validate.score_status(bad), costs)
    load = _with_gradient(choice.load, expert_ids, adjusted.shape[1], source, start)
    return expert_ids, load, status


def _gathered(inputs: Inputs, axis_name: Any) -> Inputs:
    """The tokens of all shards, in the order of the shards."""
    gather = lambda x: None if x is None else lax.all_gather(x, axis_name, tiled=True)
    extra = inputs.extra
    return inputs._replace(
        scores=gather(inputs.scores),
        selection=gather(inputs.selection),
        extra=gather(extra) if extra is not None and extra.ndim == 2 else extra,
        valid=gather(inputs.valid),
    )


def _of_first_shard(tree: Any, axis_name: Any) -> Any:
    """What all shards have computed alike, in a form that `jax.shard_map` knows to be one."""
    first = lax.axis_index(axis_name) == 0
    return jax.tree.map(lambda x: lax.psum(jnp.where(first, x, 0), axis_name), tree)


def _nan_highest(x: Array) -> Array:
    return jnp.where(jnp.isnan(x), jnp.inf, x)


def _widened(x: Array) -> Array:
    """Half precision as float32: its ties would be of rounding, and loads would not add up."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _start(source: AbstractCostSource, load: Any) -> Any:
    """The load to start from, in the dtype that the source adds in."""
    empty = source.initial_load()
    if load is None:
        return empty
    if jax.tree.structure(load) != jax.tree.structure(empty):
        raise ValueError(f"initial_load is a {jax.tree.structure(load)}, not as the source's load")
    for given, wanted in zip(jax.tree.leaves(load), jax.tree.leaves(empty)):
        validate.check_shape("initial_load", given, wanted.shape)
    return jax.tree.map(lambda given, like: jnp.asarray(given, like.dtype), load, empty)


def _with_gradient(load, expert_ids, num_experts, source, start):
    """`load`, with the derivative of adding all choices to `start` at once."""
    floats, rest = eqx.partition((source, start), eqx.is_inexact_array)

    @jax.custom_jvp
    def attach(floats, rest, load, expert_ids):
        return load

    @attach.defjvp
    def attach_jvp(primals, tangents):
        floats, rest, load, expert_ids = primals
        chosen = jax.nn.one_hot(expert_ids, num_experts).sum((0, 1))

        def added(floats):
            source, start = eqx.combine(floats, rest)
            return source.update(start, chosen)

        return load, jax.jvp(added, (floats,), (tangents[0],))[1]

    return attach(floats, rest, load, expert_ids)
