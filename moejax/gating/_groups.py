"""Group-limited selection: a token chooses inside the groups of experts it likes best."""

from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp

from moejax._typing import Array, Bool, Float


GroupScore: TypeAlias = Literal["max", "top2"]
GROUP_SCORES = ("max", "top2")


def groups_on_offer(
    score: Float[Array, "tokens experts"],
    num_groups: int,
    top_groups: int,
    group_score: GroupScore,
) -> Bool[Array, "tokens experts"]:
    """Whether each expert stands in one of the token's `top_groups` groups, ties lower group.

    Groups are `num_groups` equal runs of experts. A group's score is its best expert's (`"max"`,
    DeepSeek-V2) or the sum of its two best (`"top2"`, DeepSeek-V3).
    """
    tokens, experts = score.shape
    size = experts // num_groups
    grouped = score.reshape(tokens, num_groups, size)
    counted = 1 if group_score == "max" else min(2, size)
    value = jax.lax.top_k(grouped, counted)[0].sum(-1)
    best = jax.lax.top_k(value, top_groups)[1]
    chosen = jnp.any(best[:, :, None] == jnp.arange(num_groups), axis=1)
    return jnp.repeat(chosen, size, axis=1)
