"""How many tiles a chunk has: what memory holds, and what takes the time of a part."""

import time
from collections.abc import Sequence
from typing import Any

from moejax.sweep._memory import budget_of
from moejax.sweep._plan import Plan
from moejax.sweep._program import Program, one_line
from moejax.sweep._sweep import Sweep


PART_SECONDS = 10.0
PART_ROWS = 1 << 20
COPIES = 8
"""Of a table, between the devices' results and the file; measured."""


class Pace:
    """Sizes of chunks; never what is in a row.

    Fields: `depth`, chunks on the devices at the same time.
    """

    def __init__(
        self, sweep: Sweep, plan: Plan, devices: Sequence[Any], chunk: int | None,
        memory: float | None,
    ):  # fmt: skip
        self._width, self._num_devices, self._chunk = plan.width, len(devices), chunk
        inner_size = sweep.inner_size
        # Where the device is the host, tables on their way to a file come out of the same memory.
        self._copies = COPIES if devices[0].platform == "cpu" else 0
        self._fixed_bytes = 8 * (len(sweep.names) + 2) * plan.width * inner_size
        self._budget = budget_of(devices, memory)
        self._most_rows = max(PART_ROWS // (plan.width * inner_size), 1)
        self.depth, self._most = 2, plan.num_tiles + 1
        self._timed, self._finished_at = len(devices), time.monotonic()

    def limit(self, program: Program | None) -> int:
        """Tiles that a chunk may have, by option, time, and memory.

        **Raises:** `ValueError` where a single tile takes more than the budget.
        """
        most = min(self._chunk or self._timed, self._most)
        if program is None:
            return max(most, 1)
        left = self._budget - program.num_bytes
        if program.out_bytes > left:
            needed = (program.num_bytes + program.out_bytes) / 1e6
            raise ValueError(
                f"a tile of width {self._width} takes {needed:.0f} MB on a device, the budget is "
                f"{self._budget / 1e6:.0f} MB: choose a smaller width in the sweep"
            )
        tables = self._copies * (program.out_bytes + self._fixed_bytes)
        launches = int(left // max(self.depth * program.out_bytes + tables, 1))
        return max(min(most, launches * self._num_devices), 1)

    def compiled(self, seconds: float) -> None:
        """Leaves a compilation out of the time of the present chunk."""
        self._finished_at += seconds

    def finished(self, tiles: int) -> None:
        """Learns from a chunk of so many tiles how many take the time of a part."""
        now = time.monotonic()
        seconds = max(now - self._finished_at, 1e-3)
        self._finished_at = now
        wanted = int(PART_SECONDS * tiles / seconds)
        wanted = min(wanted, 4 * self._timed, self._most_rows)
        self._timed = max(wanted // self._num_devices, 1) * self._num_devices

    def halve(self, largest: int, error: Exception) -> None:
        """Half as many tiles as the largest chunk that there was no room for.

        **Raises:** `ValueError` where that was one launch, and alone.
        """
        if largest <= self._num_devices:
            if self.depth == 1:
                raise ValueError(
                    f"width {self._width} does not fit the device: {one_line(error)}; choose a "
                    "smaller width in the sweep"
                ) from None
            self.depth = 1
        self._most = max(largest // 2, 1)
