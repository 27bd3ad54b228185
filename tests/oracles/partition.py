"""Partitions written out literally: loops over experts and subsets, plain numbers, no JAX.

`costs` is a dict with the field names of `moejax.partition.PartitionCosts`. The arithmetic is done
in the dtype of the numbers handed in, so that float32 can be compared with float32.
"""

import itertools

import numpy as np


def total_time(on_gpu, counts, costs):
    """(total, gpu_time, pim_time) of one choice, straight from Sieve's Eq. 1."""
    table = costs["pim_time_by_tokens"]
    moved, flops = costs["fixed_bytes"], costs["fixed_flops"]
    pim_time = costs["attention_time"]
    for expert, n in enumerate(counts):
        if n == 0:
            continue
        if on_gpu[expert]:
            moved = moved + (costs["expert_bytes"] + costs["token_bytes"] * n)
            flops = flops + costs["flops_per_token"] * n
        else:
            moved = moved + costs.get("pim_token_bytes", 0.0) * n
            pim_time = pim_time + table[n]
    off, comp = moved / costs["hbm_bandwidth"], flops / costs["flops_per_s"]
    memory = max(off, pim_time) + costs.get("contention", 0.0) * min(off, pim_time)
    return max(costs["comm_time"], comp, memory), max(off, comp), pim_time


def greedy_order(counts):
    """Active experts by descending count, lower id first on a tie."""
    return sorted((e for e, n in enumerate(counts) if n > 0), key=lambda e: (-counts[e], e))


def sieve(counts, costs):
    """Move one expert after the other until a move does not lower the total.

    Returns (on_gpu, totals): the choice and every total that was looked at.
    """
    on_gpu = [False] * len(counts)
    totals = [total_time(on_gpu, counts, costs)[0]]
    for expert in greedy_order(counts):
        on_gpu[expert] = True
        totals.append(total_time(on_gpu, counts, costs)[0])
        if not totals[-1] < totals[-2]:
            on_gpu[expert] = False
            break
    return on_gpu, totals


def prefix_totals(counts, costs):
    """Totals of every prefix of the greedy order, the empty one first."""
    on_gpu = [False] * len(counts)
    totals = [total_time(on_gpu, counts, costs)[0]]
    for expert in greedy_order(counts):
        on_gpu[expert] = True
        totals.append(total_time(on_gpu, counts, costs)[0])
    return totals


def best_subset(counts, costs):
    """The smallest total over all subsets of the active experts."""
    active = [e for e, n in enumerate(counts) if n > 0]
    best = float("inf")
    for size in range(len(active) + 1):
        for subset in itertools.combinations(active, size):
            on_gpu = [e in subset for e in range(len(counts))]
            best = min(best, total_time(on_gpu, counts, costs)[0])
    return best


def pimoe_channel(counts, costs, num_groups):
    """(on_gpu, loads): the busiest channel group gives up experts until the GPU is slower."""
    on_gpu = [False] * len(counts)

    def loads():
        load = [0.0] * num_groups
        for expert, n in enumerate(counts):
            if n > 0 and not on_gpu[expert]:
                load[expert % num_groups] += costs["channel_time_by_tokens"][n]
        return load

    while any(n > 0 and not on_gpu[e] for e, n in enumerate(counts)):
        gpu_time = total_time(on_gpu, counts, costs)[1]
        if gpu_time > max(loads()):
            break
        group = int(np.argmax(loads()))
        members = [
            e for e, n in enumerate(counts) if n > 0 and not on_gpu[e] and e % num_groups == group
        ]
        on_gpu[min(members, key=lambda e: (-counts[e], e))] = True
    return on_gpu, loads()


def sieve_incremental(counts, costs):
    """The same greedy choice with O(1) updates per move: the loop that one would write in NumPy.

    Returns (on_gpu, num_gpu, total). This is the twin that the benchmark times.
    """
    table = costs["pim_time_by_tokens"]
    order = np.argsort(-counts, kind="stable")
    tokens = counts[order].tolist()
    pim_of = table[counts[order]].tolist()
    bandwidth, flops_per_s = costs["hbm_bandwidth"], costs["flops_per_s"]
    expert_bytes, token_bytes = costs["expert_bytes"], costs["token_bytes"]
    pim_token_bytes, contention = costs["pim_token_bytes"], costs["contention"]
    flops_per_token, comm = costs["flops_per_token"], costs["comm_time"]
    moved = costs["fixed_bytes"] + pim_token_bytes * sum(tokens)
    flops = costs["fixed_flops"]
    pim = costs["attention_time"] + sum(pim_of[: int(np.count_nonzero(counts))])

    def total():
        off = moved / bandwidth
        memory = max(off, pim) + contention * min(off, pim)
        return max(comm, flops / flops_per_s, memory)

    best, num_gpu = total(), 0
    for n, pim_time in zip(tokens, pim_of):
        if n == 0:
            break
        moved += expert_bytes + (token_bytes - pim_token_bytes) * n
        flops += flops_per_token * n
        pim -= pim_time
        candidate = total()
        if not candidate < best:
            break
        best, num_gpu = candidate, num_gpu + 1
    on_gpu = np.zeros(len(counts), bool)
    on_gpu[order[:num_gpu]] = True
    return on_gpu, num_gpu, best
