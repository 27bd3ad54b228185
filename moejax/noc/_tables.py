"""Results as columns for plots, files and terminals, units in their names. On the host only."""

import numpy as np

from moejax._status import Status
from moejax._units import GB, US
from moejax.noc._messages import Messages
from moejax.noc._queue import NO_ITEM
from moejax.noc._run import Bookings
from moejax.noc._simulate import LinkReport, Switching, bookings
from moejax.noc._topology import NO_LINK, Topology


def columns(topology: Topology, report: LinkReport) -> dict[str, np.ndarray]:
    """A `LinkReport`, whatever its batch axes, as columns of NumPy arrays with those axes.

    - `makespan_us`, `iterations`, and `status`, a name of `moejax.Status` in lower case.
    - `busiest_link`: the link in use longest, as "3>11" (from, to); "-" where nothing moves or the
        row is not okay. `busiest_link_us`: how long; `busiest_link_utilization`: the share of the
        makespan.
    - `link_gb_s`: bytes that all links together carry per second of makespan; `share_of_peak`: the
        same over the sum of their bandwidths.

    `topology` is the one of all rows.
    """
    makespan, busy = _float64(report.makespan), _float64(report.link_occupancy)
    bandwidth = _float64(topology.link_bandwidth)
    names = np.array([*link_names(topology), "-"])
    longest = np.max(busy, axis=-1, initial=0)
    # Without links there is nothing to look for; -1 picks the name that stands for none.
    place = np.argmax(busy, axis=-1) if busy.shape[-1] else np.full(busy.shape[:-1], -1)
    rate = _per(_carried(busy, bandwidth).sum(axis=-1), makespan)
    return {
        "makespan_us": makespan / US,
        "busiest_link": names[np.where(longest > 0, place, -1)],
        "busiest_link_us": longest / US,
        "busiest_link_utilization": _per(longest, makespan),
        "link_gb_s": rate / GB,
        "share_of_peak": _per(rate, bandwidth.sum()),
        "iterations": np.asarray(report.iterations),
        "status": np.array([code.name.lower() for code in Status])[np.asarray(report.status)],
    }


def link_rows(topology: Topology, report: LinkReport) -> dict[str, np.ndarray]:
    """One row per directed link, as columns: what `moejax.plot.link_heat_map` draws.

    - `link`, `name` (as "3>11"); `from`, `to`: vertex ids; `from_switch`, `to_switch`: whether
        these are switches; `from_x`, `from_y`, `to_x`, `to_y`: where to draw them, y down.
    - `occupancy_us`: how long the link is in use; `utilization`: the share of the makespan, which
        is the share of its peak rate that it reaches.
    - `gb_s`: bytes it carries per second of makespan; `peak_gb_s`: its bandwidth.
    - `critical`: whether it lies on the critical path.

    **Raises:** `ValueError` for a report with batch axes: take one row of it with `jax.tree.map`.
    """
    makespan, busy = _float64(report.makespan), _float64(report.link_occupancy)
    if makespan.ndim:
        raise ValueError(
            f"link_rows: report.makespan has shape {makespan.shape}, expected () (one row of a "
            "batch: jax.tree.map(lambda x: x[i], report))"
        )
    bandwidth, place = _float64(topology.link_bandwidth), _float64(topology.coordinates)
    table = {"link": np.arange(len(busy)), "name": np.array(link_names(topology), dtype=str)}
    for side, vertex in zip(("from", "to"), np.asarray(topology.links).T):
        table |= {side: vertex, f"{side}_switch": vertex >= topology.num_nodes}
        table |= {f"{side}_x": place[vertex, 0], f"{side}_y": place[vertex, 1]}
    return table | {
        "occupancy_us": busy / US,
        "utilization": _per(busy, makespan),
        "gb_s": _per(_carried(busy, bandwidth), makespan) / GB,
        "peak_gb_s": bandwidth / GB,
        "critical": np.asarray(report.critical_links),
    }


def timeline_rows(
    topology: Topology,
    messages: Messages,
    *,
    switching: Switching = "store_and_forward",
    max_iterations: int = 1000,
    busiest: int = 8,
) -> dict[str, np.ndarray]:
    """When messages use the busiest links, as columns: what `moejax.plot.link_timeline` draws.

    One row per use of a link by a message, the busiest link first, each in the order of time:
    `link`, `name` and `utilization` (of the link) as in `link_rows`; `message`, its `source` and
    `destination`; `start_us`, `end_us`; `critical`: whether this use lies on the critical path.
    Ports count as links where there are any: "in 3" is the injection, "out 3" the ejection port
    of node 3.

    **Arguments:**

    - `topology`, `messages`, `switching`, `max_iterations`: as `simulate`.
    - `busiest`: how many links; fewer where fewer are in use.

    **Raises:** `ValueError` as `simulate`, and for `busiest` below 1.
    """
    if busiest < 1:
        raise ValueError(f"timeline_rows.busiest = {busiest}: allowed is 1 or more")
    booked = bookings(topology, messages, switching=switching, max_iterations=max_iterations)
    resource = np.asarray(booked.resource)
    there = resource != NO_LINK
    used, start, end = resource[there], _float64(booked.start)[there], _float64(booked.end)[there]
    message = np.broadcast_to(np.arange(resource.shape[1]), resource.shape)[there]
    arrival = arrivals(topology, messages, booked)
    critical = critical_uses(booked, int(np.argmax(arrival)))[there] if used.size else used > 0
    # What waits for a dead link never ends, and is not time in use.
    time = np.subtract(end, start, out=np.zeros_like(end), where=np.isfinite(end))
    busy = np.bincount(used, time, minlength=topology.num_resources)
    place = np.empty(topology.num_resources, int)
    place[np.argsort(-busy, kind="stable")] = np.arange(topology.num_resources)
    order = np.lexsort((message, start, place[used]))
    order = order[place[used[order]] < busiest]
    used, message = used[order], message[order]
    return {
        "link": used,
        "name": np.array([*link_names(topology), *_port_names(topology)], dtype=str)[used],
        "message": message,
        "source": np.asarray(messages.source)[message],
        "destination": np.asarray(messages.destination)[message],
        "start_us": start[order] / US,
        "end_us": end[order] / US,
        "critical": critical[order],
        "utilization": _per(busy, np.max(arrival, initial=0))[used],
    }


def link_names(topology: Topology) -> list[str]:
    """Links as "from>to"."""
    return [f"{u}>{v}" for u, v in np.asarray(topology.links).tolist()]


def arrivals(topology: Topology, messages: Messages, booked: Bookings) -> np.ndarray:
    """[messages] s: a hop after the last use of a link; 0 for padding."""
    resource, end = np.asarray(booked.resource), _float64(booked.end)
    time = _float64(messages.start_time)
    for used, until in zip(resource, end):
        there = used != NO_LINK
        time = np.where(there, until + _float64(topology.resource_latency)[used], time)
    return np.where(np.asarray(messages.valid), time, 0)


def critical_uses(booked: Bookings, last: int) -> np.ndarray:
    """[columns, messages]: the uses of links on the critical path, where `simulate` marks messages
    and links. Walks back from the message that arrives last."""
    there, before = np.asarray(booked.resource) != NO_LINK, np.asarray(booked.before)
    critical = np.zeros(there.shape, bool)
    column, message = len(there) - 1, last
    while column >= 0:
        critical[column, message] |= there[column, message]
        if there[column, message] and before[column, message] != NO_ITEM:
            column, message = divmod(int(before[column, message]), there.shape[1])
        else:
            column -= 1
    return critical


def _port_names(topology: Topology) -> list[str]:
    if topology.num_resources == topology.num_links:
        return []
    return [f"{way} {node}" for way in ("in", "out") for node in range(topology.num_nodes)]


def _carried(busy: np.ndarray, bandwidth: np.ndarray) -> np.ndarray:
    """Bytes over each link; none over a dead one, which may be waited for without end."""
    return np.where(bandwidth > 0, busy, 0) * bandwidth


def _per(amount: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """amount / whole along the leading axes; 0 where the whole is, NaN where nothing arrives."""
    whole = np.expand_dims(whole, tuple(range(np.ndim(whole), np.ndim(amount))))
    with np.errstate(invalid="ignore"):
        return np.where(whole == 0, 0, amount / np.where(whole == 0, 1, whole))


def _float64(values) -> np.ndarray:
    return np.asarray(values, np.float64)
