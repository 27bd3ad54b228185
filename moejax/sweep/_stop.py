"""Ctrl-C that lets a chunk finish."""

import signal
import sys
import threading
from typing import Any


SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stop:
    """While open, the first SIGINT or SIGTERM sets `asked`; the second stops at once.

    Only the main thread hears signals; elsewhere nothing changes.
    """

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Stop":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._hear) for number in SIGNALS}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _hear(self, number: int, frame: object) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        if sys.stderr.isatty():
            print("\nfinishing what has begun; once more stops at once", file=sys.stderr)
