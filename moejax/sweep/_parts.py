"""Part files: a range of tiles each, whole or not there.

A part is written under a temporary name, synced, and renamed; its name says which tiles it holds
and it carries the hash of its config. Parquet, or npz where pyarrow is not installed.
"""

import importlib.util
import os
import re
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moejax.sweep._columns import Columns, Text, compact, plain


FOLDER = "parts"
HASH = "config_hash"
_NAME = re.compile(r"part-(\d+)-(\d+)\.(parquet|npz)")


class Part(NamedTuple):
    """A whole part file: tiles `first` to `last`, both included."""

    path: Path
    first: int
    last: int


def write(folder: Path, first: int, last: int, columns: Columns, config_hash: str) -> Path:
    """Writes the rows of tiles `first` to `last`."""
    parquet = importlib.util.find_spec("pyarrow") is not None
    path = folder / FOLDER / f"part-{first:08}-{last:08}.{'parquet' if parquet else 'npz'}"
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("wb") as file:
        if parquet:
            _write_parquet(file, columns, config_hash)
        else:
            arrays = {name: plain(column) for name, column in columns.items()}
            np.savez(file, allow_pickle=False, **{HASH: np.array(config_hash)}, **arrays)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)
    return path


def _write_parquet(file, columns: Columns, config_hash: str) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    arrays = {
        name: pa.DictionaryArray.from_arrays(pa.array(column.codes), pa.array(column.words))
        if isinstance(column, Text)
        else pa.array(column)
        for name, column in columns.items()
    }
    table = pa.table(arrays).replace_schema_metadata({HASH: config_hash})
    # Text repeats; numbers do not, and a dictionary of them would only take time.
    texts = [name for name, column in columns.items() if isinstance(column, Text)]
    options: Any = dict(use_dictionary=texts, compression="zstd")
    pq.write_table(table, file, **options)


def read(part: Part, names: Iterable[str] | None = None) -> Columns:
    """The columns of a part, all or some."""
    if part.path.suffix == ".npz":
        with np.load(part.path, allow_pickle=False) as file:
            wanted = [name for name in file.files if name != HASH] if names is None else names
            return {name: compact(file[name]) for name in wanted}
    import pyarrow.parquet as pq

    table = pq.read_table(part.path, columns=None if names is None else list(names))
    return {name: _from_arrow(table[name].combine_chunks()) for name in table.column_names}


def _from_arrow(column) -> "np.ndarray | Text":
    if hasattr(column, "dictionary"):
        return Text(np.asarray(column.indices), np.array(column.dictionary.to_pylist(), str))
    return column.to_numpy(zero_copy_only=False)


def find(folder: Path) -> Iterator[Part]:
    """All part files by name, in the order of their tiles."""
    found = []
    for path in (folder / FOLDER).glob("part-*"):
        if match := _NAME.fullmatch(path.name):
            found.append(Part(path, int(match[1]), int(match[2])))
    yield from sorted(found, key=lambda part: (part.first, -part.last))


def hash_of(part: Part) -> str | None:
    """The hash of the config that a part belongs to, `None` where the file is broken."""
    try:
        if part.path.suffix == ".npz":
            with np.load(part.path, allow_pickle=False) as file:
                return str(file[HASH])
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            metadata = pq.read_metadata(part.path).metadata or {}
        except pa.ArrowInvalid:
            return None
        return metadata.get(HASH.encode(), b"").decode()
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None


def whole(folder: Path, config_hash: str) -> list[Part]:
    """Parts whose rows are there, no tile twice.

    **Raises:** `ValueError` for a part of another config.
    """
    found: list[Part] = []
    for part in find(folder):
        theirs = hash_of(part)
        if theirs is None or (found and part.last <= found[-1].last):
            continue
        if theirs != config_hash:
            raise ValueError(f"{part.path} belongs to another sweep (config {theirs[:12]})")
        found.append(part)
    return found


def clean(folder: Path, tiles: range) -> None:
    """Removes what processes that were killed left half written: temporary files, broken parts."""
    for part in find(folder):
        if hash_of(part) is None:
            part.path.unlink(missing_ok=True)
    for path in (folder / FOLDER).glob(".part-*"):
        match = _NAME.match(path.name[1:])
        if match and int(match[1]) in tiles:
            path.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Whole or not at all, as parts are."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Makes renames in a folder last through a power cut, where the system can."""
    if os.name != "posix":
        return
    at = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(at)
    finally:
        os.close(at)
