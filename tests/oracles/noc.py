"""A network as a literal event heap (HD-MoE, arXiv 2509.09420, Alg. 1): plain Python, no JAX.

A resource is a pair of whole numbers: a link is (from, to), an injection port `(INJECTION, node)`,
an ejection port `(EJECTION, node)`. A path is a tuple of resources, and Python's comparison of
tuples is the tie rule: hop by hop, the path that ends first, an ejection port before any link.
"""

import bisect
import heapq
import math
from typing import NamedTuple


INJECTION, EJECTION = -2, -1


class Booking(NamedTuple):
    """One use of a resource, times in s."""

    ready: float
    start: float
    end: float
    message: int
    service: float


class Simulated(NamedTuple):
    """What one run gives. Times in s; `finish` is 0 where a message is not valid.

    `occupancy`: s that each resource is used; `bookings`: its uses in the order of service.
    """

    makespan: float
    finish: list
    occupancy: dict
    bookings: dict


class Intervals:
    """Bookings of one resource as the authors keep them: sorted intervals with gaps between."""

    def __init__(self):
        self.intervals = []

    def book(self, now, duration):
        """(start, end) in the first gap at or after `now`."""
        gap = math.inf
        for start, end in self.intervals:
            if now < start:
                gap = start - now
                break
            now = max(now, end)
        # The algorithm would split the transfer here. It pops in order of time, so it never has to.
        assert duration <= gap, "a transfer had to be split"
        bisect.insort(self.intervals, (now, now + duration))
        return now, now + duration


class NextFree:
    """The same as one number: when the resource is free for good."""

    def __init__(self):
        self.free = 0.0

    def book(self, now, duration):
        """(start, end): after everything booked so far."""
        start = max(now, self.free)
        self.free = start + duration
        return start, self.free


def with_ports(path):
    """The path of one message with its source's injection and its destination's ejection port."""
    if not path:
        return ()
    return ((INJECTION, path[0][0]), *path, (EJECTION, path[-1][1]))


def duration(size, bandwidth):
    """Seconds on one resource: nothing takes no time, even on a dead link."""
    if size == 0:
        return 0.0
    return size / bandwidth if bandwidth else math.inf


def heap_simulate(
    paths,
    sizes,
    bandwidth,
    *,
    latency=None,
    start_times=None,
    valid=None,
    switching="store_and_forward",
    packet_bytes=None,
    calendar=NextFree,
):
    """Runs the messages through their paths.

    `paths`: a tuple of resources for each message; `sizes`: bytes; `bandwidth` and `latency`:
    dicts from resource to bytes/s and s (missing latency: 0). Store-and-forward serves the
    smallest (ready time, bytes, remaining path, index), cut-through the smallest (ready time,
    index). `packet_bytes` cuts each message into full packets and a rest, one after the other.
    """
    latency = latency or {}
    events, owner = [], []
    for message, (path, size) in enumerate(zip(paths, sizes)):
        if valid is not None and not valid[message]:
            continue
        for part in packets(size, packet_bytes):
            ready = 0.0 if start_times is None else start_times[message]
            events.append(event(switching, ready, part, tuple(path), len(owner)))
            owner.append(message)
    heapq.heapify(events)
    finish, calendars, bookings = [0.0] * len(paths), {}, {}
    while events:
        ready, *_, (size, path, index) = heapq.heappop(events)
        if not path:
            finish[owner[index]] = max(finish[owner[index]], ready)
            continue
        resource, rest = path[0], path[1:]
        time = duration(size, bandwidth[resource])
        start, end = calendars.setdefault(resource, calendar()).book(ready, time)
        booking = Booking(ready, start, end, owner[index], time)
        bookings.setdefault(resource, []).append(booking)
        leaves = end if switching == "store_and_forward" or not rest else start
        after = leaves + latency.get(resource, 0.0)
        heapq.heappush(events, event(switching, after, size, rest, index))
    occupancy = {r: math.fsum(b.service for b in booked) for r, booked in bookings.items()}
    return Simulated(max(finish, default=0.0), finish, occupancy, bookings)


def event(switching, ready, size, path, index):
    """A heap entry: its key, then what it carries."""
    if switching == "store_and_forward":
        return ready, size, path, index, (size, path, index)
    return ready, index, (size, path, index)


def packets(size, packet_bytes):
    """Bytes of each packet of one message."""
    if packet_bytes is None or size <= packet_bytes:
        return [size]
    full = math.ceil(size / packet_bytes) - 1
    return [packet_bytes] * full + [size - full * packet_bytes]


def busy_times(paths, sizes, bandwidth, valid=None):
    """Dict from each resource in use to the s that it is busy, whatever the order."""
    busy = {}
    for message, path in enumerate(paths):
        if valid is None or valid[message]:
            for resource in path:
                time = duration(sizes[message], bandwidth[resource])
                busy[resource] = busy.get(resource, 0.0) + time
    return busy


def link_bound(paths, sizes, bandwidth, valid=None):
    """The busiest resource: no schedule is faster than max over resources of bytes / bandwidth."""
    return max(busy_times(paths, sizes, bandwidth, valid).values(), default=0.0)


def critical_chain(run, paths):
    """Bookings that set the makespan, without packets: set of (resource, message).

    Walks back from the last arrival: a booking that waited for its resource leads to the one served
    before it there, any other one to the same message's previous hop.
    """
    message = max(range(len(paths)), key=lambda m: run.finish[m])
    hop, chain = len(paths[message]) - 1, set()
    while hop >= 0:
        resource = paths[message][hop]
        chain.add((resource, message))
        booked = run.bookings[resource]
        place = [b.message for b in booked].index(message)
        if booked[place].start > booked[place].ready:
            message = booked[place - 1].message
            hop = paths[message].index(resource)
        else:
            hop -= 1
    return chain
