"""The text: the running Python's standard library, by a list of files and hashes. No text ships."""

import dataclasses
import hashlib
import json
import sysconfig
from importlib import resources
from pathlib import Path

import numpy as np


# Tests are absent from many distributions; codec tables, generated topics and build records are
# not prose or code that a person wrote.
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_SKIPPED_TOPS = ("encodings", "pydoc_data", "config-", "_sysconfigdata", "lib-dynload")
_HELD_OUT_SHARE = 16  # one file in this many


@dataclasses.dataclass(frozen=True)
class Document:
    """One file of the list as found in the running Python."""

    name: str
    data: bytes
    matches: bool


@dataclasses.dataclass(frozen=True)
class Corpus:
    """The files of one split that this Python has, and how they compare with the list.

    **Arguments:**

    - `documents`: the files found, in the list's order.
    - `missing`: names on the list that this Python lacks.
    """

    documents: tuple[Document, ...]
    missing: tuple[str, ...]

    @property
    def differing(self) -> tuple[str, ...]:
        """Names found whose SHA-256 is not the list's."""
        return tuple(d.name for d in self.documents if not d.matches)

    @property
    def matches(self) -> bool:
        """Whether this is byte for byte the text the shipped model was made with."""
        return not self.differing and not self.missing

    @property
    def num_bytes(self) -> int:
        """Bytes of all documents together."""
        return sum(len(d.data) for d in self.documents)

    def report(self) -> str:
        """One paragraph saying which files differ, for the head of any result."""
        found = len(self.documents)
        lines = [f"{found - len(self.differing)} of {found + len(self.missing)} files identical"]
        for label, names in (("differ", self.differing), ("missing", self.missing)):
            if names:
                shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
                lines.append(f"{len(names)} {label}: {shown}")
        return "; ".join(lines)


def stdlib_path() -> Path:
    """The folder of the running Python's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def make_list(root: Path | None = None) -> dict:
    """The list of files under `root` (default: the running standard library) with their hashes.

    The split goes by a hash of the name, so a file is on the same side in every Python version.

    **Returns:** `{"python", "train": {name: sha256}, "heldout": {name: sha256}}`.
    """
    root = root or stdlib_path()
    files: dict = {"python": sysconfig.get_python_version(), "train": {}, "heldout": {}}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if _SKIPPED_FOLDERS.intersection(name.parts) or str(name).startswith(_SKIPPED_TOPS):
            continue
        data = path.read_bytes()
        if not data.strip():
            continue
        digest = hashlib.sha256(name.as_posix().encode()).digest()
        split = "heldout" if digest[0] % _HELD_OUT_SHARE == 0 else "train"
        files[split][name.as_posix()] = hashlib.sha256(data).hexdigest()
    return files


def shipped_list() -> dict:
    """The list the shipped weights were trained with."""
    return json.loads((resources.files("moejax.zoo") / "data" / "files.json").read_text())


def read(split: str, files: dict | None = None, root: Path | None = None) -> Corpus:
    """The files of a split, read from the running standard library.

    **Arguments:**

    - `split`: `"train"` or `"heldout"`.
    - `files`: a list from `make_list`; default the shipped one.
    - `root`: where to look; default the running standard library.

    **Raises:** `ValueError` for an unknown split, or where none of the files is there.
    """
    if split not in ("train", "heldout"):
        raise ValueError(f"split = {split!r}: allowed are 'train' and 'heldout'")
    root = root or stdlib_path()
    documents, missing = [], []
    for name, digest in (files or shipped_list())[split].items():
        try:
            data = (root / name).read_bytes()
        except OSError:
            missing.append(name)
            continue
        documents.append(Document(name, data, hashlib.sha256(data).hexdigest() == digest))
    if not documents:
        raise ValueError(f"no file of the {split} list under {root}: a Python without sources?")
    return Corpus(tuple(documents), tuple(missing))


def join(corpus: Corpus) -> np.ndarray:
    """All documents as one array of byte values, a zero byte before each."""
    return np.frombuffer(b"".join(b"\0" + d.data for d in corpus.documents), np.uint8)
