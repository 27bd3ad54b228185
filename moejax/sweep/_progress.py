"""Watching a sweep: a bar on standard error where somebody watches, and a log of JSON lines."""

import json
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, TextIO


class Watch(NamedTuple):
    """Where a sweep stands.

    Fields: `rows` that are there out of `total` of this process, `rows_per_s` since it started and
    seconds to go (`eta_s`, infinite while nothing is known), `compiles`, `devices`, `failed` rows
    whose status is not okay, `parts` written.
    """

    rows: int
    total: int
    rows_per_s: float
    eta_s: float
    compiles: int
    devices: int
    failed: int
    parts: int


class Meter:
    """Counts rows and tells listeners."""

    def __init__(
        self, total: int, done: int, devices: int, listeners: Sequence[Callable[[Watch], None]]
    ):
        self._total, self._before, self._devices = total, done, devices
        self._listeners = listeners
        self._started = time.monotonic()
        self.rows = self.compiles = self.failed = self.parts = 0
        self.tell()

    def tell(self) -> None:
        """Tells everybody where it stands."""
        if not self._listeners:
            return
        spent = time.monotonic() - self._started
        rate = self.rows / spent if spent else 0.0
        done = self._before + self.rows
        left = (self._total - done) / rate if rate else float("inf")
        watch = Watch(
            done, self._total, rate, left, self.compiles, self._devices, self.failed, self.parts
        )
        for listener in self._listeners:
            listener(watch)


class Bar:
    """Redraws one line, at most ten times a second; `close` ends a line that stopped early."""

    def __init__(self, label: str, stream: TextIO | None = None):
        self._label, self._stream = label, sys.stderr if stream is None else stream
        self._drawn, self._open = -1.0, False
        self._watched = self._stream.isatty()

    def __call__(self, watch: Watch) -> None:
        now, last = time.monotonic(), watch.rows >= watch.total
        if not self._watched or (now - self._drawn < 0.1 and not last):
            return
        self._drawn, self._open = now, True
        filled = min(round(20 * watch.rows / max(watch.total, 1)), 20)
        bar = "#" * filled + "." * (20 - filled)
        facts = [f"{watch.rows}/{watch.total} rows", f"{watch.rows_per_s:.3g}/s"]
        facts += [_time(watch.eta_s)] if watch.rows_per_s and not last else []
        facts += [f"{watch.compiles} compiled", f"{watch.devices} dev"]
        facts += [f"{watch.failed} failed"] if watch.failed else []
        width = shutil.get_terminal_size((100, 24)).columns - 1
        line = f"{self._label} [{bar}] {', '.join(facts)}"[:width]
        # Padded, so that a shorter line hides the longer one before it.
        self._stream.write(f"\r{line:<{width}}")
        self._stream.flush()
        if last:
            self.close()

    def close(self) -> None:
        """Ends the line, if one was begun."""
        if self._open:
            self._open = False
            self._stream.write("\n")
            self._stream.flush()


class JsonLog:
    """One JSON object a line: time (s since the epoch) and all fields of `Watch`."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def __call__(self, watch: Watch) -> None:
        known = {name: value for name, value in watch._asdict().items() if value != float("inf")}
        self._stream.write(json.dumps({"time": round(time.time(), 3)} | known) + "\n")
        self._stream.flush()


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s left"
    return f"{seconds / 60:.0f} min left" if seconds < 7200 else f"{seconds / 3600:.1f} h left"
