"""Runs a sweep: chunks of tiles, host and device at the same time, parts that last."""

import contextlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from moejax.sweep import _config, _folder, _parts
from moejax.sweep._chunks import Chunks
from moejax.sweep._columns import Columns, concatenate
from moejax.sweep._lock import locked
from moejax.sweep._plan import Plan, shard_of
from moejax.sweep._progress import Bar, Watch
from moejax.sweep._result import Result, load
from moejax.sweep._stop import Stop
from moejax.sweep._sweep import Sweep


def run(
    sweep: Sweep,
    out: str | Path | None = None,
    *,
    resume: bool = True,
    chunk: int | None = None,
    devices: int | Sequence[Any] | None = None,
    shard: str | None = None,
    progress: Callable[[Watch], None] | bool | None = None,
    memory: float | None = None,
    file: str | None = None,
) -> Result:
    """Runs every configuration of a sweep, once.

    Rows do not depend on `chunk`, `devices`, `shard`, interruptions or processes.

    **Arguments:**

    - `out`: a folder for the rows, whole after every part; or `None`, to keep them in memory.
    - `resume`: whether rows that are in `out` stay. Otherwise they go first.
    - `chunk`: tiles in a part. By default some ten seconds' worth.
    - `devices`: how many local devices, or which; all by default.
    - `shard`: `"2/8"` is the second of eight parts of the work, each for a process of its own. By
        default everything, or under `jax.distributed` the part of this process.
    - `progress`: called with a `Watch` as rows arrive; a bar on a terminal by default; `False` for
        silence.
    - `memory`: bytes that a chunk may take on a device. By default 80 % of what a GPU or TPU has,
        and half of what the host has free.
    - `file`: the sweep file, for the manifest.

    **Returns:** the rows: all of them, or those in `out` so far where other shards write too.

    **Raises:** `ValueError` for options that make no sense, for an `out` with rows of another
    config (with what differs) or one that another process writes to, and if every row is refused;
    `KeyboardInterrupt` after Ctrl-C or SIGTERM, once the chunk is whole.
    """
    if chunk is not None and (not isinstance(chunk, int) or chunk < 1):
        raise ValueError(f"run: chunk = {chunk!r}: allowed is a whole number from 1")
    if not (progress is None or isinstance(progress, bool) or callable(progress)):
        raise ValueError(f"run: progress = {progress!r:.60}: allowed are a function, True, False")
    if out is None and not resume:
        raise ValueError("run: resume=False without out: there is nothing to resume")
    used = _devices(devices)
    at, count = _shard(shard)
    if not resume and count > 1:
        raise ValueError("run: resume=False in a shard would remove the rows of the others")
    label = Path(file).stem if file else "sweep"
    bar = Bar(label) if progress in (None, True) and jax.process_index() == 0 else None
    listeners = [bar] if bar else [progress] if callable(progress) else []
    with contextlib.ExitStack() as stack:
        if out is not None:
            # Before an hour of preparing, not after it.
            Path(out).mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(Path(out), (at, count)))
        # As they are now: host functions may fill tables of their own.
        functions = sweep.functions
        plan = Plan(sweep, sweep.prepared())
        config = _config.config_of(sweep, functions, plan.width, used[0].platform)
        manifest = _folder.manifest_of(sweep, config, plan.num_tiles, file)
        tiles = shard_of(plan.num_tiles, (at, count))
        stop = stack.enter_context(Stop())
        if bar:
            stack.callback(bar.close)
        chunks = Chunks(sweep, plan, used, stop, chunk=chunk, memory=memory, listeners=listeners)
        if out is None:
            parts: list[Columns] = []
            chunks.run(list(tiles), lambda first, last, columns: parts.append(columns), None)
            manifest["columns"] = chunks.schema
            return Result(manifest, count == 1, lambda: concatenate(parts) if parts else {})
        alone = count == 1
        folder = _folder.prepare(Path(out), manifest, config, resume=resume, alone=alone)
        _parts.clean(Path(out), tiles)
        missing = folder.missing(tiles)
        there = sorted({*tiles} - {*missing})
        chunks.run(missing, folder.write, folder, plan.rows_of(there) * sweep.inner_size)
        _note(chunks.unread if len(missing) == plan.num_tiles else ())
    return load(out, partial=True)


def _note(unread: Sequence[str]) -> None:
    """Says which axes changed nothing, where several programs hid it until the end."""
    for name in unread:
        print(f"axis {name!r} changed nothing: fn does not ask for it", file=sys.stderr)


def _devices(devices: int | Sequence[Any] | None) -> list[Any]:
    local = jax.local_devices()
    if devices is None:
        return local
    if isinstance(devices, int):
        if not 1 <= devices <= len(local):
            raise ValueError(f"run: devices = {devices}: allowed is 1 to {len(local)}")
        return local[:devices]
    if not len(devices):
        raise ValueError("run: devices: allowed is at least one")
    return list(devices)


def _shard(shard: str | None) -> tuple[int, int]:
    """(position from 0, number of shards)."""
    if shard is None:
        return jax.process_index(), jax.process_count()
    at, slash, count = str(shard).partition("/")
    if not (slash and at.isdecimal() and count.isdecimal() and 1 <= int(at) <= int(count)):
        raise ValueError(
            f"run: shard = {shard!r}: allowed is '1/8' to '8/8', for any number of them"
        )
    return int(at) - 1, int(count)
