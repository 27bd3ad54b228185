"""Messages that make no sense on a topology: named errors, or a status under tracing."""

import jax
import jax.numpy as jnp
import numpy as np

from moejax._status import Status, flag, is_traced, merge
from moejax._typing import IntScalar
from moejax.noc._messages import Messages
from moejax.noc._topology import Topology


def check_messages(messages: Messages, topology: Topology) -> None:
    """Raises `ValueError` for the first message that can not be sent. Tracers pass."""
    if topology.link_bandwidth.ndim != 1 or messages.source.ndim != 1:
        raise ValueError(
            f"link_bandwidth has shape {topology.link_bandwidth.shape} and Messages.source "
            f"{messages.source.shape}, expected [links] and [messages] (batches: jax.vmap)"
        )
    if is_traced(messages):
        return
    valid = np.asarray(messages.valid)
    for name in ("source", "destination"):
        ids = np.asarray(getattr(messages, name))
        _first(name, ids, valid & ((ids < 0) | (ids >= topology.num_nodes)), _nodes(topology))
    for name in ("bytes", "start_time"):
        values = np.asarray(getattr(messages, name))
        _first(name, values, valid & ~((values >= 0) & (values < np.inf)), "finite, 0 or more")
    if int(messages.status) != Status.OK:
        raise ValueError(f"messages: {Status(int(messages.status)).message}")


def check_rates(topology: Topology) -> None:
    """Raises `ValueError` for a bandwidth or latency below zero or NaN. Tracers pass."""
    for name in ("link_bandwidth", "hop_latency", "injection_bandwidth", "ejection_bandwidth"):
        values = getattr(topology, name)
        if values is None or is_traced(values):
            continue
        values = np.asarray(values)
        bad = np.flatnonzero(~(values >= 0))
        if bad.size:
            raise ValueError(
                f"topology.{name}[{bad[0]}] = {values[bad[0]]:g}: allowed is 0 or more"
            )


def sane(messages: Messages, topology: Topology) -> tuple[Messages, IntScalar]:
    """Messages that can be sent, in the widest precision at hand, and what was wrong with them."""
    dtype = jnp.result_type(messages.bytes, messages.start_time, topology.link_bandwidth)
    here = lambda ids: (ids >= 0) & (ids < topology.num_nodes)
    real = lambda values: (values >= 0) & (values < jnp.inf)
    node = here(messages.source) & here(messages.destination)
    size = real(messages.bytes) & real(messages.start_time)
    valid = messages.valid & node & size
    bad_rate = [~jnp.all(rate >= 0) for rate in (topology.resource_bandwidth, topology.hop_latency)]
    seen = merge(
        flag(jnp.any(messages.valid & ~node), Status.INVALID_NODE),
        flag(jnp.any(messages.valid & ~size), Status.NEGATIVE_BYTES),
        flag(bad_rate[0] | bad_rate[1], Status.BAD_RATE),
    )
    # What was wrong when the messages were made is why their bytes are NaN now.
    status = jnp.where(messages.status == Status.OK, seen, messages.status)
    last = max(topology.num_nodes - 1, 0)
    safe = Messages(
        jnp.clip(messages.source, 0, last),
        jnp.clip(messages.destination, 0, last),
        jnp.where(valid, messages.bytes, 0).astype(dtype),
        valid,
        jnp.where(valid, messages.start_time, 0).astype(dtype),
        None if messages.flow is None else jnp.abs(messages.flow),
        messages.status,
    )
    return safe, status


def blank(values: jax.Array, status: IntScalar) -> jax.Array:
    """NaN where something was wrong. A dead link is not wrong: its times are infinite."""
    fine = (status == Status.OK) | (status == Status.DEAD_LINK)
    return jnp.where(fine, values, jnp.nan)


def _nodes(topology: Topology) -> str:
    return f"0 .. {topology.num_nodes - 1} ({topology.kind} {'x'.join(map(str, topology.shape))})"


def _first(name: str, values: np.ndarray, bad: np.ndarray, allowed: str) -> None:
    if bad.any():
        message = int(np.argmax(bad))
        raise ValueError(f"{name}[{message}] = {values[message]:g}: allowed is {allowed}")
