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
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moejax import models, noc, placement, plot, routing, serving, zoo


ZOO_COST_MODEL = "mixtral-8x7b"
NODES, REGIONS = 32, 8
HOP_LATENCY = 10e-9  # chosen: ten cycles of a router at 1 GHz
TOPOLOGIES = {
    "mesh 4x8": functools.partial(noc.mesh, 4, 8),
    "torus 4x8": functools.partial(noc.torus, 4, 8),
    "fat tree 32": noc.fat_tree,
}
BANDWIDTHS = (25e9, 50e9, 75e9)  # as in HDA-MoE
BATCHES = (16, 32, 64, 128)
LAYERS, SEEDS = 4, 2
PLACEMENTS = {  # bytes of an element
    "expert parallel": noc.SIMULATED_BYTES_PER_ELEMENT,
    "hybrid": noc.SIMULATED_BYTES_PER_ELEMENT,
    "tensor parallel": noc.ESTIMATED_BYTES_PER_ELEMENT,
    "tensor parallel, 1 B": noc.SIMULATED_BYTES_PER_ELEMENT,
}
SHOWN = dict(bandwidth_gb_s=50.0, batch=128)
AT_ONCE = 8  # of a batch; more would not stay in the processor's cache


class Traffic(NamedTuple):
    """Messages of every case: [placements, batches, layers * seeds], and which layer is which."""

    model: models.MoEModel
    name: str
    layers: tuple[int, ...]
    messages: noc.Messages


def rows(*, trace: str | None = None, progress=None) -> Iterator[list[dict[str, Any]]]:
    """One row per topology, switching, placement, bandwidth, batch size, layer and seed."""
    traffic = _traffic(trace)
    jobs = list(itertools.product(TOPOLOGIES, noc.SWITCHING))
    for done, (topology, switching) in enumerate(jobs):
        if progress is not None:
            progress(done, len(jobs))
        found = _run(traffic.messages, jnp.array(BANDWIDTHS), topology, switching)
        yield _tidy(traffic, topology, switching, *found)
    if progress is not None:
        progress(len(jobs), len(jobs))


def _network(topology: str, bandwidth: Any) -> noc.Topology:
    return TOPOLOGIES[topology](bandwidth=bandwidth, hop_latency=HOP_LATENCY)


@functools.partial(jax.jit, static_argnames=("topology", "switching"))
def _run(messages, bandwidths, topology: str, switching):
    """Reports and lower bounds, [placements, batches, layers * seeds, bandwidths]."""

    def one(messages, bandwidth):
        network = _network(topology, bandwidth)
        report = noc.simulate(network, messages, switching=switching)
        return report, noc.link_load_bound(network, messages)

    cases = messages.status.shape
    flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[len(cases) :]), messages)
    each = lambda messages: jax.vmap(one, in_axes=(None, 0))(messages, bandwidths)
    found = jax.lax.map(each, flat, batch_size=AT_ONCE)
    return jax.tree.map(lambda x: x.reshape(*cases, *x.shape[1:]), found)


@functools.lru_cache(maxsize=2)
def _traffic(path: str | None) -> Traffic:
    trace, model, name = _case(path)
    keep = np.unique(np.linspace(0, trace.num_layers - 1, LAYERS).round().astype(int))
    loads = placement.trace_statistics(trace, max_groups=1).frequency[keep]
    keys = jax.vmap(jax.random.key)(jnp.arange(SEEDS))
    batches = _batches(trace)
    draw = lambda key: routing.decode_batch(trace, max(batches), key=key, reuse=True)
    ids = jnp.stack([draw(key) for key in keys], axis=1)[keep]  # [layers, seeds, tokens, top_k]
    cases = (ids, _shares(loads, keys), keys, noc.token_bytes(model.hidden), batches)
    room = int(_gathers(*cases, None).valid.sum(-1).max())
    room = -(-max(room, NODES * NODES) // 64) * 64  # of an all-reduce, too
    gathers = _gathers(*cases, room)
    reduces = _all_reduces(model.hidden, batches, len(keep) * SEEDS, room)
    messages = jax.tree.map(lambda *parts: jnp.concatenate(parts), gathers, reduces)
    return Traffic(model, name, tuple(keep.tolist()), messages)


def _case(path: str | None):
    """(trace, model that gives the sizes, name of the study)."""
    if path is None:
        return zoo.trace(), models.get(ZOO_COST_MODEL), "zoo"
    trace = routing.load(path)
    if trace.model not in models.MODELS:
        raise ValueError(f"{path}: no sizes known for its model, {trace.model or 'unnamed'}")
    return trace, models.get(trace.model), trace.model


def _batches(trace: routing.RoutingTrace) -> tuple[int, ...]:
    valid = int(np.count_nonzero(trace.valid))
    return tuple(batch for batch in BATCHES if batch <= valid)


@jax.jit
def _shares(loads, keys):
    """[2 placements, layers, seeds, experts, nodes]: expert parallel by seed, hybrid by load."""
    num_experts = loads.shape[-1]
    dealt = jax.vmap(lambda key: placement.expert_parallel(num_experts, NODES, key=key))(keys)
    split = jax.vmap(lambda load: placement.hybrid(load, NODES, REGIONS))(loads)
    return jnp.stack(jnp.broadcast_arrays(dealt[None], split[:, None]))


@functools.partial(jax.jit, static_argnames=("batches", "room"))
def _gathers(ids, share, keys, size, batches: tuple[int, ...], room: int | None):
    """Messages [2 placements, batches, layers * seeds]; tokens beyond the batch are padding."""

    def one(share, batch, ids, key):
        there = jnp.arange(ids.shape[0])[:, None] < batch
        ids, position = jnp.where(there, ids, routing.NOT_ROUTED), jnp.arange(NODES)
        options = dict(bytes_per_token=size, key=key, max_messages=room)
        return noc.expert_traffic(ids, share, position, **options)

    seeds = jax.vmap(one, in_axes=(0, None, 0, 0))
    layers = jax.vmap(seeds, in_axes=(0, None, 0, None))
    cases = jax.vmap(layers, in_axes=(None, 0, None, None))
    cases = jax.vmap(cases, in_axes=(0, None, None, None))
    made = cases(share, jnp.array(batches), ids, keys)
    return jax.tree.map(lambda x: x.reshape(*x.shape[:2], -1, *x.shape[4:]), made)


def _all_reduces(hidden, batches: tuple[int, ...], repeats: int, room: int) -> noc.Messages:
    """One of two equal steps, [2 placements, batches, layers * seeds]: all layers are alike."""

    def one(size, batch):
        step = noc.direct_all_reduce(NODES, batch * noc.token_bytes(hidden, size)).messages
        pad = lambda x: jnp.pad(x, (0, room - x.shape[0]))
        ends = (pad(step.source), pad(step.destination))
        return noc.Messages(*ends, pad(step.bytes), pad(step.valid), flow=pad(step.source))

    sizes = jnp.array(list(PLACEMENTS.values())[2:])
    made = jax.vmap(jax.vmap(one, in_axes=(None, 0)), in_axes=(0, None))(sizes, jnp.array(batches))
    return jax.tree.map(lambda x: jnp.repeat(x[:, :, None], repeats, axis=2), made)


def _tidy(traffic: Traffic, topology, switching, reports, bounds) -> list[dict[str, Any]]:
    valid = np.asarray(traffic.messages.valid.sum(-1))
    batches = BATCHES[: valid.shape[1]]
    tidy = []
    for b, bandwidth in enumerate(BANDWIDTHS):
        report = jax.tree.map(lambda x, b=b: x[..., b, *[slice(None)] * (x.ndim - 4)], reports)
        table = noc.columns(_network(topology, bandwidth), report)
        bound = np.asarray(bounds[..., b], np.float64)
        cases = itertools.product(enumerate(PLACEMENTS.items()), enumerate(batches))
        for ((p, (name, size)), (n, batch)), (i, layer) in itertools.product(
            cases, enumerate(np.repeat(traffic.layers, SEEDS).tolist())
        ):
            at = (p, n, i)
            row = dict(
                model=traffic.name,
                cost_model=traffic.model.name,
                topology=topology,
                switching=switching,
                placement=name,
                bandwidth_gb_s=bandwidth / 1e9,
                hop_latency_ns=HOP_LATENCY / 1e-9,
                batch=batch,
                layer=layer,
                seed=i % SEEDS,
                bytes_per_element=size,
                messages=int(valid[at]),
            )
            row |= {column: values[at].item() for column, values in table.items()}
            # There and back, or the two steps of an all-reduce.
            row |= dict(comm_us=2 * row["makespan_us"], bound_us=bound[at].item() / 1e-6)
            tidy.append(row)
    return tidy


def summary(rows: list[dict[str, Any]]) -> str:
    """Communication of a layer by placement and network, mean over layers and seeds."""
    table = _columns(rows)
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


def figures(rows: list[dict[str, Any]], *, trace: str | None = None) -> dict[str, Any]:
    """The links of mesh and torus, and the busiest links of the mesh over time: expert parallel."""
    traffic, bandwidth = _traffic(trace), SHOWN["bandwidth_gb_s"] * 1e9
    messages = jax.tree.map(lambda x: x[0, -1, 0], traffic.messages)
    heat, axes = plot.figure(1, 2, (12, 3.9))
    table = _columns(rows)
    for ax, name in zip(axes.flat, ("mesh 4x8", "torus 4x8")):
        network = _network(name, bandwidth)
        links = noc.link_rows(network, noc.simulate(network, messages))
        plot.link_heat_map(links, ax, title=f"{name}, {bandwidth / 1e9:g} GB/s a link")
    lanes, axes = plot.figure(1, 1, (9, 3.6))
    network = _network("mesh 4x8", bandwidth)
    title = f"{_title(table)}, expert parallel, B = {max(table['batch'])}: a gather on the mesh"
    plot.link_timeline(noc.timeline_rows(network, messages), axes[0, 0], title=title)
    return {"link_heat_map": heat, "link_timeline": lanes}


def _columns(rows: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    return {name: np.array([row[name] for row in rows]) for name in rows[0]}
