"""Router arrays of unknown kind: named, or told apart by their values, and never guessed."""

import zipfile
from pathlib import Path
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from moejax._checks import lookup
from moejax.routing import RoutingTrace


Kind: TypeAlias = Literal["logits", "probabilities", "ids"]
NAMES: dict[str, Kind] = {
    **dict.fromkeys(["logits", "router_logits", "gate_logits"], "logits"),
    **dict.fromkeys(["probabilities", "probs", "router_probs", "router_scores"], "probabilities"),
    **dict.fromkeys(
        ["ids", "expert_ids", "experts", "topk_ids", "router_indices", "selected_experts"], "ids"
    ),
}
KINDS = dict.fromkeys(["logits", "probabilities", "ids"])
_SUM_TOLERANCE = 0.02
"""How far a row of half-precision probabilities may be from 1."""


def kind_of(array: Any) -> Kind:
    """What a router array holds, by its values.

    Whole numbers by dtype are ids. Floats that are 0 to 1 and sum to 1 in every row are
    probabilities. Floats of which some are negative or above 1 are logits.

    **Raises:** `ValueError` for everything else, such as sigmoids, which are 0 to 1 and sum to
    anything, or whole numbers stored as floats: those have to be named.
    """
    values = np.asarray(array)
    if np.issubdtype(values.dtype, np.integer):
        return "ids"
    if not np.issubdtype(values.dtype, np.floating) or not values.size:
        raise ValueError(f"array is {values.dtype}{list(values.shape)}: allowed are numbers")
    values = values.astype(np.float32)
    if not np.isfinite(values).all():
        raise ValueError("array is not finite: allowed are finite numbers (name its kind)")
    if (values == np.round(values)).all() and values.max() > 1:
        raise ValueError("array holds whole numbers as floats: name its kind (ids, or logits?)")
    if values.min() < 0 or values.max() > 1:
        return "logits"
    if (np.abs(values.sum(-1) - 1) <= _SUM_TOLERANCE).all():
        return "probabilities"
    raise ValueError(
        "array is between 0 and 1 and its rows do not sum to 1: name its kind (logits that happen "
        "to be small, sigmoids, or top-k weights?)"
    )


def from_array(
    array: Any,
    *,
    top_k: int | None = None,
    num_experts: int | None = None,
    kind: Kind | None = None,
    model: str | None = None,
) -> RoutingTrace:
    """A trace from one router array, all tokens one sequence.

    **Arguments:**

    - `array`: [layers, tokens, experts] logits or probabilities, or [layers, tokens, top_k] ids.
    - `top_k`: experts of a token, needed for logits and probabilities.
    - `num_experts`: of a layer, needed for ids.
    - `kind`: what it holds; told by its values where not given.

    **Returns:** `RoutingTrace`. Logits are kept, and make the weights by one softmax over the
    chosen. Probabilities are not put through a softmax again: they make the weights as they are,
    renormalized, and their logarithms are the logits.

    **Raises:** `ValueError` as `kind_of`, for shapes, for a `top_k` or `num_experts` that is
    missing or not the array's, for logits that are NaN or +inf, and for ids out of range or chosen
    twice.
    """
    found = kind_of(array) if kind is None else kind
    lookup("kind", found, KINDS)
    values = np.asarray(array)
    if values.ndim != 3:
        raise ValueError(f"array has shape {values.shape}: allowed is [layers, tokens, ...]")
    said = ("top_k", top_k) if found == "ids" else ("num_experts", num_experts)
    if said[1] not in (None, values.shape[-1]):
        raise ValueError(f"{said[0]} = {said[1]}: the array of {found} has {values.shape[-1]}")
    if found == "ids":
        if num_experts is None:
            raise ValueError("num_experts is needed for ids")
        trace = RoutingTrace(values.astype(np.int64), num_experts, model=model)
        trace.check("array")
        return trace
    if top_k is None or not 1 <= top_k <= values.shape[-1]:
        raise ValueError(f"top_k = {top_k}: allowed is 1 to the {values.shape[-1]} experts")
    values = values.astype(np.float32)
    if found == "probabilities":
        _check_probabilities(values)
        with np.errstate(divide="ignore"):
            logits = np.log(values)
    else:
        logits = values
        if not (logits < np.inf).all():
            raise ValueError("logits are NaN or +inf somewhere: allowed is finite, or -inf")
    chosen, ids = jax.lax.top_k(jnp.asarray(values), top_k)
    if found == "logits":
        weights = jax.nn.softmax(chosen, axis=-1)
    else:
        weights = chosen / chosen.sum(-1, keepdims=True)
    return RoutingTrace(ids, values.shape[-1], weights=weights, logits=logits, model=model)


def load_array(path: str | Path, **options: Any) -> RoutingTrace:
    """`from_array` from a `.npy`, or from a `.npz` whose one known array says its kind by its name
    (`router_logits`, `router_probs`, `expert_ids` and the like).

    **Raises:** `ValueError` naming the file, and as `from_array`.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    try:
        loaded = np.load(path, allow_pickle=False)
        arrays = dict(loaded) if isinstance(loaded, np.lib.npyio.NpzFile) else {"": loaded}
    except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path}: not a readable npy or npz ({error})") from None
    known = [name for name in arrays if name in NAMES]
    name = known[0] if len(known) == 1 else next(iter(arrays), "") if len(arrays) == 1 else None
    if name is None or not arrays:
        raise ValueError(f"{path}: has arrays {', '.join(arrays)}: allowed is one of known name")
    options = {"kind": NAMES.get(name)} | {k: v for k, v in options.items() if v is not None}
    try:
        return from_array(arrays[name], **options)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _check_probabilities(values: np.ndarray) -> None:
    outside = not ((values >= 0) & (values <= 1)).all()
    if outside or (np.abs(values.sum(-1) - 1) > _SUM_TOLERANCE).any():
        raise ValueError(
            "probabilities are not all 0 to 1 with rows that sum to 1: are they logits or sigmoids?"
        )
