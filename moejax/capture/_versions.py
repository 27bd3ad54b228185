"""What capture needs installed, checked when it is first used and never at import."""

import importlib
import importlib.metadata
import re
from typing import Any


OLDEST, NEWEST = (5, 18), (5, 24)
"""Versions of `transformers` this was tested with: from 5.18 on, the routers of all families
return (logits, weights, ids), which is what the hooks read and replace. Later releases of the same
major version are accepted, and every router's output is looked at."""


def require_torch() -> Any:
    """The module `torch`. **Raises:** `ValueError` in one line where it is not installed."""
    try:
        # By name, so that type checkers do not look for it.
        return importlib.import_module("torch")
    except ImportError as error:
        raise ValueError(
            f"capture needs torch ({error}): pip install 'moejax[capture]', or for the CPU alone "
            "first pip install torch --index-url https://download.pytorch.org/whl/cpu"
        ) from None


def require_transformers() -> Any:
    """The module `transformers`, of a version whose routers are known.

    **Raises:** `ValueError` in one line where it is missing, older than `OLDEST`, or of another
    major version.
    """
    require_torch()
    try:
        installed = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        raise ValueError(
            "capture needs transformers: pip install 'moejax[capture]' (torch is there)"
        ) from None
    check_version(installed)
    return importlib.import_module("transformers")


def check_version(installed: str) -> None:
    """**Raises:** `ValueError` for a version of `transformers` outside the supported range."""
    found = re.match(r"(\d+)\.(\d+)", installed)
    version = (int(found[1]), int(found[2])) if found else (0, 0)
    if not OLDEST <= version < (OLDEST[0] + 1, 0):
        allowed = f"{OLDEST[0]}.{OLDEST[1]} or newer, below {OLDEST[0] + 1}"
        raise ValueError(f"transformers {installed} is installed: allowed is {allowed}")
