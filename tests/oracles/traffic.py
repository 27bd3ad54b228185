"""Traffic between GPUs counted token by token, and its expectation by enumeration."""

import itertools


def host_of(expert, num_experts, num_gpus):
    """The GPU of an expert: equal blocks, found by walking up."""
    gpu = 0
    while (gpu + 1) * num_experts <= expert * num_gpus:
        gpu += 1
    return gpu


def dispatch_traffic(expert_ids, valid, num_experts, num_gpus, dedup):
    """Matrix of token vectors that GPU i sends to GPU j, as a list of lists."""
    traffic = [[0] * num_gpus for _ in range(num_gpus)]
    for token, (experts, is_valid) in enumerate(zip(expert_ids, valid, strict=True)):
        if not is_valid:
            continue
        origin = token % num_gpus
        hosts = [host_of(e, num_experts, num_gpus) for e in experts if e >= 0]
        for host in set(hosts) if dedup else hosts:
            if host != origin:
                traffic[origin][host] += 1
    return traffic


def comm_time(traffic, vector_bytes, bandwidth, latency):
    """Dispatch, then combine with every volume turned round."""
    num_gpus, time = len(traffic), 0.0
    if num_gpus == 1:
        return time
    for matrix in (traffic, [list(column) for column in zip(*traffic, strict=True)]):
        sent = max(sum(row) for row in matrix)
        received = max(sum(row[j] for row in matrix) for j in range(num_gpus))
        time += latency + max(sent, received) * vector_bytes / bandwidth
    return time


def expected_remote_gpus(num_experts, num_gpus, top_k):
    """Mean number of remote GPUs of a token of GPU 0, over all sets of `top_k` experts."""
    reached = [
        len({host_of(e, num_experts, num_gpus) for e in chosen} - {0})
        for chosen in itertools.combinations(range(num_experts), top_k)
    ]
    return sum(reached) / len(reached)
