"""What identifies a sweep: a config in canonical JSON, its hash, and how two of them differ."""

import functools
import hashlib
import importlib.metadata
import json
import math
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moejax.sweep._sweep import Sweep


FORMAT = 1


def config_of(
    sweep: Sweep, functions: dict[str, str], width: int, platform_name: str
) -> dict[str, Any]:
    """Everything that decides the rows: design, functions by content, versions, precision."""
    return _plain(
        {
            "format": FORMAT,
            "axes": sweep.design.describe(),
            "seeds": sweep.seeds.tolist(),
            "width": width,
            "bucket": list(sweep.bucket),
            "options": {name: option(value) for name, value in sweep.options.items()},
            "functions": functions,
            "versions": versions(),
            "platform": platform_name,
            "float": str(jnp.result_type(float)),
        }
    )


def canonical(config: dict[str, Any]) -> str:
    """JSON with sorted keys and no spaces: equal configs are equal text."""
    return json.dumps(config, sort_keys=True, separators=(",", ":"), allow_nan=False)


def hash_of(config: dict[str, Any]) -> str:
    """SHA-256 of the canonical JSON."""
    return hashlib.sha256(canonical(config).encode()).hexdigest()


def difference(old: dict[str, Any], new: dict[str, Any]) -> str:
    """What changed, one `path: old -> new` for each value, for people."""
    before, after = dict(_flat(old)), dict(_flat(new))
    lines = []
    for path in sorted(before.keys() | after.keys()):
        was, now = before.get(path, "nothing"), after.get(path, "nothing")
        if was != now:
            lines.append(f"{path}: {_short(was)} -> {_short(now)}")
    return "; ".join(lines)


@functools.cache
def versions() -> dict[str, str]:
    """Of everything that may change a number. `moejax` with a digest of its source."""
    names = ("jax", "jaxlib", "numpy", "scipy", "equinox")
    found = {name: importlib.metadata.version(name) for name in names}
    package = Path(__file__).resolve().parent.parent
    source = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        source.update(path.relative_to(package).as_posix().encode() + path.read_bytes())
    found["moejax"] = f"{importlib.metadata.version('moejax')} ({source.hexdigest()[:12]})"
    found["machine"] = platform.machine()
    return found


def option(value: Any) -> Any:
    """An option of a sweep file: itself, with the content of the file where it names one."""
    if isinstance(value, str) and value and Path(value).is_file():
        return {"file": value, "content": hashlib.sha256(Path(value).read_bytes()).hexdigest()}
    return value


def _plain(value: Any) -> Any:
    """For JSON, which has no infinities."""
    if isinstance(value, dict):
        return {str(name): _plain(of) for name, of in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(of) for of in value]
    if isinstance(value, np.generic | jax.Array):
        return _plain(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, str | int | float | None) else str(value)


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves by path; an axis, or a part of several, goes by the names in it."""
    if isinstance(value, dict):
        for name, of in value.items():
            yield from _flat(of, f"{path}.{name}" if path else name)
    elif isinstance(value, list) and value and all(isinstance(of, dict) for of in value):
        for at, of in enumerate(value):
            yield from _flat(of, f"{path}.{of.get('name', at)}")
    else:
        yield path, value


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:45]} ... {text[-10:]}"
