"""Gates in files: one line of JSON that says what kind, then the arrays as Equinox writes them."""

import json
from pathlib import Path
from typing import Any

import equinox as eqx
import jax.numpy as jnp

from moejax.gating import HardwareAwareGate


ARRAYS = ("share", "r_comp", "r_comm", "token_time", "selection_bias")
SETTINGS = (
    *("top_k", "score", "combine", "scaling", "num_groups", "top_groups", "group_score"),
    *("protect", "chunk", "max_rows", "max_hosts"),
)


def save_gate(gate: HardwareAwareGate, path: str | Path) -> None:
    """Writes a gate that `load_gate` reads back unchanged; `.eqx` is the usual ending."""
    arrays = {name: getattr(gate, name) for name in ARRAYS if getattr(gate, name) is not None}
    head = {
        "settings": {name: getattr(gate, name) for name in SETTINGS},
        "arrays": {name: [list(a.shape), a.dtype.name] for name, a in arrays.items()},
    }
    with open(path, "wb") as file:
        file.write(json.dumps(head).encode() + b"\n")
        eqx.tree_serialise_leaves(file, gate)


def load_gate(path: str | Path) -> HardwareAwareGate:
    """The gate that `save_gate` wrote.

    **Raises:** `ValueError` in one line for a file that is not there or holds no such gate.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    with open(path, "rb") as file:
        try:
            head = json.loads(file.readline())
            like = _like(head)
            return eqx.tree_deserialise_leaves(file, like)
        except (ValueError, KeyError, TypeError, EOFError, RuntimeError) as error:
            what = " ".join(str(error).split())[:200]
            raise ValueError(
                f"{path}: not a gate that moejax.capture.save_gate wrote ({what})"
            ) from None


def _like(head: Any) -> HardwareAwareGate:
    """A gate of the same shapes."""
    zeros = {name: jnp.zeros(shape, dtype) for name, (shape, dtype) in head["arrays"].items()}
    return HardwareAwareGate(**zeros, **head["settings"])
