"""Which nodes a token reaches for one expert's sake only."""

import jax
import jax.numpy as jnp
import numpy as np

from moejax._checks import as_float
from moejax._typing import Array, Float
from moejax.gating._resource_loads import HOSTING_SHARE
from moejax.gating._validate import check_scores, check_share, check_whole


def own_visits(
    selection: Float[Array, "tokens experts"], share: Float[Array, "experts nodes"], top_k: int
) -> Float[Array, "tokens experts"]:
    """How many nodes a token visits because of each expert, beside its other original choices.

    For an expert among the `top_k` of `selection`, the nodes that hold it and none of the token's
    other choices: what dropping it saves. For another expert, the nodes that hold it and no choice
    of the token: what it would add. Times a price it is an `extra_cost` of `hardware_aware_top_k`
    that counts messages, where `r_comm` counts nodes whether or not the token is there anyway.

    **Arguments:** `top_k` is static; `share` rows sum to 1.

    **Returns:** [tokens, experts]. Zero gradient.

    **Raises:** `ValueError` for shapes that disagree, `top_k` out of range, and shares that do not
    sum to 1.
    """
    check_share(share)
    experts = check_scores(selection, np.shape(share)[0])[1]
    check_whole("top_k", top_k, 1, experts)
    hosts = (as_float(share) > HOSTING_SHARE).astype(jnp.float32)
    ids = jax.lax.top_k(jnp.asarray(selection), top_k)[1]
    chosen = jax.nn.one_hot(ids, experts).sum(-2)
    here = chosen @ hosts
    alone, new = ((here == number).astype(jnp.float32) @ hosts.T for number in (1, 0))
    return jnp.where(chosen > 0, alone, new)
