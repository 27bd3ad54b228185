"""What does it cost to keep the expert weights of every node near its equal share?

Node Balance may pile experts up on a node, if the others are busy. Here a node holds at most rho
times its equal share of each layer's weights (HDA-MoE, arXiv 2609.08682, section V-B, which sweeps
rho as well), from rho = 1, where all nodes hold the same, to no cap; beside the baselines. Fitted
to the first half of a trace and judged on the second by the papers' estimate. The trace is that of
moejax's own model "zoo", costed with the sizes of DeepSeek-V2-Lite (column `cost_model`), or
`--trace FILE`.

    moejax run sweeps/placement_memory.py
"""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from moejax import hardware, models, placement, plot, routing, serving, zoo


COST_MODEL = "deepseek-v2-lite"
SYSTEMS = ("nmp-4x8-2.5t-75g", "nmp-4x8-10t-25g")
FACTORS = (1.0, 1.1, 1.25, 1.5, 2.0, float("inf"))
BASELINES = ("tensor_parallel", "expert_parallel", "hybrid", "eplb")
BATCH, GROUPS = 128, 256
LINES = 4  # layers of the picture of the search


def rows(*, trace: str | None = None, progress=None) -> Iterator[list[dict[str, Any]]]:
    """One row per system, placement, cap on the memory, and half of the trace."""
    total = len(SYSTEMS) * (1 + len(FACTORS))
    for done, (name, factor) in enumerate((n, f) for n in SYSTEMS for f in (None, *FACTORS)):
        if progress is not None:
            progress(done, total)
        if factor is None:
            found = {method: _baseline(trace, name, method) for method in BASELINES}
            yield [row for m, p in found.items() for row in _tidy(trace, name, m, p, np.inf)]
        else:
            share = _balance(trace, name, factor).share
            yield _tidy(trace, name, "node", placement.Placement(share), factor)
    if progress is not None:
        progress(total, total)


def _case(path: str | None):
    """(name, model, statistics of the first and the second half) of a study."""
    recorded = zoo.trace() if path is None else routing.load(path)
    if path is None:
        shapes = models.get(COST_MODEL)
        layers = shapes.layers[: recorded.num_layers + shapes.num_dense_layers]
        sizes = dict(num_experts=recorded.num_experts, top_k=recorded.top_k, layers=layers)
        model = shapes.replace(**sizes)
    elif recorded.model in models.MODELS:
        model = models.get(recorded.model)
    else:
        name = recorded.model or "unnamed"
        raise ValueError(f"{path}: no sizes known for its model, {name}")
    ids = np.asarray(recorded.expert_ids)[:, np.asarray(recorded.valid)]
    halves = np.split(ids, [ids.shape[1] // 2], axis=1)
    halves = [placement.statistics(h, recorded.num_experts, max_groups=GROUPS) for h in halves]
    return recorded.model or "unnamed", model, dict(zip(("first half", "second half"), halves))


def _costs(model: models.MoEModel, name: str) -> placement.NodeCosts:
    return serving.node_costs(model, hardware.get(name), BATCH)


def _baseline(path: str | None, name: str, method: str) -> placement.Placement:
    _, model, halves = _case(path)
    network = serving.network_of(hardware.get(name))
    costs, key = _costs(model, name), jax.random.key(0)
    return placement.place(method, halves["first half"], network, costs, key=key)


def _balance(path: str | None, name: str, factor: float) -> placement.NodeBalance:
    """Node Balance of every layer under a cap."""
    _, model, halves = _case(path)
    costs, num_nodes = _costs(model, name), hardware.get(name).num_nodes
    cap = None if factor == np.inf else factor
    keys = jax.random.split(jax.random.key(0), model.num_moe_layers)
    one = lambda layer, key: placement.node_balance(
        layer, costs, num_nodes, key=key, memory_factor=cap
    )
    return jax.vmap(one)(halves["first half"], keys)


def _tidy(path, name: str, method: str, placed: placement.Placement, factor: float):
    case, model, halves = _case(path)
    costs, system = _costs(model, name), hardware.get(name)
    # EPLB stores whole copies, the others slices.
    stored = lambda share: placement.memory_use(
        share, model.expert_bytes, whole_copies=method == "eplb"
    )
    fullest = max(float(stored(share).max_over_mean) for share in placed.share)
    copies = float((placed.share > placement.HOSTING_SHARE).sum(-1).mean())
    fixed = dict(model=case, cost_model=model.name, layers=model.num_moe_layers, system=name)
    fixed |= dict(tflop_s=float(system.flops_per_s) / 1e12, batch=BATCH, method=method)
    fixed |= dict(link_gb_s=float(system.link_bandwidth) / 1e9, memory_factor=factor)
    fixed |= dict(memory_max_over_mean=fullest, nodes_per_expert=copies)
    fixed |= dict(node_memory_mb=float(stored(placed.share).node_bytes.max()) / 1e6)
    found = []
    for half, statistics in halves.items():
        times = jax.vmap(placement.evaluate, (0, 0, None))(placed.share, statistics, costs)
        comp, total = (1e6 * float(time.sum()) for time in (times.comp_time, times.total))
        row = fixed | dict(judged_on=half, unseen=half != "first half")
        found.append(row | dict(comp_us=comp, comm_us=total - comp, total_us=total))
    return found


def summary(rows: list[dict[str, Any]]) -> str:
    """Estimated time of the unseen half and memory of the fullest node, by cap."""
    table = {name: np.array([row[name] for row in rows]) for name in rows[0]}
    line = "  {:<17}{:>6}{:>10}{:>10}{:>11}{:>13}{:>10}{:>9}"
    lines = ["", "expected times of all layers on unseen tokens; memory of the fullest node"]
    for name in dict.fromkeys(table["system"].tolist()):
        of = plot.select(table, system=name, unseen=True)
        heads = ("placement", "rho", "comp_us", "comm_us", "total_us", "fitted half", "max/mean")
        lines += ["", f"{of['model'][0]} on {name}, B = {of['batch'][0]}"]
        lines.append(line.format(*heads, "nodes"))
        seen = plot.select(table, system=name, unseen=False)["total_us"]
        for i, method in enumerate(of["method"]):
            cap = of["memory_factor"][i]
            cells = [f"{of[column][i]:.1f}" for column in ("comp_us", "comm_us", "total_us")]
            cells += [f"{seen[i]:.1f}", f"{of['memory_max_over_mean'][i]:.2f}"]
            cells.append(f"{of['nodes_per_expert'][i]:.2f}")
            lines.append(line.format(method, "-" if np.isinf(cap) else f"{cap:g}", *cells))
    return "\n".join(lines)


def figures(rows: list[dict[str, Any]], *, trace: str | None = None) -> dict[str, Any]:
    """Time against memory of the fullest node; the course of the search in some layers."""
    table = {name: np.array([row[name] for row in rows]) for name in rows[0]}
    systems = list(dict.fromkeys(table["system"].tolist()))
    memory, axes = plot.figure(1, len(systems), (4.5 * len(systems), 3.2))
    for ax, name in zip(axes[0], systems):
        of = plot.select(table, system=name, unseen=True)
        # Far above the others.
        shown = [m for m in dict.fromkeys(of["method"].tolist()) if m != "expert_parallel"]
        for place, method in enumerate(shown):
            _line(ax, plot.select(of, method=method), "o-", f"C{place}", method)
        fitted = plot.select(table, system=name, unseen=False, method="node")
        _line(ax, fitted, "o--", f"C{len(shown) - 1}", "node, fitted half")
        ax.set_xlabel("memory of the fullest node / mean")
        ax.set_ylabel("compute + communication (us)")
        ax.set_title(f"{of['model'][0]}, {name.removeprefix('nmp-')}, unseen tokens")
    plot.shared_legend(memory, axes)
    return {"memory": memory, "convergence": _course(trace)}


def _line(ax, table, style: str, color: str, label: str) -> None:
    order = np.argsort(table["memory_max_over_mean"])
    x, y = (table[column][order] for column in ("memory_max_over_mean", "total_us"))
    ax.plot(x, y, style, color=color, label=label)


def _course(path: str | None):
    found = _balance(path, SYSTEMS[0], FACTORS[-1])
    curve, bound = (1e6 * np.asarray(times)[:LINES] for times in (found.curve, found.bound))
    steps = curve.shape[1]
    table = dict(
        step=np.tile(np.arange(1, steps + 1), len(curve)),
        total_us=curve.ravel(),
        bound_us=np.repeat(bound, steps),
        search=np.repeat([f"layer {layer}" for layer in range(len(curve))], steps),
    )
    figure, axes = plot.figure(1, 1, (7, 3.0))
    plot.convergence(table, axes[0, 0], title="Node Balance: best placement so far")
    return figure
