"""A bar for work of the host: placements that are searched, texts that are read."""

import sys
import time
from collections.abc import Callable


def progress_line(label: str) -> Callable[[int, int], None]:
    """Redraws one line on standard error, where somebody watches."""
    started = time.monotonic()

    def show(done: int, total: int) -> None:
        if sys.stderr.isatty():
            left = (time.monotonic() - started) / done * (total - done)
            bar = "#" * (20 * done // total)
            line = f"\r{label} [{bar:.<20}] {done}/{total}, {left:.0f} s left"
            print(f"{line:<79}", end="\n" if done == total else "", file=sys.stderr, flush=True)

    return show
