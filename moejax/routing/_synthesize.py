"""Synthetic routing: Gumbel top-k on a popularity drawn once per layer."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moejax._status import is_traced
from moejax._typing import Array, Bool, Float, FloatLike, Int, PRNGKeyArray
from moejax.models import MoEModel
from moejax.routing._calibrated import calibrated
from moejax.routing._popularity import AbstractPopularity
from moejax.routing._trace import NOT_ROUTED, RoutingTrace


def synthesize(
    model: MoEModel,
    num_tokens: int,
    *,
    key: PRNGKeyArray,
    popularity: AbstractPopularity | None = None,
    correlation: FloatLike = 0.0,
) -> RoutingTrace:
    """A trace of `num_tokens` unrelated tokens, each a sequence of its own, through `model`.

    For one key, the first tokens are the same whatever `num_tokens` is: a sweep over batch sizes
    adds requests and changes none.

    **Arguments:**

    - `model`: gives experts, top_k, MoE layers and the groups of its router.
    - `num_tokens`: static.
    - `popularity`: a family; by default `calibrated(model.name)`.
    - `correlation`: in [0, 1), as in `sample_expert_ids`.

    **Returns:** a trace without router weights. Works under `jax.jit` and `jax.vmap` over keys.

    **Raises:** `ValueError` as `sample_expert_ids`.
    """
    popularity = calibrated(model.name).popularity if popularity is None else popularity
    expert_ids = sample_expert_ids(
        popularity,
        model.num_experts,
        model.top_k,
        model.num_moe_layers,
        num_tokens,
        key=key,
        correlation=correlation,
        num_groups=model.router.num_groups,
        top_groups=model.router.top_groups,
    )
    starts = jnp.arange(num_tokens)
    return RoutingTrace(expert_ids, model.num_experts, sequence_start=starts, model=model.name)


def sample_expert_ids(
    popularity: AbstractPopularity,
    num_experts: int,
    top_k: int,
    num_layers: int,
    num_tokens: int,
    *,
    key: PRNGKeyArray,
    correlation: FloatLike = 0.0,
    num_groups: int = 1,
    top_groups: int = 1,
) -> Int[Array, "layers tokens top_k"]:
    """Expert ids of `num_tokens` tokens, strongest choice first.

    Every layer draws its popularity once; a token takes the `top_k` largest of log-popularity plus
    Gumbel noise, which are `top_k` draws without replacement (Plackett-Luce). Token t of layer l
    depends on the key, l and t alone, not on `num_layers` or `num_tokens`.

    **Arguments:**

    - `popularity`: a family, its fields may be traced.
    - `num_experts`, `top_k`, `num_layers`, `num_tokens`: static.
    - `correlation`: in [0, 1), may be traced. The chance that a token's noise for an expert is the
        noise that the whole batch shares, instead of its own. Whatever its value, one token on its
        own is distributed as without it; the tokens of a batch become alike.
    - `num_groups`, `top_groups`: group-limited selection as in DeepSeek-V3: a token chooses only
        inside the `top_groups` groups of consecutive experts with the largest score. The score of
        a group is the sum of its two largest perturbed log-popularities.

    **Returns:** int32. Under tracing, `NOT_ROUTED` everywhere for a correlation out of range and in
    layers whose popularity is not finite.

    **Raises:** `ValueError` for sizes below 1, `top_k` above the experts that can be chosen from,
    groups that do not divide the experts, or a correlation outside [0, 1).
    """
    shape = _Shape(num_layers, num_tokens, num_experts, top_k, num_groups, top_groups)
    shape.check()
    if is_traced(correlation):
        return _sample(popularity, correlation, key, shape)
    if not 0 <= float(correlation) < 1:
        raise ValueError(f"correlation = {correlation}: allowed is [0, 1)")
    # Without correlation there is one random number less per token and expert.
    return _sample(popularity, correlation if float(correlation) else None, key, shape)


class _Shape(NamedTuple):
    """The static side of a draw, hashable so that `jax.jit` can key on it."""

    num_layers: int
    num_tokens: int
    num_experts: int
    top_k: int
    num_groups: int = 1
    top_groups: int = 1

    def check(self) -> None:
        for name, value in self._asdict().items():
            if not isinstance(value, int | np.integer) or value < 1:
                raise ValueError(f"{name} = {value!r}: allowed is a whole number, at least 1")
        if self.num_experts % self.num_groups:
            raise ValueError(
                f"num_groups = {self.num_groups} does not divide num_experts = {self.num_experts}"
            )
        if self.top_groups > self.num_groups:
            raise ValueError(
                f"top_groups = {self.top_groups} is more than num_groups = {self.num_groups}"
            )
        allowed = self.top_groups * (self.num_experts // self.num_groups)
        if self.top_k > allowed:
            raise ValueError(f"top_k = {self.top_k} is more than the {allowed} experts on offer")


class _Keys(NamedTuple):
    """One key for each of the independent draws of a layer."""

    popularity: PRNGKeyArray
    noise: PRNGKeyArray
    shared_noise: PRNGKeyArray
    copied: PRNGKeyArray


def layer_log_popularity(
    popularity: AbstractPopularity, num_experts: int, num_layers: int, *, key: PRNGKeyArray
) -> Float[Array, "layers experts"]:
    """The very popularities that `sample_expert_ids` draws for this key."""
    draw = lambda keys: popularity.log_popularity(num_experts, key=keys.popularity)
    return jax.vmap(draw)(_layer_keys(key, num_layers))


def _layer_keys(key: PRNGKeyArray, num_layers: int) -> _Keys:
    layer = jnp.arange(num_layers)
    return jax.vmap(lambda i: _Keys(*jax.random.split(jax.random.fold_in(key, i), 4)))(layer)


@functools.partial(jax.jit, static_argnames="shape")
def _sample(popularity, correlation, key, shape: _Shape) -> Int[Array, "layers tokens top_k"]:
    sample_layer = lambda keys: _sample_layer(popularity, correlation, keys, shape)
    # One layer at a time: its noise stays in cache, and a vmap over seeds fits in memory.
    return jax.lax.map(sample_layer, _layer_keys(key, shape.num_layers))


def _sample_layer(popularity, correlation, keys: _Keys, shape: _Shape):
    experts = (shape.num_experts,)
    log_popularity = popularity.log_popularity(shape.num_experts, key=keys.popularity)
    shared_noise = jax.random.gumbel(keys.shared_noise, experts)

    def perturbed(token):
        # Keys are folded in token by token, so that no token depends on how many follow.
        noise = jax.random.gumbel(jax.random.fold_in(keys.noise, token), experts)
        if correlation is None:
            return log_popularity + noise
        copied_key = jax.random.fold_in(keys.copied, token)
        copied = jax.random.bernoulli(copied_key, correlation, experts)
        return log_popularity + jnp.where(copied, shared_noise, noise)

    scores = jax.vmap(perturbed)(jnp.arange(shape.num_tokens))
    if shape.num_groups > 1:
        scores = _inside_best_groups(scores, shape.num_groups, shape.top_groups)
    expert_ids = jax.lax.top_k(scores, shape.top_k)[1].astype(jnp.int32)
    fine = jnp.isfinite(log_popularity).all()
    if correlation is not None:
        fine &= (correlation >= 0) & (correlation < 1)
    return jnp.where(fine, expert_ids, NOT_ROUTED)


def _inside_best_groups(
    scores: Float[Array, "tokens experts"], num_groups: int, top_groups: int
) -> Float[Array, "tokens experts"]:
    """Scores with minus infinity outside the groups that the token may choose from."""
    grouped = scores.reshape(len(scores), num_groups, -1)
    best_two = jax.lax.top_k(grouped, min(2, grouped.shape[-1]))[0]
    chosen = jax.lax.top_k(best_two.sum(-1), top_groups)[1]
    inside: Bool[Array, "tokens groups"] = jax.nn.one_hot(chosen, num_groups, dtype=bool).any(1)
    return jnp.where(inside[..., None], grouped, -jnp.inf).reshape(scores.shape)
