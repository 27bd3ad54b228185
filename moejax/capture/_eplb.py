"""EPLB's tensors: loads of experts in, maps of their copies out (DeepSeek's load balancer)."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from moejax.capture._counts import ExpertCounts
from moejax.capture._torch_files import load_pt, tensor
from moejax.capture._versions import require_torch
from moejax.placement import ReplicaPlan


def load_eplb_weights(path: str | Path, *, layer_numbers: Any = None) -> ExpertCounts:
    """The weight tensor that `rebalance_experts` takes, loads [layers, experts] in any unit.

    **Arguments:**

    - `path`: `.npy`, or `.pt` with the tensor alone or under one key.
    - `layer_numbers`: of the rows in the model; 0 and on where not given.

    **Raises:** `ValueError` naming the file for what is not a matrix of finite loads, 0 or more.
    """
    path = Path(path)
    if path.suffix == ".npy":
        if not path.is_file():
            raise ValueError(f"{path}: no such file")
        try:
            weights = np.load(path, allow_pickle=False).astype(np.float64)
        except (ValueError, OSError, EOFError) as error:
            raise ValueError(f"{path}: not a readable npy ({error})") from None
    else:
        content = load_pt(path)
        if isinstance(content, dict) and len(content) == 1:
            (content,) = content.values()
        weights = tensor(f"{path}: the weights", content, 2, whole=False)
    if weights.ndim != 2 or 0 in weights.shape:
        raise ValueError(f"{path}: weights are {weights.shape}: allowed is [layers, experts]")
    bad = ~((weights >= 0) & (weights < np.inf))
    if bad.any():
        layer, expert = np.argwhere(bad)[0]
        value = weights[layer, expert]
        raise ValueError(
            f"{path}: layer {layer}, expert {expert}: {value:g}: allowed is finite, 0 or more"
        )
    numbers = np.arange(len(weights)) if layer_numbers is None else np.asarray(layer_numbers)
    return ExpertCounts(weights, numbers)


def plan_of_share(share: Any) -> ReplicaPlan:
    """A placement of whole experts in the shape of EPLB's maps: the copies of an expert share its
    tokens evenly, and every node holds the same number of them.

    **Arguments:**

    - `share`: [experts, nodes], or with a leading axis of layers; a row is spread evenly over the
        nodes that have any of it.

    **Returns:** `ReplicaPlan` with a leading axis of layers, slots numbered node by node.

    **Raises:** `ValueError` naming layer, and expert or node, for uneven rows and nodes.
    """
    shares = np.asarray(share, np.float64)
    shares = shares[None] if shares.ndim == 2 else shares
    if shares.ndim != 3 or 0 in shares.shape:
        raise ValueError(f"share has shape {np.shape(share)}: allowed is [layers, experts, nodes]")
    hosts = shares > 1e-6
    copies = hosts.sum(-1)
    even = hosts / np.maximum(copies, 1)[..., None]
    uneven = np.abs(shares - even).max(-1) > 1e-4
    if uneven.any() or not copies.all():
        layer, expert = np.argwhere(uneven | (copies == 0))[0]
        raise ValueError(
            f"layer {layer}, expert {expert}: share is not even over its nodes: EPLB's maps hold "
            "whole copies only"
        )
    slots = hosts.sum(1)
    if len(np.unique(slots)) > 1:
        layer, node = np.argwhere(slots != slots[0, 0])[0]
        raise ValueError(
            f"layer {layer}, node {node} holds {slots[layer, node]} experts, the first node "
            f"{slots[0, 0]}: EPLB's maps need equal numbers"
        )
    # Node by node, experts ascending in each.
    physical = np.stack([np.nonzero(layer.T)[1] for layer in hosts])
    logical = np.full((*copies.shape, copies.max()), -1)
    for layer, experts in enumerate(physical):
        for expert in range(copies.shape[1]):
            places = np.flatnonzero(experts == expert)
            logical[layer, expert, : len(places)] = places
    return ReplicaPlan(*(jnp.asarray(x, jnp.int32) for x in (physical, logical, copies)))


def save_eplb(plan: ReplicaPlan, path: str | Path) -> None:
    """Writes a plan for others to read, by the ending of `path`:

    - `.npz`: `phy2log`, `log2phy` and `logcnt`, the three results of `rebalance_experts`, int64.
    - `.pt`: the same as tensors in a dict, with `physical_to_logical_map` besides.
    - `.json`: `physical_to_logical_map`, which SGLang takes as its initial expert location.

    Rows are MoE layers in their order.

    **Raises:** `ValueError` for another ending.
    """
    arrays = {
        name: np.asarray(value, np.int64)
        for name, value in zip(("phy2log", "log2phy", "logcnt"), plan)
    }
    if arrays["phy2log"].ndim == 1:
        arrays = {name: array[None] for name, array in arrays.items()}
    path = Path(path)
    by_sglang = {"physical_to_logical_map": arrays["phy2log"]}
    if path.suffix == ".npz":
        phy2log, log2phy, logcnt = arrays.values()
        np.savez(path, phy2log=phy2log, log2phy=log2phy, logcnt=logcnt)
    elif path.suffix == ".json":
        text = json.dumps({name: array.tolist() for name, array in by_sglang.items()})
        path.write_text(text + "\n", encoding="utf-8")
    elif path.suffix == ".pt":
        torch = require_torch()
        torch.save({n: torch.from_numpy(a) for n, a in (arrays | by_sglang).items()}, path)
    else:
        raise ValueError(f"{path}: allowed endings are .npz, .json and .pt")
