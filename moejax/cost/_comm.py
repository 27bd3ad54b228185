"""Communication between GPUs: expert dispatch and combine, all-gather, all-reduce.

Experts are dealt out in blocks, expert e on GPU `floor(e * g / E)`; tokens of a batch in turn,
token t on GPU `t mod g`, so that a batch is a prefix of any larger one.
"""

import jax.numpy as jnp
import numpy as np

from moejax._status import is_traced
from moejax._typing import Array, Bool, Float, FloatLike, FloatScalar, Int
from moejax.hardware import Link


def gpu_of_expert(num_experts: int, num_gpus: int) -> np.ndarray:
    """The GPU that holds each expert, int32 [experts]; known when tracing, so a NumPy array."""
    return (np.arange(num_experts) * num_gpus // num_experts).astype(np.int32)


def gpu_of_token(num_tokens: int, num_gpus: int) -> Int[Array, " tokens"]:
    """The GPU that each token of a batch starts from, int32 [tokens]."""
    return (jnp.arange(num_tokens) % num_gpus).astype(jnp.int32)


def dispatch_traffic(
    expert_ids: Int[Array, "tokens top_k"],
    valid: Bool[Array, " tokens"],
    num_experts: int,
    num_gpus: int,
    *,
    dedup: bool = True,
) -> Float[Array, "gpus gpus"]:
    """Token vectors that GPU i sends to GPU j, zero on the diagonal.

    With `dedup` a token travels once to each GPU that holds any of its experts; without, once
    for each of its experts. Negative ids (not routed) travel nowhere.

    **Raises:** `ValueError` for an id of a valid token at or above `num_experts`; all NaN under
    tracing.
    """
    dtype = jnp.result_type(float)
    outside = jnp.any((expert_ids >= num_experts) & valid[:, None])
    if not is_traced(outside) and outside:
        raise ValueError(f"expert id {jnp.max(expert_ids)}: allowed is below {num_experts}")
    owner = jnp.asarray(gpu_of_expert(num_experts, num_gpus))
    host = jnp.where(expert_ids >= 0, owner[expert_ids], num_gpus)
    wanted = (host[..., None] == jnp.arange(num_gpus)) & valid[:, None, None]
    copies = jnp.any(wanted, axis=1) if dedup else jnp.sum(wanted, axis=1)
    origin = gpu_of_token(expert_ids.shape[0], num_gpus)[:, None] == jnp.arange(num_gpus)
    # Small whole numbers, so no precision is at stake, whatever the matrix unit does with floats.
    traffic = jnp.sum(origin[:, :, None] * copies[:, None, :].astype(dtype), axis=0)
    return jnp.where(outside, jnp.nan, traffic * (1 - jnp.eye(num_gpus, dtype=dtype)))


def expert_comm_time(
    traffic: Float[Array, "gpus gpus"], vector_bytes: FloatLike, link: Link
) -> FloatScalar:
    """Dispatch and its mirror, combine, in s (Sieve, T_Comm).

    Each takes the largest volume that any GPU sends or receives, over the bandwidth of one
    direction, and one latency. 0 for a single GPU.
    """
    if traffic.shape[0] == 1:
        return jnp.zeros((), traffic.dtype)
    busiest = jnp.maximum(jnp.max(jnp.sum(traffic, 1)), jnp.max(jnp.sum(traffic, 0)))
    return 2 * (busiest * vector_bytes / link.bandwidth + link.latency)


def all_gather_time(bytes_per_gpu: FloatLike, num_gpus: int, link: Link) -> FloatScalar:
    """Every GPU receives the part of every other one: `latency + (g - 1) * bytes / bandwidth`."""
    if num_gpus == 1:
        return jnp.zeros((), jnp.result_type(float))
    return link.latency + (num_gpus - 1) * bytes_per_gpu / link.bandwidth


def all_reduce_time(message_bytes: FloatLike, group_size: FloatLike, link: Link) -> FloatScalar:
    """Ring all-reduce over p GPUs: `2 (p - 1) (latency + bytes / p / bandwidth)`; 0 for p = 1."""
    steps = 2 * (group_size - 1)
    return steps * (link.latency + message_bytes / group_size / link.bandwidth)


def expected_remote_gpus(num_experts: int, num_gpus: int, top_k: int) -> float:
    """Distinct remote GPUs that a token reaches under uniform routing:
    `(g - 1) (1 - C(E - E/g, k) / C(E, k))`.

    **Raises:** `ValueError` where `num_gpus` does not divide `num_experts`, or `top_k` is above it.
    """
    if num_experts % num_gpus or not 0 <= top_k <= num_experts:
        raise ValueError(
            f"num_gpus = {num_gpus}, top_k = {top_k}: allowed are divisors of {num_experts} experts"
            f" and 0 to {num_experts}"
        )
    local = num_experts // num_gpus
    missed = 1.0
    for i in range(top_k):
        missed *= max(num_experts - local - i, 0) / (num_experts - i)
    return (num_gpus - 1) * (1 - missed)
