"""A pseudo-channel in plain Python, one command at a time; and a checker of timing violations.

Whole clocks. The channel keeps what was last sent where, and asks for every new command how long
each of those keeps it waiting. The checker takes a list of commands with their times and looks at
all pairs; it knows nothing of how they came about.
"""

import functools


KINDS = ("ACT", "RD", "WR", "PRE", "MAC", "GWRITE", "RDRES", "SYNC", "NOP")
COLUMNS = ("RD", "WR", "MAC")
# Pairs that share data and no wires.
DEPENDENT = ({"MAC", "RDRES"}, {"MAC", "GWRITE"})
ALL, EVEN, ODD, FOUR = -1, -2, -3, -4


def distance(t, earlier, later, relation):
    """Clocks from `earlier` to `later`, or None where they may go together.

    `relation`: `same` bank, bank `group`, `other` group, or row buffers `across` in the other set.
    """
    written = t["cwl"] + t["burst"]
    near = relation in ("same", "group")
    wtr = t["wtr_long"] if near else t["wtr_short"]
    ccd = t["ccd_long"] if near else t["ccd_short"]
    read_to_write = max(0, t["cl"] + t["burst"] + t["turnaround"] - t["cwl"])
    if earlier == "ACT" and later == "ACT":
        return {"same": t["rc"], "group": t["rrd_long"]}.get(relation, t["rrd_short"])
    if later in ("ACT", "PRE") or earlier in ("ACT", "PRE"):
        return _row_distance(t, earlier, later, written) if relation == "same" else None
    if {earlier, later} <= {"MAC", "RD", "WR"} and "MAC" in (earlier, later):
        if earlier == later:
            return t["mac_cadence"]
        if relation == "across":
            return None
        if earlier == "WR":
            return written + wtr
        return read_to_write if later == "WR" else ccd
    if earlier == "MAC":
        return t["drain"] if later == "RDRES" else t["mac_cadence"]
    if later == "MAC":
        return t["operand"] if earlier == "GWRITE" else None
    return _bus_distance(t, earlier, later, ccd, written + wtr, read_to_write)


def _row_distance(t, earlier, later, written):
    return {
        ("ACT", "RD"): t["rcd"],
        ("ACT", "MAC"): t["rcd"],
        ("ACT", "WR"): t["rcd_write"],
        ("ACT", "PRE"): t["ras"],
        ("PRE", "ACT"): t["rp"],
        ("RD", "PRE"): t["read_to_precharge"],
        ("MAC", "PRE"): t["read_to_precharge"],
        ("WR", "PRE"): written + t["wr"],
    }.get((earlier, later))


def _bus_distance(t, earlier, later, ccd, write_to_read, read_to_write):
    reads = ("RD", "RDRES")
    if earlier == later:
        own = {"GWRITE": t["write_cadence"], "RDRES": t["result_cadence"]}
        return own.get(earlier, ccd)
    if (earlier, later) == ("GWRITE", "RDRES"):
        return t["write_to_result"]
    if (earlier, later) == ("RDRES", "GWRITE"):
        return t["result_to_write"]
    if earlier in reads and later in reads:
        return t["ccd_short"]
    if earlier not in reads and later not in reads:
        return t["ccd_short"]
    if earlier in reads:
        return read_to_write
    # Vector writes and results know no bank group.
    short = t["cwl"] + t["burst"] + t["wtr_short"]
    return write_to_read if (earlier, later) == ("WR", "RD") else short


@functools.cache
def nearest_relations(where, banks, per_group):
    """How the banks of one command stand to those of another, each by its nearest."""
    if not where or not banks:
        return frozenset(["other"])
    found = set()
    groups = {(side, bank // per_group) for side, bank in where}
    for side, bank in banks:
        if (side, bank) in where:
            found.add("same")
        elif (side, bank // per_group) in groups:
            found.add("group")
        else:
            found.add("other" if any(side == s for s, _ in where) else "across")
    return frozenset(found)


class Channel:
    """Sends commands one by one; `events` are (time, kind, banks) with (side, bank) in `banks`."""

    def __init__(self, t, num_banks, num_groups, *, dual=False, due=None, breaks=True):
        self.t, self.num_banks, self.per_group = t, num_banks, num_banks // num_groups
        self.dual, self.due, self.breaks = dual, due, breaks
        self.last, self.opened, self.activates, self.events = {}, set(), [], []
        self.floor = self.done = 0
        self.runs = []

    def banks_of(self, target, side):
        side = side if self.dual else 0
        return frozenset(
            (side, bank)
            for bank in range(self.num_banks)
            if target in (ALL, bank)
            or (target == EVEN and bank % 2 == 0)
            or (target == ODD and bank % 2 == 1)
            or (target <= FOUR and bank % self.per_group == FOUR - target)
        )

    def run(self, kind, count, target, side):
        """One run; appends (first, last) to `runs`, (-1, -1) where nothing was sent."""
        sent, times = [], []
        self.refreshed = False  # at most once a run
        if kind == "SYNC":
            self.done += count
            self.floor = max(self.floor, self.done)
        elif kind != "NOP" and count > 0:
            banks = self.banks_of(target, side)
            cadence = self.cadence(kind, target)
            for _ in range(count):
                at = self.send(kind, banks, target, sent, cadence)
                if at is None:
                    break
                sent.append(at)
                times.append(at)
        self.runs.append((times[0], times[-1]) if times else (-1, -1))

    def cadence(self, kind, target):
        if target <= FOUR and kind in COLUMNS:
            long = distance(self.t, kind, kind, "group")
            return max(distance(self.t, kind, kind, "other"), -(-long // 4))
        return distance(self.t, kind, kind, "same") or 0

    def send(self, kind, banks, target, sent, cadence):
        """One command of a run, of which `sent` are out: its time, or None if it does nothing."""
        if kind in ("GWRITE", "RDRES"):
            banks = frozenset()
        elif kind == "PRE":
            banks = banks & self.opened
        if (kind == "PRE" and not banks) or (kind == "ACT" and not banks - self.opened):
            return None
        self.refresh_if_due(kind, banks, target, sent, cadence)
        closed = banks - self.opened
        if closed and kind in ("ACT", *COLUMNS):
            # A row that is closed, or that the refresh has closed.
            at = self.when_opened(banks, target)
            self.record(at, "ACT", closed, target)
            if kind == "ACT":
                self.done = max(self.done, at)
                return at
        at = self.when(kind, banks, target, sent, cadence)
        self.record(at, kind, banks, target)
        if target <= FOUR and kind in COLUMNS:
            # One bank of the four at a time, in turn.
            at, kind, _, counted = self.events.pop()
            self.events.append((at, kind, frozenset([sorted(banks)[len(sent) % 4]]), counted))
        return at

    def refresh_if_due(self, kind, banks, target, sent, cadence):
        if self.due is None or self.refreshed or kind not in ("ACT", *COLUMNS):
            return
        at = self.when(kind, banks, target, sent, cadence)
        event = self.when_opened(banks, target) if banks - self.opened else at
        is_late = at >= self.due if self.breaks else not sent and event >= self.due
        if is_late or event >= self.due and not sent:
            self.refresh(event)
            sent.clear()
            self.refreshed = True

    def when(self, kind, banks, target, sent, cadence):
        """Earliest time of a command whose rows are open, or will be by an activate first."""
        if kind == "ACT":
            return self.when_opened(banks, target)
        if sent:
            return sent[-1] + cadence
        at = max(self.waits(kind, banks), self.floor)
        if banks - self.opened and kind in COLUMNS:
            opened = self.when_opened(banks, target) + self.spread(target)
            at = max(at, opened + distance(self.t, "ACT", kind, "same"))
        return at

    def when_opened(self, banks, target):
        at = max(self.waits("ACT", banks - self.opened), self.floor)
        if target < 0 and not self.counts(target):
            return at
        recent = sorted(self.activates)[-4:]
        if recent and (target < 0 or len(recent) == 4):
            at = max(at, (recent[-1] if target < 0 else recent[0]) + self.t["faw"])
        return at

    def counts(self, target):
        """Whether an activate is subject to the window."""
        return target >= 0 or target <= FOUR or self.t["windows"] > 1

    def spread(self, target):
        if target >= 0:
            return 0
        if target <= FOUR:
            return 3 * self.t["rrd_short"]
        return (self.t["windows"] - 1) * self.t["faw"]

    def waits(self, kind, banks):
        """The time before which what was sent keeps `kind` out of `banks`."""
        at = 0
        for (earlier, where), when in self.last.items():
            for relation in nearest_relations(where, banks, self.per_group):
                gap = distance(self.t, earlier, kind, relation)
                if gap is not None:
                    at = max(at, when + gap)
        return at

    def record(self, at, kind, banks, target):
        counted = []
        if kind == "ACT":
            last_bank = at + self.spread(target)
            if self.counts(target):
                counted = [last_bank] * (1 if target >= 0 else 4)
            self.activates += counted
            self.opened |= banks
            self.events.append((at, kind, banks, counted))
            self.last[kind, banks] = last_bank
            return
        if kind == "PRE":
            self.opened -= banks
        self.events.append((at, kind, banks, counted))
        self.last[kind, banks] = at
        read, write = self.t["cl"] + self.t["burst"], self.t["cwl"] + self.t["burst"]
        ends = {"RD": read, "WR": write, "MAC": self.t["mac_cadence"], "GWRITE": write}
        ends |= {"RDRES": self.t["result_latency"], "PRE": 0}
        self.done = max(self.done, at + ends[kind])

    def refresh(self, event):
        self.due += max(event - self.due, 0) // self.t["refi"] * self.t["refi"]
        close = max(self.due, self.floor)
        if self.opened:
            close = max(close, self.waits("PRE", frozenset(self.opened)))
            self.events.append((close, "PRE", frozenset(self.opened), []))
            self.last["PRE", frozenset(self.opened)] = close
        everything = frozenset((s, b) for s in range(1 + self.dual) for b in range(self.num_banks))
        early = max(self.t["rp"] - self.t["precharge_to_refresh"], 0)
        start = max(self.waits("ACT", everything) - early, self.due, self.floor)
        self.events.append((start, "REF", everything, []))
        self.opened = set()
        # An activate waits for the end of the refresh: as if there had been a precharge then.
        self.last["PRE", everything] = start + self.t["rfc"] - self.t["rp"]
        self.due += self.t["refi"]


def gemv_clocks(channel, stream):
    """Runs (kind, count, target, side) through a channel; its end."""
    for kind, count, target, side in stream:
        channel.run(KINDS[kind], count, target, side)
    return channel.done


def violations(t, events, per_group):
    """Every pair of commands that stand too close, and every command to a row in the wrong state.

    `events` are in program order. Operands and results tie only what comes in that order.
    """
    found = []
    order = sorted(enumerate(events), key=lambda numbered: numbered[1][0])
    for later, (number, (when, kind, banks, _)) in enumerate(order):
        for place, (before, first, where, _) in reversed(order[:later]):
            if when - before > t["longest"]:
                break
            if place > number and {first, kind} in DEPENDENT:
                continue
            for relation in _relations(where, banks, per_group):
                gap = _pair(t, first, kind, relation)
                if gap is not None and when - before < gap:
                    found.append((first, before, kind, when, relation, gap))
    timely = [event for _, event in order]
    return found + _row_errors(timely) + _window_errors(t, timely)


def _pair(t, earlier, later, relation):
    if earlier == "REF":
        return t["rfc"] if later == "ACT" else None
    if later == "REF":
        same = relation == "same"
        return {"PRE": t["precharge_to_refresh"]}.get(earlier) if same else None
    return distance(t, earlier, later, relation)


@functools.cache
def _relations(where, banks, per_group):
    if not where or not banks:
        return frozenset(["other"])
    found = set()
    for side, bank in banks:
        for s, b in where:
            if (s, b) == (side, bank):
                found.add("same")
            elif s != side:
                found.add("across")
            else:
                found.add("group" if b // per_group == bank // per_group else "other")
    return frozenset(found)


def _row_errors(order):
    found, opened = [], set()
    for when, kind, banks, _ in order:
        if kind == "ACT":
            found += [("ACT of an open row", when)] * bool(banks & opened)
            opened |= banks
        elif kind == "PRE":
            opened -= banks
        elif kind == "REF":
            found += [("REF with an open row", when)] * bool(opened)
        elif kind in COLUMNS and not banks <= opened:
            found.append((f"{kind} to a closed row", when))
    return found


def _window_errors(t, order):
    activates = sorted(when for *_, counted in order for when in counted)
    close = [when for when, fifth in zip(activates, activates[4:]) if fifth - when < t["faw"]]
    return [("five activates in a window", when) for when in close]
