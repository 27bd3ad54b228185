"""How long does the traffic of a MoE layer take, on which network, for which placement?

One layer on 32 near-memory nodes: topology, link bandwidth, batch size, placement of the experts
and switching, on the real routing of moejax's own model ("zoo", with vectors of the size of
Mixtral-8x7B's, column `cost_model`) or, with `--trace FILE`, of a measured trace. All see the same
tokens and the same aggregators, layer by layer and seed by seed, so ratios are paired.

Expert parallelism deals whole experts (or, with nodes to spare, equal parts) to random nodes.
The hybrid splits every expert over the 4 nodes of one of 8 regions. Both send one vector from each
node that hosts an expert of a token to the token's aggregator, and back: 1 B an element. Tensor
parallelism splits all experts over all nodes and adds up with a direct all-reduce (two steps, the
same network), with the published 4 B an element and with 1 B.

    moejax run sweeps/network.py
"""

import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moejax import models, noc, placement, plot, routing, serving, zoo
from moejax.sweep import Axis, Sweep


ZOO_COST_MODEL = "mixtral-8x7b"
NODES, REGIONS = 32, 8
HOP_LATENCY = 10e-9  # chosen: ten cycles of a router at 1 GHz
TOPOLOGIES = {
    "mesh 4x8": functools.partial(noc.mesh, 4, 8),
    "torus 4x8": functools.partial(noc.torus, 4, 8),
    "fat tree 32": noc.fat_tree,
}
BANDWIDTHS_GB_S = (25.0, 50.0, 75.0)  # as in HDA-MoE
BATCHES = (16, 32, 64, 128)
LAYERS, SEEDS = 4, 2
PLACEMENTS = {  # bytes of an element
    "expert parallel": noc.SIMULATED_BYTES_PER_ELEMENT,
    "hybrid": noc.SIMULATED_BYTES_PER_ELEMENT,
    "tensor parallel": noc.ESTIMATED_BYTES_PER_ELEMENT,
    "tensor parallel, 1 B": noc.SIMULATED_BYTES_PER_ELEMENT,
}
SHOWN = dict(bandwidth_gb_s=50.0, batch=128)
AT_ONCE = 8  # sets of messages; more would not stay in the processor's cache


class Study(NamedTuple):
    """Routing, the model that gives the sizes, a name, and the layers looked at."""

    trace: routing.RoutingTrace
    model: models.MoEModel
    name: str
    layers: tuple[int, ...]


class Draw(NamedTuple):
    """Of one seed: expert ids [layers, tokens, top_k], shares [2 placements, layers, ...]."""

    ids: jax.Array
    share: jax.Array
    key: jax.Array


def SWEEP(*, trace: str | None = None) -> Sweep:
    """Messages are made on the host side, once for all networks that carry them."""
    study = _study(trace)

    def messages(placement, batch, layer, seed):
        return dict(messages=_messages(trace, placement, batch, layer, seed))

    def about(placement):
        known = dict(model=study.name, cost_model=study.model.name)
        known |= dict(hop_latency_ns=HOP_LATENCY / 1e-9)
        return known | dict(bytes_per_element=PLACEMENTS[placement])

    return Sweep(
        [
            Axis("topology", list(TOPOLOGIES), static=True),
            Axis("switching", list(noc.SWITCHING), static=True),
            Axis("placement", list(PLACEMENTS)),
            Axis("batch", _batches(study.trace)),
            Axis("layer", study.layers),
            Axis("bandwidth_gb_s", BANDWIDTHS_GB_S, inner=True),
        ],
        report,
        seeds=SEEDS,
        prepare=messages,
        about=about,
        columns=columns,
        width=AT_ONCE,
    )


def report(config: dict[str, Any], key) -> dict[str, Any]:
    """Reports and lower bounds [bandwidths] of one set of messages on one network."""
    del key  # tokens and aggregators were drawn with the messages
    messages, switching = config["messages"], config["switching"]

    def one(bandwidth):
        network = _network(config["topology"], bandwidth)
        found = noc.simulate(network, messages, switching=switching)
        return found, noc.link_load_bound(network, messages)

    bandwidths = 1e9 * config["bandwidth_gb_s"]
    reports, bounds = jax.vmap(one)(bandwidths)
    sent = jnp.sum(messages.valid)[None]
    number = list(TOPOLOGIES).index(config["topology"])
    return dict(report=reports, bound=bounds, sent=sent, network=number, bandwidths=bandwidths)


def columns(found: dict[str, Any]) -> dict[str, np.ndarray]:
    """Columns [calls, bandwidths]; calls of one program have one topology."""
    name = list(TOPOLOGIES)[found["network"][0]]
    table: dict[str, Any] = {}
    for at, bandwidth in enumerate(found["bandwidths"][0].tolist()):
        of = jax.tree.map(lambda x, at=at: x[:, at], found["report"])
        for column, values in noc.columns(_network(name, bandwidth), of).items():
            table.setdefault(column, []).append(values)
    table = {column: np.stack(values, axis=1) for column, values in table.items()}
    # There and back, or the two steps of an all-reduce.
    table["comm_us"] = 2 * table["makespan_us"]
    return table | dict(messages=found["sent"], bound_us=found["bound"].astype(np.float64) / 1e-6)


def _network(topology: str, bandwidth: Any) -> noc.Topology:
    return TOPOLOGIES[topology](bandwidth=bandwidth, hop_latency=HOP_LATENCY)


@functools.lru_cache(maxsize=2)
def _study(path: str | None) -> Study:
    if path is None:
        trace, model, name = zoo.trace(), models.get(ZOO_COST_MODEL), "zoo"
    else:
        trace = routing.load(path)
        if trace.model not in models.MODELS:
            raise ValueError(f"{path}: no sizes known for its model, {trace.model or 'unnamed'}")
        model, name = models.get(trace.model), trace.model
    keep = np.unique(np.linspace(0, trace.num_layers - 1, LAYERS).round().astype(int))
    return Study(trace, model, name, tuple(keep.tolist()))


def _batches(trace: routing.RoutingTrace) -> list[int]:
    valid = int(np.count_nonzero(trace.valid))
    return [batch for batch in BATCHES if batch <= valid]


@functools.lru_cache(maxsize=64)
def _draw(path: str | None, seed: int) -> Draw:
    """Tokens, and placements: experts dealt to nodes by seed, or split by load."""
    trace, _, _, layers = _study(path)
    key, keep = jax.random.key(seed), np.array(layers)
    loads = placement.trace_statistics(trace, max_groups=1).frequency[keep]
    most = max(_batches(trace))
    ids = routing.decode_batch(trace, most, key=key, reuse=True)[keep]
    dealt = placement.expert_parallel(loads.shape[-1], NODES, key=key)
    split = jax.vmap(lambda load: placement.hybrid(load, NODES, REGIONS))(loads)
    return Draw(ids, jnp.stack(jnp.broadcast_arrays(dealt[None], split)), key)


@functools.lru_cache(maxsize=2)
def _room(path: str | None) -> int:
    """Messages of the largest batch, of which arrays have room for all: one program for all."""
    most = 0
    for seed, place in itertools.product(range(SEEDS), range(2)):
        draw = _draw(path, seed)
        made = jax.vmap(_gather, in_axes=(0, 0, None, None, None, None))
        sent = made(draw.ids, draw.share[place], draw.key, 1.0, draw.ids.shape[1], None).valid
        most = max(most, int(sent.sum(-1).max()))
    return -(-max(most, NODES * NODES) // 64) * 64  # of an all-reduce, too


def _messages(path: str | None, name: str, batch: int, layer: int, seed: int) -> noc.Messages:
    """What one layer sends, as NumPy arrays."""
    study, most = _study(path), max(_batches(_study(path).trace))
    if not 1 <= batch <= most:
        raise ValueError(f"batch = {batch}: allowed is 1 to {most}")
    if layer not in study.layers:
        raise ValueError(f"layer = {layer}: allowed are {study.layers}")
    size, room = noc.token_bytes(study.model.hidden, PLACEMENTS[name]), _room(path)
    place = list(PLACEMENTS).index(name)
    if place < 2:
        draw, at = _draw(path, seed), study.layers.index(layer)
        made = _gather(draw.ids[at], draw.share[place, at], draw.key, size, batch, room)
    else:
        made = _all_reduce(batch * size, room)
    return jax.tree.map(np.asarray, made)


@functools.partial(jax.jit, static_argnames="room")
def _gather(ids, share, key, size, batch, room: int | None) -> noc.Messages:
    """Messages of one layer; tokens beyond the batch are padding."""
    there = jnp.arange(ids.shape[0])[:, None] < batch
    ids, position = jnp.where(there, ids, routing.NOT_ROUTED), jnp.arange(NODES)
    options = dict(bytes_per_token=size, key=key, max_messages=room)
    return noc.expert_traffic(ids, share, position, **options)


@functools.partial(jax.jit, static_argnames="room")
def _all_reduce(size, room: int) -> noc.Messages:
    """One of two equal steps: all layers and tokens are alike."""
    step = noc.direct_all_reduce(NODES, size).messages
    pad = lambda x: jnp.pad(x, (0, room - x.shape[0]))
    ends = (pad(step.source), pad(step.destination))
    return noc.Messages(*ends, pad(step.bytes), pad(step.valid), flow=pad(step.source))


def summary(table: dict[str, np.ndarray]) -> str:
    """Communication of a layer by placement and network, mean over layers and seeds."""
    shown = SHOWN | dict(batch=max(table["batch"]))
    lines = ["", _title(table) + ": communication of a layer in us, mean +- 95 %, and of which the"]
    lines += ["busiest link is in use (%), at {bandwidth_gb_s:g} GB/s, B = {batch}".format(**shown)]
    lines.append(f"  {'':<30}" + "".join(f"{name:>24}" for name in PLACEMENTS))
    for topology, switching in itertools.product(TOPOLOGIES, noc.SWITCHING):
        case = plot.select(table, topology=topology, switching=switching, **shown)
        cells = [_cell(plot.select(case, placement=name)) for name in PLACEMENTS]
        name = f"{topology}, {switching.replace('_', ' ')}"
        lines.append(f"  {name:<30}" + "".join(f"{cell:>24}" for cell in cells))
    share = table["bound_us"] / table["makespan_us"]
    lines += ["", f"busiest link / makespan over all rows: {share.min():.3f} to {share.max():.3f}"]
    rounds = {name: table["iterations"][table["topology"] == name].max() for name in TOPOLOGIES}
    lines.append("rounds to settle: " + ", ".join(f"{k} {v}" for k, v in rounds.items() if v))
    return "\n".join(lines)


def _title(table: dict[str, np.ndarray]) -> str:
    model, cost_model = table["model"][0], table["cost_model"][0]
    return model if model == cost_model else f"{model} with the vectors of {cost_model}"


def _cell(case: dict[str, np.ndarray]) -> str:
    mean, half = serving.mean_and_interval(case["comm_us"])
    return f"{mean:.1f} +-{half:.1f} ({100 * np.mean(case['busiest_link_utilization']):3.0f})"


def figures(table: dict[str, np.ndarray], *, trace: str | None = None) -> dict[str, Any]:
    """The links of mesh and torus, and the busiest links of the mesh over time: expert parallel."""
    bandwidth, batch = SHOWN["bandwidth_gb_s"] * 1e9, int(max(table["batch"]))
    messages = _messages(trace, "expert parallel", batch, _study(trace).layers[0], 0)
    messages = jax.tree.map(jnp.asarray, messages)
    heat, axes = plot.figure(1, 2, (12, 3.9))
    for ax, name in zip(axes.flat, ("mesh 4x8", "torus 4x8")):
        network = _network(name, bandwidth)
        links = noc.link_rows(network, noc.simulate(network, messages))
        plot.link_heat_map(links, ax, title=f"{name}, {bandwidth / 1e9:g} GB/s a link")
    lanes, axes = plot.figure(1, 1, (9, 3.6))
    network = _network("mesh 4x8", bandwidth)
    title = f"{_title(table)}, expert parallel, B = {max(table['batch'])}: a gather on the mesh"
    plot.link_timeline(noc.timeline_rows(network, messages), axes[0, 0], title=title)
    return {"link_heat_map": heat, "link_timeline": lanes}
