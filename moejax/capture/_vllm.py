"""What vLLM returns as routed experts: expert ids [tokens, MoE layers, top_k] of each request."""

import json
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from moejax._checks import lookup
from moejax.capture._counts import as_paths
from moejax.capture._record import PHASES, Phase
from moejax.routing import RoutingTrace


PROMPT, GENERATED = "prompt_routed_experts", "routed_experts"


def from_routed_experts(
    requests: Iterable[Any], num_experts: int, *, phase: Phase = "all", model: str | None = None
) -> RoutingTrace:
    """A trace from the arrays of requests, each a sequence.

    **Arguments:**

    - `requests`: of each request an array [tokens, layers, top_k] of generated tokens (or of all),
        or a pair (prompt, generated) of them.
    - `num_experts`: routed experts of a layer, which the arrays do not say.
    - `phase`: marks the tokens of the other phase as not valid; arrays alone count as decode.
    - `model`: name of the model.

    **Raises:** `ValueError` naming the request for arrays of another kind or shape, ids out of
    range, and experts chosen twice by a token.
    """
    lookup("phase", phase, PHASES)
    parts, decode, starts, count = [], [], [], 0
    for index, request in enumerate(requests):
        pair = request if isinstance(request, tuple) else (None, request)
        starts.append(count)
        for array, generated in zip(pair, (False, True), strict=True):
            if array is None:
                continue
            ids = _ids(f"request {index}", array, parts[0] if parts else None)
            parts.append(ids)
            decode.append(np.full(len(ids), generated))
            count += len(ids)
    if not parts:
        raise ValueError("no requests: allowed is at least one")
    is_decode = np.concatenate(decode)
    trace = RoutingTrace(
        np.moveaxis(np.concatenate(parts), 0, 1),
        num_experts,
        valid=np.ones(count, bool) if phase == "all" else is_decode == (phase == "decode"),
        sequence_start=np.array(starts),
        model=model,
    )
    trace.check("routed experts")
    return trace


def load_routed_experts(
    paths: Any, num_experts: int, *, phase: Phase = "all", model: str | None = None
) -> RoutingTrace:
    """`from_routed_experts` from files: `.npy` with the array of a request; `.npz` with
    `routed_experts` and perhaps `prompt_routed_experts`; or the JSON of a completions response.

    **Raises:** `ValueError` naming the file, and as `from_routed_experts`.
    """
    requests = [request for path in as_paths(paths) for request in _requests(path)]
    return from_routed_experts(requests, num_experts, phase=phase, model=model)


def _requests(path: Path) -> list[tuple[Any, Any]]:
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    if path.suffix == ".json":
        return _from_response(path)
    try:
        loaded = np.load(path, allow_pickle=False)
        found = dict(loaded) if isinstance(loaded, np.lib.npyio.NpzFile) else {GENERATED: loaded}
    except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path}: not a readable npy or npz ({error})") from None
    if GENERATED not in found:
        raise ValueError(f"{path}: has no array {GENERATED!r} (arrays: {', '.join(found)})")
    return [(found.get(PROMPT), found[GENERATED])]


def _from_response(path: Path) -> list[tuple[Any, Any]]:
    try:
        response = json.loads(path.read_text(encoding="utf-8"))
        choices = response["choices"]
        shared = response.get(PROMPT)
        return [(choice.get(PROMPT, shared), choice[GENERATED]) for choice in choices]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path}: not a completions response with choices[].{GENERATED} ({error!r})"
        ) from None


def _ids(where: str, array: Any, like: np.ndarray | None) -> np.ndarray:
    try:
        ids = np.asarray(array)
    except ValueError:
        raise ValueError(f"{where}: rows differ in length") from None
    if ids.ndim != 3 or 0 in ids.shape[1:] or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(
            f"{where}: routed experts are {ids.dtype}{list(ids.shape)}: allowed are whole numbers "
            "[tokens, layers, top_k]"
        )
    if like is not None and ids.shape[1:] != like.shape[1:]:
        raise ValueError(
            f"{where}: (layers, top_k) = {ids.shape[1:]}, others have {like.shape[1:]}"
        )
    return ids.astype(np.int64)
