"""Plain-text tables, and what every command that computes sets up first."""

import argparse
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import jax


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns padded to their widest entry, two spaces apart; numbers to the right."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    numeric = [all(_is_number(row[i]) for row in rows) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        cells = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        ]
        return "  ".join(cells).rstrip()

    return "\n".join(line(row) for row in (header, *rows))


def _is_number(cell: str) -> bool:
    return cell[:1].isdigit() or cell[:1] in "+-" and cell[1:2].isdigit()


def number(value: object) -> str:
    """A number of a preset as people write it."""
    if isinstance(value, float) and (abs(value) >= 1e6 or 0 < abs(value) < 1e-3):
        return f"{value:.6g}"
    return str(value)


def whole(low: int) -> Callable[[str], int]:
    """An argparse type: whole numbers from `low` that an int32 holds."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = -1
        if not low <= value < 2**31:
            raise argparse.ArgumentTypeError(
                f"{text!r}: allowed is a whole number from {low} to {2**31 - 1}"
            )
        return value

    return parse


def finite(text: str) -> float:
    """An argparse type: a finite number that is not negative."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: allowed is a finite number, 0 or more")
    return value


def cache_dir() -> Path:
    """Where compiled programs are kept: `JAX_COMPILATION_CACHE_DIR`, or the user's cache."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moejax"
    return Path(os.environ.get("JAX_COMPILATION_CACHE_DIR") or default)


def use_cache() -> None:
    """Keeps compiled programs between runs; a second run then starts in seconds."""
    jax.config.update("jax_compilation_cache_dir", str(cache_dir()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
