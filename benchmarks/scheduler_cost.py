"""How long one partition decision takes, against the published 20 us, and where it hides.

    python benchmarks/scheduler_cost.py

Sieve (arXiv 2605.11277) measures 20 us for a layer of DeepSeek-R1 on a B200. Here: the compiled
greedy partition of DeepSeek-V3's layers (256 experts, 8 GPUs, 64 requests) on this machine, one
layer a call, and all 58 layers and 8 GPUs in one call; the best of many rounds, without the first
call. Then the same decision inside the execution graph of a layer: what the dispatch hides of it.
"""

import time

import jax

import moejax as mj
from moejax import partition, serving
from moejax.serving import Execution


ROUNDS = 200
SYSTEM = "8xb200-hbm-pim"


def best(function, *arguments) -> float:
    """Seconds of the fastest call after the first."""
    jax.block_until_ready(function(*arguments))
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        times.append(time.perf_counter() - start)
    return min(times)


def costs_of(model, system, max_tokens: int) -> partition.PartitionCosts:
    """Costs of one layer and GPU, in round numbers of its size."""
    table = serving.expert_time_table(model, system.pim, max_tokens)
    weights = float(model.expert_bytes)
    return partition.PartitionCosts(
        pim_time_by_tokens=table,
        attention_time=1e-5,
        comm_time=5e-6,
        expert_bytes=weights,
        token_bytes=4.0 * model.hidden,
        flops_per_token=6.0 * model.hidden * model.moe_intermediate,
        fixed_bytes=weights,
        fixed_flops=1e9,
        hbm_bandwidth=system.gpu.hbm_bandwidth,
        flops_per_s=system.gpu.flops_per_s,
    )


def main() -> None:
    # In 8 bits, or its weights would not fit.
    model, system = mj.models.get("deepseek-v3", precision="native"), mj.hardware.get(SYSTEM)
    workload, key = mj.Workload(64, 512.0), jax.random.key(0)
    counts, _ = serving.partition_layers(model, system, workload, "sieve", key=key)
    costs = costs_of(model, system, workload.max_batch)
    sieve = lambda counts: partition.sieve(counts, costs).on_gpu
    one = best(jax.jit(sieve), counts[0, 0])
    layers, gpus, experts = counts.shape
    every = best(jax.jit(jax.vmap(sieve)), counts.reshape(layers * gpus, experts))
    print(f"one layer and GPU a call, {experts} experts: {1e6 * one:.1f} us (published: 20 us)")
    print(f"{layers} layers on {gpus} GPUs in one call: {1e6 * every:.0f} us, "
          f"{1e6 * every / (layers * gpus):.2f} us a decision")  # fmt: skip
    names = {"hidden behind the dispatch": False, "before the dispatch": True}
    for name, exposed in names.items():
        execution = Execution("coarse", exposed=exposed)
        tbt = lambda seconds, execution=execution: (
            mj.evaluate(
                model,
                system.replace(scheduler_time=seconds),
                workload,
                "sieve",
                key=key,
                execution=execution,
            ).tbt
        )
        published, free = float(tbt(20e-6)), float(tbt(0.0))
        exposed = (published - free) / model.num_moe_layers
        print(f"20 us {name}: a layer takes {1e6 * exposed:.1f} us more than with a free decision, "
              f"{1 - free / published:.0%} of tbt")  # fmt: skip


if __name__ == "__main__":
    main()
