"""Messages cut into packets, so that a long one does not hold a link for all of its length."""

import math

import jax.numpy as jnp
import numpy as np

from moejax._checks import check_positive
from moejax._status import Status, flag, is_traced, merge
from moejax._typing import Array, FloatLike
from moejax.noc._messages import Messages


# Of a packet: less than that left over by rounding is not a packet of its own.
REMAINDER = 1e-6


def packets_needed(messages: Messages, packet_bytes: FloatLike) -> int:
    """The largest number of packets of any one message. Concrete values only."""
    largest = float(np.max(np.where(messages.valid, messages.bytes, 0), initial=0))
    return max(1, math.ceil(largest / float(packet_bytes) - REMAINDER))


def check_packets(messages: Messages, packet_bytes: FloatLike, max_packets: int | None) -> int:
    """The static number of packets per message.

    **Raises:** `ValueError` where `max_packets` is needed but missing, or too few.
    """
    check_positive("simulate", "packet_bytes", packet_bytes)
    if max_packets is not None and max_packets < 1:
        raise ValueError(f"simulate.max_packets = {max_packets}: allowed is 1 or more")
    if is_traced(messages) or is_traced(packet_bytes):
        if max_packets is None:
            raise ValueError("simulate.max_packets must be given where values are traced")
        return max_packets
    needed = packets_needed(messages, packet_bytes)
    if max_packets is not None and needed > max_packets:
        message = int(np.argmax(np.where(messages.valid, messages.bytes, 0)))
        raise ValueError(
            f"message {message} has {float(messages.bytes[message]):g} bytes, {needed} packets of "
            f"{float(packet_bytes):g}: allowed is max_packets = {max_packets}"
        )
    return needed if max_packets is None else max_packets


def split(messages: Messages, packet_bytes: FloatLike, max_packets: int) -> Messages:
    """[messages * max_packets] packets, those of one message side by side; the last is shorter."""
    number = jnp.arange(max_packets)
    sent = number * packet_bytes
    rest = messages.bytes[:, None] - sent
    exists = (number == 0) | (rest > REMAINDER * packet_bytes)
    left = messages.bytes - max_packets * packet_bytes
    too_many = jnp.any(messages.valid & (left > REMAINDER * packet_bytes))
    spread = lambda x: jnp.repeat(x, max_packets)
    return Messages(
        spread(messages.source),
        spread(messages.destination),
        jnp.clip(rest, 0, packet_bytes).reshape(-1),
        (messages.valid[:, None] & exists).reshape(-1),
        spread(messages.start_time),
        None if messages.flow is None else spread(messages.flow),
        merge(messages.status, flag(too_many, Status.TOO_MANY_MESSAGES)),
    )


def join(packets: Array, max_packets: int) -> Array:
    """[messages, max_packets]: what belongs to one message in a row."""
    return packets.reshape(-1, max_packets)
