"""How fast is the exact network simulator, against the event heap that one would write in Python?

    python benchmarks/noc.py             # about 1 minute
    python benchmarks/noc.py --growth    # and how time and memory grow: about 1 more

256 batches of 128 tokens of Mixtral-8x7B on 4 x 8 nodes: with the folder `MOEJAX_DATA` the real
tokens and the published placement of each layer, else calibrated routing and expert parallelism.
The twin is `tests/oracles/noc.py: heap_simulate`, its paths prepared outside of the clock; both
must agree in every makespan and in what every link carries. A vector takes 2^-24 s to cross a link
(4096 B at 64 GiB/s), so that sums are exact in either precision and agree to the last bit.
"""

import argparse
import gc
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


# Before jax is imported: a device for every core of the machine that the goals are stated for.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
)

import jax
import numpy as np


sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import _timing
from moejax import noc, placement, routing
from tests.oracles import noc as oracle


REPOSITORY = Path(__file__).resolve().parent.parent
DATA = Path(os.environ.get("MOEJAX_DATA", REPOSITORY.parent / "shared" / "data"))
BATCHES, TOKENS, HIDDEN = 256, 128, 4096
BANDWIDTH = 64 * 2.0**30
LOOPED = 16  # batches per timing of the twin, other ones in every round
ROUNDS = 7
AT_ONCE = 8  # configurations in one vmap, where a loop goes over the rest


def problem() -> tuple[noc.Messages, str]:
    """Messages [batches, room], packed, and where they are from."""
    made = _published() if (DATA / "hd-moe-reference").is_dir() else _synthetic()
    *tables, source = made
    keys = jax.random.split(jax.random.key(0), BATCHES)

    def traffic(ids, share, position, key, room=None):
        size = float(HIDDEN)
        return noc.expert_traffic(
            ids, share, position, bytes_per_token=size, key=key, max_messages=room
        )

    counts = jax.jit(jax.vmap(lambda *case: traffic(*case).valid.sum()))(*tables, keys)
    room = -(-int(counts.max()) // 8) * 8
    messages = jax.jit(jax.vmap(lambda *case: traffic(*case, room)))(*tables, keys)
    what = f"{source}: {float(counts.mean()):.0f} messages on average, room for {room}"
    return messages, what


def _published():
    """8 batches of each of 32 layers, all with the layer's own placement."""
    stored = np.load(DATA / "hd-moe-reference" / "placements.npz")
    name = "mixtral_nodelink_5.0T_50.0G_4x8"
    trace = routing.load(DATA / "mixtral-8x7b" / "mtbench-reasoning.npz")
    per_layer = BATCHES // trace.num_layers
    ids = np.asarray(trace.expert_ids)[:, : per_layer * TOKENS]
    share = stored[f"{name}_P"]
    share = np.repeat(share / share.sum(axis=-1, keepdims=True), per_layer, axis=0)
    position = np.repeat(stored[f"{name}_pos"].astype(np.int32), per_layer, axis=0)
    ids = ids.reshape(BATCHES, TOKENS, trace.top_k)
    return ids, share, position, "MT-Bench reasoning, placements of HD-MoE"


def _synthetic():
    popularity = routing.calibrated("mixtral-8x7b").popularity
    ids = routing.sample_expert_ids(popularity, 8, 2, BATCHES, TOKENS, key=jax.random.key(1))
    keys = jax.random.split(jax.random.key(2), BATCHES)
    share = jax.vmap(lambda key: placement.expert_parallel(8, 32, key=key))(keys)
    position = np.tile(np.arange(32, dtype=np.int32), (BATCHES, 1))
    return ids, share, position, "calibrated routing, expert parallel"


class Twin:
    """The event heap on the same messages."""

    def __init__(self, topology: noc.Topology, messages: noc.Messages):
        self.topology, self.paths = topology, {}
        self.links = [tuple(link) for link in np.asarray(topology.links).tolist()]
        rates = np.asarray(topology.link_bandwidth, np.float64).tolist()
        self.bandwidth = dict(zip(self.links, rates))
        self.host = jax.tree.map(np.asarray, messages)

    def case(self, index: int) -> tuple[list, list]:
        """Paths and sizes of the valid messages of one batch."""
        valid = self.host.valid[index]
        ends = (getattr(self.host, end)[index][valid].tolist() for end in ("source", "destination"))
        return [self._path(*end) for end in zip(*ends)], self.host.bytes[index][valid].tolist()

    def _path(self, source: int, destination: int) -> tuple:
        if (source, destination) not in self.paths:
            route = self.topology.route(source, destination)
            self.paths[source, destination] = tuple(zip(route[:-1], route[1:]))
        return self.paths[source, destination]

    def run(self, cases, switching: str) -> list[oracle.Simulated]:
        return [oracle.heap_simulate(*c, self.bandwidth, switching=switching) for c in cases]

    def occupancy(self, found: oracle.Simulated) -> list[float]:
        return [found.occupancy.get(link, 0.0) for link in self.links]


def simulator(
    topology: noc.Topology, switching: str, at_once: int | None, devices: int
) -> Callable:
    """Makespan, finish times and occupancy of messages [batches, ...], one program."""

    def one(messages):
        report = noc.simulate(topology, messages, switching=switching)
        return report.makespan, report.finish_time, report.link_occupancy, report.iterations

    return spread(one, at_once, devices)


def spread(one: Callable, at_once: int | None, devices: int) -> Callable:
    """`one` over the leading axis: one vmap, or `at_once` at a time, over one or more devices."""
    if at_once is None:
        every = jax.vmap(one)
    else:
        every = lambda messages: jax.lax.map(one, messages, batch_size=at_once)
    if devices == 1:
        return jax.jit(every)
    mesh = jax.make_mesh((devices,), ("batch",))
    axis = jax.sharding.PartitionSpec("batch")
    split = jax.shard_map(every, mesh=mesh, in_specs=axis, out_specs=axis, check_vma=False)
    return jax.jit(split)


def placed(messages: noc.Messages, devices: int) -> noc.Messages:
    """The messages where the program wants them."""
    if devices == 1:
        return jax.device_put(messages, jax.devices()[0])
    mesh = jax.make_mesh((devices,), ("batch",))
    axis = jax.sharding.PartitionSpec("batch")
    return jax.device_put(messages, jax.sharding.NamedSharding(mesh, axis))


def memory(run: Callable, messages: noc.Messages, devices: int = 1) -> float:
    """Bytes per configuration: arguments, results and everything in between."""
    found = run.lower(messages).compile().memory_analysis()
    sizes = ("argument_size_in_bytes", "output_size_in_bytes", "temp_size_in_bytes")
    # A program for several devices states what each one needs.
    return devices * sum(getattr(found, size) for size in sizes) / messages.valid.shape[0]


def check(twin: Twin, batches: list[int], slow: list[oracle.Simulated], fast: Any) -> None:
    """Equal to the last bit."""
    makespan, finish, occupancy, _ = (np.asarray(part) for part in fast)
    for batch, found in zip(batches, slow, strict=True):
        valid = twin.host.valid[batch]
        assert makespan[batch] == found.makespan, (batch, makespan[batch], found.makespan)
        assert finish[batch][valid].tolist() == found.finish, batch
        assert occupancy[batch].tolist() == twin.occupancy(found), batch


def timed(run: Callable) -> tuple[float, Any]:
    """Seconds and result. As in `timeit`, the twin's many tuples do not wake the collector."""
    gc.collect()
    gc.disable()
    try:
        start = time.perf_counter()
        result = run()
        return time.perf_counter() - start, result
    finally:
        gc.enable()


class Rounds:
    """Twin and program in turn, so that a drifting machine slows both. Seconds a configuration."""

    def __init__(self, twin: Twin, switching: str, run: Callable, messages, rounds=ROUNDS, times=1):
        self.first = _timing.first_call(lambda: run(messages))
        self.fast, self.slow, self.found = [], [], []
        count = messages.valid.shape[0]
        looped = min(LOOPED, count)
        for start in range(min(rounds, count)):
            batches = list(range(start, count, max(1, count // looped)))[:looped]
            cases = [twin.case(batch) for batch in batches]
            each, _ = timed(lambda: [jax.block_until_ready(run(messages)) for _ in range(times)])
            self.fast.append(each / times / count)
            each, slow = timed(lambda cases=cases: twin.run(cases, switching))
            self.slow.append(each / looped)
            self.found.append((batches, cases, slow))
        self.ratios = np.array(self.slow) / self.fast

    def __str__(self) -> str:
        low, high = self.ratios.min(), self.ratios.max()
        us, ms = 1e6 * np.median(self.fast), 1e3 * np.median(self.slow)
        return (
            f"{np.median(self.ratios):6.1f} x the heap ({low:.1f} to {high:.1f}); "
            f"{us:6.1f} us against {ms:5.2f} ms; first call {self.first:.1f} s"
        )


def compare(name, kind: str, switching: str, messages: noc.Messages, at_once, devices: int) -> None:
    """One line: the simulator against the heap."""
    topology = getattr(noc, kind)(4, 8, bandwidth=BANDWIDTH)
    run, mine = simulator(topology, switching, at_once, devices), placed(messages, devices)
    twin = Twin(topology, messages)
    rounds = Rounds(twin, switching, run, mine)
    result = run(mine)
    for batches, _, slow in rounds.found:
        check(twin, batches, slow, result)
    settled = int(np.max(result[3]))
    how = "one vmap" if at_once is None else f"{at_once} at once"
    print(
        f"{kind:5} {switching:17} {name} {devices} core(s) {how:9} {rounds}; "
        f"{memory(run, mine, devices) / 1e3:.0f} kB" + (f"; {settled} rounds" if settled else ""),
        flush=True,
    )


def bound(name: str, messages: noc.Messages, devices: int) -> None:
    """One line: `link_load_bound` against the same heap."""
    topology = noc.mesh(4, 8, bandwidth=BANDWIDTH)
    twin = Twin(topology, messages)
    run = spread(lambda messages: noc.link_load_bound(topology, messages), None, devices)
    mine = placed(messages, devices)
    rounds = Rounds(twin, "store_and_forward", run, mine, times=50)
    least = np.asarray(run(mine))
    share = []
    for batches, cases, slow in rounds.found:
        assert least[batches].tolist() == [oracle.link_bound(*c, twin.bandwidth) for c in cases]
        share += (least[batches] / [found.makespan for found in slow]).tolist()
    print(
        f"{'mesh':5} {'bound':17} {name} {devices} core(s) {'one vmap':9} {rounds}; "
        f"{min(share):.3f} to {max(share):.3f} of the makespan",
        flush=True,
    )


def growth() -> None:
    """One core, float32, store and forward: uniformly random pairs, one size."""
    print(
        "messages, nodes, batch in one vmap: us a configuration, ratio to the heap, kB, first call"
    )
    for count in (100, 300, 1000, 3000, 10000):
        grow(count, (4, 8), 8)
    for shape in ((4, 4), (8, 8), (8, 16), (16, 16)):
        grow(1000, shape, 8)
    for batch in (1, 4, 16, 64, 256, 1024):
        grow(1000, (4, 8), batch)


def grow(count: int, shape: tuple[int, int], batch: int) -> None:
    """One line of the growth curves."""
    topology = noc.mesh(*shape, bandwidth=BANDWIDTH)
    ends = np.random.default_rng(0).integers(topology.num_nodes, size=(2, batch, count))
    full = np.ones((batch, count))
    messages = jax.vmap(noc.Messages)(*ends, full * HIDDEN, full > 0)
    run, twin = simulator(topology, "store_and_forward", None, 1), Twin(topology, messages)
    rounds = Rounds(twin, "store_and_forward", run, messages, rounds=3)
    result = run(messages)
    for batches, _, slow in rounds.found:
        check(twin, batches, slow, result)
    print(
        f"{count:6} {topology.num_nodes:4} {batch:5}: {1e6 * np.median(rounds.fast):8.1f} "
        f"{np.median(rounds.ratios):6.1f} {memory(run, messages) / 1e3:8.0f} {rounds.first:5.1f} s",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--growth", action="store_true", help="how time and memory grow, too")
    options = parser.parse_args()
    print(_timing.machine())
    messages, what = problem()
    print(f"{BATCHES} batches of {TOKENS} tokens, Mixtral-8x7B on 4 x 8 nodes, {what}")
    exact = "store_and_forward"
    compare("float32", "mesh", exact, messages, AT_ONCE, 2)
    compare("float32", "mesh", exact, messages, AT_ONCE, 1)
    compare("float32", "mesh", exact, messages, None, 1)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: x.astype(float) if x.dtype == np.float32 else x, messages)
        compare("float64", "mesh", exact, wide, AT_ONCE, 2)
    compare("float32", "mesh", "cut_through", messages, AT_ONCE, 2)
    compare("float32", "torus", exact, messages, AT_ONCE, 2)
    compare("float32", "torus", "cut_through", messages, AT_ONCE, 2)
    bound("float32", messages, 2)
    bound("float32", messages, 1)
    if options.growth:
        growth()


if __name__ == "__main__":
    main()
