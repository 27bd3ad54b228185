"""From the original scores of the chosen experts to their weights, by the model's own rule."""

from typing import Any, Literal, TypeAlias

import jax

from moejax._checks import lookup
from moejax._typing import Array, Float, FloatLike


Combine: TypeAlias = Literal["renormalize", "raw", "softmax"]

# What the published implementations add before they divide.
_EPSILON = 1e-20


def _renormalize(chosen: Array) -> Array:
    return chosen / (chosen.sum(-1, keepdims=True) + _EPSILON)


COMBINE = {
    "renormalize": _renormalize,
    "raw": lambda chosen: chosen,
    "softmax": lambda chosen: jax.nn.softmax(chosen, axis=-1),
}


def combine_weights(
    chosen: Float[Array, "*tokens top_k"],
    combine: Combine = "renormalize",
    scaling: FloatLike = 1.0,
) -> Float[Array, "*tokens top_k"]:
    """Combine weights of the chosen experts. Differentiable, exact gradient.

    **Arguments:**

    - `chosen`: original scores of the chosen experts.
    - `combine`: `"renormalize"` divides by their sum + 1e-20 (Mixtral, Qwen3, DeepSeek-V3);
        `"raw"` leaves them (DeepSeek-V2); `"softmax"` is over the chosen ones, whose scores are
        then logits (gpt-oss; the same as renormalizing a softmax over all experts).
    - `scaling`: factor on the result, the routed scaling factor of DeepSeek.

    **Raises:** `ValueError` for an unknown rule.
    """
    return scaling * lookup("combine rule", combine, COMBINE)(chosen)


def router_options(router: Any) -> dict[str, Any]:
    """Keyword arguments of `hardware_aware_top_k` that a model's router stands for.

    **Arguments:**

    - `router`: of `moejax.models`, or anything with its attributes.

    **Returns:** `combine`, `scaling`, `num_groups`, `top_groups` and `group_score`. A softmax over
    the chosen logits is the renormalized softmax over all experts, so `scores` are probabilities
    whatever the model.
    """
    renormalize = router.renormalize or router.softmax_position == "after_topk"
    return dict(
        combine="renormalize" if renormalize else "raw",
        scaling=router.scaling,
        num_groups=router.num_groups,
        top_groups=router.top_groups,
        group_score="max" if router.score == "softmax" else "top2",
    )
