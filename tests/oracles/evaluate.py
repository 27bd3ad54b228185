"""One decode iteration written out literally: loops over layers, GPUs, tokens and experts.

Plain floats, no JAX. Written from the description of Sieve (arXiv 2605.11277): T_offchip, T_comp,
T_PIM and T_Comm of every layer and GPU, and the iteration around them.

`model`, `system` and the entries of `model["layers"]` are dicts of plain numbers:

- model: `hidden`, `inner`, `experts`, `top_k`, `vocab`, `tied`, `shared` (inner width of the shared
  experts), `dense_layers`, `dense_inner`, and bits per element `weight_bits`, `expert_bits`,
  `activation_bits`, `kv_bits`.
- system: `gpus`, `attention_tp`, `flops_per_s`, `hbm_bandwidth` (both as kernels reach them),
  `link_bandwidth`, `link_latency`, `dedup`, `scheduler_time`, `contention`, `attention_overhead`,
  `device` (`pim_timing.Device`), `order`.

Token t of a batch starts on GPU t mod g; expert e lies on GPU floor(e g / E).
"""

import functools
from dataclasses import replace

from tests.oracles import partition, pim_timing, traffic


# --- What operators compute and move -----------------------------------------------------------


def attention_weights(a, hidden):
    """Elements of all matrices of an attention block."""
    if a["kind"] == "gqa":
        query = hidden * a["heads"] * a["head_dim"]
        key_and_value = 2 * hidden * a["kv_heads"] * a["head_dim"]
        output = a["heads"] * a["head_dim"] * hidden
        return query + key_and_value + output + (query if a.get("output_gate") else 0)
    if a["kind"] == "mla":
        width = a["heads"] * (a["nope_dim"] + a["rope_dim"])
        rank = a.get("q_rank", 0)
        query = hidden * rank + rank * width if rank else hidden * width
        compress = hidden * (a["kv_rank"] + a["rope_dim"])
        expand = a["kv_rank"] * a["heads"] * (a["nope_dim"] + a["value_dim"])
        return query + compress + expand + a["heads"] * a["value_dim"] * hidden
    keys = a["key_heads"] * a["key_head_dim"]
    values = a["value_heads"] * a["value_head_dim"]
    inputs = hidden * (2 * keys + 2 * values)
    return inputs + values * hidden


def projected_values(a):
    """Values that QKV generation writes for a token: queries, and what goes to the cache."""
    if a["kind"] == "gqa":
        return a["head_dim"] * (a["heads"] + 2 * a["kv_heads"])
    if a["kind"] == "mla":
        queries = a["heads"] * (a["nope_dim"] + a["rope_dim"])
        return queries + a["kv_rank"] + a["rope_dim"]
    return 2 * a["key_heads"] * a["key_head_dim"] + 2 * a["value_heads"] * a["value_head_dim"]


def decode_attention(a, context):
    """(FLOPs, cached values read) of one request in one layer."""
    if a["kind"] == "gqa":
        seen = context if a.get("window") is None else min(context, a["window"])
        flops = 4 * seen * a["heads"] * a["head_dim"]
        return flops, 2 * seen * a["kv_heads"] * a["head_dim"]
    if a["kind"] == "mla":
        flops = 2 * context * a["heads"] * (2 * a["kv_rank"] + a["rope_dim"])
        return flops, context * (a["kv_rank"] + a["rope_dim"])
    state = a["value_heads"] * a["key_head_dim"] * a["value_head_dim"]
    return 6 * state, 3 * state


def cached_values(a, context):
    """Values that one request keeps in memory for one layer."""
    if a["kind"] == "linear":
        return a["value_heads"] * a["key_head_dim"] * a["value_head_dim"]
    return decode_attention(a, context)[1]


@functools.cache
def expert_ns(device, order, hidden, inner, tokens, weight_bits, activation_bits):
    """A gated expert on PIM: gate and up share the vector, then down."""
    bits = dict(weight_bits=weight_bits, activation_bits=activation_bits)
    up, _ = pim_timing.gemv_ns(device, 2 * inner, hidden, tokens, order, "fixed", **bits)
    down, _ = pim_timing.gemv_ns(device, hidden, inner, tokens, order, "fixed", **bits)
    return up + down


def pim_seconds(model, system, device, inner, bits, tokens):
    """The same in s, for the model's sizes; `bits` names the width of its weights."""
    widths = model[bits], model["activation_bits"]
    return 1e-9 * expert_ns(device, system["order"], model["hidden"], inner, tokens, *widths)


def pim_flops_per_s(device):
    """Two FLOPs per multiply-add of every unit, once per column access."""
    units = device.channels * device.banks
    return units * device.macs_per_unit * 2 / (device.mac_cadence * 1e-9)


# --- What a layer costs one GPU whatever the partition ------------------------------------------


def attention_on_gpu(model, system, a, tokens_by_gpu, contexts, gpu):
    """(FLOPs, bytes, PIM seconds). The p GPUs of a tensor-parallel group share their tokens."""
    p = system["attention_tp"]
    group = [i for i in range(system["gpus"]) if i // p == gpu // p]
    mine = [token for i in group for token in tokens_by_gpu[i]]
    weights = attention_weights(a, model["hidden"])
    flops = 2 * weights * len(mine) / p
    moved = weights * model["weight_bits"] / 8 / p
    moved += projected_values(a) * len(mine) * model["activation_bits"] / 8 / p
    pim = 0.0
    for token in mine:
        attention_flops, read = decode_attention(a, contexts[token])
        if a["kind"] == "gqa":
            rate = pim_flops_per_s(system["device"]) * 16 / model["kv_bits"]
            pim += system["attention_overhead"] * attention_flops / rate / p
        else:
            flops += attention_flops / p
            moved += read * model["kv_bits"] / 8 / p
    return flops, moved, pim


def dense_ffn(model, inner, tokens):
    """(FLOPs, bytes) of a gated FFN of the model's ordinary weights on the GPU."""
    weights = 3 * model["hidden"] * inner
    vectors = 2 * model["hidden"] * tokens * model["activation_bits"] / 8
    return 2 * weights * tokens, weights * model["weight_bits"] / 8 + vectors


def fixed_of_moe_layer(model, system, a, tokens_by_gpu, contexts, gpu, shared_on_pim):
    """(FLOPs, bytes, PIM seconds) of attention, router and shared experts."""
    tokens = len(tokens_by_gpu[gpu])
    flops, moved, pim = attention_on_gpu(model, system, a, tokens_by_gpu, contexts, gpu)
    router = model["hidden"] * model["experts"]
    flops += 2 * router * tokens
    moved += router * model["weight_bits"] / 8
    if model["shared"] and shared_on_pim:
        pim += pim_seconds(model, system, system["device"], model["shared"], "weight_bits", tokens)
        moved += 2 * model["hidden"] * tokens * model["activation_bits"] / 8
    elif model["shared"]:
        more_flops, more_bytes = dense_ffn(model, model["shared"], tokens)
        flops, moved = flops + more_flops, moved + more_bytes
    return flops, moved, pim


def all_reduce_time(model, system, tokens_by_gpu):
    """Ring all-reduce over the tokens of the fullest attention group."""
    p, g = system["attention_tp"], system["gpus"]
    groups = [range(first, first + p) for first in range(0, g, p)]
    tokens = max(sum(len(tokens_by_gpu[i]) for i in group) for group in groups)
    message = tokens * model["hidden"] * model["activation_bits"] / 8
    time = 0.0
    for _ in range(2 * (p - 1)):
        time += system["link_latency"] + message / p / system["link_bandwidth"]
    return time


# --- Policies -----------------------------------------------------------------------------------


def threshold(counts, costs):
    """PIMoE's static rule: the smallest count that is faster alone on the GPU than alone on PIM."""
    for n in range(1, len(costs["pim_time_by_tokens"])):
        load = costs["expert_bytes"] / costs["hbm_bandwidth"]
        compute = costs["flops_per_token"] * n / costs["flops_per_s"]
        if max(load, compute) < costs["pim_time_by_tokens"][n]:
            return [count >= n for count in counts]
    return [False for _ in counts]


POLICIES = {
    "no_exp": dict(decide=lambda n, costs: [True] * len(n), scheduled=False),
    "all_exp": dict(decide=lambda n, costs: [False] * len(n), scheduled=False, shared_on_pim=True),
    "few_tokens": dict(decide=lambda n, costs: [count > 4 for count in n], scheduled=False),
    "pimoe_threshold": dict(decide=threshold, scheduled=False),
    "pimoe_channel": dict(
        decide=lambda n, costs: partition.pimoe_channel(n, costs, 8)[0], num_groups=8
    ),
    "sieve": dict(decide=lambda n, costs: partition.sieve(n, costs)[0]),
    "sieve_no_attention": dict(
        decide=lambda n, costs: partition.sieve(n, costs | dict(attention_time=0.0))[0]
    ),
    "sieve_no_comm": dict(
        decide=lambda n, costs: partition.sieve(n, costs | dict(comm_time=0.0))[0]
    ),
}


# --- The iteration ------------------------------------------------------------------------------


def iteration(model, system, contexts, expert_ids, policy, believed=None):
    """All results of one decode iteration, as a dict with the names of `moejax.Report`.

    `contexts` has one entry per request of the batch, `expert_ids` is [MoE layers][requests][k],
    `policy` is a key of `POLICIES`; it decides on the system `believed`.
    """
    policy = POLICIES[policy]
    believed = system if believed is None else believed
    g, batch = system["gpus"], len(contexts)
    tokens_by_gpu = [[t for t in range(batch) if t % g == gpu] for gpu in range(g)]
    layers = []
    for index, a in enumerate(model["layers"]):
        if index < model["dense_layers"]:
            layers.append(_dense_layer(model, system, a, tokens_by_gpu, contexts))
        else:
            ids = expert_ids[index - model["dense_layers"]]
            layers.append(
                _moe_layer(model, system, believed, a, tokens_by_gpu, contexts, ids, policy)
            )
    head = _head(model, system, tokens_by_gpu)

    limited = dict.fromkeys(("comm", "hbm", "compute", "pim", "scheduler"), 0.0)
    limited["hbm"] += head
    for layer in layers:
        limited[_limit(layer)] += layer["total"]
        limited["scheduler"] += layer.get("scheduler", 0.0)
    tbt = head
    for layer in layers:
        tbt += layer["total"] + layer.get("scheduler", 0.0)
    moe = layers[model["dense_layers"] :]
    total = lambda name, of=layers: sum(layer.get(name, 0.0) for layer in of)
    mean = lambda name: total(name, moe) / len(moe)
    return dict(
        tbt=tbt,
        interactivity=1 / tbt,
        throughput_per_gpu=batch / g / tbt,
        gpu_time=sum(max(layer["offchip"], layer["compute"]) for layer in layers),
        offchip_time=total("offchip"),
        compute_time=total("compute"),
        pim_time=total("pim"),
        attention_time=total("attention"),
        comm_time=total("comm"),
        scheduler_time=total("scheduler"),
        head_time=head,
        time_limited_by=list(limited.values()),
        limited_by=max(range(5), key=lambda i: list(limited.values())[i]),
        experts_on_gpu=mean("experts_on_gpu"),
        experts_on_pim=mean("experts_on_pim"),
        channel_utilization=mean("utilization"),
        memory_bytes=_memory(model, system, tokens_by_gpu, contexts),
    )


def _limit(layer):
    if layer["comm"] >= layer["total"]:
        return "comm"
    if layer["compute"] >= layer["total"]:
        return "compute"
    return "hbm" if layer["offchip"] >= layer["pim"] else "pim"


def _slowest(candidates):
    """The first GPU with the largest total."""
    return max(candidates, key=lambda times: times["total"])


def _total(system, offchip, compute, pim, comm):
    memory = max(offchip, pim) + system["contention"] * min(offchip, pim)
    return max(comm, compute, memory)


def _dense_layer(model, system, a, tokens_by_gpu, contexts):
    comm = all_reduce_time(model, system, tokens_by_gpu)
    candidates = []
    for gpu in range(system["gpus"]):
        flops, moved, pim = attention_on_gpu(model, system, a, tokens_by_gpu, contexts, gpu)
        ffn = dense_ffn(model, model["dense_inner"], len(tokens_by_gpu[gpu]))
        compute = (flops + ffn[0]) / system["flops_per_s"]
        offchip = (moved + ffn[1]) / system["hbm_bandwidth"]
        total = _total(system, offchip, compute, pim, comm)
        times = dict(offchip=offchip, compute=compute, pim=pim, attention=pim)
        candidates.append(times | dict(comm=comm, total=total))
    return _slowest(candidates)


def _moe_layer(model, system, believed, a, tokens_by_gpu, contexts, ids, policy):
    g = system["gpus"]
    candidates, utilizations, on_gpu_in_all, on_pim_in_all = [], [], 0, 0
    for gpu in range(g):
        hosted = [
            e for e in range(model["experts"]) if traffic.host_of(e, model["experts"], g) == gpu
        ]
        counts = [sum(row.count(e) for row in ids) for e in hosted]
        args = (a, tokens_by_gpu, contexts, ids, policy, gpu)
        on_gpu = policy["decide"](counts, _costs(model, believed, *args))
        costs = _costs(model, system, *args)
        times, utilization = _score(system, on_gpu, counts, costs, policy)
        candidates.append(times)
        utilizations.append(utilization)
        on_gpu_in_all += sum(1 for n, here in zip(counts, on_gpu, strict=True) if n and here)
        on_pim_in_all += sum(1 for n, here in zip(counts, on_gpu, strict=True) if n and not here)
    return _slowest(candidates) | dict(
        scheduler=_exposed(model, system, tokens_by_gpu, ids, policy),
        experts_on_gpu=on_gpu_in_all,
        experts_on_pim=on_pim_in_all,
        utilization=sum(utilizations) / g,
    )


def _exchange_time(model, system, ids):
    """Dispatch and combine."""
    vectors = traffic.dispatch_traffic(
        ids, [True] * len(ids), model["experts"], system["gpus"], system["dedup"]
    )
    vector_bytes = model["hidden"] * model["activation_bits"] / 8
    link = system["link_bandwidth"], system["link_latency"]
    return traffic.comm_time(vectors, vector_bytes, *link)


def _costs(model, system, a, tokens_by_gpu, contexts, ids, policy, gpu):
    """What a policy is told: a dict as `partition` takes it."""
    flops, moved, pim = fixed_of_moe_layer(
        model, system, a, tokens_by_gpu, contexts, gpu, policy.get("shared_on_pim", False)
    )
    device, inner = system["device"], model["inner"]
    part = replace(device, channels=device.channels // policy.get("num_groups", 1))
    seconds = lambda device, n: pim_seconds(model, system, device, inner, "expert_bits", n)
    counts = range(len(ids) + 1)
    vector_bytes = 2 * model["hidden"] * model["activation_bits"] / 8
    return dict(
        pim_time_by_tokens=[seconds(device, n) for n in counts],
        channel_time_by_tokens=[seconds(part, n) for n in counts],
        attention_time=pim,
        comm_time=_exchange_time(model, system, ids)
        + all_reduce_time(model, system, tokens_by_gpu),
        expert_bytes=3 * model["hidden"] * inner * model["expert_bits"] / 8,
        token_bytes=vector_bytes,
        flops_per_token=6 * model["hidden"] * inner,
        fixed_bytes=moved,
        fixed_flops=flops,
        hbm_bandwidth=system["hbm_bandwidth"],
        flops_per_s=system["flops_per_s"],
        pim_token_bytes=vector_bytes,
        contention=system["contention"],
    )


def _score(system, on_gpu, counts, costs, policy):
    """(times of this GPU, utilization of its channel groups)."""
    num_groups = policy.get("num_groups")
    flops, moved = costs["fixed_flops"], costs["fixed_bytes"]
    busy = [costs["attention_time"]] * (num_groups or 1)
    for expert, n in enumerate(counts):
        if n == 0:
            continue
        if on_gpu[expert]:
            flops += costs["flops_per_token"] * n
            moved += costs["expert_bytes"] + costs["token_bytes"] * n
            continue
        moved += costs["pim_token_bytes"] * n
        if num_groups is None:
            busy[0] += costs["pim_time_by_tokens"][n]
        else:
            busy[expert % num_groups] += costs["channel_time_by_tokens"][n]
    offchip, compute = moved / costs["hbm_bandwidth"], flops / costs["flops_per_s"]
    pim = max(busy)
    total = _total(system, offchip, compute, pim, costs["comm_time"])
    times = dict(offchip=offchip, compute=compute, pim=pim, comm=costs["comm_time"], total=total)
    utilization = sum(busy) / len(busy) / pim if pim > 0 else 1.0
    return times | dict(attention=costs["attention_time"]), utilization


def _exposed(model, system, tokens_by_gpu, ids, policy):
    """All-gather of routing maps, 4 bytes a choice in parts of one size, then the decision as far
    as dispatch does not hide it."""
    time, g = 0.0, system["gpus"]
    if g > 1:
        part = max(len(tokens) for tokens in tokens_by_gpu) * model["top_k"] * 4
        time = system["link_latency"] + (g - 1) * part / system["link_bandwidth"]
    if policy.get("scheduled", True):
        time += max(0.0, system["scheduler_time"] - _exchange_time(model, system, ids) / 2)
    return time


def _head(model, system, tokens_by_gpu):
    """Embedding rows of the local tokens, and the LM head split over the GPUs by vocabulary."""
    g, weights = system["gpus"], model["hidden"] * model["vocab"]
    batch = sum(len(tokens) for tokens in tokens_by_gpu)
    compute = 2 * weights * batch / g / system["flops_per_s"]
    load = weights * model["weight_bits"] / 8 / g / system["hbm_bandwidth"]
    most = max(len(tokens) for tokens in tokens_by_gpu)
    rows = most * model["hidden"] * model["weight_bits"] / 8
    return max(compute, load) + rows / system["hbm_bandwidth"]


def _memory(model, system, tokens_by_gpu, contexts):
    """Bytes on the fullest GPU."""
    g, p, hidden = system["gpus"], system["attention_tp"], model["hidden"]
    hosts = [traffic.host_of(e, model["experts"], g) for e in range(model["experts"])]
    experts = max(hosts.count(gpu) for gpu in range(g))
    weights = (1 if model["tied"] else 2) * hidden * model["vocab"] / g
    routed, cache = 0, [0.0] * g
    for index, a in enumerate(model["layers"]):
        weights += attention_weights(a, hidden) / p
        if index < model["dense_layers"]:
            weights += 3 * hidden * model["dense_inner"]
        else:
            weights += hidden * model["experts"] + 3 * hidden * model["shared"]
            routed += experts * 3 * hidden * model["inner"]
        for gpu in range(g):
            group = [i for i in range(g) if i // p == gpu // p]
            for token in (token for i in group for token in tokens_by_gpu[i]):
                cache[gpu] += cached_values(a, contexts[token]) / p
    weight_bytes = (weights * model["weight_bits"] + routed * model["expert_bits"]) / 8
    return weight_bytes + max(cache) * model["kv_bits"] / 8
