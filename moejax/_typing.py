"""Scalar aliases used in annotations all over moejax.

Axis names inside jaxtyping strings are the field's: ``layers tokens top_k experts gpus counts``
(``counts`` is an axis indexed by a token count, 0 to ``max_tokens``).
"""

from typing import TypeAlias

import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int, PRNGKeyArray


FloatScalar: TypeAlias = Float[Array, ""]
IntScalar: TypeAlias = Int[Array, ""]
BoolScalar: TypeAlias = Bool[Array, ""]
FloatLike: TypeAlias = float | int | np.floating | np.integer | FloatScalar
IntLike: TypeAlias = int | np.integer | IntScalar

__all__ = [
    "Array",
    "Bool",
    "BoolScalar",
    "Float",
    "FloatLike",
    "FloatScalar",
    "Int",
    "IntLike",
    "IntScalar",
    "PRNGKeyArray",
]
