"""What a placement is fitted to: how often experts, and sets of experts, are chosen."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from moejax._checks import as_float
from moejax._status import is_traced
from moejax._typing import Array, Float, FloatScalar, Int, PRNGKeyArray
from moejax.placement._validate import check_count
from moejax.routing import NOT_ROUTED, RoutingTrace, co_activation_groups


class Statistics(eqx.Module):
    """Activation statistics of one MoE layer (HD-MoE, arXiv 2509.09420, section IV).

    A pytree of arrays; layers are stacked on a leading axis and mapped over with `jax.vmap`.

    **Arguments:**

    - `frequency`: [experts], tokens that choose the expert, per token. Sums to k.
    - `groups`: int [groups, k], distinct sets of experts that one token chose, each ascending.
        `NOT_ROUTED` (-1) fills up tokens with fewer experts, and whole rows of padding.
    - `group_frequency`: [groups], share of the tokens that chose exactly this set; 0 for padding.
    """

    frequency: Float[Array, "*layers experts"] = eqx.field(converter=as_float)
    groups: Int[Array, "*layers groups k"] = eqx.field(converter=lambda ids: jnp.asarray(ids))
    group_frequency: Float[Array, "*layers groups"] = eqx.field(converter=as_float)

    def __check_init__(self):
        shapes = f"{self.frequency.shape}, {self.groups.shape}, {self.group_frequency.shape}"
        layers = self.frequency.shape[:-1]
        if (
            self.frequency.ndim < 1
            or self.groups.ndim != len(layers) + 2
            or self.groups.shape[:-1] != self.group_frequency.shape
            or self.groups.shape[:-2] != layers
            or 0 in self.frequency.shape + self.groups.shape
        ):
            raise ValueError(
                f"Statistics: frequency, groups, group_frequency have shapes {shapes}: "
                "allowed is [experts], [groups, k], [groups] (all with the same leading axes)"
            )
        if not jnp.issubdtype(self.groups.dtype, jnp.integer):
            raise ValueError(f"Statistics.groups is {self.groups.dtype}: allowed is whole numbers")

    @property
    def num_experts(self) -> int:
        """Routed experts of a layer."""
        return self.frequency.shape[-1]

    @property
    def top_k(self) -> int:
        """Experts of one token."""
        return self.groups.shape[-1]

    @property
    def kept_mass(self) -> FloatScalar:
        """Share of the tokens whose set is among `groups`: 1 unless `max_groups` cut some off."""
        return self.group_frequency.sum(-1)


def statistics(
    expert_ids: Int[Array | np.ndarray, "... tokens k"],
    num_experts: int,
    *,
    max_groups: int | None = None,
) -> Statistics:
    """The `Statistics` of routed tokens (host only: the number of groups is a shape).

    **Arguments:**

    - `expert_ids`: expert choices of tokens; ids below 0 are padding, and a token without any
        expert does not count. With leading axes, such as layers, each entry has statistics of its
        own, stacked and padded to the same number of groups.
    - `num_experts`: routed experts of a layer.
    - `max_groups`: keeps the commonest groups (ties: lexicographic) and pads to exactly this
        number. By default all groups are kept. `frequency` always counts all tokens, and
        `group_frequency` stays relative to all of them, so that a cut shows in `kept_mass` and
        lowers the estimated communication by at most what is missing from 1.

    **Returns:** `Statistics`; groups in lexicographic order, padding last.

    **Raises:** `ValueError` for ids that are not whole numbers or too large, an expert chosen
    twice by one token, no routed token, or `max_groups` below 1.
    """
    ids = _checked_ids(expert_ids, num_experts)
    if max_groups is not None:
        check_count("statistics", "max_groups", max_groups)
    layers = ids.shape[:-2]
    found = [
        _one_layer(layer, num_experts, max_groups) for layer in ids.reshape(-1, *ids.shape[-2:])
    ]
    room = max_groups or max(len(groups) for _, groups, _ in found)
    pad = lambda rows, fill: np.concatenate(
        [rows, np.full((room - len(rows), *rows.shape[1:]), fill, rows.dtype)]
    )
    stack = lambda rows: np.stack(rows).reshape(*layers, *rows[0].shape)
    return Statistics(
        stack([frequency for frequency, _, _ in found]),
        stack([pad(groups, NOT_ROUTED) for _, groups, _ in found]),
        stack([pad(share, 0.0) for _, _, share in found]),
    )


def trace_statistics(trace: RoutingTrace, *, max_groups: int | None = None) -> Statistics:
    """The `Statistics` of every layer of a trace, stacked, over its valid tokens (host only).

    **Returns:** `Statistics` with a leading layer axis. Errors as `statistics`.
    """
    ids = np.where(np.asarray(trace.valid)[:, None], np.asarray(trace.expert_ids), NOT_ROUTED)
    return statistics(ids, trace.num_experts, max_groups=max_groups)


def _checked_ids(expert_ids: Any, num_experts: int) -> np.ndarray:
    check_count("statistics", "num_experts", num_experts)
    ids = np.asarray(expert_ids)
    if ids.dtype.kind not in "iu":
        raise ValueError(f"statistics: expert_ids is {ids.dtype}: allowed is whole numbers")
    if ids.ndim < 2 or 0 in ids.shape:
        raise ValueError(
            f"statistics: expert_ids has shape {ids.shape}: allowed is [..., tokens, k], not empty"
        )
    if ids.max() >= num_experts:
        raise ValueError(f"statistics: expert id {ids.max()}: allowed is 0 to {num_experts - 1}")
    ids = np.sort(np.maximum(ids.astype(np.int64), NOT_ROUTED), axis=-1)
    twice = (ids[..., 1:] == ids[..., :-1]) & (ids[..., 1:] != NOT_ROUTED)
    if twice.any():
        *_, token, slot = np.argwhere(twice)[0]
        culprit = ids[..., 1:][twice][0]
        raise ValueError(f"statistics: token {token} chose expert {culprit} twice")
    return ids


def _one_layer(
    ids: np.ndarray, num_experts: int, max_groups: int | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    groups, group_frequency = co_activation_groups(jnp.asarray(ids, jnp.int32))
    num_tokens = np.count_nonzero(ids[:, -1] != NOT_ROUTED)
    frequency = np.bincount(ids[ids >= 0], minlength=num_experts) / num_tokens
    if max_groups is not None and len(groups) > max_groups:
        commonest = np.argsort(-group_frequency, kind="stable")[:max_groups]
        kept = np.sort(commonest)
        groups, group_frequency = groups[kept], group_frequency[kept]
    return frequency, groups.astype(np.int32), group_frequency


def drawn_statistics(
    expert_ids: Int[Array, "tokens k"],
    num_experts: int,
    batch: int,
    num_draws: int,
    *,
    key: PRNGKeyArray,
) -> list[Statistics]:
    """Statistics of random batches, to pass to `node_balance` as scenarios.

    **Arguments:**

    - `expert_ids`: expert choices of tokens, each with at least one expert; ids below 0 are
        padding of a token.
    - `batch`: tokens of a draw, without replacement.
    - `num_draws`: static.

    **Returns:** `num_draws` `Statistics`. Works under `jax.jit`, and `jax.vmap` over layers.

    **Raises:** `ValueError` for sizes below 1, a batch larger than the number of tokens, and ids as
    `statistics` where they are known.
    """
    where = "drawn_statistics"
    for name, value in (("num_experts", num_experts), ("num_draws", num_draws)):
        check_count(where, name, value)
    if not is_traced(expert_ids):
        _checked_ids(expert_ids, num_experts)
    ids = jnp.asarray(expert_ids)
    if ids.ndim != 2:
        raise ValueError(f"{where}: expert_ids has shape {ids.shape}: allowed is [tokens, k]")
    if not check_count(where, "batch", batch) <= len(ids):
        raise ValueError(f"{where}: batch = {batch}: allowed is at most the {len(ids)} tokens")

    def draw(key: PRNGKeyArray) -> Statistics:
        tokens = jnp.sort(ids[jax.random.choice(key, len(ids), (batch,), replace=False)], axis=-1)
        counted = batch_statistics(jnp.maximum(tokens, NOT_ROUTED), num_experts)
        per_token = lambda part: part / batch
        return Statistics(
            per_token(counted.frequency), counted.groups, per_token(counted.group_frequency)
        )

    return [draw(each) for each in jax.random.split(key, num_draws)]


def batch_statistics(expert_ids: Int[Array, "tokens k"], num_experts: int) -> Statistics:
    """Every token of a batch as a group of frequency 1, so that `batch` = 1 counts tokens."""
    ids = jnp.asarray(expert_ids).astype(jnp.int32)
    index = jnp.where(ids < 0, num_experts, ids).ravel()
    zeros = jnp.zeros(num_experts, jnp.result_type(float))
    counts = zeros.at[index].add(1.0, mode="drop")
    return Statistics(counts, ids, (ids >= 0).any(-1).astype(counts.dtype))
