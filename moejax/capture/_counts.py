"""How often each expert of each layer was chosen, and the CSV form that people exchange it in."""

import csv
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moejax.routing import RoutingTrace, tokens_per_expert


HEADER = ["layer_id", "expert_id", "count"]


class ExpertCounts(NamedTuple):
    """Tokens of each expert. Fields: `counts` int64 or float [layers, experts], MoE layers only;
    `layer_numbers` [layers], where they stand in the model."""

    counts: np.ndarray
    layer_numbers: np.ndarray

    @classmethod
    def of(cls, trace: RoutingTrace, layer_numbers: Any = None) -> "ExpertCounts":
        """Counts of a trace, of its valid tokens."""
        counts = tokens_per_expert(trace.expert_ids, trace.num_experts, trace.valid)
        numbers = np.arange(trace.num_layers) if layer_numbers is None else layer_numbers
        return cls(np.asarray(counts, np.int64), np.asarray(numbers))


def save_counts(counts: ExpertCounts, path: str | Path) -> None:
    """Writes `layer_id,expert_id,count` rows, experts without a token left out, as SGLang does."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(HEADER)
        for number, layer in zip(counts.layer_numbers, counts.counts):
            for expert in np.flatnonzero(layer):
                writer.writerow([int(number), int(expert), layer[expert].item()])


def read_whole_rows(path: Path, header: list[str], *, optional: bool = False) -> np.ndarray:
    """A CSV of whole numbers, 0 or more, as int64 [rows, columns].

    **Raises:** `ValueError` naming file and line for another header (or none, unless `optional`),
    a row of another length, what is no such number, and a file without rows.
    """
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    wanted = ",".join(header)
    rows = []
    with open(path, newline="", encoding="utf-8", errors="replace") as file:
        for line, row in enumerate(csv.reader(file), 1):
            cells = [cell.strip() for cell in row]
            if line == 1 and cells == header:
                continue
            if line == 1 and not optional:
                raise ValueError(f"{path}: begins with {','.join(row)[:60]!r}: allowed is {wanted}")
            if not cells:
                continue
            if len(cells) != len(header) or not all(cell.isdecimal() for cell in cells):
                shown = ",".join(row)[:60]
                raise ValueError(
                    f"{path}, line {line}: {shown!r}: allowed is {wanted}, whole numbers"
                )
            rows.append([int(cell) for cell in cells])
    if not rows:
        raise ValueError(f"{path}: holds no rows")
    try:
        return np.array(rows, np.int64)
    except OverflowError:
        raise ValueError(f"{path}: holds a number beyond 64 bits") from None


def as_paths(paths: Any) -> list[Path]:
    """One path or several. **Raises:** `ValueError` for none."""
    one = isinstance(paths, str | Path)
    found = [Path(paths)] if one else [Path(path) for path in paths]
    if not found:
        raise ValueError("no files: allowed is at least one")
    return found
