"""Traces from files and back. Host only; whatever a file gets wrong is one `ValueError` line."""

import dataclasses
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from moejax.routing._trace import NOT_ROUTED, RoutingTrace, check_experts, check_starts


def load(
    path: str | Path, *, num_experts: int | None = None, model: str | None = None
) -> RoutingTrace:
    """A routing trace from one of three formats, told apart by their content:

    - npz with `experts` [layers, tokens, top_k], `seq_start`, optionally `probs` (float16) or
      `probs_e4` (times 10,000) and `seq_fresh`; a .json of the same name beside it holds `model`
      and `experts` (their number). Tokens before `seq_fresh` of their sequence repeat an earlier
      prompt: they stay in the trace with `valid` False.
    - the JSON of HD-MoE, `{layer: [[expert ids of a token], ...]}`. Layers are sorted by number;
      all tokens are one sequence.
    - the npz that `save` writes.

    **Arguments:**

    - `num_experts`: routed experts of a layer, where the file does not say.
    - `model`: registry name of the model that the trace must be of.

    **Raises:** `ValueError` naming the file, and where there is one the layer and token: missing
    and unreadable files, aggregate counts, ids out of range, duplicate experts of a token, ragged
    rows, layers of different length, an empty trace, an unknown number of experts, or a trace of
    another model.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    expected = None if model is None else _preset_shape(model)
    default = None if expected is None else expected[1]
    if zipfile.is_zipfile(path):
        arrays = _read_npz(path)
        reader = _from_own if "expert_ids" in arrays else _from_npz
    else:
        arrays = _read_json(path)
        reader = _from_hd_moe
    trace = reader(path, arrays, num_experts, default)
    if model is None:
        return trace
    found = (trace.num_layers, trace.num_experts, trace.top_k)
    if trace.model not in (None, model) or found != expected:
        raise ValueError(
            f"{path}: trace of {trace.model or 'an unnamed model'} with (layers, experts, top_k) = "
            f"{found}; asked for {model} with {expected}"
        )
    return dataclasses.replace(trace, model=model)


def save(trace: RoutingTrace, path: str | Path) -> None:
    """Writes a trace as a compressed npz that `load` reads back unchanged."""
    names = ("weights", "logits", "decode", "model")
    optional = {name: getattr(trace, name) for name in names}
    with open(path, "wb") as file:
        np.savez_compressed(
            file,
            expert_ids=trace.expert_ids,
            valid=trace.valid,
            sequence_start=trace.sequence_start,
            num_experts=trace.num_experts,
            **{name: value for name, value in optional.items() if value is not None},
        )


def _read_npz(path: Path) -> dict[str, np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except (ValueError, OSError, zipfile.BadZipFile, EOFError) as error:
        raise ValueError(f"{path}: not a readable npz ({error})") from None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: neither an npz nor JSON ({error})") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: the JSON is a {type(content).__name__}, not an object")
    return content


def _from_own(path: Path, arrays: dict[str, Any], given: int | None, default: int | None):
    stated = int(arrays["num_experts"]) if "num_experts" in arrays else None
    optional = ("weights", "logits", "valid", "sequence_start", "decode")
    fields: dict[str, Any] = {name: arrays.get(name) for name in optional}
    fields["model"] = str(arrays["model"]) if "model" in arrays else None
    count = _agree(path, given, stated, default)
    return _build(path, arrays["expert_ids"], count, lowest=NOT_ROUTED, **fields)


def _from_npz(path: Path, arrays: dict[str, Any], given: int | None, default: int | None):
    if "experts" not in arrays:
        what = "holds counts, not a trace" if "counts" in arrays else "holds no routing trace"
        raise ValueError(f"{path}: {what} (arrays: {', '.join(arrays)})")
    sidecar_path = path.with_suffix(".json")
    sidecar = _read_json(sidecar_path) if sidecar_path.is_file() else {}
    weights = arrays.get("probs")
    if weights is None and "probs_e4" in arrays:
        weights = arrays["probs_e4"] / 1e4
    name = sidecar.get("model")
    return _build(
        path,
        arrays["experts"],
        _agree(path, given, sidecar.get("experts"), default),
        weights=weights,
        sequence_start=arrays.get("seq_start"),
        fresh=arrays.get("seq_fresh"),
        model=None if name is None else _registry_name(name),
    )


def _from_hd_moe(path: Path, content: dict[str, Any], given: int | None, default: int | None):
    strays = [key for key in content if not key.isdecimal()]
    if strays:
        beside = path.with_suffix(".npz")
        hint = f"; the trace is in {beside.name}" if beside.is_file() else ""
        raise ValueError(f"{path}: key {strays[0]!r} is not the number of a layer{hint}")
    names = sorted(content, key=int)
    if not names:
        raise ValueError(f"{path}: the trace is empty")
    layers = [_layer_ids(path, name, content[name]) for name in names]
    for name, ids in zip(names, layers):
        if ids.shape != layers[0].shape:
            raise ValueError(
                f"{path}: layer {name} has {ids.shape[0]} tokens of {ids.shape[1]} experts, "
                f"layer {names[0]} has {layers[0].shape[0]} of {layers[0].shape[1]}"
            )
    return _build(path, np.stack(layers), _agree(path, given, None, default), names)


def _layer_ids(path: Path, name: str, rows: Any) -> np.ndarray:
    """One layer of HD-MoE JSON as [tokens, top_k]."""
    if not isinstance(rows, list):
        raise ValueError(f"{path}: layer {name} is not a list of tokens")
    if not rows:
        raise ValueError(f"{path}: layer {name} is empty")
    where = f"{path}: layer {name}, token"
    whole = lambda row: isinstance(row, list) and all(type(expert) is int for expert in row)
    for token, row in enumerate(rows):
        if not whole(row) or not row:
            raise ValueError(f"{where} {token}: {row!r:.60} is not a list of expert ids")
        if len(row) != len(rows[0]):
            ragged = f"ragged, {len(row)} experts where token 0 has {len(rows[0])}"
            raise ValueError(f"{where} {token}: {ragged}")
    try:
        return np.array(rows, np.int64)
    except OverflowError:
        raise ValueError(f"{path}: layer {name}: an expert id does not fit 64 bits") from None


def _build(
    path: Path,
    ids: np.ndarray,
    num_experts: int,
    layer_names: list[str] | None = None,
    *,
    lowest: int = 0,
    fresh: np.ndarray | None = None,
    **fields: Any,
) -> RoutingTrace:
    """The trace, with every value checked as the file has it."""
    try:
        trace = RoutingTrace(ids, num_experts, **fields)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from None
    check_experts(ids, num_experts, str(path), layer_names=layer_names, lowest=lowest)
    check_starts(np.asarray(trace.sequence_start), trace.num_tokens, str(path))
    return trace if fresh is None else _without_repeats(path, trace, fresh)


def _without_repeats(path: Path, trace: RoutingTrace, fresh: np.ndarray) -> RoutingTrace:
    """Tokens before the first fresh one of their sequence are not valid."""
    if fresh.shape != trace.sequence_start.shape:
        raise ValueError(
            f"{path}: seq_fresh has shape {fresh.shape}, seq_start {trace.sequence_start.shape}"
        )
    tokens = np.arange(trace.num_tokens)
    sequence = np.searchsorted(np.asarray(trace.sequence_start), tokens, side="right") - 1
    return dataclasses.replace(trace, valid=tokens >= fresh[sequence])


def _agree(path: Path, given: int | None, stated: int | None, default: int | None) -> int:
    """The number of experts: as the caller and the file say, else as the asked-for model has."""
    if given is not None and stated is not None and given != stated:
        raise ValueError(f"{path}: has {stated} experts a layer, asked for {given}")
    known = [count for count in (given, stated, default) if count is not None]
    if not known:
        raise ValueError(f"{path}: does not say how many experts a layer has; pass num_experts")
    return int(known[0])


def _registry_name(name: str) -> str:
    """The registry name that a longer one begins with ("Mixtral-8x7B-Instruct" and the like)."""
    from moejax.models import MODELS

    plain = name.split(" (")[0].split("/")[-1].strip().lower()
    starts = lambda known: plain == known or plain.startswith((known + "-", known + "_"))
    return max(filter(starts, MODELS), key=len, default=name)


def _preset_shape(model: str) -> tuple[int, int, int]:
    """MoE layers, experts and top_k of a registry entry."""
    from moejax.models import get

    preset = get(model)
    return preset.num_moe_layers, preset.num_experts, preset.top_k
