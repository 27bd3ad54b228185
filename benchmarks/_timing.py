"""Timing on noisy machines: medians, ratios within one run, compilation apart."""

import os
import platform
import statistics
import time
from collections.abc import Callable

import jax


def seconds(run: Callable[[], object], repeats: int) -> float:
    """Median wall time of `run`, results awaited, after one call that is not counted."""
    jax.block_until_ready(run())
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(run())
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def first_call(run: Callable[[], object]) -> float:
    """Wall time of a first call, tracing and compilation included."""
    start = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start


def machine() -> str:
    """What a number was measured on."""
    device = jax.devices()[0]
    return (
        f"{platform.machine()}, {os.cpu_count()} cores, {device.platform}; "
        f"Python {platform.python_version()}, jax {jax.__version__}"
    )
