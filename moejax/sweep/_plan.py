"""Which calls run together: groups that share a program, cut into tiles of one fixed width.

The plan depends on the sweep alone, not on devices, shards or chunks, so that everybody who runs a
part of it computes the same rows with the same program.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from moejax.sweep._axes import Axis
from moejax.sweep._host import Prepared, combine
from moejax.sweep._sweep import Sweep
from moejax.sweep._values import LARGE, Structure, Value, split, stack


MOST_WIDTH = 64


class Traced(NamedTuple):
    """An axis of pytrees: its values by structure.

    Fields: `values`, `bucket` (which structure each has), `position` (its place among those of
    one), `shared` (whether the rows of a tile have to have the same).
    """

    values: list[Value]
    bucket: np.ndarray
    position: np.ndarray
    shared: bool

    def structure(self, bucket: int) -> Structure:
        return self.values[int(np.argmax(self.bucket == bucket))].structure

    def table(self, bucket: int) -> tuple[Any, ...]:
        """Arrays [values, ...] of all of one structure."""
        return stack([self.values[i] for i in np.flatnonzero(self.bucket == bucket)])


class Plan:
    """The tiles of a sweep.

    Fields:

    - `order`: [calls], calls by group.
    - `start`, `count`: [tiles], where in `order` a tile starts and how many calls it has.
    - `group`: [tiles], tiles of one group share a program, unless what is prepared differs.
    - `width`: calls in a full tile.
    - `traced`: axes of pytrees by name; `large`: names prepared that a tile shares.
    """

    def __init__(self, sweep: Sweep, prepared: Prepared):
        calls = sweep.calls
        self.calls, self.prepared = calls, prepared
        self.traced = {axis.name: _traced(axis) for axis in sweep.axes if _is_tree(axis)}
        self.large = [
            name
            for name, step in prepared.made.items()
            if split(step.any_result()[name]).structure.num_bytes > LARGE
        ]
        groups, shared = [], []
        for axis in sweep.axes:
            if axis.inner:
                continue
            codes = calls.codes[axis.name]
            if axis.static:
                groups.append(codes)
            elif axis.name in self.traced:
                traced = self.traced[axis.name]
                groups.append(traced.bucket[codes])
                shared += [codes] if traced.shared else []
        shared += [prepared.made[name].ids for name in self.large]
        group, _ = combine(groups, len(calls))
        run, _ = combine([group, *shared], len(calls))
        keys = [calls.codes[name] for name in reversed(sweep.bucket)]
        # Runs are numbered by value; in the order of their first call they are easier to watch.
        self.order = np.lexsort((*keys, _by_appearance(run), _by_appearance(group)))
        self.width = sweep.width or _default_width(run)
        self._cut(run[self.order], group[self.order])

    def _cut(self, run: np.ndarray, group: np.ndarray) -> None:
        first = np.flatnonzero(np.diff(run, prepend=-1))
        length = np.diff(first, append=len(run))
        tiles = -(-length // self.width)
        step = np.arange(tiles.sum()) - np.repeat(np.cumsum(tiles) - tiles, tiles)
        self.start = np.repeat(first, tiles) + step * self.width
        self.count = np.minimum(np.repeat(length, tiles) - step * self.width, self.width)
        self.group = group[self.start]

    @property
    def num_tiles(self) -> int:
        return len(self.start)

    def rows_of(self, tiles: Sequence[int]) -> int:
        """How many calls of their own some tiles have."""
        return int(self.count[np.array(tiles, int)].sum())

    def calls_of(self, tiles: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(calls [tiles, width], whether each is its own or fills up the tile)."""
        step = np.arange(self.width)
        own = step < self.count[tiles, None]
        last = self.count[tiles, None] - 1
        return self.order[self.start[tiles, None] + np.minimum(step, last)], own


def shard_of(num_tiles: int, shard: tuple[int, int]) -> range:
    """The tiles of shard (i, n): neighbours, so that a shard compiles few programs."""
    at, count = shard
    return range(at * num_tiles // count, (at + 1) * num_tiles // count)


def _is_tree(axis: Axis) -> bool:
    return axis.kind == "traced" and not axis.is_number


def _traced(axis: Axis) -> Traced:
    values = [split(value) for value in axis.seen]
    seen: dict[Structure, int] = {}
    bucket = np.array([seen.setdefault(value.structure, len(seen)) for value in values], np.int32)
    position = np.zeros_like(bucket)
    for at in range(len(seen)):
        position[bucket == at] = np.arange(np.count_nonzero(bucket == at))
    shared = max(value.structure.num_bytes for value in values) > LARGE
    return Traced(values, bucket, position, shared)


def _by_appearance(ids: np.ndarray) -> np.ndarray:
    _, first, inverse = np.unique(ids, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[inverse.reshape(-1)]


def _default_width(run: np.ndarray) -> int:
    longest = int(np.bincount(run).max())
    return min(1 << (longest - 1).bit_length(), MOST_WIDTH)
