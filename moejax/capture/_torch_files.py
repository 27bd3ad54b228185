"""Files of `torch.save`, read without running what is in them."""

from pathlib import Path
from typing import Any

import numpy as np

from moejax.capture._versions import require_torch


def load_pt(path: Path) -> Any:
    """What a `.pt` file holds: tensors, numbers, lists and dicts, and nothing that needs code.

    **Raises:** `ValueError` in one line for a file that is not there, unreadable, or that could
    only be read by unpickling arbitrary objects.
    """
    torch = require_torch()
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises whatever the unpickler or the zip reader met
        first = " ".join(str(error).split())[:120]
        raise ValueError(f"{path}: not a .pt file of plain tensors ({first})") from None


def tensor(where: str, value: Any, ndim: int, *, whole: bool = True) -> np.ndarray:
    """A tensor of a `.pt` file as an array. **Raises:** `ValueError` beginning with `where`."""
    torch = require_torch()
    if not isinstance(value, torch.Tensor) or value.ndim != ndim or 0 in value.shape:
        shape = list(value.shape) if hasattr(value, "shape") else type(value).__name__
        raise ValueError(f"{where} is {shape}: allowed is a tensor of {ndim} axes, none empty")
    if whole and (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool):
        raise ValueError(f"{where} is {value.dtype}: allowed are whole numbers")
    return (value if whole else value.double()).numpy()
