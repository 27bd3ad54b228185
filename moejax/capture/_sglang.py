"""What SGLang's expert distribution recorder writes: counts as CSV or `.pt`, tokens as `.pt`.

Formats after its `expert_distribution.py` of 2026: CSV `layer_id,expert_id,count` for each rank
(older releases); `.pt` with `logical_count` [steps, layers, experts], summed over ranks (modes stat
and stat_approx); `.pt` for each rank with `records` of single passes, which count physical experts,
and the map from those to logical ones (modes per_pass and per_token).
"""

from pathlib import Path
from typing import Any

import numpy as np

from moejax.capture._counts import HEADER, ExpertCounts, as_paths, read_whole_rows
from moejax.capture._torch_files import load_pt, tensor
from moejax.routing import NOT_ROUTED, RoutingTrace


def load_sglang(paths: Any, *, num_experts: int | None = None) -> ExpertCounts:
    """Counts of one dump or of several ranks, summed.

    With tensor parallelism and without data-parallel attention every rank counts every token: the
    sum is then a multiple, and shares are right all the same. Layers without a token, which are
    dense, are left out.

    **Arguments:**

    - `paths`: one file or several, CSV or `.pt`.
    - `num_experts`: logical experts of a layer, where CSV files do not name the last.

    **Raises:** `ValueError` naming the file for what does not have one of the formats, files that
    disagree in shape, and dumps of several ranks that each hold the sum already.
    """
    found = [(path, _counts_of(path)) for path in as_paths(paths)]
    _check_not_summed(found)
    if all(path.suffix == ".csv" for path, _ in found):
        layers, experts = np.max([counts.shape for _, (counts, _) in found], axis=0)
        experts = max(experts, num_experts or 0)
    else:
        layers, experts = found[0][1][0].shape
    if num_experts is not None and experts != num_experts:
        raise ValueError(f"{found[0][0]}: has {experts} experts, asked for {num_experts}")
    total = np.zeros((layers, experts), np.int64)
    for path, (counts, _) in found:
        beyond = np.greater(counts.shape, total.shape).any()
        if beyond or path.suffix != ".csv" and counts.shape != total.shape:
            raise ValueError(
                f"{path}: counts [layers, experts] = {counts.shape}, others {total.shape}"
            )
        total[: counts.shape[0], : counts.shape[1]] += counts
    numbers = np.flatnonzero(total.any(1))
    if not len(numbers):
        raise ValueError(f"{found[0][0]}: every count is 0")
    return ExpertCounts(total[numbers], numbers)


def load_sglang_trace(paths: Any) -> RoutingTrace:
    """The tokens of per_token dumps. Runs of ascending positions in a pass are a sequence; the
    tokens of decode steps, whose requests are not named, are one each.

    **Raises:** `ValueError` naming the file for dumps of another mode and malformed ones.
    """
    ids, starts, experts, tokens = [], [], 0, 0
    for path in as_paths(paths):
        records, to_logical = _records(path)
        experts = max(experts, int(to_logical.max()) + 1)
        for index, record in enumerate(records):
            where = f"{path}: records[{index}]"
            if "topk_ids_of_layer" not in record:
                raise ValueError(f"{where} has no 'topk_ids_of_layer': not of mode per_token")
            logical = _logical(where, record["topk_ids_of_layer"], to_logical)
            positions = np.asarray(record.get("positions", []))
            if positions.shape != logical.shape[1:2]:
                raise ValueError(
                    f"{where}: {len(positions)} positions for {logical.shape[1]} tokens"
                )
            starts.append(tokens + np.flatnonzero(np.diff(positions, prepend=-9) != 1))
            ids.append(logical)
            tokens += logical.shape[1]
    shapes = {(x.shape[0], x.shape[2]) for x in ids}
    if len(shapes) != 1:
        raise ValueError(f"dumps differ in (layers, top_k): {sorted(shapes)}")
    joined = np.concatenate(ids, axis=1)
    routed = (joined != NOT_ROUTED).any(axis=1)  # dense layers and unused ranks are -1 throughout
    joined = joined[routed.any(1)][:, :, routed.any(0)]
    if not joined.size:
        raise ValueError("no token of these dumps has an expert")
    trace = RoutingTrace(joined, experts, sequence_start=np.concatenate(starts))
    trace.check("SGLang dump")
    return trace


def _counts_of(path: Path) -> tuple[np.ndarray, int | None]:
    """(counts [layers, logical experts], rank of a dump that holds the sum of all ranks)."""
    if path.suffix == ".csv":
        return _from_csv(path), None
    content = load_pt(path)
    if isinstance(content, dict) and "logical_count" in content:
        value = content["logical_count"]
        ndim = 2 if getattr(value, "ndim", 3) == 2 else 3
        counts = tensor(f"{path}: logical_count", value, ndim).astype(np.int64)
        if counts.min() < 0:
            raise ValueError(f"{path}: logical_count = {counts.min()}: allowed is 0 or more")
        rank = content.get("rank", 0)
        if not isinstance(rank, int):
            raise ValueError(f"{path}: rank = {rank!r}: allowed is a whole number")
        return counts.reshape(-1, *counts.shape[-2:]).sum(0), rank
    records, to_logical = _records(path, content)
    total = np.zeros((len(to_logical), int(to_logical.max()) + 1), np.int64)
    for index, record in enumerate(records):
        where = f"{path}: records[{index}].global_physical_count"
        counts = tensor(where, record.get("global_physical_count"), 2)
        if counts.shape != to_logical.shape or counts.min() < 0:
            raise ValueError(f"{where} is {counts.shape}: allowed is {to_logical.shape}, 0 or more")
        layer = np.arange(len(total))[:, None]
        np.add.at(total, (np.broadcast_to(layer, counts.shape), to_logical), counts)
    return total, None


def _from_csv(path: Path) -> np.ndarray:
    rows = read_whole_rows(path, HEADER)
    layers, experts = rows[:, :2].max(0) + 1
    if layers > 10_000 or experts > 100_000:
        raise ValueError(f"{path}: layer {layers - 1}, expert {experts - 1}: not of a model")
    if len(np.unique(rows[:, :2], axis=0)) < len(rows):
        raise ValueError(f"{path}: counts an expert of a layer twice")
    counts = np.zeros((layers, experts), np.int64)
    counts[rows[:, 0], rows[:, 1]] = rows[:, 2]
    return counts


def _records(path: Path, content: Any = None) -> tuple[list[dict], np.ndarray]:
    content = load_pt(path) if content is None else content
    keys = list(content) if isinstance(content, dict) else type(content).__name__
    if not isinstance(content, dict) or not isinstance(content.get("records"), list):
        raise ValueError(
            f"{path}: holds {keys}: allowed is 'logical_count', or 'records' with "
            "'last_physical_to_logical_map'"
        )
    if not content["records"] or not all(isinstance(x, dict) for x in content["records"]):
        raise ValueError(f"{path}: records is empty or not a list of dicts")
    where = f"{path}: last_physical_to_logical_map"
    to_logical = tensor(where, content.get("last_physical_to_logical_map"), 2).astype(np.int64)
    if to_logical.min() < 0:
        raise ValueError(f"{where} has {to_logical.min()}: allowed is 0 or more")
    return content["records"], to_logical


def _logical(where: str, value: Any, to_logical: np.ndarray) -> np.ndarray:
    physical = tensor(f"{where}.topk_ids_of_layer", value, 3).astype(np.int64)
    layers, slots = to_logical.shape
    if len(physical) != layers or physical.min() < NOT_ROUTED or physical.max() >= slots:
        raise ValueError(
            f"{where}.topk_ids_of_layer is {physical.shape} with ids {physical.min()} to "
            f"{physical.max()}: allowed are {layers} layers and ids {NOT_ROUTED} to {slots - 1}"
        )
    layer = np.arange(layers)[:, None, None]
    return np.where(physical < 0, NOT_ROUTED, to_logical[layer, np.maximum(physical, 0)])


def _check_not_summed(found: list) -> None:
    summed = {rank for _, (_, rank) in found if rank is not None}
    if len(summed) > 1:
        raise ValueError(
            f"{found[0][0]}: logical_count is summed over ranks already; pass the dumps of one "
            f"rank, not of ranks {sorted(summed)}"
        )
