"""What does it cost to keep the expert weights of every node near its equal share?

Node Balance may pile experts up on a node, if the others are busy. Here a node holds at most rho
times its equal share of each layer's weights (HDA-MoE, arXiv 2609.08682, section V-B, which sweeps
rho as well), from rho = 1, where all nodes hold the same, to no cap; beside the baselines. Fitted
to the first half of a trace and judged on the second by the papers' estimate. The trace is that of
moejax's own model "zoo", costed with the sizes of DeepSeek-V2-Lite (column `cost_model`), or
`--trace FILE`.

    moejax run sweeps/placement_memory.py
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moejax import hardware, models, placement, plot, routing, serving, zoo
from moejax.sweep import Axis, Sweep, conditional


COST_MODEL = "deepseek-v2-lite"
SYSTEMS = ("nmp-4x8-2.5t-75g", "nmp-4x8-10t-25g")
FACTORS = (1.0, 1.1, 1.25, 1.5, 2.0, float("inf"))
METHODS = ("tensor_parallel", "expert_parallel", "hybrid", "eplb", "node")
HALVES = ("first half", "second half")
BATCH, GROUPS = 128, 256
LINES = 4  # layers of the picture of the search


def SWEEP(*, trace: str | None = None) -> Sweep:
    """One call judges a placement on both halves."""
    given = lambda function: functools.partial(function, trace)
    factors = Axis("memory_factor", FACTORS)
    return Sweep(
        [
            Axis("system", SYSTEMS, resolve=_unnamed),
            Axis("method", METHODS, resolve=METHODS.index),
            conditional(factors, otherwise=np.inf, method="node"),
            Axis("judged_on", HALVES, inner=True),
        ],
        times,
        prepare=[given(fit), given(judge)],
        about=given(about),
    )


def _unnamed(name: str) -> hardware.NMPSystem:
    """The name is no number: without it, all systems share a compilation."""
    return dataclasses.replace(hardware.get(name), name="any")


@functools.lru_cache(maxsize=2)
def _case(path: str | None) -> tuple[str, models.MoEModel, dict[str, placement.Statistics]]:
    """Name, model, statistics of the halves of a study."""
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
    count = lambda half: placement.statistics(half, recorded.num_experts, max_groups=GROUPS)
    return recorded.model or "unnamed", model, dict(zip(HALVES, map(count, halves)))


def fit(path: str | None, system: hardware.NMPSystem, method: int, memory_factor: float):
    """The placement of all layers, and what it stores."""
    _, model, halves = _case(path)
    name, costs = METHODS[int(method)], serving.node_costs(model, system, BATCH)
    if name == "node":
        share = _balance(halves[HALVES[0]], costs, system.num_nodes, memory_factor).share
    else:
        network, key = serving.network_of(system), jax.random.key(0)
        share = placement.place(name, halves[HALVES[0]], network, costs, key=key).share
    # EPLB stores whole copies, the others slices.
    stored = lambda share: placement.memory_use(
        share, model.expert_bytes, whole_copies=name == "eplb"
    )
    found = dict(memory_max_over_mean=max(float(stored(layer).max_over_mean) for layer in share))
    found |= dict(nodes_per_expert=float((share > placement.HOSTING_SHARE).sum(-1).mean()))
    found |= dict(node_memory_mb=float(stored(share).node_bytes.max()) / 1e6)
    return dict(share=share, costs=costs, stored=found)


def _balance(statistics, costs, num_nodes: int, factor: float) -> placement.NodeBalance:
    """Node Balance of every layer under a cap."""
    cap = None if factor == np.inf else float(factor)
    keys = jax.random.split(jax.random.key(0), statistics.frequency.shape[0])
    one = lambda layer, key: placement.node_balance(
        layer, costs, num_nodes, key=key, memory_factor=cap
    )
    return jax.vmap(one)(statistics, keys)


def judge(path: str | None, judged_on: list[str]) -> dict[str, Any]:
    """Statistics [halves, layers] to judge on."""
    halves = _case(path)[2]
    return dict(halves=jax.tree.map(lambda *x: jnp.stack(x), *(halves[h] for h in judged_on)))


def times(config: dict[str, Any], key) -> dict[str, Any]:
    """Expected times of all layers [halves], in us."""
    del key
    layers = jax.vmap(placement.evaluate, (0, 0, None))
    found = jax.vmap(layers, (None, 0, None))(config["share"], config["halves"], config["costs"])
    comp, total = (1e6 * time.sum(-1) for time in (found.comp_time, found.total))
    same = {name: jnp.broadcast_to(x, comp.shape) for name, x in config["stored"].items()}
    return same | dict(
        comp_us=comp, comm_us=total - comp, total_us=total, status=found.status[:, 0]
    )


def about(path: str | None, system: hardware.NMPSystem, judged_on: list[str]) -> dict[str, Any]:
    """The model, the system's rates, and which half nobody has seen."""
    name, model, _ = _case(path)
    rates = float(system.flops_per_s) / 1e12, float(system.link_bandwidth) / 1e9
    tera, giga = (round(rate, 3) for rate in rates)
    found = dict(model=name, cost_model=model.name, layers=model.num_moe_layers, batch=BATCH)
    unseen = np.array([half != HALVES[0] for half in judged_on])
    return found | dict(tflop_s=tera, link_gb_s=giga, unseen=unseen)


def summary(table: dict[str, np.ndarray]) -> str:
    """Estimated time of the unseen half and memory of the fullest node, by cap."""
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


def figures(table: dict[str, np.ndarray], *, trace: str | None = None) -> dict[str, Any]:
    """Time against memory of the fullest node; the course of the search in some layers."""
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
    _, model, halves = _case(path)
    system = hardware.get(SYSTEMS[0])
    costs = serving.node_costs(model, system, BATCH)
    first = jax.tree.map(lambda part: part[:LINES], halves[HALVES[0]])
    found = _balance(first, costs, system.num_nodes, np.inf)
    curve, bound = (1e6 * np.asarray(times) for times in (found.curve, found.bound))
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
