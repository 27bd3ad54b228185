"""A progress bar on standard error, silent where nobody watches."""

import sys
import time
from typing import TextIO


class Progress:
    """Call it as `progress(done, total)`; it redraws one line, at most ten times a second.

    `close()` ends a line that stopped before its total, so that what is printed next has its own.
    """

    def __init__(self, label: str, stream: TextIO | None = None):
        self._label = label
        self._stream = sys.stderr if stream is None else stream
        self._started = time.monotonic()
        self._drawn = -1.0
        self._open = False
        self._watched = self._stream.isatty()

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        last = done >= total
        if not self._watched or (now - self._drawn < 0.1 and not last):
            return
        self._drawn = now
        elapsed = now - self._started
        filled = min(round(30 * done / max(total, 1)), 30)
        left = f", {elapsed / done * (total - done):.0f} s left" if 0 < done < total else ""
        bar = "#" * filled + "." * (30 - filled)
        line = f"\r{self._label} [{bar}] {done}/{total}, {elapsed:.0f} s{left}"
        self._open = True
        self._stream.write(f"{line:<79}")
        self._stream.flush()
        if last:
            self.close()

    def close(self) -> None:
        """Ends the line, if one was begun."""
        if self._open:
            self._open = False
            self._stream.write("\n")
            self._stream.flush()
