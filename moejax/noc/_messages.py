"""What travels: messages between the nodes of a network, padded to a static number."""

from collections.abc import Sequence

import equinox as eqx
import jax.numpy as jnp
import numpy as np

from moejax._checks import as_float
from moejax._status import Status, is_traced
from moejax._typing import Array, Bool, Float, Int, IntLike, IntScalar


class Messages(eqx.Module):
    """Messages of one step of communication. Their order is their index, the last tie-breaker.

    One batch has 1-D fields of one length; many batches are `jax.vmap(Messages)(...)`, or whatever
    a function under `jax.vmap` returns. A message to its own node crosses no link and has finished
    when it starts. Ids and sizes are looked at by whoever sends the messages over a topology.

    **Arguments:**

    - `source`, `destination`: int [messages], endpoint ids.
    - `bytes`: [messages] B, fractions allowed.
    - `valid`: bool [messages]; False is padding, whatever the other fields hold.
    - `start_time`: [messages] s, the moment from which a message waits for its first link.
        Default 0.
    - `flow`: int [messages], chooses among equal-cost routes: number `flow` modulo their count.
        Default the first route.
    - `status`: what went wrong when the messages were made. Default `Status.OK`.

    **Raises:** `ValueError` naming the field for another shape or a wrong kind of number.
    """

    source: Int[Array, " messages"]
    destination: Int[Array, " messages"]
    bytes: Float[Array, " messages"]
    valid: Bool[Array, " messages"]
    start_time: Float[Array, " messages"]
    flow: Int[Array, " messages"] | None
    status: IntScalar

    def __init__(
        self,
        source: Int[Array, " messages"] | Sequence[int],
        destination: Int[Array, " messages"] | Sequence[int],
        bytes: Float[Array, " messages"] | Sequence[float],
        valid: Bool[Array, " messages"] | Sequence[bool],
        start_time: Float[Array, " messages"] | Sequence[float] | None = None,
        flow: Int[Array, " messages"] | Sequence[int] | None = None,
        status: IntLike | None = None,
    ):
        self.source = _integers("source", source)
        self.destination = _integers("destination", destination)
        self.bytes = as_float(bytes)
        self.valid = jnp.asarray(valid)
        if self.valid.dtype != bool:
            raise ValueError(f"Messages.valid is {self.valid.dtype}, not bool")
        default = jnp.zeros_like(self.bytes)
        self.start_time = default if start_time is None else as_float(start_time)
        self.flow = None if flow is None else _integers("flow", flow)
        self.status = jnp.int32(Status.OK) if status is None else jnp.asarray(status, jnp.int32)
        self._check_shapes()

    def _check_shapes(self):
        shape = self.source.shape
        if len(shape) != 1:
            raise ValueError(
                f"Messages.source has shape {shape}, expected [messages] (batches: jax.vmap)"
            )
        for name in ("destination", "bytes", "valid", "start_time", "flow"):
            field = getattr(self, name)
            if field is not None and field.shape != shape:
                raise ValueError(
                    f"Messages.{name} has shape {field.shape}, source has {shape}: expected one "
                    "length [messages] for all fields (batches: jax.vmap)"
                )

    @property
    def num_messages(self) -> int:
        """How many there is room for, padding included."""
        return self.source.shape[-1]


def _integers(name: str, value) -> Int[Array, " messages"]:
    """An int32 array; ids of 64 bits may not wrap around unseen."""
    if not is_traced(value):
        value = np.asarray(value) if np.size(value) else np.zeros(np.shape(value), np.int32)
        if value.dtype.kind in "iu" and np.any(np.abs(value.astype(np.int64)) >= 2**31):
            raise ValueError(f"Messages.{name} has an entry of 2^31 or more")
    value = jnp.asarray(value)
    if not jnp.issubdtype(value.dtype, jnp.integer):
        raise ValueError(f"Messages.{name} is {value.dtype}, not an integer")
    return value.astype(jnp.int32)
