"""`moejax doctor`: versions, devices and folders, for bug reports and first doubts."""

import argparse
import importlib.metadata
import importlib.util
import os
import platform
from pathlib import Path

import jax
import jax.numpy as jnp

from moejax.cli._format import cache_dir, table


CORE = ("moejax", "jax", "jaxlib", "equinox", "optax", "numpy", "scipy", "jaxtyping")
OPTIONAL = {
    "pyarrow": "parquet",
    "matplotlib": "plots",
    "hypothesis": "tests",
    "torch": "capture",
    "transformers": "capture",
}


def add_parser(commands) -> None:
    parser = commands.add_parser(
        "doctor",
        help="versions, devices and folders",
        description="Says what moejax runs on. Exit status 1 if something it needs is missing.",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Prints one line per fact."""
    del options
    rows = [("python", platform.python_version()), ("machine", _machine())]
    rows += [(name, _version(name)) for name in CORE]
    rows += [
        (name, _version(name) if importlib.util.find_spec(name) else f"no (moejax[{extra}])")
        for name, extra in OPTIONAL.items()
    ]
    rows += [
        ("devices", _devices()),
        ("64-bit floats", "on" if jnp.zeros(()).dtype.itemsize == 8 else "off (JAX_ENABLE_X64=1)"),
        ("compilation cache", _folder(cache_dir())),
        ("traces for tests", _folder(Path(os.environ.get("MOEJAX_DATA", "../shared/data")))),
    ]
    print(table(("", ""), rows).lstrip("\n"))
    return int(any(value.startswith("missing") for _, value in rows))


def _machine() -> str:
    return f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"


def _devices() -> str:
    try:
        return ", ".join(str(device) for device in jax.devices())
    except RuntimeError as error:
        return "missing: " + " ".join(str(error).split())


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def _folder(path: Path) -> str:
    return f"{path} ({'there' if path.is_dir() else 'not there'})"
