"""How soon does Sieve's PIM cost table learn what experts cost, and what does it lose until then?

Batches arrive; Sieve decides from the table; the DRAM truth answers, every expert at a refresh
phase of its own; the table moves by beta. Measured: the relative error of the entries used, and
the regret against a partition that knows the mean truth. Varied: beta, the fallback for counts
never seen (as a multiple of the roofline: 1 is Sieve's, too fast by about 2.4; 8 is far too slow,
and entries that keep experts away from PIM are never corrected), and what arrives: batches of one
size, of twice the size from half of the run on, drawn from calibrated routing, or measured routing
(moejax's own model "zoo", with the sizes of Qwen3-30B-A3B, or `--trace FILE`). A scheduler that
stays with the roofline stands beside it, on the same batches.

    moejax run sweeps/cost_table_convergence.py
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import moejax as mj
from moejax import cost, hardware, models, partition, plot, routing, serving, zoo
from moejax.cost import PIMCostTable, dram
from moejax.sweep import Axis, Sweep


ZOO_COST_MODEL = "qwen3-30b-a3b"
CASES = {"qwen3-30b-a3b": 1, "gpt-oss-120b": 4, "qwen3.5-397b-a17b": 8}  # GPUs as in Sieve
ARRIVALS = ("steady", "batch doubles")
BATCHES = (16, 64)
BETAS = (0.05, 0.1, 0.25, 0.5, 1.0)
FALLBACKS = (1.0, 2.5, 8.0)
ITERATIONS, LAYERS, PHASES, SEEDS = 40, 4, 32, 4
CONTEXT = 512.0
LEARNT = 10  # iterations after which the table is held to account


def SWEEP(*, trace: str | None = None) -> Sweep:
    """A run of 40 batches is one scan; betas and fallbacks are a batch of scans."""
    return Sweep(
        [
            Axis("model", _cases(trace)),
            Axis("arrivals", list(ARRIVALS), static=True),
            Axis("batch", list(BATCHES), static=True),
            Axis("beta", list(BETAS), inner=True),
            Axis("fallback_over_roofline", list(FALLBACKS), inner=True),
            Axis("iteration", list(range(1, ITERATIONS + 1)), inner=True),
        ],
        runs,
        seeds=SEEDS,
        prepare=truth,
        about=about,
        columns=columns,
        width=1,
    )


def _cases(path: str | None) -> dict[str, dict[str, Any]]:
    """Model, system, and its trace or None."""
    if path is not None:
        trace = routing.load(path)
        if trace.model not in models.MODELS:
            raise ValueError(f"{path}: no sizes known for its model, {trace.model or 'unnamed'}")
        return {trace.model: _case(trace.model, 1, trace)}
    cases = {name: _case(name, num_gpus, None) for name, num_gpus in CASES.items()}
    return {"zoo": _case(ZOO_COST_MODEL, 1, zoo.trace())} | cases


def _case(name: str, num_gpus: int, trace: routing.RoutingTrace | None) -> dict[str, Any]:
    model = models.get(name)
    if trace is not None:
        model = model.replace(num_experts=trace.num_experts, top_k=trace.top_k)
    return dict(model=model, system=hardware.get(f"{num_gpus}xb200-hbm-pim"), trace=trace)


def truth(model: dict[str, Any]) -> dict[str, Any]:
    """Expert times by commands, [phases, counts], for as many tokens as can meet in an expert."""
    shape, pim = model["model"], model["system"].pim
    phases = (jnp.arange(PHASES) + 0.5) / PHASES * pim.timing.refi
    times = jax.jit(
        lambda phases: dram.expert_times(
            shape.hidden, shape.moe_intermediate, 2 * max(BATCHES), pim, phases
        )
    )
    return dict(truth=times(phases))


def about(model: dict[str, Any]) -> dict[str, Any]:
    """Whose sizes, and where routing comes from."""
    workload = mj.Workload(1, CONTEXT, routing=model["trace"])
    source = serving.routing_source(model["model"], workload)
    return dict(cost_model=model["model"].name, gpus=model["system"].num_gpus, routing=source)


def runs(config: dict[str, Any], key) -> dict[str, Any]:
    """Regret and errors [betas, fallbacks, iterations]."""
    case, batch = config["model"], config["batch"]
    draw, noise = jax.random.split(key)
    counts = _counts(case, batch, config["arrivals"] == "batch doubles", draw)
    costs = _costs(case, batch, config["truth"])
    model = case["model"]
    work = cost.expert_work(model.hidden, model.moe_intermediate, 1.0, model.precision)
    roofline = cost.pim_roofline_time(work, case["system"].pim)

    def run(beta, fallback, learns=True):
        times = config["truth"]
        table = PIMCostTable.create(times.shape[1] - 1, fallback * roofline, beta)
        found = partition.run_online(counts, costs, times, table, learns=learns, key=noise)
        numbers = dict(
            regret=found.regret,
            table_error=found.table_error,
            worst_error=found.worst_error,
            unseen_share=found.unseen_share,
            experts_on_gpu=jnp.mean(found.num_gpu.astype(float), axis=1),
            status=jnp.broadcast_to(found.status, found.regret.shape),
        )
        return jax.tree.map(lambda series: series[config["iteration"] - 1], numbers)

    by_fallback = jax.vmap(run, (None, 0))
    learning = jax.vmap(by_fallback, (0, None))(config["beta"], config["fallback_over_roofline"])
    frozen = run(1.0, 1.0, learns=False)["regret"]
    return learning | dict(roofline_regret=frozen[None, None])


def _counts(case: dict[str, Any], batch: int, doubles: bool, key):
    """Tokens per expert of the first GPU, [iterations, layers, experts]."""
    model, size = case["model"], 2 * batch if doubles else batch
    ids = _expert_ids(case, size, key)
    # The first half of the run takes only the first half of each batch.
    half = jnp.arange(ITERATIONS)[:, None] < (ITERATIONS // 2 if doubles else 0)
    valid = (jnp.arange(size) < batch) | ~half
    count = lambda ids, valid: routing.tokens_per_expert(ids, model.num_experts, valid)
    counts = jax.vmap(count)(ids, valid)
    return counts[:, :, : model.num_experts // case["system"].num_gpus]


def _expert_ids(case: dict[str, Any], size: int, key):
    """[iterations, layers, tokens, top_k]."""
    model, trace = case["model"], case["trace"]
    if trace is not None:
        draw = lambda key: routing.decode_batch(trace, size, key=key, reuse=True)[:LAYERS]
        return jax.lax.map(draw, jax.random.split(key, ITERATIONS))
    popularity = routing.calibrated(model.name).popularity
    ids = routing.sample_expert_ids(
        popularity, model.num_experts, model.top_k, LAYERS, ITERATIONS * size, key=key
    )
    return jnp.swapaxes(ids.reshape(LAYERS, ITERATIONS, size, model.top_k), 0, 1)


def _costs(case: dict[str, Any], batch: int, times) -> partition.PartitionCosts:
    """A layer of the model on its share of the batch, without what the sweep does not vary."""
    model, system = case["model"], case["system"]
    attention, precision = model.layers[-1], model.precision
    tokens = batch / system.num_gpus
    one = cost.attention_work(attention, CONTEXT, precision)
    fixed = cost.projection_work(attention, model.hidden, tokens, precision)
    fixed += cost.router_work(model.hidden, model.num_experts, tokens, precision)
    if model.num_shared_experts:
        fixed += cost.expert_work(model.hidden, model.shared_intermediate, tokens, precision)
    expert = cost.expert_work(model.hidden, model.moe_intermediate, 1.0, precision)
    load = cost.expert_work(model.hidden, model.moe_intermediate, 0.0, precision)
    remote = cost.expected_remote_gpus(model.num_experts, system.num_gpus, model.top_k)
    sent = tokens * remote * model.hidden * precision.activation_bits / 8
    comm = 2 * (sent / system.link.bandwidth + system.link.latency) if system.num_gpus > 1 else 0.0
    return partition.PartitionCosts(
        pim_time_by_tokens=times[0],
        attention_time=system.pim.attention_overhead * tokens * one.flops / system.pim.flops_per_s,
        comm_time=comm,
        expert_bytes=load.bytes,
        token_bytes=expert.bytes - load.bytes,
        flops_per_token=expert.flops,
        fixed_bytes=fixed.bytes,
        fixed_flops=fixed.flops,
        hbm_bandwidth=system.gpu.effective_bandwidth,
        flops_per_s=system.gpu.effective_flops_per_s(precision.activation_bits),
    )


def columns(result: dict[str, Any]) -> dict[str, np.ndarray]:
    """Shares as percent."""
    percent = ("regret", "roofline_regret", "table_error", "worst_error")
    table = {f"{name}_percent": 100 * result.pop(name) for name in percent}
    return table | result


NUMBERS = ("regret_percent", "roofline_regret_percent", "table_error_percent")
NUMBERS += ("worst_error_percent", "unseen_share")


def summary(table: dict[str, np.ndarray]) -> str:
    """Regret of the whole run, errors after 10 iterations; beta 0.25 and Sieve's fallback."""
    lines = ["", f"{'mean over seeds':<44}{'regret %':>10}{'roofline':>10}"]
    lines[-1] += f"{f'error % after {LEARNT}':>18}{'worst %':>9}{'unseen':>8}"
    default = plot.select(table, beta=0.25, fallback_over_roofline=1.0)
    lines += _block(default, ["model", "arrivals", "batch"])
    lines += ["", "by beta, all models and arrivals"]
    lines += _block(plot.select(table, fallback_over_roofline=1.0), ["beta"])
    lines += ["", "by fallback over roofline, at beta 0.25"]
    lines += _block(plot.select(table, beta=0.25), ["fallback_over_roofline"])
    return "\n".join(lines)


def _block(table: dict[str, np.ndarray], by: list[str]) -> list[str]:
    whole = serving.mean_by(table, by, NUMBERS[:2])
    late = {name: values[table["iteration"] > LEARNT] for name, values in table.items()}
    # Where nothing ran on PIM in an iteration, no entry was used.
    used = np.isfinite(late["table_error_percent"])
    late = serving.mean_by({name: values[used] for name, values in late.items()}, by, NUMBERS[2:])
    lines = []
    for i in range(len(whole[by[0]])):
        name = "  " + ", ".join(f"{whole[column][i]}" for column in by)
        same = [j for j in range(len(late[by[0]])) if all(late[c][j] == whole[c][i] for c in by)]
        numbers = [whole[column][i] for column in NUMBERS[:2]]
        numbers += [late[column][same[0]] if same else np.nan for column in NUMBERS[2:]]
        widths = zip(numbers, (10, 10, 18, 9, 8), strict=True)
        lines.append(f"{name:<44}" + "".join(f"{number:>{width}.2f}" for number, width in widths))
    return lines


def figures(table: dict[str, np.ndarray]) -> dict[str, Any]:
    """Error and regret over iterations, by beta and by fallback."""
    shown = plot.select(table, arrivals=table["arrivals"][0], batch=max(table["batch"]))
    names = list(dict.fromkeys(shown["model"]))
    figure, axes = plot.figure(3, len(names), (3.4 * len(names), 9.0))
    for i, name in enumerate(names):
        mine = plot.select(shown, model=name)
        betas = plot.select(mine, fallback_over_roofline=1.0)
        fallbacks = plot.select(mine, beta=0.25)
        rows = [(betas, "beta", "table_error_percent"), (betas, "beta", "regret_percent")]
        rows += [(fallbacks, "fallback_over_roofline", "regret_percent")]
        for row, (data, by, y) in enumerate(rows):
            means = serving.mean_by(data, [by, "iteration"], [y])
            ax = axes[row, i]
            legend = i == len(names) - 1
            plot.lines(means, ax, x="iteration", y=y, by=by, title=name, legend=legend)
            if y == "regret_percent":
                never = np.mean(data["roofline_regret_percent"])
                ax.axhline(never, color="0.5", linestyle=":")
    return {"convergence": figure}
