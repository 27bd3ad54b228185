"""The loop: one chunk on the devices while the host prepares the next and writes the one before.

A chunk is a few neighboring tiles of one group, and becomes one part.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np

from moejax._checks import nearest
from moejax.sweep._columns import OK, STATUS, Columns, Text
from moejax.sweep._folder import Folder
from moejax.sweep._harvest import Harvest, Launch
from moejax.sweep._pace import Pace
from moejax.sweep._plan import Plan
from moejax.sweep._program import Program, one_line
from moejax.sweep._programs import Programs
from moejax.sweep._progress import Meter, Watch
from moejax.sweep._stop import Stop
from moejax.sweep._sweep import Sweep


class Chunk(NamedTuple):
    """Neighboring tiles on their way."""

    tiles: list[int]
    launches: list[Launch]


class Chunks:
    """Runs tiles and hands over their columns.

    Fields: `schema`, what columns there are, once some are; `unread`, axes that no program has
    asked for.
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
        self._sweep, self._plan, self._stop = sweep, plan, stop
        self._num_devices, self._listeners = len(devices), listeners
        self._programs = Programs(sweep, plan, devices)
        self._pace = Pace(sweep, plan, devices, chunk, memory)
        self.schema: dict[str, dict[str, str]] = {}

    def run(
        self,
        tiles: list[int],
        write: Callable[[int, int, Columns], Any],
        folder: Folder | None,
        there: int = 0,
    ) -> None:
        """All of `tiles`, in order; `there` are rows of others that are done already.

        **Raises:** `KeyboardInterrupt` if asked to stop, when the chunks on their way are whole.
        """
        self._write, self._folder = write, folder
        self.schema = dict(folder.manifest["columns"]) if folder else {}
        self._harvest = Harvest(self._sweep, self._num_devices, self.schema)
        rows = self._plan.rows_of(tiles) * self._sweep.inner_size
        self._meter = Meter(there + rows, there, self._num_devices, self._listeners)
        queue, flying, late = deque(tiles), deque[Chunk](), list[Chunk]()
        with ThreadPoolExecutor(1, thread_name_prefix="moejax-writer") as writer:
            self._writing: deque[Future] = deque()
            while flying or (queue and not self._stop.asked):
                try:
                    self._step(queue, flying, late, writer)
                except jax.errors.JaxRuntimeError as error:
                    if "RESOURCE_EXHAUSTED" not in str(error):
                        raise
                    self._pace.halve(max(len(chunk.tiles) for chunk in flying), error)
                    while flying:
                        queue.extendleft(reversed(flying.pop().tiles))
            if not self._stop.asked:
                for chunk in late:
                    self._hand_over(chunk, self._refusals(chunk), writer)
            self._wait(0)
        if self._stop.asked:
            raise KeyboardInterrupt

    def _step(self, queue: deque, flying: deque, late: list, writer: ThreadPoolExecutor) -> None:
        """Starts a chunk, and finishes the oldest if there are enough."""
        if queue and not self._stop.asked and len(flying) < self._pace.depth:
            chunk = Chunk([], [])
            # From here on it is known to whoever has to put its tiles back.
            flying.append(chunk)
            self._start(queue, chunk)
            if len(flying) < self._pace.depth and queue:
                return
        chunk = flying[0]
        columns = self._finish(chunk)
        flying.popleft()
        if columns is None:
            # All rows were refused, and nobody knows yet what columns they should have.
            late.append(chunk)
        else:
            self._hand_over(chunk, columns, writer)

    def _start(self, queue: deque, chunk: Chunk) -> None:
        """Launches tiles until the chunk is full."""
        group, program, next_tile = self._plan.group[queue[0]], None, queue[0]
        while not self._stop.asked or not chunk.tiles:
            limit = self._pace.limit(program) - len(chunk.tiles)
            taken: list[int] = []
            while queue and len(taken) < min(limit, self._num_devices):
                if queue[0] != next_tile or self._plan.group[next_tile] != group:
                    break
                taken.append(queue.popleft())
                next_tile += 1
            if not taken:
                return
            chunk.tiles.extend(taken)
            chunk.launches.append(self._launch(np.array(taken)))
            program = chunk.launches[-1].program

    def _launch(self, tiles: np.ndarray) -> Launch:
        calls, own = self._plan.calls_of(tiles)
        used, refused = self._programs.usable(calls)
        bad = np.isin(used, list(refused)).any(axis=1)
        if bad.all():
            return Launch(calls, own, refused, None, None)
        # All calls of a tile may have been refused: another tile stands in for it.
        stand_in = np.where(bad, np.argmin(bad), np.arange(len(tiles)))
        # A device without a tile of its own repeats the last one.
        spread = stand_in[np.minimum(np.arange(self._num_devices), len(tiles) - 1)]
        before, started = self._programs.compiled, time.monotonic()
        try:
            program, results = self._programs.launch(tiles[spread], used[spread])
        except ValueError as error:
            why = dict.fromkeys(calls.reshape(-1).tolist(), one_line(error)) | refused
            return Launch(calls, own, why, None, None)
        if self._programs.compiled > before:
            self._meter.compiles = self._programs.compiled
            self._pace.compiled(time.monotonic() - started)
            self._check(program)
        return Launch(calls, own, refused, program, results)

    def _check(self, program: Program) -> None:
        """What a new program shows before its first row: that it does not fit, or that an axis
        changes nothing, which is a mistake.

        **Raises:** `ValueError` for either.
        """
        self._pace.limit(program)
        if len(np.unique(self._plan.group)) == 1 and (unread := self.unread):
            hint = nearest(unread[0], sorted(self._programs.read))
            raise ValueError(f"axis {unread[0]!r} changes nothing: fn does not ask for it{hint}")

    @property
    def unread(self) -> list[str]:
        """Axes that neither `fn` nor a host function has asked for."""
        asked = self._programs.read | self._sweep.host_names
        names = [axis.name for axis in self._sweep.axes if "." not in axis.name]
        return [name for name in names if name not in asked]

    def _finish(self, chunk: Chunk) -> Columns | None:
        """Columns of a chunk, `None` where nothing has said yet what columns there are."""
        done = [launch for launch in chunk.launches if launch.program is not None]
        before = self._meter.rows
        try:
            for launch in done:
                jax.block_until_ready(launch.results)
                self._meter.rows += int(launch.own.sum()) * self._sweep.inner_size
                self._meter.tell()
            fetched = jax.device_get([launch.results for launch in done])
        except jax.errors.JaxRuntimeError:
            # Whoever runs them again counts them again.
            self._meter.rows = before
            raise
        self._pace.finished(len(chunk.tiles))
        columns = self._harvest.columns(chunk.launches, fetched)
        if columns is not None and not self.schema:
            self.schema = self._harvest.schema
            if self._folder is not None:
                self._folder.describe(self.schema)
        return columns

    def _refusals(self, chunk: Chunk) -> Columns:
        """Columns of a chunk of which every row was refused."""
        columns = self._harvest.columns(chunk.launches, [])
        if columns is None:
            why = next(iter(chunk.launches[0].refused.values()))
            raise ValueError(f"every row was refused, the first with: {why}")
        return columns

    def _hand_over(self, chunk: Chunk, columns: Columns, writer: ThreadPoolExecutor) -> None:
        self._wait(1)
        first, last = chunk.tiles[0], chunk.tiles[-1]
        self._writing.append(writer.submit(self._write, first, last, columns))
        status = columns[STATUS]
        assert isinstance(status, Text)
        refused = [launch.own for launch in chunk.launches if launch.program is None]
        self._meter.rows += sum(int(own.sum()) for own in refused) * self._sweep.inner_size
        self._meter.failed += int(np.count_nonzero((status.words != OK)[status.codes]))
        self._meter.parts += 1
        self._meter.tell()

    def _wait(self, most: int) -> None:
        """Until at most so many parts are not written yet."""
        while len(self._writing) > most:
            self._writing.popleft().result()
