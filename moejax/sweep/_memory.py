"""How much memory a chunk may take."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def budget_of(devices: Sequence[Any], given: float | None) -> float:
    """Bytes a device: what is given, or 80 % of a device's own memory, or half of the host's free
    memory, shared by its devices.

    **Raises:** `ValueError` unless it is positive.
    """
    if given is not None:
        if not 0 < given < float("inf"):
            raise ValueError(f"run: memory = {given}: allowed are positive numbers of bytes")
        return float(given)
    known = [device.memory_stats() or {} for device in devices]
    limits = [stats["bytes_limit"] for stats in known if "bytes_limit" in stats]
    return 0.8 * min(limits) if limits else 0.5 * _host_free() / len(devices)


def _host_free() -> float:
    info = Path("/proc/meminfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return 1024.0 * int(line.split()[1])
    return 0.5 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
