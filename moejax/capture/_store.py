"""Where recorded tokens are kept: in memory, or in files of a folder."""

import shutil
import tempfile
import weakref
from pathlib import Path

import numpy as np


class MemoryStore:
    """Columns of arrays whose first axis is tokens, in memory."""

    def __init__(self):
        self._parts: dict[str, list[np.ndarray]] = {}

    def append(self, columns: dict[str, np.ndarray]) -> None:
        """Adds tokens; columns, shapes and dtypes are the same in every call."""
        for name, array in columns.items():
            self._parts.setdefault(name, []).append(array)

    def columns(self) -> dict[str, np.ndarray]:
        """All tokens so far, by column."""
        for parts in self._parts.values():
            parts[:] = [np.concatenate(parts)]
        return {name: parts[0] for name, parts in self._parts.items()}


class FileStore:
    """The same in files of a temporary folder below `parent`, gone with the store."""

    def __init__(self, parent: str | Path):
        try:
            self._folder = Path(tempfile.mkdtemp(prefix="moejax-capture-", dir=parent))
        except OSError as error:
            raise ValueError(f"spill = {str(parent)!r}: no folder to write to ({error})") from None
        weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        self._like: dict[str, np.ndarray] = {}
        self._rows = 0

    def append(self, columns: dict[str, np.ndarray]) -> None:
        """As `MemoryStore.append`."""
        for name, array in columns.items():
            self._like.setdefault(name, array[:0])
            with open(self._folder / name, "ab") as file:
                file.write(np.ascontiguousarray(array).data)
        self._rows += len(next(iter(columns.values())))

    def columns(self) -> dict[str, np.ndarray]:
        """As `MemoryStore.columns`, mapped from the files and read when indexed."""
        return {
            name: np.memmap(
                self._folder / name, like.dtype, "r", shape=(self._rows, *like.shape[1:])
            )
            for name, like in self._like.items()
        }
