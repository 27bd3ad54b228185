"""The critical path: the chain of bookings, each waiting for the one before, that sets the end."""

import jax.numpy as jnp
from jax import lax

from moejax._typing import Array, Bool
from moejax.noc._queue import NO_ITEM
from moejax.noc._run import Run
from moejax.noc._topology import NO_LINK


def critical_path(
    run: Run, num_resources: int
) -> tuple[Bool[Array, " messages"], Bool[Array, " resources"]]:
    """Which messages and resources lie on it. Starts at the message that arrives last.

    A booking that waited goes back to the one that it waited for, any other one to the previous
    hop of its own message. All False where no message crosses a link.
    """
    num_messages = run.arrival.shape[0]
    resource, before = run.bookings.resource.reshape(-1), run.bookings.before.reshape(-1)
    if resource.shape[0] == 0:
        return jnp.zeros(num_messages, bool), jnp.zeros(num_resources, bool)

    def unfinished(state):
        place, steps, *_ = state
        return (place >= 0) & (steps < resource.shape[0])

    def back(state):
        place, steps, messages, resources = state
        used = resource[place]
        crossing = used != NO_LINK
        messages = messages.at[place % num_messages].max(crossing)
        resources = resources.at[used].max(crossing)
        previous = before[place]
        waited = crossing & (previous != NO_ITEM)
        return jnp.where(waited, previous, place - num_messages), steps + 1, messages, resources

    last = jnp.argmax(run.arrival).astype(jnp.int32) + resource.shape[0] - num_messages
    marks = (jnp.zeros(num_messages, bool), jnp.zeros(num_resources, bool))
    return lax.while_loop(unfinished, back, (last, jnp.int32(0), *marks))[2:]
