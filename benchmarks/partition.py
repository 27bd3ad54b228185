"""How fast is a batch of Sieve partitions, against the loop that one would write in NumPy?

    python benchmarks/partition.py

4096 layers of 512 experts (Qwen3-Next), 64 tokens each, in one vmap that returns `on_gpu`,
`num_gpu` and `total_time`; the loop is `tests/oracles/partition.py: sieve_incremental`, and both
must choose the same experts. Also printed: compilations of a sweep over hardware and batch sizes,
and how far the greedy stop lies from the best prefix where the two can differ.
"""

import dataclasses
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np


sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import moejax as mj
from benchmarks import _timing
from moejax import partition, routing
from tests import strategies
from tests.oracles import partition as oracle


LAYERS, EXPERTS, TOKENS, TOP_K = 4096, 512, 64, 10
LOOPED = 256  # partitions per timing of the loop, spread over all layers
ROUNDS = 7


def problem() -> tuple[jax.Array, partition.PartitionCosts, dict]:
    """Counts of calibrated routing, and the costs of a Qwen3-Next layer on a B200 with HBM-PIM."""
    popularity = routing.calibrated("qwen3-next-80b-a3b").popularity
    ids = routing.sample_expert_ids(
        popularity, EXPERTS, TOP_K, LAYERS, TOKENS, key=jax.random.key(0)
    )
    counts = routing.tokens_per_expert(ids, EXPERTS)
    model, system = mj.models.get("qwen3-next-80b-a3b"), mj.hardware.get("1xb200-hbm-pim")
    table = mj.serving.expert_time_table(model, system.pim, TOKENS)
    expert_bytes = float(model.expert_bytes)
    numbers = dict(
        attention_time=5e-6,
        comm_time=3e-6,
        expert_bytes=expert_bytes,
        token_bytes=4.0 * model.hidden,
        flops_per_token=expert_bytes,
        fixed_bytes=6e7,
        fixed_flops=4e9,
        hbm_bandwidth=8e12,
        flops_per_s=2.25e15,
        pim_token_bytes=0.0,
        contention=0.0,
    )
    costs = partition.PartitionCosts(pim_time_by_tokens=table, **numbers)
    return counts, costs, numbers | dict(pim_time_by_tokens=np.asarray(table))


@jax.jit
def vmapped(counts, costs):
    found = jax.vmap(partition.sieve, in_axes=(0, None))(counts, costs)
    return found.on_gpu, found.num_gpu, found.total_time


def throughput(counts, costs, plain) -> None:
    """Loop and vmap in turn, so that a drifting machine slows both."""
    compile_time = _timing.first_call(lambda: vmapped(counts, costs))
    chosen = np.asarray(vmapped(counts, costs)[0])
    host = np.asarray(counts)
    step = LAYERS // LOOPED
    ratios, fast, slow = [], [], []
    for start in range(ROUNDS):
        fast.append(_timing.seconds(lambda: vmapped(counts, costs), 9) / LAYERS)
        loop = lambda start=start: [oracle.sieve_incremental(n, plain) for n in host[start::step]]
        slow.append(_timing.seconds(loop, 1) / LOOPED)
        ratios.append(slow[-1] / fast[-1])
        for n, ours in zip(host[start::step], chosen[start::step], strict=True):
            assert np.array_equal(oracle.sieve_incremental(n, plain)[0], ours)
    print(f"ratio loop / vmap: median {np.median(ratios):.1f} of {ROUNDS} rounds "
          f"({min(ratios):.1f} to {max(ratios):.1f})")  # fmt: skip
    print(f"vmap {1e6 * np.median(fast):.2f} us, loop {1e6 * np.median(slow):.1f} us a partition; "
          f"first call {compile_time:.2f} s")  # fmt: skip


def compilations() -> None:
    """50 bandwidths, 50 FLOP rates and 8 batch sizes padded to one."""
    model, system = mj.models.get("qwen3-30b-a3b"), mj.hardware.get("1xb200-hbm-pim")
    traces = 0

    @jax.jit
    def tbt(system, batch):
        nonlocal traces
        traces += 1
        workload = mj.Workload(batch, 512, max_batch=64)
        return mj.evaluate(model, system, workload, "sieve", key=jax.random.key(0)).tbt

    for share in np.linspace(0.5, 2.0, 50):
        tbt(system.replace(gpu=dict(hbm_bandwidth=8e12 * share)), jnp.int32(64))
        tbt(system.replace(gpu=dict(flops_per_s=2.25e15 * share)), jnp.int32(64))
    for batch in (1, 2, 4, 8, 16, 32, 48, 64):
        tbt(system, jnp.int32(batch))
    print(f"compilations for 50 bandwidths, 50 FLOP rates, 8 batch sizes: {traces}")


def greedy_gap(counts, costs) -> None:
    """Total of the greedy stop over that of the best prefix, where the two can differ: with
    contention and bus traffic of tokens on PIM."""
    changed = dataclasses.replace(costs, contention=0.5, pim_token_bytes=1e6)
    _print_gap("the same layers, contention 0.5, 1 MB a token on PIM", counts, changed, None)
    rng = np.random.default_rng(0)
    problems = [strategies.random_partition_problem(rng, kind=2) for _ in range(LAYERS)]
    _print_gap("random tables and costs", *strategies.stack_problems(problems), 0)


def _print_gap(name: str, counts, costs, axis: int | None) -> None:
    greedy, best = (
        np.asarray(jax.vmap(policy, in_axes=(0, axis))(counts, costs).total_time)
        for policy in (partition.sieve, partition.best_prefix)
    )
    gap = greedy / best - 1
    print(
        f"greedy stop above best prefix, {name}: {np.mean(gap > 1e-5):.1%} of cases, "
        f"mean {gap.mean():.2%}, max {gap.max():.1%}"
    )


if __name__ == "__main__":
    print(_timing.machine())
    case = problem()
    throughput(*case)
    compilations()
    greedy_gap(*case[:2])
