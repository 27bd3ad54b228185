"""What llama.cpp's moe-trace example writes: one row `layer,expert` for each routed activation."""

from pathlib import Path

import numpy as np

from moejax.capture._counts import read_whole_rows
from moejax.routing import NOT_ROUTED, RoutingTrace


def load_llama_cpp(
    path: str | Path, top_k: int, num_experts: int, *, model: str | None = None
) -> RoutingTrace:
    """The trace of one prompt and what was generated after it, one sequence.

    The file holds passes, each with a run of rows for every MoE layer: `top_k` for each token. In
    its last layer llama.cpp computes only tokens whose output is wanted, so that most tokens of a
    prompt have no experts there: they are `NOT_ROUTED` and not valid.

    **Arguments:**

    - `path`: the CSV, with or without a header `layer,expert`.
    - `top_k`, `num_experts`: of the model; the file does not say.

    **Raises:** `ValueError` naming the file for rows of another form, runs that are no multiple of
    `top_k`, passes whose layers disagree, and ids out of range.
    """
    path = Path(path)
    if top_k < 1:
        raise ValueError(f"top_k = {top_k}: allowed is 1 or more")
    rows = read_whole_rows(path, ["layer", "expert"], optional=True)
    numbers = np.unique(rows[:, 0])
    begins = np.flatnonzero(np.diff(rows[:, 0], prepend=-1))
    runs = np.split(rows[:, 1], begins[1:])
    if len(numbers) == 1:
        raise ValueError(f"{path}: one layer only: its passes can not be told apart")
    if len(runs) % len(numbers):
        raise ValueError(f"{path}: {len(runs)} runs of {len(numbers)} layers: a pass is cut short")
    order = rows[begins, 0].reshape(-1, len(numbers))
    if (order != numbers).any():
        number = np.flatnonzero((order != numbers).any(1))[0]
        raise ValueError(f"{path}: pass {number} has layers {order[number].tolist()[:8]} ...")
    passes = [
        _one_pass(f"{path}: pass {i}", runs[i * len(numbers) : (i + 1) * len(numbers)], top_k)
        for i in range(len(order))
    ]
    ids = np.concatenate(passes, axis=1)
    valid = (ids != NOT_ROUTED).all(axis=(0, 2))
    try:
        trace = RoutingTrace(ids, num_experts, valid=valid, model=model)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    trace.check(str(path))
    return trace


def _one_pass(where: str, runs: list[np.ndarray], top_k: int) -> np.ndarray:
    """[layers, tokens, top_k] of a pass."""
    for index, run in enumerate(runs):
        if len(run) % top_k:
            raise ValueError(
                f"{where}: MoE layer {index} has {len(run)} rows: allowed are multiples of top_k = "
                f"{top_k}"
            )
    tokens = len(runs[0]) // top_k
    wrong = [i for i, run in enumerate(runs[:-1]) if len(run) != len(runs[0])]
    if wrong or len(runs[-1]) > len(runs[0]):
        index = wrong[0] if wrong else len(runs) - 1
        raise ValueError(
            f"{where}: MoE layer {index} has {len(runs[index]) // top_k} tokens, the first {tokens}"
        )
    ids = np.full((len(runs), tokens, top_k), NOT_ROUTED)
    for layer, run in zip(ids, runs):
        layer[tokens - len(run) // top_k :] = run.reshape(-1, top_k)
    return ids
