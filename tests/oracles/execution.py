"""The execution graph of an iteration as a printed formula, with plain floats.

Written from the description of Sieve (arXiv 2605.11277, execution graph) for layers without shared
experts, where nothing waits for a resource but for what it depends on. Models and systems are dicts
as in `evaluate`.
"""

from tests.oracles import evaluate as plain


def output_weights(a, hidden):
    """Elements of the output projection."""
    if a["kind"] == "gqa":
        return a["heads"] * a["head_dim"] * hidden
    if a["kind"] == "mla":
        return a["heads"] * a["value_dim"] * hidden
    return a["value_heads"] * a["value_head_dim"] * hidden


def kernel(system, flops, moved):
    return max(flops / system["flops_per_s"], moved / system["hbm_bandwidth"])


def attention_end(model, system, a, tokens, gpu, contexts):
    """Seconds from the start of a layer to the end of the output projection; no tensor
    parallelism."""
    mine, bits = tokens[gpu], model["activation_bits"]
    weights = plain.attention_weights(a, model["hidden"])
    share = output_weights(a, model["hidden"]) / weights
    moved = weights * model["weight_bits"] / 8
    moved += plain.projected_values(a) * len(mine) * bits / 8
    around = lambda part: kernel(system, part * 2 * weights * len(mine), part * moved)
    both = [plain.decode_attention(a, contexts[token]) for token in mine]
    flops, read = sum(f for f, _ in both), sum(r for _, r in both)
    if a["kind"] == "gqa":
        rate = plain.pim_flops_per_s(system["device"]) * 16 / model["kv_bits"]
        inside = system["attention_overhead"] * flops / rate
    else:
        inside = kernel(system, flops, read * model["kv_bits"] / 8)
    return around(1 - share) + inside + around(share)


def moe_layer(model, system, a, tokens, contexts, ids, on_gpu, exposed=False):
    """Seconds of one layer. `on_gpu` names the experts that run on the GPU."""
    g, hidden, inner = system["gpus"], model["hidden"], model["inner"]
    bits = model["activation_bits"]
    exchange = plain._exchange_time(model, system, ids) / 2
    gathered = 0.0
    if g > 1:
        most = max(len(mine) for mine in tokens) * model["top_k"] * 4
        gathered = system["link_latency"] + (g - 1) * most / system["link_bandwidth"]
    router = kernel(system, 0.0, hidden * model["experts"] * model["weight_bits"] / 8)
    before = max(
        attention_end(model, system, a, tokens, gpu, contexts)
        + max(router, 2 * hidden * model["experts"] * len(tokens[gpu]) / system["flops_per_s"])
        for gpu in range(g)
    )
    start = before + gathered
    decided = start + system["scheduler_time"]
    arrived = (decided if exposed else start) + exchange
    ends = []
    for gpu in range(g):
        mine = [e for e in range(model["experts"]) if e * g // model["experts"] == gpu]
        counts = {e: sum(row.count(e) for row in ids) for e in mine}
        here = {e: n for e, n in counts.items() if n and e in on_gpu}
        there = {e: n for e, n in counts.items() if n and e not in on_gpu}
        vectors = hidden * bits / 8
        load = len(here) * 3 * hidden * inner * model["expert_bits"] / 8
        load = (load + 2 * vectors * sum(here.values())) / system["hbm_bandwidth"]
        gemm = 6 * hidden * inner * sum(here.values()) / system["flops_per_s"]
        cross = vectors * sum(there.values()) / system["hbm_bandwidth"]
        device = system["device"]
        pim = sum(
            plain.pim_seconds(model, system, device, inner, "expert_bits", n)
            for n in there.values()
        )
        gpu_end = max(decided + load, max(decided, arrived) + gemm)
        pim_end = max(decided, arrived) + cross + pim + cross
        ends.append(max(gpu_end, pim_end))
    combined = max(ends) + exchange
    summed = max(len(mine) for mine in tokens) * hidden * bits / 8 * (model["top_k"] + 1)
    return combined + summed / system["hbm_bandwidth"]


def iteration(model, system, contexts, expert_ids, on_gpu, exposed=False):
    """Seconds of one iteration; `on_gpu` names the experts of every MoE layer on the GPU."""
    tokens = [
        [t for t in range(len(contexts)) if t % system["gpus"] == gpu]
        for gpu in range(system["gpus"])
    ]
    total = plain._head(model, system, tokens)
    for index, a in enumerate(model["layers"]):
        if index < model["dense_layers"]:
            total += max(
                attention_end(model, system, a, tokens, gpu, contexts)
                + kernel(system, *plain.dense_ffn(model, model["dense_inner"], len(tokens[gpu])))
                for gpu in range(system["gpus"])
            )
            continue
        layer = index - model["dense_layers"]
        total += moe_layer(
            model, system, a, tokens, contexts, expert_ids[layer], on_gpu[layer], exposed
        )
    return total
