"""Sweep files: Python files with one `SWEEP`, and values for axes from a command line."""

import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from moejax._checks import nearest
from moejax.sweep._axes import Ends, logspace
from moejax.sweep._sweep import Sweep


def load_file(path: str | Path, **options: Any) -> tuple[Sweep, ModuleType]:
    """The sweep of a file, and the file as a module.

    **Arguments:**

    - `path`: a Python file that defines `SWEEP`: a `Sweep`, or a function of keyword options that
        returns one.
    - `options`: of that function.

    **Raises:** `ValueError` for a file that is not there or defines no sweep, and for an option
    that it does not have, naming the nearest.
    """
    path = Path(path)
    module = _module(path)
    made = getattr(module, "SWEEP", None)
    if isinstance(made, Sweep):
        known: list[str] = []
    elif callable(made):
        known = list(inspect.signature(made).parameters)
    else:
        raise ValueError(
            f"{path} defines no SWEEP: a moejax.sweep.Sweep, or a function that gives one"
        )
    for name in options:
        if name not in known:
            has = f"it has {', '.join(known)}" if known else "it has none"
            raise ValueError(f"{path} has no option {name!r}{nearest(name, known)} ({has})")
    if not isinstance(made, Sweep):
        made = made(**options)
    if not isinstance(made, Sweep):
        raise ValueError(f"{path}: SWEEP gave a {type(made).__name__}: allowed is a Sweep")
    made.options = dict(options)
    return made, module


def _module(path: Path) -> ModuleType:
    if not path.is_file():
        raise ValueError(f"no sweep file {path}")
    spec = importlib.util.spec_from_file_location(f"moejax_sweep_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise ValueError(f"{path}, line {error.lineno}: {error.msg}") from None
    except ImportError as error:
        raise ValueError(f"{path}: {error}") from None
    return module


def parse_values(text: str) -> Any:
    """Values of an axis as one writes them: `1,2,4`, `on,off`, `low:high:count[:log]`, `low:high`.

    **Returns:** a list of numbers, truth values (`true`, `false`) or texts; an array for
    `low:high:count`; the two ends for `low:high`.

    **Raises:** `ValueError` for nothing, or a range that is none.
    """
    text = text.strip()
    if ":" in text:
        return _range(text)
    values = [_value(part.strip()) for part in text.split(",")]
    if "" in values:
        raise ValueError(f"values {text!r}: allowed are values with commas between them")
    return values


def _range(text: str) -> Any:
    parts = text.split(":")
    log = parts[-1] == "log"
    numbers = [_value(part) for part in (parts[:-1] if log else parts)]
    whole = len(numbers) == 3 and isinstance(numbers[2], int) and numbers[2] >= 1
    if any(isinstance(number, str) for number in numbers) or not (
        whole or (len(numbers) == 2 and not log)
    ):
        raise ValueError(
            f"values {text!r}: allowed are low:high:count, low:high:count:log, low:high"
        )
    if len(numbers) == 2:
        return Ends(*numbers)
    return logspace(*numbers) if log else np.linspace(*numbers)


def _value(text: str) -> Any:
    truths = {"true": True, "false": False}
    if text.lower() in truths:
        return truths[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
