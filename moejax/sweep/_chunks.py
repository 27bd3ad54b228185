"""The loop: one chunk on the devices while the host prepares the next and writes the one before.

A chunk is a few neighboring tiles of one group, and becomes one part. How many depends on memory
and time, never what is in a row.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np

from moejax._checks import nearest
from moejax.sweep._columns import (
    OK,
    ROW,
    STATUS,
    Columns,
    Maker,
    Text,
    concatenate,
    failed,
    overruled,
    schema_of,
)
from moejax.sweep._folder import Folder
from moejax.sweep._host import HostFunction
from moejax.sweep._memory import budget_of
from moejax.sweep._plan import Plan
from moejax.sweep._program import Program, Programs, one_line
from moejax.sweep._progress import Meter, Watch
from moejax.sweep._stop import Stop
from moejax.sweep._sweep import Sweep


PART_SECONDS = 10.0
PART_ROWS = 1 << 20


class Launch(NamedTuple):
    """A tile on each device: calls [tiles, width], which are their own, why some were refused,
    and what comes of them; `program` is `None` where all were."""

    calls: np.ndarray
    own: np.ndarray
    refused: dict[int, str]
    program: Program | None
    results: Any


class Chunk(NamedTuple):
    """Neighboring tiles on their way."""

    tiles: list[int]
    launches: list[Launch]


class Chunks:
    """Runs tiles and hands over their columns.

    Fields: `schema`, what columns there are (for the manifest), once some are; `unread`, axes that
    no program has asked for.
    """

    def __init__(
        self,
        sweep: Sweep,
        plan: Plan,
        devices: Sequence[Any],
        stop: Stop,
        *,
        chunk: int | None,
        memory: float | None,
        listeners: Sequence[Callable[[Watch], None]],
    ):
        self._sweep, self._plan, self._stop, self._chunk = sweep, plan, stop, chunk
        self._num_devices, self._listeners = len(devices), listeners
        self._budget = budget_of(devices, memory)
        self._programs = Programs(sweep, plan, devices)
        about = sweep.about and HostFunction("about", sweep.about, sweep.calls, {})
        self._maker = Maker(sweep, about or None)
        self.schema: dict[str, dict[str, str]] = {}
        self._depth, self._most = 2, plan.num_tiles + 1
        self._timed, self._finished_at = len(devices), time.monotonic()

    def run(
        self, tiles: list[int], write: Callable[[int, int, Columns], Any], folder: Folder | None
    ) -> None:
        """All of `tiles`, in order.

        **Raises:** `KeyboardInterrupt` if asked to stop, when the chunks on their way are whole.
        """
        self._write, self._folder = write, folder
        self.schema = dict(folder.manifest["columns"]) if folder else {}
        rows = int(self._plan.count[tiles].sum()) * self._sweep.inner_size
        total = self._sweep.num_rows
        self._meter = Meter(total if folder else rows, 0, self._num_devices, self._listeners)
        queue, flying, late = deque(tiles), deque[Chunk](), list[Chunk]()
        with ThreadPoolExecutor(1, thread_name_prefix="moejax-writer") as writer:
            self._writing: deque[Future] = deque()
            while flying or (queue and not self._stop.asked):
                try:
                    self._step(queue, flying, late, writer)
                except jax.errors.JaxRuntimeError as error:
                    if "RESOURCE_EXHAUSTED" not in str(error):
                        raise
                    self._halve(queue, flying, error)
            if not self._stop.asked:
                for chunk in late:
                    self._hand_over(chunk, self._refusals(chunk), writer)
            self._wait(0)
        if self._stop.asked:
            raise KeyboardInterrupt

    def _step(self, queue: deque, flying: deque, late: list, writer: ThreadPoolExecutor) -> None:
        """Starts a chunk, and finishes the oldest if there are enough."""
        if queue and not self._stop.asked and len(flying) < self._depth:
            chunk = Chunk([], [])
            # From here on it is known to whoever has to put its tiles back.
            flying.append(chunk)
            self._start(queue, chunk)
            if len(flying) < self._depth and queue:
                return
        chunk = flying[0]
        columns = self._finish(chunk)
        flying.popleft()
        if columns is None and not self.schema:
            late.append(chunk)
        else:
            self._hand_over(chunk, columns or self._refusals(chunk), writer)

    def _start(self, queue: deque, chunk: Chunk) -> None:
        """Launches tiles until the chunk is full."""
        plan, group, program = self._plan, self._plan.group[queue[0]], None
        while queue and len(chunk.tiles) < self._limit(program):
            room = min(self._limit(program) - len(chunk.tiles), self._num_devices)
            taken: list[int] = []
            last = chunk.tiles[-1] if chunk.tiles else queue[0] - 1
            while (
                queue
                and len(taken) < room
                and queue[0] == last + 1
                and plan.group[queue[0]] == group
            ):
                last = queue.popleft()
                taken.append(last)
            if not taken:
                return
            chunk.tiles.extend(taken)
            launch = self._launch(np.array(taken))
            chunk.launches.append(launch)
            program = launch.program
            if self._stop.asked:
                return

    def _launch(self, tiles: np.ndarray) -> Launch:
        calls, own = self._plan.calls_of(tiles)
        used, _, refused = self._programs.usable(tiles)
        # A device without a tile of its own repeats the last one.
        spread = np.minimum(np.arange(self._num_devices), len(tiles) - 1)
        before = self._programs.compiled
        started = time.monotonic()
        bad = np.isin(used, list(refused)).any(axis=1)
        try:
            if bad.any():
                # All calls of a tile were refused: another tile stands in for it.
                used = used[np.where(bad, np.argmin(bad), np.arange(len(tiles)))]
            if bad.all():
                return Launch(calls, own, refused, None, None)
            program, results = self._programs.launch(tiles[spread], used[spread])
        except ValueError as error:
            why = dict.fromkeys(calls.reshape(-1).tolist(), one_line(error)) | refused
            return Launch(calls, own, why, None, None)
        if self._programs.compiled > before:
            self._meter.compiles = self._programs.compiled
            self._finished_at += time.monotonic() - started
            self._check_read()
            self._limit(program)
        return Launch(calls, own, refused, program, results)

    def _finish(self, chunk: Chunk) -> Columns | None:
        """Columns of a chunk, `None` where there is no row that was not refused."""
        done = [launch for launch in chunk.launches if launch.program is not None]
        for launch in done:
            jax.block_until_ready(launch.results)
            self._meter.rows += int(launch.own.sum()) * self._sweep.inner_size
            self._meter.tell()
        fetched = jax.device_get([launch.results for launch in done])
        self._time(len(chunk.tiles))
        made = [self._columns(launch, results) for launch, results in self._together(done, fetched)]
        if not made:
            return None
        if not self.schema:
            self._describe(made[0])
        refused = [self._all_refused(launch) for launch in chunk.launches if launch.program is None]
        return concatenate([*made, *refused])

    def _together(self, launches: list[Launch], fetched: list) -> list[tuple[Launch, Any]]:
        """Launches of one program as one, so that columns are made once for all of them."""
        found = []
        for program in dict.fromkeys(launch.program for launch in launches):
            at = [i for i, launch in enumerate(launches) if launch.program is program]
            own = np.concatenate([self._padded(launches[i].own).reshape(-1) for i in at])
            pick = lambda *leaves, own=own: np.concatenate(leaves)[own]
            results = jax.tree.map(pick, *(fetched[i] for i in at))
            why = {call: text for i in at for call, text in launches[i].refused.items()}
            calls = np.concatenate([launches[i].calls[launches[i].own] for i in at])
            found.append((Launch(calls, own, why, program, None), results))
        return found

    def _padded(self, own: np.ndarray) -> np.ndarray:
        """[devices, width]: what a device without a tile of its own computed is nobody's."""
        missing = self._num_devices - len(own)
        return np.pad(own, ((0, missing), (0, 0))) if missing else own

    def _columns(self, launch: Launch, results: Any) -> Columns:
        fixed = self._maker.fixed(launch.calls)
        order = launch.program.layout.order if launch.program else ()
        found = self._maker.results(results, len(launch.calls), order)
        if twice := found.keys() & fixed.keys():
            raise ValueError(f"column {sorted(twice)[0]!r} is there twice: fn, an axis, or about")
        self._found = set(found)
        if launch.refused:
            at = np.flatnonzero(np.isin(launch.calls, list(launch.refused)))
            size = self._sweep.inner_size
            rows = (at[:, None] * size + np.arange(size)).reshape(-1)
            why = [launch.refused[int(launch.calls[i])] for i in np.repeat(at, size)]
            found = overruled(found, rows, _values(schema_of(found)), why)
        return fixed | found

    def _refusals(self, chunk: Chunk) -> Columns:
        if not self.schema:
            why = next(iter(chunk.launches[0].refused.values()))
            raise ValueError(f"every row was refused, the first with: {why}")
        return concatenate([self._all_refused(launch) for launch in chunk.launches])

    def _all_refused(self, launch: Launch) -> Columns:
        calls, size = launch.calls[launch.own], self._sweep.inner_size
        why = [launch.refused[int(call)] for call in np.repeat(calls, size)]
        values = {n: of["dtype"] for n, of in self.schema.items() if of["role"] == "value"}
        self._meter.rows += len(why)
        return self._maker.fixed(calls) | failed(_values(values), why)

    def _describe(self, columns: Columns) -> None:
        roles = dict.fromkeys(self._found, "value")
        roles |= dict.fromkeys(self._sweep.names, "axis") | {ROW: "row"}
        self.schema = {
            name: {"dtype": dtype, "role": roles.get(name, "about")}
            for name, dtype in schema_of(columns).items()
        }
        if self._folder is not None:
            self._folder.describe(self.schema)

    def _hand_over(self, chunk: Chunk, columns: Columns, writer: ThreadPoolExecutor) -> None:
        self._check_schema(columns)
        self._wait(1)
        first, last = chunk.tiles[0], chunk.tiles[-1]
        self._writing.append(writer.submit(self._write, first, last, columns))
        status = columns[STATUS]
        assert isinstance(status, Text)
        self._meter.failed += int(np.count_nonzero((status.words != OK)[status.codes]))
        self._meter.parts += 1
        self._meter.tell()

    def _check_schema(self, columns: Columns) -> None:
        if odd := columns.keys() ^ self.schema.keys():
            raise ValueError(f"fn gives column {sorted(odd)[0]!r} for some configurations only")

    def _wait(self, most: int) -> None:
        """Until at most so many parts are not written yet."""
        while len(self._writing) > most:
            self._writing.popleft().result()

    def _limit(self, program: Program | None) -> int:
        """Tiles that a chunk may have, by option, time, and memory."""
        most = min(self._chunk or self._timed, self._most)
        if program is None:
            return max(most, 1)
        left = self._budget - program.num_bytes
        if program.out_bytes > left:
            needed = (program.num_bytes + program.out_bytes) / 1e6
            raise ValueError(
                f"a tile of width {self._plan.width} takes {needed:.0f} MB on a device, the budget "
                f"is {self._budget / 1e6:.0f} MB: choose a smaller width in the sweep"
            )
        launches = int(left // max(self._depth * program.out_bytes, 1))
        return max(min(most, launches * self._num_devices), 1)

    def _time(self, tiles: int) -> None:
        """Learns how many tiles take the time of a part, compilation apart."""
        now = time.monotonic()
        seconds = max(now - self._finished_at, 1e-3)
        self._finished_at = now
        most = max(PART_ROWS // (self._plan.width * self._sweep.inner_size), 1)
        wanted = min(int(PART_SECONDS * tiles / seconds), 4 * self._timed, most)
        self._timed = max(wanted // self._num_devices, 1) * self._num_devices

    def _halve(self, queue: deque, flying: deque, error: Exception) -> None:
        """Puts all tiles back and takes half as many from now on."""
        largest = max(len(chunk.tiles) for chunk in flying)
        while flying:
            queue.extendleft(reversed(flying.pop().tiles))
        if largest <= self._num_devices:
            # One launch is what there is: only one at a time is left to try.
            if self._depth == 1:
                text = f"width {self._plan.width} does not fit the device: {one_line(error)}"
                raise ValueError(f"{text}; choose a smaller width in the sweep") from None
            self._depth = 1
        self._most = max(largest // 2, 1)

    def _check_read(self) -> None:
        """An axis that changes nothing is a mistake, seen before the first row."""
        if len(np.unique(self._plan.group)) == 1 and (unread := self.unread):
            known = sorted(self._programs.read)
            hint = nearest(unread[0], known)
            raise _Unread(f"axis {unread[0]!r} changes nothing: fn does not ask for it{hint}")

    @property
    def unread(self) -> list[str]:
        """Axes that neither `fn` nor a host function has asked for."""
        asked = set(self._programs.read) | self._sweep.host_names
        names = [axis.name for axis in self._sweep.axes if axis.name.split(".")[0] == axis.name]
        return [name for name in names if name not in asked]


class _Unread(ValueError):
    """Of the sweep, not of a row."""


def _values(schema: dict[str, str]) -> dict[str, str]:
    return {name: dtype for name, dtype in schema.items() if name != STATUS}
