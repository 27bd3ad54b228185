"""What does splitting experts between GPU and HBM-PIM gain, and for whom?

Seven policies on the real routing of moejax's own model ("zoo", costed with the sizes of
Qwen3-30B-A3B, column `cost_model`) and on three production-size models, each on Sieve's system for
it (B200 with HBM-PIM), on the same with a decision that takes no time instead of the published
20 us, and on as many H200; batch sizes 1 to 256. Routing of the production models is synthetic,
calibrated to Sieve's published statistics. With `--trace FILE` it is drawn from a measured trace,
and the model is the trace's own. Policies and systems see the same draws, seed by seed, so ratios
are paired.

    moejax run sweeps/quickstart.py
"""

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import moejax as mj
from moejax import hardware, models, plot, routing, serving, zoo


ZOO_COST_MODEL = "qwen3-30b-a3b"
CASES = {  # GPUs as in Sieve
    "zoo": 1,
    "gpt-oss-120b": 4,
    "qwen3-30b-a3b": 1,
    "qwen3.5-397b-a17b": 8,
}
SYSTEMS = {
    "{}xb200-hbm-pim": {},
    "{}xb200-hbm-pim, free decision": {"scheduler_time": 0.0},
    "{}xh200-hbm-pim": {},
}
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXT = 512
SEEDS = 8
POLICIES = (
    "no_exp", "all_exp", "few_tokens", "pimoe_threshold", "pimoe_channel", "sieve",
    "sieve_no_attention",
)  # fmt: skip
SHOWN = (8, 64, 256)
BINS = ("share_1", "share_2", "share_3_4", "share_more", "active")
FRONT = ("interactivity_tok_s", "throughput_per_gpu_tok_s")


def rows(*, trace: str | None = None, progress=None) -> Iterator[list[dict[str, Any]]]:
    """One row per model, system, batch size, policy and seed."""
    cases = _cases(trace)
    if progress is not None:
        progress(0, len(cases) * SEEDS)
    for i, (model, num_gpus, measured, cost_model) in enumerate(cases):
        systems = _systems(num_gpus)
        stacked = hardware.stack(list(systems.values()))
        batches = _batches(measured)
        for seed in range(SEEDS):
            reports, bins = _run(model, stacked, measured, jnp.array(batches), seed, batches[-1])
            if progress is not None:
                progress(i * SEEDS + seed + 1, len(cases) * SEEDS)
            source = serving.routing_source(model, _workload(1, 1, measured))
            fixed = dict(model=model.name, cost_model=cost_model, context=CONTEXT)
            fixed |= dict(seed=seed, routing=source)
            yield _tidy(fixed, list(systems), batches, reports, bins)


def _cases(path: str | None):
    """(model, GPUs, trace or None, whose sizes it is costed with) of each study."""
    if path is None:
        return [_case(name, num_gpus) for name, num_gpus in CASES.items()]
    trace = routing.load(path)
    if trace.model not in models.MODELS:
        raise ValueError(f"{path}: no sizes known for its model, {trace.model or 'unnamed'}")
    model = models.get(trace.model)
    # Enough GPUs to leave half of an H200 to the cache.
    fits = lambda num_gpus: float(model.weight_bytes) / num_gpus < 70e9
    return [(model, next(filter(fits, (1, 2, 4, 8)), 16), trace, model.name)]


def _case(name: str, num_gpus: int):
    if name != "zoo":
        return models.get(name), num_gpus, None, name
    # The zoo model's own experts are too small for a B200: it has as many as it has, of the sizes
    # of another model.
    trace, shapes = zoo.trace(), models.get(ZOO_COST_MODEL)
    model = shapes.replace(
        name=name,
        num_experts=trace.num_experts,
        top_k=trace.top_k,
        layers=shapes.layers[: trace.num_layers],
    )
    return model, num_gpus, trace, ZOO_COST_MODEL


def _systems(num_gpus: int) -> dict[str, hardware.System]:
    made = {}
    for name, changes in SYSTEMS.items():
        system = hardware.get(name.format(num_gpus).partition(",")[0])
        made[name.format(num_gpus)] = system.replace(**changes)
    return made


def _batches(trace: routing.RoutingTrace | None) -> tuple[int, ...]:
    most = BATCHES[-1] if trace is None else int(np.count_nonzero(trace.valid))
    return tuple(batch for batch in BATCHES if batch <= most)


def _workload(batch, max_batch: int, trace: routing.RoutingTrace | None) -> mj.Workload:
    reuse = trace is not None and trace.num_sequences < BATCHES[-1]
    return mj.Workload(batch, CONTEXT, max_batch=max_batch, routing=trace, reuse=reuse)


@functools.partial(jax.jit, static_argnames="max_batch")
def _run(model, systems, trace, batches, seed, max_batch: int):
    """Reports by policy, [systems * batches], and what routing looks like, [batches].

    One flat axis, because every vmap is another pass over the program. The draw depends on neither
    system nor batch, so it is made once.
    """
    key = jax.random.key(seed)

    def reports(system, batch):
        workload = _workload(batch, max_batch, trace)
        return mj.compare(model, system, workload, POLICIES, key=key)

    def bins(batch):
        workload = _workload(batch, max_batch, trace)
        expert_ids = serving.route(model, workload, key=key)
        counts = routing.tokens_per_expert(expert_ids, model.num_experts, workload.valid)
        return jax.tree.map(jnp.mean, routing.bimodality(counts))

    num_systems = systems.scheduler_time.shape[0]
    repeated = jax.tree.map(lambda x: jnp.repeat(x, batches.shape[0], axis=0), systems)
    found = jax.vmap(reports)(repeated, jnp.tile(batches, num_systems))
    return found, jax.vmap(bins)(batches)


def _tidy(fixed, names, batches, reports, bins) -> list[dict[str, Any]]:
    bins = {name: np.asarray(share) for name, share in bins._asdict().items()}
    tidy = []
    for policy, report in reports.items():
        columns = serving.columns(report)
        for i, (system, b) in enumerate(itertools.product(names, range(len(batches)))):
            row = fixed | dict(system=system, policy=policy, batch=batches[b])
            row |= {name: column[i].item() for name, column in columns.items()}
            tidy.append(row | {name: share[b].item() for name, share in bins.items()})
    return tidy


def summary(rows: list[dict[str, Any]]) -> str:
    """Speed-up over NoExp by policy, mean over seeds with its 95 % interval."""
    table = _columns(rows)
    # A short trace has no large batches.
    batches = [b for b in SHOWN if b in table["batch"]] or [max(table["batch"])]
    lines = ["", "tbt of no_exp over tbt of the policy, mean +- 95 % over seeds"]
    studies = zip(
        table["model"], table["cost_model"], table["system"], table["routing"], strict=True
    )
    for model, cost_model, system, source in dict.fromkeys(studies):
        sizes = "" if model == cost_model else f" with the sizes of {cost_model}"
        lines += ["", f"{model}{sizes} on {system}; routing: {source}"]
        lines.append(f"  {'policy':<20}" + "".join(f"{f'B={b}':>18}" for b in batches))
        for policy in POLICIES[1:]:
            cells = [_gain(table, model, system, policy, batch) for batch in batches]
            lines.append(f"  {policy:<20}" + "".join(f"{cell:>18}" for cell in cells))
    return "\n".join(lines)


def _gain(table, model, system, policy, batch) -> str:
    pick = lambda name: plot.select(table, model=model, system=system, policy=name, batch=batch)
    ratio = pick("no_exp")["tbt_ms"] / pick(policy)["tbt_ms"]
    mean, half = serving.mean_and_interval(ratio)
    return f"{mean:.2f} +-{half:.2f}"


def figures(rows: list[dict[str, Any]], *, trace: str | None = None) -> dict[str, Any]:
    """Experts on the roofline, expert bins by batch size, throughput against interactivity."""
    table = _columns(rows)
    models_shown = list(dict.fromkeys(table["model"]))
    width = 3.2 * len(models_shown)
    bins, bin_axes = plot.figure(1, len(models_shown), (width, 3.6))
    fronts, front_axes = plot.figure(2, len(models_shown), (width, 6.8))
    for i, name in enumerate(models_shown):
        of_model = plot.select(table, model=name)
        first, free = list(dict.fromkeys(of_model["system"]))[:2]
        shares = plot.select(of_model, system=first, policy="sieve")
        by_batch = serving.mean_by(shares, ["batch"], BINS)
        plot.expert_bins(by_batch, bin_axes[0, i], title=name, legend=False)
        for row, (system, title) in enumerate(((first, name), (free, "same, free decision"))):
            front = serving.mean_by(
                plot.select(of_model, system=system), ["policy", "batch"], FRONT
            )
            ax = front_axes[row, i]
            plot.throughput_interactivity(front, ax, title=title, legend=False)
    plot.shared_legend(bins, bin_axes)
    plot.shared_legend(fronts, front_axes)
    return {"roofline": _roofline(trace), "expert_bins": bins, "throughput": fronts}


def _roofline(path: str | None):
    model, num_gpus, trace, _ = _cases(path)[:2][-1]
    system = next(iter(_systems(num_gpus).values()))
    batch = min(64, _batches(trace)[-1])
    workload = _workload(batch, batch, trace)
    dots = serving.expert_rows(model, system, workload, "sieve", key=jax.random.key(0))
    gpu, pim = system.gpu, system.pim
    machines = [
        dict(name=gpu.name.upper(), flops_per_s=gpu.flops_per_s, bandwidth=gpu.hbm_bandwidth),
        dict(name="HBM-PIM", flops_per_s=pim.flops_per_s, bandwidth=pim.internal_bandwidth),
    ]
    figure, axes = plot.figure(1, 1, (9, 4.2))
    title = f"Experts of {model.name} where Sieve runs them, B = {batch}"
    plot.roofline(dots, machines, axes[0, 0], title=title)
    return figure


def _columns(rows: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    return {name: np.array([row[name] for row in rows]) for name in rows[0]}
