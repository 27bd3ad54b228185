"""Which placement of experts on a near-memory mesh is fastest, on tokens that it was not fitted to?

Six placements (tensor and expert parallelism, the hybrid of regions, EPLB's copies, Node Balance at
random places, and with Link Balance) are fitted to one part of a trace and judged on batches of
that part and of others, in the units of HDA-MoE (arXiv 2609.08682): 1 B an element in messages,
4 B in the four all-reduces of tensor parallelism. Node Balance knows gamma, the measured ratio of
simulated to estimated communication. Placements see the same batches, so speed-ups are paired.

By default: four layers with the sizes of DeepSeek-V2-Lite (column `cost_model`) and the routing of
moejax's own model "zoo", or synthetic routing that is calibrated to gpt-oss-20b; the second half of
the tokens is unseen. With `--option data=FOLDER` of real traces: Mixtral and six layers of
DeepSeek-V2-Lite, fitted to one category and judged on others, on three meshes, beside the
placements that HD-MoE's authors published ("hd-moe-reference"). With `--trace FILE`: the two halves
of its sequences.

    moejax run sweeps/placement_on_mesh.py
"""

import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from moejax import hardware, models, noc, placement, plot, routing, serving, zoo
from moejax.hardware import NMPSystem
from moejax.placement import Placement
from moejax.routing import RoutingTrace
from moejax.sweep import Axis, Sweep


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
Source: TypeAlias = tuple[str | None, str | None]  # a trace, or a folder of them, or neither
PARTS = ("comp", "comm", "attention", "memory")  # of the time between tokens
WIDTH = 4  # batches at a time: their messages take memory


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, what placements are fitted to, and what they are judged on.

    `published` says where the published placements of its layers are: file, model and layers.
    """

    name: str
    model: models.MoEModel
    fitted_on: str
    parts: dict[str, RoutingTrace]
    published: tuple[Path, str, np.ndarray] | None = None

    @property
    def fit(self) -> RoutingTrace:
        return self.parts[self.fitted_on]

    @property
    def methods(self) -> list[str]:
        return [*placement.METHODS, *([REFERENCE] if self.published else [])]


def SWEEP(*, trace: str | None = None, data: str | None = None) -> Sweep:
    """One call judges all placements of a model on a system on one batch."""
    source = trace, data
    cases, parts = _cases(source), _parts(source)
    # Numbers, so that models of one shape share a compilation.
    known = {case.name: dict(number=i, model=case.model) for i, case in enumerate(cases)}
    given = lambda function: functools.partial(function, source)
    return Sweep(
        [
            Axis("model", known),
            Axis("system", list(ALL if data else SETTINGS), resolve=_unnamed),
            Axis("judged_on", parts, resolve=parts.index),
            Axis("method", cases[0].methods, inner=True),  # tensor parallelism first
        ],
        reports,
        seeds=SEEDS,
        prepare=[given(fit), given(draw)],
        about=given(about),
        columns=columns,
        where=given(belongs),
        width=WIDTH,
    )


def _unnamed(name: str) -> NMPSystem:
    """The name is no number: without it, all settings of a mesh share a compilation."""
    return dataclasses.replace(hardware.get(name), name="any")


def _parts(source: Source) -> list[str]:
    return list(dict.fromkeys(part for case in _cases(source) for part in case.parts))


def _part(source: Source, model: dict[str, Any], judged_on: int) -> tuple[Case, str]:
    return _cases(source)[int(model["number"])], _parts(source)[int(judged_on)]


@functools.lru_cache(maxsize=2)
def _cases(source: Source) -> tuple[Case, ...]:
    path, folder = source
    if folder is not None:
        return tuple(_real(Path(folder)))
    if path is not None:
        trace = routing.load(path)
        if trace.model not in models.MODELS:
            raise ValueError(f"{path}: no sizes known for its model, {trace.model or 'unnamed'}")
        return (_halves(trace.model, models.get(trace.model), trace),)
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
    zoos = _halves("zoo", model, recorded)
    return (zoos, _halves(f"synthetic {SYNTHETIC}", model, drawn))


def _halves(name: str, model: models.MoEModel, trace: RoutingTrace) -> Case:
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
    return Case(name, model, "first half", parts)


def _real(folder: Path) -> Iterator[Case]:
    """Some layers of models whose traces are there, with the published placements."""
    if not (folder / REFERENCE / "placements.npz").is_file():
        raise ValueError(f"data={folder}: no {REFERENCE}/placements.npz there")
    for name, (short, number, fitted_on, others) in REAL.items():
        full = models.get(name)
        keep = np.unique(np.linspace(0, full.num_moe_layers - 1, number).astype(int))
        model = full.replace(layers=full.layers[: len(keep) + full.num_dense_layers])
        parts = {}
        for task in (fitted_on, *others):
            trace = routing.load(folder / name / f"{task}.npz")
            kept = trace.expert_ids[keep]
            parts[task] = dataclasses.replace(trace, expert_ids=kept, weights=None)
        published = (folder / REFERENCE / "placements.npz", short, keep)
        yield Case(name, model, fitted_on, parts, published)


def _published(case: Case, system: NMPSystem) -> Placement:
    assert case.published is not None
    path, model, layers = case.published
    rates = f"{float(system.flops_per_s) / 1e12:.1f}T_{float(system.link_bandwidth) / 1e9:.1f}G"
    name = f"{model}_nodelink_{rates}_{'x'.join(map(str, system.shape))}"
    with np.load(path) as file:
        share, position = (file[f"{name}_{x}"] for x in ("P", "pos"))
    return Placement(share[layers], position[layers].astype(np.int32))


def belongs(source: Source, model, judged_on) -> bool:
    """Whether a part is one of the model's."""
    case, part = _part(source, model, judged_on)
    return part in case.parts


def fit(source: Source, model: dict[str, Any], system: NMPSystem, method: list[str]):
    """Placements of a model on a system; found once, for rows and pictures. `reduced` is tensor
    parallelism, which comes first, `placed` are the others, stacked without their names."""
    if method[0] != "tensor_parallel" or len(method) < 2:
        raise ValueError(f"method = {', '.join(method)}: allowed is tensor_parallel and others")
    case = _cases(source)[int(model["number"])]
    at = (case.name, case.fit.num_tokens, *map(str, jax.tree.leaves(system)), system.shape)
    found = _FITTED[at] = _FITTED.get(at) or _fit(case, system)
    plain = [dataclasses.replace(found[name], name="any") for name in method]
    placed = jax.tree.map(lambda *leaves: jnp.stack(leaves), *plain[1:])
    return dict(reduced=plain[0], placed=placed, gamma=found["gamma"])


_FITTED: dict[tuple, dict[str, Any]] = {}


def _fit(case: Case, system: NMPSystem) -> dict[str, Any]:
    """Every placement by name, and the gamma that they were made with."""
    key, network = jax.random.key(0), serving.network_of(system)
    statistics = placement.trace_statistics(case.fit, max_groups=GROUPS)
    gamma = _gamma(case, network, key)
    costs = serving.node_costs(case.model, system, BATCH, accounting=ACCOUNTING, gamma=gamma)
    place = lambda method: placement.place(method, statistics, network, costs, key=key)
    found = {method: place(method) for method in placement.METHODS if method != "node"}
    # Node Balance alone: the shares of both, at random places.
    share, scattered = found["node_link"].share, found["expert_parallel"].node_position
    found["node"] = Placement(share, scattered)
    if case.published:
        found[REFERENCE] = _published(case, system)
    return found | dict(gamma=gamma)


def _gamma(case: Case, network: noc.Topology, key) -> float:
    """Simulated over estimated communication of expert parallelism, mean over some layers."""
    ids = np.asarray(case.fit.expert_ids)[:, np.asarray(case.fit.valid)]
    share = placement.expert_parallel(case.fit.num_experts, network.num_nodes, key=key)
    position = jax.random.permutation(key, network.num_nodes)
    layers = np.unique(np.linspace(0, len(ids) - 1, GAMMA_LAYERS).astype(int))
    sizes = [size for size in GAMMA_BATCHES if size <= ids.shape[1]]
    options = dict(hidden_size=case.model.hidden, key=key, batch_sizes=sizes)
    calibrate = functools.partial(noc.calibrate_gamma, network, **options)
    fits = [calibrate(jnp.asarray(ids[layer]), share, position) for layer in layers]
    return float(np.mean([fit.slope for fit in fits]))


def draw(source: Source, model: dict[str, Any], judged_on: int, seed: int) -> dict[str, Any]:
    """A batch [layers, batch, top_k] of different sequences, where there are enough."""
    case, name = _part(source, model, judged_on)
    part = case.parts[name]
    owners = np.asarray(part.sequence_id)[np.asarray(part.valid)]
    reuse = len(np.unique(owners)) < BATCH
    return dict(drawn=routing.decode_batch(part, BATCH, key=jax.random.key(seed), reuse=reuse))


def reports(config: dict[str, Any], key) -> serving.NearMemoryReport:
    """Reports [methods] of one batch."""
    model, system, starts = config["model"]["model"], config["system"], np.arange(BATCH)
    batch = RoutingTrace(config["drawn"], model.num_experts, sequence_start=starts)
    workload = serving.Workload(len(starts), CONTEXT, routing=batch)
    judge = lambda placed: serving.evaluate_placement(
        model, system, workload, placed, key=key, accounting=ACCOUNTING
    )
    first, others = judge(config["reduced"]), jax.lax.map(judge, config["placed"])
    return jax.tree.map(lambda one, more: jnp.concatenate([one[None], more]), first, others)


def columns(report: serving.NearMemoryReport) -> dict[str, Any]:
    """Times of all layers, and the speed-up over tensor parallelism, the first method."""
    found = {f"{part}_us": 1e6 * vars(report)[f"{part}_time"] for part in PARTS}
    found |= dict(tbt_us=1e6 * report.tbt, speedup=report.tbt[..., :1] / report.tbt)
    return found | dict(max_mean_load=report.load_imbalance, status=report.status)


def about(source: Source, model, system: NMPSystem, judged_on, method) -> dict[str, Any]:
    """What a row was fitted to and ran on, and what each placement stores on the fullest node."""
    (case, part), fitted = _part(source, model, judged_on), fit(source, model, system, method)
    shares = [fitted["reduced"].share, *fitted["placed"].share]
    # EPLB stores whole copies, the others slices.
    stored = [
        placement.memory_use(share, case.model.expert_bytes, whole_copies=name == "eplb")
        for name, share in zip(method, shares)
    ]
    rates = float(system.flops_per_s) / 1e12, float(system.link_bandwidth) / 1e9
    tera, giga = (round(rate, 3) for rate in rates)
    found = dict(cost_model=case.model.name, layers=case.model.num_moe_layers)
    found |= dict(network=system.network, nodes=system.num_nodes, tflop_s=tera, link_gb_s=giga)
    found |= dict(accounting=ACCOUNTING, batch=BATCH, context=CONTEXT, gamma=fitted["gamma"])
    found |= dict(fitted_on=case.fitted_on, unseen=part != case.fitted_on)
    found |= dict(node_memory_mb=np.array([float(s.node_bytes.max()) / 1e6 for s in stored]))
    return found | dict(memory_max_over_mean=np.array([float(s.max_over_mean) for s in stored]))


def summary(table: dict[str, np.ndarray]) -> str:
    """Times on unseen tokens, and speed-ups over tensor parallelism on seen and unseen ones."""
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


def figures(table, *, trace: str | None = None, data: str | None = None) -> dict[str, Any]:
    """Speed-ups, and one layer of the first model: loads, shares, links before and after."""
    source = trace, data
    case = next(case for case in _cases(source) if case.name in table["model"])
    model = dict(number=_cases(source).index(case))
    system = _unnamed(list(dict.fromkeys(table["system"].tolist()))[:2][-1])
    layer = case.model.num_moe_layers // 2
    found = fit(source, model, system, case.methods)
    of_layer = zip(found["placed"].share[:, layer], found["placed"].node_position[:, layer])
    placed = dict(zip(case.methods[1:], of_layer))
    return {
        "speedup": _speedups(table),
        "node_load": _node_load(case, system, found["gamma"], placed, layer),
        "share": _shares(placed),
        "link_before_after": _links(source, model, system, placed, layer),
    }


def _speedups(table: dict[str, np.ndarray]):
    table = plot.select(table, unseen=True)
    names = list(dict.fromkeys(table["model"].tolist()))
    methods = list(dict.fromkeys(table["method"].tolist()))[1:]
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


def _node_load(case: Case, system: NMPSystem, gamma: float, placed: dict[str, Any], layer: int):
    """Expected loads of the unseen part."""
    costs = serving.node_costs(case.model, system, BATCH, accounting=ACCOUNTING, gamma=gamma)
    statistics = placement.trace_statistics(list(case.parts.values())[-1], max_groups=GROUPS)
    here = jax.tree.map(lambda part: part[layer], statistics)
    shown = {"expert_parallel": "Expert parallel", "hybrid": "Hybrid", "node": "Node Balance"}
    figure, axes = plot.figure(1, len(shown), (10, 3.0))
    for ax, (method, title) in zip(axes[0], shown.items()):
        times = placement.evaluate(placed[method][0], here, costs)
        compute, communicate = (np.asarray(times[i]) * 1e6 for i in (3, 4))
        table = dict(node=np.arange(len(compute)), comp_us=compute, comm_us=2 * communicate)
        title += f": {1e6 * float(times.total):.1f} us"
        plot.node_loads(table, ax, title=title, legend=False)
    bottom, top = zip(*(ax.get_ylim() for ax in axes[0]))
    for ax in axes[0]:
        ax.set_ylim(min(bottom), max(top))
    plot.shared_legend(figure, axes)
    return figure


def _shares(placed: dict[str, Any]):
    shown = {"hybrid": "Hybrid", "eplb": "EPLB", "node": "Node Balance"}
    figure, axes = plot.figure(1, len(shown), (10, 3.4))
    for ax, (method, title) in zip(axes[0], shown.items()):
        share = np.asarray(placed[method][0])
        expert, node = (ids.ravel() for ids in np.indices(share.shape))
        table = dict(expert=expert, node=node, share=share.ravel())
        plot.expert_shares(table, ax, title=title, colorbar=ax is axes[0][-1])
    return figure


def _links(source: Source, model, system: NMPSystem, placed: dict[str, Any], layer: int):
    """Unseen batches, all at once, with nodes at random places and where Link Balance puts them."""
    network, case = serving.network_of(system), _cases(source)[model["number"]]
    last = _parts(source).index(list(case.parts)[-1])
    ids = [draw(source, model, last, seed)["drawn"][layer] for seed in range(SEEDS)]
    figure, axes = plot.figure(1, 2, (11, 3.0))
    shown = {"node": "Random places", "node_link": "Link Balance"}
    for ax, (method, title) in zip(axes[0], shown.items()):
        messages = noc.expert_traffic(
            jnp.concatenate(ids),
            *placed[method],
            bytes_per_token=noc.token_bytes(case.model.hidden),
            key=jax.random.key(0),
        )
        report = noc.simulate(network, messages)
        title += f": {1e6 * float(report.makespan):.1f} us for {SEEDS * BATCH} tokens"
        rows = noc.link_rows(network, report)
        plot.link_heat_map(rows, ax, title=title, colorbar=ax is axes[0][-1])
    return figure
