"""What does the sweep engine cost, and how fast does it make rows?

    python benchmarks/sweep_throughput.py [--rows 1000000]

Three things. Overhead: rows of 64 drawn tokens and the Sieve partition of their counts (E = 128,
top-8, a dozen outputs), written to a folder, against `jit(vmap(fn))` over the same tiles and
nothing else. Throughput: Sieve alone on given counts and a million sampled systems, rows written,
by width of the tiles and number of (forced host) devices. Memory: what a run adds to a process of
its own, against the budget of its chunks (Python's own columns come on top). Compilations are
counted everywhere.
"""

import argparse
import functools
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path


sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp
import numpy as np

import moejax as mj
from benchmarks import _timing
from moejax import partition, routing, sweep
from moejax.sweep import Axis, Range, Sweep, samples


MODEL, SYSTEM, TOKENS = "qwen3-30b-a3b", "1xb200-hbm-pim", 64
DRAWS = 64  # given counts in the second part
OVERHEAD_ROWS, OVERHEAD_WIDTH, ROUNDS = 16_384, 256, 5
WIDTH = 2048
RATES = (
    Range("hbm_bandwidth", 2e12, 16e12, log=True),
    Range("flops_per_s", 5e14, 5e15, log=True),
    Range("pim_speed", 0.25, 4.0, log=True),
)


@functools.cache
def layer() -> tuple[np.ndarray, float, float]:
    """PIM times by token count, bytes of an expert and of a token; made before tracing."""
    model, system = mj.models.get(MODEL), mj.hardware.get(SYSTEM)
    table = mj.serving.expert_time_table(model, system.pim, TOKENS)
    return np.asarray(table), float(model.expert_bytes), 4.0 * model.hidden


def costs(config: dict) -> partition.PartitionCosts:
    """Of one layer, with the rates of a configuration."""
    table, expert_bytes, token_bytes = layer()
    return partition.PartitionCosts(
        pim_time_by_tokens=table / config["pim_speed"],
        attention_time=5e-6,
        comm_time=3e-6,
        expert_bytes=expert_bytes,
        token_bytes=token_bytes,
        flops_per_token=expert_bytes,
        fixed_bytes=6e7,
        fixed_flops=4e9,
        hbm_bandwidth=config["hbm_bandwidth"],
        flops_per_s=config["flops_per_s"],
        pim_token_bytes=0.0,
        contention=0.0,
    )


def outputs(found: partition.Partition, counts) -> dict:
    """A dozen numbers of a partition."""
    shares = routing.bimodality(counts)._asdict()
    return {
        "total_us": 1e6 * found.total_time,
        "gpu_us": 1e6 * found.gpu_time,
        "pim_us": 1e6 * found.pim_time,
        "comm_us": 1e6 * found.comm_time,
        "experts_on_gpu": found.num_gpu,
        "tokens_on_gpu": jnp.sum(jnp.where(found.on_gpu, counts, 0)),
        **shares,
        "status": found.status,
    }


def drawn_row(config: dict, key) -> dict:
    """Draws a batch and partitions its experts."""
    model = mj.models.get(MODEL)
    popularity = routing.calibrated(MODEL).popularity
    ids = routing.sample_expert_ids(popularity, model.num_experts, model.top_k, 1, TOKENS, key=key)
    counts = routing.tokens_per_expert(ids, model.num_experts)[0]
    return outputs(partition.sieve(counts, costs(config)), counts)


def bare_row(config: dict, key) -> dict:
    """Partitions given counts."""
    del key
    found = partition.sieve(config["counts"], costs(config))
    names = ("total_time", "gpu_time", "pim_time")
    return {name: getattr(found, name) for name in names} | {"experts_on_gpu": found.num_gpu}


def given_counts() -> dict[str, np.ndarray]:
    """Counts of calibrated routing, by label."""
    model = mj.models.get(MODEL)
    ids = routing.sample_expert_ids(
        routing.calibrated(MODEL).popularity,
        *(model.num_experts, model.top_k, DRAWS, TOKENS),
        key=jax.random.key(0),
    )
    counts = np.asarray(routing.tokens_per_expert(ids, model.num_experts))
    return {f"draw {i}": of for i, of in enumerate(counts)}


def drawn_sweep(rows: int, width: int) -> Sweep:
    layer()
    return Sweep([samples(rows // 8, *RATES)], drawn_row, seeds=8, width=width)


def bare_sweep(rows: int, width: int) -> Sweep:
    layer()
    axes = [Axis("counts", given_counts()), samples(rows // DRAWS, *RATES)]
    return Sweep(axes, bare_row, width=width)


class Timer:
    """Wall and CPU seconds of one block."""

    def __enter__(self) -> "Timer":
        self._wall, self._cpu = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *error: object) -> None:
        self.wall = time.perf_counter() - self._wall
        self.cpu = time.process_time() - self._cpu


def timed_run(made: Sweep, **options) -> tuple[Timer, int]:
    """A run into a folder, rows written and synced, and how many programs it compiled.

    The time is that from the first result on and of one tile less, so that tracing and compilation
    are not in it.
    """
    watched: list[tuple[float, float, int, sweep.Watch]] = []

    def note(watch: sweep.Watch) -> None:
        watched.append((time.perf_counter(), time.process_time(), watch.rows, watch))

    with tempfile.TemporaryDirectory() as folder:
        sweep.run(made, folder, progress=note, **options)
        end = time.perf_counter(), time.process_time()
    start = next(at for at in watched if at[2])
    share = made.num_rows / (made.num_rows - start[2])
    timer = Timer()
    timer.wall, timer.cpu = (share * (b - a) for a, b in zip(start[:2], end))
    return timer, watched[-1][3].compiles


def bare_loop(made: Sweep, fn) -> Timer:
    """The same tiles through `jit(vmap(fn))`, inputs on the device, results dropped."""
    width = made.width
    calls = made.calls
    config = {}
    for axis in made.axes:
        values = axis.labels if axis.is_number else np.stack(list(axis.seen))
        kind = jnp.float32 if axis.is_number else jnp.int32
        config[axis.name] = jnp.asarray(values[calls.codes[axis.name]], kind)
    seeds = jnp.asarray(calls.seeds[calls.codes["seed"]], jnp.uint32)
    tile = jax.jit(jax.vmap(lambda config, seed: fn(config, jax.random.key(seed))))
    cut = lambda at: (jax.tree.map(lambda x: x[at : at + width], config), seeds[at : at + width])
    tiles = [cut(at) for at in range(0, len(calls) - width + 1, width)]
    jax.block_until_ready(tile(*tiles[0]))
    with Timer() as timer:
        for given in tiles:
            found = tile(*given)
        jax.block_until_ready(found)
    scale = len(calls) / (len(tiles) * width)
    timer.wall, timer.cpu = scale * timer.wall, scale * timer.cpu
    return timer


def overhead() -> None:
    made = drawn_sweep(OVERHEAD_ROWS, OVERHEAD_WIDTH)
    walls, cpus, rates = [], [], []
    for _ in range(ROUNDS):
        bare = bare_loop(made, drawn_row)
        ours, compiles = timed_run(made)
        walls.append(ours.wall / bare.wall)
        cpus.append(ours.cpu / bare.cpu)
        rates.append(1e6 * bare.wall / made.num_rows)
    print(
        f"draw and Sieve, width {OVERHEAD_WIDTH}, {made.num_rows} rows, {compiles} compiled: "
        f"engine over bare jit(vmap(fn)), median of {ROUNDS} (range): wall {np.median(walls):.3f} "
        f"({min(walls):.3f} to {max(walls):.3f}), CPU {np.median(cpus):.3f} "
        f"({min(cpus):.3f} to {max(cpus):.3f}); bare {np.median(rates):.1f} us a row"
    )


def throughput(rows: int) -> None:
    made = bare_sweep(rows, WIDTH)
    bare = bare_loop(bare_sweep(min(rows, 2**18), WIDTH), bare_row)
    per_row = 1e6 / min(rows, 2**18)
    print(
        f"Sieve alone, bare: {bare.wall * per_row:.2f} us a row ({bare.cpu * per_row:.2f} us CPU)"
    )
    with Timer() as whole, tempfile.TemporaryDirectory() as folder:
        result = sweep.run(made, folder)
        count = len(list((Path(folder) / "parts").iterdir()))
    print(
        f"{result.manifest['rows']} rows, E = 128, compilation and writing included: "
        f"{whole.wall:.1f} s ({whole.cpu:.1f} s CPU), {count} parts"
    )


def by_width_and_devices(rows: int) -> None:
    for devices in (1, 2, 4, 8):
        flags = f"--xla_force_host_platform_device_count={devices}"
        command = [sys.executable, __file__, "--child", "widths", "--rows", str(rows)]
        print(f"{devices} devices: " + _child(command, flags))


def peak_memory(rows: int) -> None:
    for budget in (16, 64, 256):
        command = [sys.executable, __file__, "--child", "memory", "--rows", str(rows)]
        print(f"budget {budget} MB: " + _child([*command, "--budget", str(budget)], ""))


def _child(command: list[str], flags: str) -> str:
    environment = os.environ | {"XLA_FLAGS": flags}
    return subprocess.run(
        command, env=environment, check=True, capture_output=True, text=True
    ).stdout.strip()


def widths(rows: int) -> None:
    found = []
    for width in (64, 512, 4096):
        timer, compiles = timed_run(bare_sweep(rows, width))
        found.append(f"width {width}: {rows / timer.wall:,.0f} rows/s ({compiles} compiled)")
    print(", ".join(found))


def memory(rows: int, budget: float) -> None:
    """The largest that the process gets during a run, above what it was, compilation before."""
    made = bare_sweep(rows, WIDTH)
    sweep.run(bare_sweep(DRAWS * 64, WIDTH))
    calls, before, most = len(made.calls), _resident(), [0.0]
    done = threading.Event()

    def look() -> None:
        while not done.wait(0.002):
            most[0] = max(most[0], _resident())

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    with tempfile.TemporaryDirectory() as folder:
        sweep.run(made, folder, memory=1e6 * budget)
        parts = len(list((Path(folder) / "parts").iterdir()))
    done.set()
    watcher.join()
    print(f"{calls} rows in {parts} parts, {most[0] - before:.0f} MB more at most")


def _resident() -> float:
    """MB of the process that are in memory now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--child", choices=("widths", "memory"))
    parser.add_argument("--budget", type=float)
    options = parser.parse_args()
    if options.child == "widths":
        widths(options.rows)
    elif options.child == "memory":
        memory(options.rows, options.budget)
    else:
        print(_timing.machine())
        overhead()
        throughput(options.rows)
        by_width_and_devices(options.rows // 8)
        peak_memory(options.rows)


if __name__ == "__main__":
    main()
