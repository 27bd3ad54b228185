"""How long the broadcast of experts takes on the simulated network."""

import jax
import jax.numpy as jnp

from moejax._typing import Array, Float, FloatScalar, Int, IntScalar
from moejax.noc import HOSTING_SHARE, Messages, Topology, broadcast, simulate


def broadcast_makespan(
    topology: Topology,
    experts: Int[Array, " broadcasts"],
    share: Float[Array, "experts nodes"],
    node_position: Int[Array, " nodes"],
    expert_bytes: FloatScalar,
    *,
    chunks: int,
    roots: int,
) -> tuple[FloatScalar, IntScalar]:
    """Seconds until every node has all parts of all `experts`, each part sent from the node that
    holds it, all at once; and the status of the simulation.

    **Arguments:**

    - `experts`: ids; below 0 is none.
    - `chunks`: of each part, static.
    - `roots`: parts of an expert at most, static.
    """
    held = jnp.where(share > HOSTING_SHARE, share, 0)[jnp.maximum(experts, 0)]
    # The largest parts, in the order of their nodes.
    part, node = jax.lax.top_k(held, roots)
    part = jnp.where((experts >= 0)[:, None], part, 0).reshape(-1)
    # Nodes without a cell hold nothing that could be sent.
    root = node_position[node].reshape(-1)
    part = jnp.where(root >= 0, part, 0)
    send = lambda root, size: broadcast(topology, root, size, chunks=chunks)
    sent = jax.vmap(send)(jnp.maximum(root, 0), part * expert_bytes)
    flat = lambda field: field.reshape(-1)
    # Chunk by chunk: the first chunks of all come before the second ones of any.
    parts = part.shape[0]
    ordered = lambda field: flat(jnp.swapaxes(field.reshape(parts, chunks, -1), 0, 1))
    messages = Messages(
        source=ordered(sent.source),
        destination=ordered(sent.destination),
        bytes=ordered(sent.bytes),
        valid=ordered(sent.valid & (part > 0)[:, None]),
        start_time=ordered(sent.start_time),
    )
    report = simulate(topology, messages)
    return report.makespan, report.status
