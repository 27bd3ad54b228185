"""What does the time between tokens on a near-memory mesh consist of, as published and counted?

Three models in HDA-MoE's settings (arXiv 2609.08682): tensor, expert and hybrid parallelism, fitted
to the routing they are timed on, in the papers' own units and with every FLOP and byte counted
once (three expert matrices, two FLOPs a multiply-add, bytes by precision). Nothing overlaps, so the
parts add up: arithmetic of the routed experts on the busiest node, all other arithmetic,
communication over the simulated mesh, and reading weights and caches.

    moejax run sweeps/near_memory_tbt.py
"""

from typing import Any

import jax
import numpy as np

import moejax as mj
from moejax import hardware, models, plot, serving
from moejax.sweep import Axis, Sweep


MODELS = ("deepseek-v2-lite", "mixtral-8x7b", "qwen2-57b-a14b")
SYSTEMS = ("nmp-4x8-2.5t-75g", "nmp-4x8-5t-50g", "nmp-4x8-10t-25g")
BATCHES = (32, 128)
CONTEXT = 64.0  # as the authors have it
PARTS = ("experts", "other_arithmetic", "communication", "memory")
# The authors' tensor-parallel rows, us: synthetic routing makes no difference to them.
PUBLISHED = {
    ("deepseek-v2-lite", "nmp-4x8-2.5t-75g", 32): 1491.23,
    ("deepseek-v2-lite", "nmp-4x8-5t-50g", 32): 1364.91,
    ("deepseek-v2-lite", "nmp-4x8-10t-25g", 32): 1756.14,
    ("mixtral-8x7b", "nmp-4x8-2.5t-75g", 32): 6406.21,
    ("mixtral-8x7b", "nmp-4x8-5t-50g", 32): 4917.51,
    ("mixtral-8x7b", "nmp-4x8-10t-25g", 32): 5291.64,
    ("qwen2-57b-a14b", "nmp-4x8-2.5t-75g", 32): 6113.30,
    ("qwen2-57b-a14b", "nmp-4x8-5t-50g", 32): 4685.15,
    ("qwen2-57b-a14b", "nmp-4x8-10t-25g", 32): 4827.41,
}


def fit(model, system, method, accounting, batch, seed) -> dict[str, Any]:
    """Placements are found on the host."""
    workload = mj.Workload(int(batch), CONTEXT)
    key = jax.random.key(int(seed))
    placed = serving.place(model, system, workload, method, key=key, accounting=accounting)
    return {"placement": placed}


def evaluate(config, key) -> serving.NearMemoryReport:
    workload = mj.Workload(config["batch"], CONTEXT, max_batch=max(BATCHES))
    return serving.evaluate_placement(
        config["model"],
        config["system"],
        workload,
        config["placement"],
        key=key,
        accounting=config["accounting"],
        must_fit=False,
    )


def columns(report: serving.NearMemoryReport) -> dict[str, np.ndarray]:
    """Times in ms; the four parts add up to `tbt_ms`."""
    times = (report.comp_time, report.attention_time, report.comm_time, report.memory_time)
    found = {f"{part}_ms": 1e3 * np.asarray(time) for part, time in zip(PARTS, times, strict=True)}
    found |= {"tbt_ms": 1e3 * np.asarray(report.tbt)}
    found |= {"load_imbalance": np.asarray(report.load_imbalance)}
    found |= {"memory_gb": np.asarray(report.memory_bytes) / 1e9}
    return found | {"status": np.asarray(report.status)}


SWEEP = Sweep(
    [
        Axis("model", list(MODELS), resolve=models.get),
        Axis("system", list(SYSTEMS), resolve=hardware.get),
        Axis("accounting", ["published", "counted"], static=True),
        Axis("method", ["tensor_parallel", "expert_parallel", "hybrid"], static=True),
        Axis("batch", list(BATCHES)),
    ],
    evaluate,
    seeds=1,
    prepare=fit,
    columns=columns,
    width=1,
)


def summary(table) -> str:
    """Time between tokens and its parts; tensor parallelism beside the published one."""
    lines = [
        "",
        f"{'model':<17}{'system':<18}{'counting':<11}{'placement':<17}{'B':>4}{'tbt_ms':>9}",
    ]
    lines[-1] += "".join(f"{part:>18}" for part in PARTS) + f"{'published_ms':>14}"
    names = ("model", "system", "accounting", "method", "batch")
    keys = list(zip(*(table[name].tolist() for name in names), strict=True))
    for model, system, accounting, method, batch in dict.fromkeys(keys):
        at = dict(model=model, system=system, accounting=accounting, method=method, batch=batch)
        rows = plot.select(table, **at)
        shares = "".join(
            f"{np.mean(rows[f'{part}_ms']) / np.mean(rows['tbt_ms']):>18.0%}" for part in PARTS
        )
        known = PUBLISHED.get((model, system, batch))
        same = known is not None and (accounting, method) == ("published", "tensor_parallel")
        lines.append(
            f"{model:<17}{system:<18}{accounting:<11}{method:<17}{batch:>4}"
            f"{np.mean(rows['tbt_ms']):>9.3f}{shares}" + (f"{known / 1e3:>14.3f}" if same else "")
        )
    return "\n".join(lines)


def figures(table) -> dict[str, Any]:
    """One bar per placement and counting, one picture per model, in the middle setting."""
    shown = list(dict.fromkeys(table["model"]))
    systems = list(dict.fromkeys(table["system"]))
    system, batch = systems[len(systems) // 2], max(table["batch"])
    figure, axes = plot.figure(1, len(shown), (4.2 * len(shown), 4.2))
    for i, model in enumerate(shown):
        rows = plot.select(table, model=model, system=system, batch=batch)
        pairs = zip(rows["method"], rows["accounting"], strict=True)
        named = {"name": [f"{m.replace('_parallel', '')}\n{a}" for m, a in pairs]}
        named |= {f"{part}_ms": rows[f"{part}_ms"] for part in PARTS}
        title = f"{model}, B = {batch}"
        plot.breakdown(named, axes[0, i], parts=PARTS, title=title, legend=False)
    plot.shared_legend(figure, axes)
    return {"near_memory_breakdown": figure}
