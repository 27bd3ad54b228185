"""First come, first served: all queues of one level at once, as a segmented max-plus scan."""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from moejax._typing import Array, Float, Int
from moejax.noc._order import Field, stable_order, time_field


NO_ITEM = -1  # nothing was waited for


class Served(NamedTuple):
    """When each item is served, and for which other one it had to wait."""

    start: Float[Array, " items"]
    end: Float[Array, " items"]
    before: Int[Array, " items"]  # NO_ITEM where the item did not wait


def serve(
    segment: Field,
    ready: Float[Array, " items"],
    service: Float[Array, " items"],
    ties: Sequence[Field] = (),
    start: Int[Array, " items"] | None = None,
) -> Served:
    """Serves the items of every segment one after another.

    **Arguments:**

    - `segment`: which queue an item stands in.
    - `ready`, `service`: when it may start and how long it takes, in s.
    - `ties`: what decides between equal ready times in one queue; the position does at last.
    - `start`: the order by `ties`, where it is known beforehand.

    Gradients follow the one item or ready time that decided (a subgradient at ties), not an
    average: the derivative of a schedule is that of its critical path.
    """
    order = stable_order([segment, time_field(ready), *ties], start)
    take = lambda values: values.at[order].get(mode="promise_in_bounds")

    def step(carry, item):
        last_segment, free = carry
        segment, ready, service = item
        waits = (segment == last_segment) & (free > ready)
        start = jnp.where(waits, free, ready)
        return (segment, start + service), (start, waits)

    queue = take(segment.value).astype(jnp.int32)
    first = (jnp.int32(-1), jnp.zeros((), ready.dtype))
    _, (start, waits) = lax.scan(step, first, (queue, take(ready), take(service)))
    before = jnp.where(waits, jnp.roll(order, 1), NO_ITEM)
    place = (
        jnp.zeros_like(order)
        .at[order]
        .set(jnp.arange(order.shape[0], dtype=jnp.int32), unique_indices=True)
    )
    start = start.at[place].get(mode="promise_in_bounds")
    return Served(start, start + service, before.at[place].get(mode="promise_in_bounds"))
