"""The gate as pure functions: choose experts by score minus cost, weigh them by score alone."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from moejax._checks import as_float, check_non_negative
from moejax._status import Status, is_traced, raise_if_bad
from moejax._typing import Array, Bool, BoolScalar, Float, FloatLike, IntLike
from moejax.gating import _validate as validate
from moejax.gating._combine import Combine
from moejax.gating._cost_sources import AbstractCostSource
from moejax.gating._groups import GroupScore
from moejax.gating._resource_loads import ResourceLoads
from moejax.gating._run import GateResult, Inputs, Options, run


def hardware_aware_top_k(
    scores: Float[Array, "tokens experts"],
    share: Float[Array, "experts nodes"],
    *,
    top_k: int,
    r_comp: FloatLike,
    r_comm: FloatLike,
    token_time: FloatLike,
    protect: int = 0,
    chunk: int = 1,
    valid: Bool[Array, " tokens"] | None = None,
    initial_load: Float[Array, " nodes"] | None = None,
    selection_scores: Float[Array, "tokens experts"] | None = None,
    extra_cost: Float[Array, "..."] | None = None,
    combine: Combine = "renormalize",
    scaling: FloatLike = 1.0,
    num_groups: int = 1,
    top_groups: int = 1,
    group_score: GroupScore = "max",
    enabled: bool | BoolScalar = True,
    max_rows: IntLike | None = None,
    include_future_original: bool = False,
    axis_name: str | tuple[str, ...] | None = None,
    max_hosts: int | None = None,
) -> GateResult:
    """Top-k experts of each token by adjusted score (HDA-MoE, arXiv 2609.08682, section V-D).

    Tokens are taken in order. With the load that the tokens before have put on each node,
    T_comp(i) = max over all nodes c of (load_c + share_ic token_time), T_comm(i) = number of nodes
    that hold a part of i, and

    adjusted_i = selection score_i - extra_cost_i + r_comp T_comp(i) + r_comm T_comm(i).

    The token takes the `top_k` largest, all against one load, which then grows by its choices.
    With all coefficients 0 this is plain top-k to the bit.

    **Arguments:** batched with `jax.vmap`, which is where its speed is: the loop is sequential.

    - `scores`: the router's scores, softmax or sigmoid. Half precision is widened. -inf is an
        expert that can not be chosen.
    - `share`: part of each expert on each node; rows sum to 1.
    - `top_k`: static.
    - `r_comp`: score units per s, `r_comm`: score units per node, both 0 or less.
    - `token_time`: s that one node takes for one token of one whole expert.
    - `protect`: the so many highest selection scores are chosen whatever they cost (static): 1
        keeps every token's favorite.
    - `chunk`: so many tokens are scored against one load (static); larger is faster and blinder.
    - `valid`: False for padding: not routed, no load, its scores are not looked at.
    - `initial_load`: s on each node before the first token, for instance `node_load` of the
        micro-batch before. Calls that hand on their load equal one call.
    - `selection_scores`: what is compared, where it differs from the `scores` that weigh: sigmoids
        plus a correction bias in DeepSeek-V3.
    - `extra_cost`: [experts] or [tokens, experts], any cost of your own in score units; infinite
        for experts that can not be chosen.
    - `combine`, `scaling`: from the scores of the chosen to weights, as in `combine_weights`.
    - `num_groups`, `top_groups`, `group_score`: a token chooses only inside the `top_groups` best
        of `num_groups` equal groups (static). Groups are judged by selection scores, by their best
        expert (`"max"`) or the sum of their two best (`"top2"`).
    - `enabled`: where False, the original top-k; the load is still counted. May be traced.
    - `max_rows`: above so many valid tokens, too, the original top-k. A whole number, 0 or more, or
        None for no limit; may be traced.
    - `include_future_original`: the load seen by a chunk also holds the original choices of the
        tokens after it (static).
    - `axis_name`: axis of a `jax.shard_map` (or `jax.vmap`) that tokens are divided over. By
        default each shard keeps a load of its own. With it, every shard walks through the tokens
        of all, first shard first: choices are those of one call on the whole batch, at its cost,
        and `node_load` is that of all.
    - `max_hosts`: no expert lies on more nodes than this (static): faster where it is small, as 1
        with expert parallelism. Counted where `share` is known.

    **Returns:** `GateResult`. Status `BAD_SCORE` for scores of a valid token that are NaN or
    +inf, or of which less than `top_k` are above -inf; `BAD_SHARE`; `BAD_COST` for a time, load or
    cost that is negative or not finite, and for a positive coefficient.

    **Raises:** `ValueError` for the same where values are known, for `top_k` beyond the experts on
    offer, `protect` beyond `top_k`, and shapes that disagree.

    Gradient: at fixed choices. `weights` exact in `scores`; `node_load` exact in `share`,
    `token_time` and `initial_load`, zero in `scores`; zero in the coefficients and in what else
    only chooses. For a gradient through the choices see `soft_top_k` and `tune`.
    """
    source = ResourceLoads.nodes(
        share, token_time=token_time, r_comp=r_comp, r_comm=r_comm, max_hosts=max_hosts
    )
    validate.check_scores(scores, np.shape(share)[0])
    validate.check_shape("initial_load", initial_load, np.shape(share)[1:])
    if initial_load is not None:
        validate.check_times("initial_load", initial_load, np.shape(share)[1:])
    return cost_aware_top_k(
        scores,
        source,
        top_k=top_k,
        protect=protect,
        chunk=chunk,
        valid=valid,
        initial_load=initial_load,
        selection_scores=selection_scores,
        extra_cost=extra_cost,
        combine=combine,
        scaling=scaling,
        num_groups=num_groups,
        top_groups=top_groups,
        group_score=group_score,
        enabled=enabled,
        max_rows=max_rows,
        include_future_original=include_future_original,
        axis_name=axis_name,
    )


def cost_aware_top_k(
    scores: Float[Array, "tokens experts"],
    source: AbstractCostSource,
    *,
    top_k: int,
    protect: int = 0,
    chunk: int = 1,
    valid: Bool[Array, " tokens"] | None = None,
    initial_load: Any = None,
    selection_scores: Float[Array, "tokens experts"] | None = None,
    extra_cost: Float[Array, "..."] | None = None,
    combine: Combine = "renormalize",
    scaling: FloatLike = 1.0,
    num_groups: int = 1,
    top_groups: int = 1,
    group_score: GroupScore = "max",
    enabled: bool | BoolScalar = True,
    max_rows: IntLike | None = None,
    include_future_original: bool = False,
    axis_name: str | tuple[str, ...] | None = None,
) -> GateResult:
    """`hardware_aware_top_k` for any running cost.

    adjusted = selection score - extra_cost - source.cost(load).

    **Arguments:** as there, but for

    - `source`: an `AbstractCostSource`, e.g. `ResourceLoads.links` or a `SummedCosts`.
    - `initial_load`: a load of that source, shaped like `source.initial_load()`.

    **Returns:** `GateResult` whose `node_load` is the load of `source`.

    **Raises:** `ValueError` as there, and for a source of another number of experts.

    Gradient: as there, that of `node_load` by `source.update`.
    """
    options = Options(
        top_k, protect, chunk, combine, num_groups, top_groups, group_score, include_future_original
    )
    shape = validate.check_scores(scores)
    options.check(shape[1])
    validate.check_shape("selection_scores", selection_scores, shape)
    validate.check_shape("extra_cost", extra_cost, shape[1:], shape)
    validate.check_shape("valid", valid, shape[:1])
    validate.check_shape("enabled", enabled, ())
    validate.check_limit("max_rows", max_rows)
    check_non_negative("gate", "scaling", scaling)
    inputs = Inputs(
        jnp.asarray(scores),
        None if selection_scores is None else jnp.asarray(selection_scores),
        None if extra_cost is None else jnp.asarray(extra_cost),
        jnp.ones(shape[0], bool) if valid is None else jnp.asarray(valid, bool),
        initial_load,
        jnp.asarray(enabled, bool),
        None if max_rows is None else jnp.asarray(max_rows),
        as_float(scaling),
    )
    result = run(inputs, source, options, axis_name)
    if not is_traced(result) and int(result.status) == Status.BAD_SCORE:
        named = dict(scores=scores, selection_scores=selection_scores, extra_cost=extra_cost)
        raise ValueError(f"gate: {validate.describe_scores(named, valid, top_k)}")
    raise_if_bad("gate", result.status)
    return result
