"""Locks: one process for a shard, one kind of sharding for a folder.

Locks of the system, so that one whose owner was killed is free again.
"""

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def locked(folder: Path, shard: tuple[int, int]) -> Iterator[None]:
    """Holds a folder, or its part for one of several shards, while rows are written.

    **Raises:** `ValueError` where another process holds it.
    """
    at, count = shard
    with contextlib.ExitStack() as stack:
        # Everybody who writes shares the folder, unless it is theirs alone.
        _hold(stack, folder / ".lock", shared=count > 1)
        if count > 1:
            _hold(stack, folder / f".lock-{at + 1}-of-{count}", shared=False)
        yield


@contextlib.contextmanager
def briefly(folder: Path) -> Iterator[None]:
    """Waits for the folder's manifest, and holds it."""
    with contextlib.ExitStack() as stack:
        _hold(stack, folder / ".lock-manifest", shared=False, wait=True)
        yield


def _hold(stack: contextlib.ExitStack, path: Path, *, shared: bool, wait: bool = False) -> None:
    try:
        import fcntl
    except ImportError:  # no POSIX: one process a folder is then the user's own care
        return
    file = stack.enter_context(path.open("a+"))
    kind = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB)
    try:
        fcntl.flock(file, kind)
    except BlockingIOError:
        file.seek(0)
        owner = " ".join(file.read().split()) or "another process"
        raise ValueError(
            f"{path.parent}: {owner} is writing here; wait for it, or choose another folder"
        ) from None
    if not wait:
        # For people: whoever comes next is told who holds it.
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
