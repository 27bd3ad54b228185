"""A folder of results: manifest, config, parts."""

import datetime
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from moejax.sweep import _config, _parts
from moejax.sweep._lock import briefly
from moejax.sweep._sweep import Sweep


MANIFEST, CONFIG = "manifest.json", "config.json"


class Folder:
    """Where a sweep writes. Opened under its lock."""

    def __init__(self, path: Path, manifest: dict[str, Any]):
        self.path, self.manifest = path, manifest
        self.config_hash: str = manifest["config_hash"]

    def missing(self, tiles: Iterable[int]) -> list[int]:
        """Those of some tiles that no part has."""
        there: set[int] = set()
        for part in _parts.whole(self.path, self.config_hash):
            there.update(range(part.first, part.last + 1))
        return [tile for tile in tiles if tile not in there]

    def write(self, first: int, last: int, columns: Any) -> None:
        """One part."""
        _parts.write(self.path, first, last, columns, self.config_hash)

    def describe(self, columns: dict[str, dict[str, str]]) -> None:
        """Adds what columns there are, known once the first rows are."""
        with briefly(self.path):
            self.manifest = read_manifest(self.path) | {"columns": columns}
            _write(self.path / MANIFEST, self.manifest)


def read_manifest(path: Path) -> dict[str, Any]:
    """What a folder of results says about itself.

    **Raises:** `ValueError` where it is none.
    """
    file = path / MANIFEST
    if not file.is_file():
        raise ValueError(f"{path} holds no results of a sweep ({MANIFEST} is not there)")
    try:
        manifest = json.loads(file.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{file}: {error}") from None
    if manifest.get("format") != _config.FORMAT:
        raise ValueError(f"{file}: format {manifest.get('format')}: allowed is {_config.FORMAT}")
    return manifest


def manifest_of(
    sweep: Sweep, config: dict[str, Any], tiles: int, file: str | None
) -> dict[str, Any]:
    """A manifest without its columns."""
    kinds = {axis.name: axis.kind for axis in sweep.axes}
    return {
        "format": _config.FORMAT,
        "config_hash": _config.hash_of(config),
        "file": file,
        "options": config["options"],
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "rows": sweep.num_rows,
        "tiles": tiles,
        "width": config["width"],
        "axes": [{"name": name, "kind": kinds.get(name, "seed")} for name in sweep.names],
        "shape": _shape(sweep),
        "seeds": config["seeds"],
        "tables": {axis.name: axis.content() for axis in sweep.axes if not axis.is_number},
        "versions": config["versions"],
        "platform": config["platform"],
        "columns": {},
    }


def _shape(sweep: Sweep) -> list[int] | None:
    """Lengths of all axes where rows are all their combinations."""
    lengths = {axis.name: len(axis) for axis in sweep.axes}
    shape = [lengths.get(name, len(sweep.seeds)) for name in sweep.names]
    product = all(part in sweep.axes for part in sweep.design.parts)
    return shape if product and sweep.where is None else None


def prepare(
    path: Path, manifest: dict[str, Any], config: dict[str, Any], *, resume: bool, alone: bool
) -> Folder:
    """The folder, ready for parts: a new one, one with a manifest of the same config, or emptied.

    One without a single row, as a sweep leaves it that refused its first one, is as good as new
    where nobody else can be about to write (`alone`).

    **Raises:** `ValueError` where there are results of another config, with what differs, or with
    `resume=False` where there are results that other shards may be writing.
    """
    (path / _parts.FOLDER).mkdir(parents=True, exist_ok=True)
    with briefly(path):
        if not resume or (alone and _has_no_rows(path)):
            _empty(path)
        if (path / MANIFEST).is_file():
            there = read_manifest(path)
            if there["config_hash"] != manifest["config_hash"]:
                before = json.loads((path / CONFIG).read_text())
                raise ValueError(
                    f"{path} holds rows of another config; start afresh (--fresh) or choose "
                    f"another folder. What changed: {_config.difference(before, config)}"
                )
            return Folder(path, there)
        if next(_parts.find(path), None) is not None:
            raise ValueError(f"{path} has parts and no {MANIFEST}: choose another folder")
        _write(path / CONFIG, config)
        _write(path / MANIFEST, manifest)
        return Folder(path, manifest)


def _has_no_rows(path: Path) -> bool:
    return (path / MANIFEST).is_file() and next(_parts.find(path), None) is None


def _empty(path: Path) -> None:
    # The manifest goes last: without one, parts belong to nobody.
    for part in _parts.find(path):
        part.path.unlink()
    (path / CONFIG).unlink(missing_ok=True)
    (path / MANIFEST).unlink(missing_ok=True)


def _write(path: Path, content: dict[str, Any]) -> None:
    _parts.write_text(path, json.dumps(content, indent=1) + "\n")
