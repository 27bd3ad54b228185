"""Which placement of experts on a near-memory mesh is fastest, on tokens that it was not fitted to?

Six placements (tensor and expert parallelism, the hybrid of regions, EPLB's copies, Node Balance at
random places, and with Link Balance) are fitted to one part of a trace and judged on batches of
that part and of others, in the units of HDA-MoE (arXiv 2609.08682): 1 B an element in messages,
4 B in the four all-reduces of tensor parallelism. Node Balance knows gamma, the measured ratio of
simulated to estimated communication. Placements see the same batches, so speed-ups are paired.

Always: four layers with the sizes of DeepSeek-V2-Lite (column `cost_model`) and the routing of
moejax's own model "zoo", or synthetic routing that is calibrated to gpt-oss-20b; the second half of
the tokens is unseen. In the folder of real traces (`MOEJAX_DATA`): Mixtral and six layers of
DeepSeek-V2-Lite, fitted to one category and judged on others, on three meshes, beside the
placements that HD-MoE's authors published ("hd-moe-reference"). With `--trace FILE`: the two halves
of its sequences.

    moejax run sweeps/placement_on_mesh.py
"""

import dataclasses
import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moejax import hardware, models, noc, placement, plot, routing, serving, zoo
from moejax.hardware import NMPSystem
from moejax.placement import Placement
from moejax.routing import RoutingTrace


SETTINGS = ("nmp-4x8-2.5t-75g", "nmp-4x8-5t-50g", "nmp-4x8-10t-25g")
ALL = (*SETTINGS, "nmp-4x4-5t-50g", "nmp-8x8-5t-50g")
COST_MODEL = "deepseek-v2-lite"
# Of as many experts as the zoo's, so that all programs are compiled once.
SYNTHETIC, SYNTHETIC_TOKENS = "gpt-oss-20b", 8192
REAL = {
    # model: (name in the file of published placements, layers, fitted to, judged on)
    "mixtral-8x7b": ("mixtral", 32, "mtbench-reasoning", ("mtbench-coding", "mtbench-writing")),
    "deepseek-v2-lite": ("ds", 6, "esft-law", ("esft-intent", "esft-translation")),
}
ACCOUNTING = "published"
BATCH, CONTEXT, SEEDS = 128, 64, 8
GROUPS = 512  # commonest sets of experts that a placement is fitted to
GAMMA_BATCHES, GAMMA_LAYERS = range(32, 272, 15), 2
REFERENCE = "hd-moe-reference"
PARTS = ("comp", "comm", "attention", "memory")  # of the time between tokens
STEPS = len(placement.METHODS)  # of the progress bar for each model and system


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, what placements are fitted to, what they are judged on, and the systems."""

    name: str
    model: models.MoEModel
    systems: tuple[str, ...]
    fitted_on: str
    parts: dict[str, RoutingTrace]
    published: dict[str, Placement] = dataclasses.field(default_factory=dict)

    @property
    def fit(self) -> RoutingTrace:
        return self.parts[self.fitted_on]


class Fitted(NamedTuple):
    """Placements by method, and the gamma that they were made with."""

    placements: dict[str, Placement]
    gamma: float


def rows(*, trace: str | None = None, progress=None) -> Iterator[list[dict[str, Any]]]:
    """One row per model, system, placement, part of the trace it is judged on, and seed."""
    studies = [(case, name) for case in _cases(trace) for name in case.systems]
    total = STEPS * len(studies)
    for done, (case, name) in enumerate(studies):
        at = iter(range(STEPS * done, total + 1))
        tick = lambda: progress is not None and progress(next(at), total)  # noqa: B023
        tick()
        yield _study(case, name, tick)
        tick()


@functools.lru_cache(maxsize=2)
def _cases(path: str | None) -> tuple[Case, ...]:
    if path is not None:
        trace = routing.load(path)
        if trace.model not in models.MODELS:
            raise ValueError(f"{path}: no sizes known for its model, {trace.model or 'unnamed'}")
        return (_halves(trace.model, models.get(trace.model), SETTINGS, trace),)
    recorded, shapes = zoo.trace(), models.get(COST_MODEL)
    drawn = routing.sample_expert_ids(
        routing.calibrated(SYNTHETIC).popularity,
        *(recorded.num_experts, recorded.top_k, recorded.num_layers, SYNTHETIC_TOKENS),
        key=jax.random.key(0),
    )
    starts = np.arange(SYNTHETIC_TOKENS)
    drawn = RoutingTrace(drawn, recorded.num_experts, sequence_start=starts)
    layers = shapes.layers[: recorded.num_layers + shapes.num_dense_layers]
    model = shapes.replace(num_experts=recorded.num_experts, top_k=recorded.top_k, layers=layers)
    zoos = _halves("zoo", model, SETTINGS, recorded)
    return (zoos, _halves(f"synthetic {SYNTHETIC}", model, SETTINGS, drawn), *_real())


def _halves(name: str, model, systems: tuple[str, ...], trace: RoutingTrace) -> Case:
    """Fitted to the first half of the sequences (or tokens, where there is one sequence only)."""
    starts = np.asarray(trace.sequence_start)
    middle = int(starts[len(starts) // 2]) or trace.num_tokens // 2

    def part(first: int, last: int) -> RoutingTrace:
        inside = starts[(starts > first) & (starts < last)]
        return RoutingTrace(
            np.asarray(trace.expert_ids)[:, first:last],
            trace.num_experts,
            valid=np.asarray(trace.valid)[first:last],
            sequence_start=np.concatenate([[0], inside - first]),
            model=trace.model,
        )

    parts = {"first half": part(0, middle), "second half": part(middle, trace.num_tokens)}
    return Case(name, model, systems, "first half", parts)


def _real() -> Iterator[Case]:
    """Some layers of models whose traces are there, with the published placements."""
    folder = os.environ.get("MOEJAX_DATA")
    for name, (short, number, fitted_on, others) in REAL.items() if folder else ():
        full = models.get(name)
        keep = np.unique(np.linspace(0, full.num_moe_layers - 1, number).astype(int))
        model = full.replace(layers=full.layers[: len(keep) + full.num_dense_layers])
        parts = {}
        for task in (fitted_on, *others):
            trace = routing.load(Path(folder or "") / name / f"{task}.npz")
            kept = trace.expert_ids[keep]
            parts[task] = dataclasses.replace(trace, expert_ids=kept, weights=None)
        published = {system: _published(folder or "", short, system, keep) for system in ALL}
        yield Case(name, model, ALL, fitted_on, parts, published)


def _published(folder: str, model: str, name: str, layers: np.ndarray) -> Placement:
    mesh, tera, giga = name.removeprefix("nmp-").split("-")
    rates = f"{float(tera[:-1]):.1f}T_{float(giga[:-1]):.1f}G"
    with np.load(Path(folder) / "hd-moe-reference" / "placements.npz") as file:
        share, position = (file[f"{model}_nodelink_{rates}_{mesh}_{x}"] for x in ("P", "pos"))
    return Placement(share[layers], position[layers].astype(np.int32), name=REFERENCE)


def _study(case: Case, name: str, tick: Callable) -> list[dict[str, Any]]:
    """All rows of one model on one system."""
    # The name is no number: without it, all settings of a mesh share a compilation.
    system = dataclasses.replace(hardware.get(name), name="any")
    fitted = _fit(case, name, tick)
    seeds = np.arange(SEEDS)
    drawn = jnp.concatenate([_draws(part, seeds) for part in case.parts.values()])
    keys = jax.vmap(jax.random.key)(jnp.tile(seeds, len(case.parts)))
    judged = {}
    for reduced in (False, True):
        names = [m for m, p in fitted.placements.items() if p.all_reduce == reduced]
        # Without names, for a stack of them.
        plain = [dataclasses.replace(fitted.placements[m], name="any") for m in names]
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *plain)
        reports = _judge(case.model, system, stacked, drawn, keys, ACCOUNTING)
        if np.any(reports.status):
            raise ValueError(f"{case.name} on {name}: status {np.max(reports.status)}")
        for i, method in enumerate(names):
            judged[method] = jax.tree.map(lambda x: np.asarray(x[i], float), reports)  # noqa: B023
    fixed = dict(model=case.name, cost_model=case.model.name, layers=case.model.num_moe_layers)
    fixed |= dict(system=name, network=system.network, nodes=system.num_nodes)
    fixed |= dict(tflop_s=float(system.flops_per_s) / 1e12)
    fixed |= dict(link_gb_s=float(system.link_bandwidth) / 1e9, accounting=ACCOUNTING)
    fixed |= dict(batch=BATCH, context=CONTEXT, gamma=fitted.gamma, fitted_on=case.fitted_on)
    return _tidy(case, fixed, fitted, judged, seeds)


def _draws(part: RoutingTrace, seeds: np.ndarray) -> jax.Array:
    """Batches of different sequences [seeds, layers, batch, top_k], where there are enough."""
    owners = np.asarray(part.sequence_id)[np.asarray(part.valid)]
    reuse = len(np.unique(owners)) < BATCH
    draw = lambda key: routing.decode_batch(part, BATCH, key=key, reuse=reuse)
    return jax.vmap(draw)(jax.vmap(jax.random.key)(seeds))


@functools.partial(jax.jit, static_argnames="accounting")
def _judge(model, system: NMPSystem, placements: Placement, drawn, keys, accounting: str):
    """Reports [placements, draws]; `drawn` are expert ids [draws, layers, batch, top_k]."""
    starts = np.arange(drawn.shape[2])

    def one(place, draw):
        batch = RoutingTrace(drawn[draw], model.num_experts, sequence_start=starts)
        workload = serving.Workload(len(starts), CONTEXT, routing=batch)
        placed = jax.tree.map(lambda leaf: leaf[place], placements)
        return serving.evaluate_placement(
            model, system, workload, placed, key=keys[draw], accounting=accounting
        )

    grid = (placements.share.shape[0], drawn.shape[0])
    # One after the other: all messages at once would take much memory.
    found = jax.lax.map(lambda pair: one(*pair), tuple(jnp.indices(grid).reshape(2, -1)))
    return jax.tree.map(lambda x: x.reshape(grid), found)


_FITTED: dict[tuple, Fitted] = {}


def _fit(case: Case, name: str, tick: Callable = lambda: None) -> Fitted:
    """Every placement of a model on a system; found once, for rows and pictures."""
    at = (case.name, case.fitted_on, name, case.fit.num_tokens)
    if at not in _FITTED:
        fitted = _fit_anew(case, hardware.get(name), tick)
        if name in case.published:
            fitted.placements[REFERENCE] = case.published[name]
        _FITTED[at] = fitted
    return _FITTED[at]


def _fit_anew(case: Case, system: NMPSystem, tick: Callable) -> Fitted:
    key, network = jax.random.key(0), serving.network_of(system)
    statistics = placement.trace_statistics(case.fit, max_groups=GROUPS)
    gamma = _gamma(case, network, key)
    costs = serving.node_costs(case.model, system, BATCH, accounting=ACCOUNTING, gamma=gamma)
    found = {}
    for method in placement.METHODS:
        if method != "node":
            found[method] = placement.place(method, statistics, network, costs, key=key)
            tick()
    # Node Balance alone: the shares of both, at random places.
    share, scattered = found["node_link"].share, found["expert_parallel"].node_position
    found["node"] = Placement(share, scattered, name="node")
    return Fitted({method: found[method] for method in placement.METHODS}, gamma)


def _gamma(case: Case, network: noc.Topology, key) -> float:
    """Simulated over estimated communication of expert parallelism, mean over some layers."""
    ids = np.asarray(case.fit.expert_ids)[:, np.asarray(case.fit.valid)]
    share = placement.expert_parallel(case.fit.num_experts, network.num_nodes, key=key)
    position = jax.random.permutation(key, network.num_nodes)
    layers = np.unique(np.linspace(0, len(ids) - 1, GAMMA_LAYERS).astype(int))
    fits = [
        noc.calibrate_gamma(
            network,
            jnp.asarray(ids[layer]),
            share,
            position,
            hidden_size=case.model.hidden,
            key=key,
            batch_sizes=[size for size in GAMMA_BATCHES if size <= ids.shape[1]],
        )
        for layer in layers
    ]
    return float(np.mean([fit.slope for fit in fits]))


def _tidy(case: Case, fixed, fitted: Fitted, judged, seeds: np.ndarray) -> list[dict[str, Any]]:
    draws = [(part, int(seed)) for part in case.parts for seed in seeds]
    found = []
    for method, placed in fitted.placements.items():
        # EPLB stores whole copies, the others slices.
        copies = method == "eplb"
        stored = placement.memory_use(placed.share, case.model.expert_bytes, whole_copies=copies)
        same = dict(method=method)
        same |= dict(node_memory_mb=float(stored.node_bytes.max()) / 1e6)
        same |= dict(memory_max_over_mean=float(stored.max_over_mean))
        report, base = judged[method], judged["tensor_parallel"]
        for i, (part, seed) in enumerate(draws):
            row = fixed | same | dict(judged_on=part, unseen=part != case.fitted_on, seed=seed)
            row |= {f"{n}_us": 1e6 * float(vars(report)[f"{n}_time"][i]) for n in PARTS}
            row |= dict(tbt_us=1e6 * float(report.tbt[i]))
            row |= dict(speedup=float(base.tbt[i] / report.tbt[i]))
            found.append(row | dict(max_mean_load=float(report.load_imbalance[i])))
    return found


def summary(rows: list[dict[str, Any]]) -> str:
    """Times on unseen tokens, and speed-ups over tensor parallelism on seen and unseen ones."""
    table = {name: np.array([row[name] for row in rows]) for name in rows[0]}
    line = "  {:<17}{:>9}{:>9}{:>10}{:>15}{:>15}{:>9}{:>9}"
    heads = ("placement", "comp_us", "comm_us", "tbt_us", "speed-up", "fitted part", "max/mean")
    lines = ["", "on unseen tokens; speed-up over tensor parallelism, mean +- 95 % over draws"]
    for model, name in dict.fromkeys(zip(table["model"].tolist(), table["system"].tolist())):
        of = plot.select(table, model=model, system=name)
        gamma, batch, layers = of["gamma"][0], of["batch"][0], of["layers"][0]
        lines += ["", f"{model} on {name}: B = {batch}, {layers} layers, gamma {gamma:.2f}"]
        lines.append(line.format(*heads, "memory"))
        for method in dict.fromkeys(of["method"].tolist()):
            lines.append(line.format(*_cells(plot.select(of, method=method))))
    return "\n".join(lines)


def _cells(of) -> tuple[str, ...]:
    parts = {unseen: plot.select(of, unseen=unseen) for unseen in (True, False)}
    new = parts[True]
    times = [f"{new[name].mean():.1f}" for name in ("comp_us", "comm_us", "tbt_us")]
    gains = [serving.mean_and_interval(parts[unseen]["speedup"]) for unseen in (True, False)]
    gains = [f"{mean:.3f} +-{half:.3f}" for mean, half in gains]
    ratios = [f"{new[name].mean():.2f}" for name in ("max_mean_load", "memory_max_over_mean")]
    return (of["method"][0], *times, *gains, *ratios)


def figures(rows: list[dict[str, Any]], *, trace: str | None = None) -> dict[str, Any]:
    """Speed-ups, and one layer: loads, shares, links before and after."""
    case = _cases(trace)[0]
    name = case.systems[min(1, len(case.systems) - 1)]
    layer = case.model.num_moe_layers // 2
    fitted = _fit(case, name)
    return {
        "speedup": _speedups(rows),
        "node_load": _node_load(case, name, fitted, layer),
        "share": _shares(fitted, layer),
        "link_before_after": _links(case, name, fitted, layer),
    }


def _speedups(rows: list[dict[str, Any]]):
    table = {name: np.array([row[name] for row in rows]) for name in rows[0]}
    table = plot.select(table, unseen=True)
    names = list(dict.fromkeys(table["model"].tolist()))
    methods = [
        name for name in dict.fromkeys(table["method"].tolist()) if name != "tensor_parallel"
    ]
    figure, axes = plot.figure(1, len(names), (max(4.5 * len(names), 6), 3.2))
    for ax, name in zip(axes[0], names):
        of = plot.select(table, model=name)
        systems = list(dict.fromkeys(of["system"].tolist()))
        means = serving.mean_by(of, ["system", "method"], ["speedup"])
        for place, method in enumerate(methods):
            mine = means["method"] == method
            at = [systems.index(system) for system in means["system"][mine].tolist()]
            low, mid, high = (means[f"speedup{end}"][mine] for end in ("_low", "", "_high"))
            shift = (place - (len(methods) - 1) / 2) * 0.8 / len(methods)
            bars = dict(width=0.74 / len(methods), color=f"C{place}", label=method)
            ax.bar(np.array(at) + shift, mid, yerr=[mid - low, high - mid], **bars)
        ax.axhline(1, color="0.4", linewidth=0.8)
        ax.set_xticks(range(len(systems)), [s.removeprefix("nmp-") for s in systems], fontsize=8)
        ax.set_ylabel("speed-up over tensor parallelism")
        ax.set_title(f"{name}, unseen tokens")
    plot.shared_legend(figure, axes)
    return figure


def _node_load(case: Case, name: str, fitted: Fitted, layer: int):
    """Expected loads of the unseen part."""
    unseen = list(case.parts.values())[-1]
    statistics = placement.trace_statistics(unseen, max_groups=GROUPS)
    here = jax.tree.map(lambda part: part[layer], statistics)
    system = hardware.get(name)
    costs = serving.node_costs(case.model, system, BATCH, accounting=ACCOUNTING, gamma=fitted.gamma)
    shown = {"expert_parallel": "Expert parallel", "hybrid": "Hybrid", "node": "Node Balance"}
    figure, axes = plot.figure(1, len(shown), (10, 3.0))
    for ax, (method, title) in zip(axes[0], shown.items()):
        times = placement.evaluate(fitted.placements[method].share[layer], here, costs)
        compute, communicate = (np.asarray(times[i]) * 1e6 for i in (3, 4))
        table = dict(node=np.arange(system.num_nodes), comp_us=compute, comm_us=2 * communicate)
        plot.node_loads(
            table, ax, title=f"{title}: {1e6 * float(times.total):.1f} us", legend=False
        )
    bottom, top = zip(*(ax.get_ylim() for ax in axes[0]))
    for ax in axes[0]:
        ax.set_ylim(min(bottom), max(top))
    plot.shared_legend(figure, axes)
    return figure


def _shares(fitted: Fitted, layer: int):
    shown = {"hybrid": "Hybrid", "eplb": "EPLB", "node": "Node Balance"}
    figure, axes = plot.figure(1, len(shown), (10, 3.4))
    for ax, (method, title) in zip(axes[0], shown.items()):
        share = np.asarray(fitted.placements[method].share[layer])
        expert, node = (ids.ravel() for ids in np.indices(share.shape))
        table = dict(expert=expert, node=node, share=share.ravel())
        plot.expert_shares(table, ax, title=title, colorbar=ax is axes[0][-1])
    return figure


def _links(case: Case, name: str, fitted: Fitted, layer: int):
    """Unseen batches, all at once, with nodes at random places and where Link Balance puts them."""
    network = serving.network_of(hardware.get(name))
    ids = _draws(list(case.parts.values())[-1], np.arange(SEEDS))[:, layer]
    figure, axes = plot.figure(1, 2, (11, 3.0))
    shown = {"node": "Random places", "node_link": "Link Balance"}
    for ax, (method, title) in zip(axes[0], shown.items()):
        placed = fitted.placements[method]
        messages = noc.expert_traffic(
            ids.reshape(-1, ids.shape[-1]),
            placed.share[layer],
            placed.node_position[layer],
            bytes_per_token=noc.token_bytes(case.model.hidden),
            key=jax.random.key(0),
        )
        report = noc.simulate(network, messages)
        title += f": {1e6 * float(report.makespan):.1f} us for {SEEDS * BATCH} tokens"
        last = ax is axes[0][-1]
        plot.link_heat_map(noc.link_rows(network, report), ax, title=title, colorbar=last)
    return figure
