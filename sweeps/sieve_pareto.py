"""Which of Sieve's published gains hold, on what do they hang, and what does the front look like?

The three systems of Sieve (arXiv 2605.11277): Qwen3-30B-A3B on one B200 with HBM-PIM, GPT-OSS-120B
on four, Qwen3.5-397B-A17B on eight; every batch size and policy on one draw of routing and contexts
(log-normal around 512 tokens). Around that baseline one thing at a time changes that the paper does
not say: context length, link bandwidth, scheduler time, what GPU kernels reach of their roofline,
channel groups of PIMoE. Overlap is ideal (the paper's Eq. 1), or that of the execution graph. The
summary is a table of claims: published, ours with its band, and whether it holds.

    moejax run sweeps/sieve_pareto.py
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import moejax as mj
from moejax import cost, hardware, models, plot, serving
from moejax.serving import POLICIES, Execution, context_lengths
from moejax.sweep import Axis, Sweep, zipped


SYSTEMS = {
    "qwen3-30b-a3b": "1xb200-hbm-pim",
    "gpt-oss-120b": "4xb200-hbm-pim",
    "qwen3.5-397b-a17b": "8xb200-hbm-pim",
}
BATCHES = (2, 8, 16, 32, 64, 256)
SPREAD = 0.8  # of the logarithm of context lengths
GROUPS = (2, 64)  # channel groups of PIMoE beside the 8 of `pimoe_channel`
LIMIT_COLUMNS = [f"limited_by_{name}_ms" for name in serving.LIMITS]
COMPARED = (
    "no_exp", "all_exp", "few_tokens", "pimoe_channel", "pimoe_tensor", "sieve",
    "sieve_no_attention", "sieve_no_comm",
)  # fmt: skip


def _setting(context=512.0, scheduler_time=20e-6, link=1.0, gpu="roofline"):
    efficiency = cost.gpu_efficiency(gpu)
    return dict(context=context, scheduler_time=scheduler_time, link=link, efficiency=efficiency)


BASELINE, FREE, MEASURED = "baseline", "decision free", "GPU measured, no launch"
SETTINGS = {
    BASELINE: _setting(),
    FREE: _setting(scheduler_time=0.0),
    "context 128": _setting(context=128.0),
    "context 2048": _setting(context=2048.0),
    "link 1/40": _setting(link=0.025),
    "GPU AttAcc": _setting(gpu="attacc"),
    MEASURED: _setting(gpu="measured-no-launch"),
    "GPU measured": _setting(gpu="measured"),
}
BAND = (BASELINE, "GPU AttAcc", MEASURED, "GPU measured")  # what GPU kernels may reach
GRAPH = (BASELINE, FREE)  # also by the execution graph


def policies() -> dict[str, serving.Policy]:
    """Those compared, and PIMoE with other numbers of channel groups."""
    found = {name: POLICIES[name] for name in COMPARED}
    for groups in GROUPS:
        name = f"pimoe_channel_{groups}"
        found[name] = dataclasses.replace(POLICIES["pimoe_channel"], name=name, num_groups=groups)
    return found


def evaluate(config, key) -> serving.Report:
    """Every policy and batch size on one draw: [policies, batches]."""
    setting, named = config["setting"], policies()
    system = config["system"]
    system = system.replace(
        scheduler_time=setting["scheduler_time"],
        link=dict(bandwidth=system.link.bandwidth * setting["link"]),
    )
    most = max(BATCHES)
    context = context_lengths(
        most, setting["context"], spread=SPREAD, key=jax.random.fold_in(key, 1)
    )
    chosen = [named[name] for name in config["policy"]]
    execution = Execution(config["overlap"])

    def one(batch):
        workload = mj.Workload(batch, context, max_batch=most)
        reports = mj.compare(
            config["model"],
            system,
            workload,
            chosen,
            key=key,
            execution=execution,
            efficiency=setting["efficiency"],
        )
        return jax.tree.map(lambda *x: jnp.stack(x), *reports.values())

    return jax.vmap(one, out_axes=1)(config["batch"])


def columns(report: serving.Report) -> dict[str, np.ndarray]:
    """Columns of a report, with the time that each of `LIMITS` is waited for."""
    spent = np.moveaxis(np.asarray(report.time_limited_by), -1, 0) * 1e3
    return serving.columns(report) | dict(zip(LIMIT_COLUMNS, spent, strict=True))


def by_graph(setting) -> bool:
    """Whether a setting is one of `GRAPH`, which differ in the scheduler time alone."""
    same = [float(setting[name]) == float(SETTINGS[BASELINE][name]) for name in ("context", "link")]
    return all(same) and float(setting["efficiency"].bandwidth) == 1


SWEEP = Sweep(
    [
        zipped(
            Axis("model", list(SYSTEMS), resolve=models.get),
            Axis("system", list(SYSTEMS.values()), resolve=hardware.get),
        ),
        Axis("overlap", ["ideal", "coarse"], static=True),
        Axis("setting", SETTINGS),
        Axis("policy", list(policies()), static=True, inner=True),
        Axis("batch", list(BATCHES), inner=True),
    ],
    evaluate,
    seeds=3,
    columns=columns,
    where=lambda overlap, setting: overlap == "ideal" or by_graph(setting),
    width=1,
)


@dataclasses.dataclass(frozen=True)
class Claim:
    """A published ratio of two policies' throughput: at a batch size or several, the largest or
    each, between two numbers."""

    text: str
    model: str
    policy: str
    over: str
    batches: tuple[int, ...]
    low: float
    high: float
    largest: bool = False
    words: bool = False  # published without a number: never more than in kind


CLAIMS = (
    Claim("Sieve over PIMoE, B = 256: 1.26", "qwen3.5-397b-a17b", "sieve", "pimoe_channel", (256,),
          1.26, 1.26),
    Claim("Sieve over PIMoE, B >= 32: 1.11-1.17", "gpt-oss-120b", "sieve", "pimoe_channel",
          (32, 64, 256), 1.11, 1.17),
    Claim("Sieve over PIMoE: up to 1.6", "qwen3-30b-a3b", "sieve", "pimoe_channel", BATCHES,
          1.6, 1.6, True),
    Claim("PIMoE near Sieve, B <= 16", "qwen3.5-397b-a17b", "sieve", "pimoe_channel", (8, 16),
          1.0, 1.0),
    Claim("PIMoE near Sieve, B <= 16", "gpt-oss-120b", "sieve", "pimoe_channel", (8, 16),
          1.0, 1.0),
    Claim("AllExp near Sieve, B <= 16", "qwen3.5-397b-a17b", "sieve", "all_exp", (8, 16),
          1.0, 1.0),
    Claim("AllExp near Sieve, B <= 16", "gpt-oss-120b", "sieve", "all_exp", (8, 16), 1.0, 1.0),
    Claim("Sieve over no T_attn", "qwen3-30b-a3b", "sieve", "sieve_no_attention", BATCHES,
          1.02, 1.6, True, words=True),
    Claim("Sieve over no T_comm", "qwen3.5-397b-a17b", "sieve", "sieve_no_comm", BATCHES,
          1.02, 1.3, True, words=True),
)  # fmt: skip
NEAR = 0.10


def ratios(table, claim: Claim, setting: str, overlap: str) -> np.ndarray:
    """Throughput of one policy over another, [seeds, batches]; NaN where memory is too small."""
    pick = lambda policy, batch: plot.select(
        table, model=claim.model, setting=setting, overlap=overlap, policy=policy, batch=batch
    )["tbt_ms"]
    return np.stack([pick(claim.over, b) / pick(claim.policy, b) for b in claim.batches], axis=1)


def verdict(claim: Claim, values: np.ndarray) -> str:
    """Holds within 10 %; in kind where at least the direction is right; fails."""
    means = np.nanmean(values, axis=0)
    judged = means.max(keepdims=True) if claim.largest else means
    if claim.words:
        return "in kind" if np.all(judged > claim.low) else "fails"
    if np.all((judged > claim.low * (1 - NEAR)) & (judged < claim.high * (1 + NEAR))):
        return "holds"
    if claim.low > 1.01:
        return "in kind" if np.all(judged > 1.01) else "fails"
    return "fails"


def shown(claim: Claim, values: np.ndarray) -> str:
    means, half = serving.mean_and_interval(values, axis=0)
    if claim.largest:
        best = int(np.nanargmax(means))
        return f"{means[best]:.2f} +-{half[best]:.2f} (B={claim.batches[best]})"
    return ", ".join(f"{m:.2f} +-{h:.2f}" for m, h in zip(means, half, strict=True))


def flat_beyond(table, model: str, setting: str, overlap: str) -> float:
    """Throughput of AllExp at the largest batch over that at 32."""
    rows = plot.select(table, model=model, setting=setting, overlap=overlap, policy="all_exp")
    rate = lambda b: np.mean(plot.select(rows, batch=b)["throughput_per_gpu_tok_s"])
    return rate(max(BATCHES)) / rate(32)


def summary(table) -> str:
    """Claim by claim: published, ours, band over GPU efficiencies, by graph, verdict, and which
    unknown would make it hold."""
    first = "ideal" if "ideal" in table["overlap"] else "coarse"
    there = set(plot.select(table, overlap=first)["setting"])
    present = lambda names: [name for name in names if name in there]
    lines = ["", "Claims of Sieve: ratio of throughputs, mean +- 95 % over seeds"]
    for claim in CLAIMS:
        wanted = {claim.policy, claim.over} <= set(table["policy"])
        wanted &= set(claim.batches) <= set(table["batch"])
        if claim.model not in table["model"] or BASELINE not in there or not wanted:
            continue
        base = ratios(table, claim, BASELINE, first)
        lines.append(f"\n{claim.model}: {claim.text}")
        said = f"{shown(claim, base)}: {verdict(claim, base)}"
        lines.append(f"  ours, {'Eq. 1' if first == 'ideal' else 'graph':<27} {said}")
        for name in present(GRAPH):
            if first == "ideal" and "coarse" in table["overlap"]:
                values = ratios(table, claim, name, "coarse")
                lines.append(
                    f"  by graph, {name:<24} {shown(claim, values)}: {verdict(claim, values)}"
                )
        band = [np.nanmean(ratios(table, claim, s, first), axis=0) for s in present(BAND)]
        judged = np.max(band, axis=1) if claim.largest else np.ravel(band)
        lines.append(f"  band over GPU efficiency {np.min(judged):.2f} to {np.max(judged):.2f}")
        held = {s: verdict(claim, ratios(table, claim, s, first)) for s in present(SETTINGS)}
        wanted = "in kind" if claim.words else "holds"
        said = ", ".join(s for s, v in held.items() if v == wanted) or "none of the settings"
        lines.append(f"  {wanted} with: {said}")
        known = [g for g in GROUPS if f"pimoe_channel_{g}" in table["policy"]]
        for groups in known if claim.over == "pimoe_channel" else ():
            other = dataclasses.replace(claim, over=f"pimoe_channel_{groups}")
            values = ratios(table, other, BASELINE, first)
            said = f"{shown(other, values)}: {verdict(other, values)}"
            lines.append(f"  {groups:>2} channel groups  {said}")
    lines += ["", "AllExp's throughput at B = 256 over that at 32 (published: flat, 1.0)"]
    if {32, max(BATCHES)} <= set(table["batch"]) and "all_exp" in table["policy"]:
        for model in dict.fromkeys(table["model"]):
            lines.append(f"  {model}: {flat_beyond(table, model, BASELINE, first):.2f}")
    return "\n".join([*lines, *flips(table, present(BAND), first)])


RANKED = ("no_exp", "all_exp", "few_tokens", "pimoe_channel", "sieve")


def flips(table, settings: list[str], overlap: str) -> list[str]:
    """Which of five policies is fastest, and where what GPU kernels reach changes that."""
    lines = ["", "Fastest policy by what GPU kernels reach of their roofline"]
    batches = [b for b in (8, 64, 256) if b in table["batch"]]
    for model in dict.fromkeys(table["model"]):
        for batch in batches:
            rows = plot.select(table, model=model, batch=batch, overlap=overlap)
            best = {}
            for setting in settings:
                mine = plot.select(rows, setting=setting)
                ranked = [policy for policy in RANKED if policy in mine["policy"]]
                tbt = lambda policy, mine=mine: mine["tbt_ms"][mine["policy"] == policy]
                means = {policy: np.mean(tbt(policy)) for policy in ranked}
                best.setdefault(min(means, key=lambda name: means[name]), []).append(setting)
            said = "; ".join(f"{name}: {', '.join(where)}" for name, where in best.items())
            same = next(iter(best))
            lines.append(f"  {model}, B={batch}: {said if len(best) > 1 else same}")
    return lines


def figures(table) -> dict[str, Any]:
    """Fronts by policy, for the paper's overlap and by graph; channel utilization; breakdown."""
    shown_models = list(dict.fromkeys(table["model"]))
    overlaps = list(dict.fromkeys(table["overlap"]))
    size = (3.4 * len(shown_models), 3.3 * len(overlaps) + 0.5)
    fronts, axes = plot.figure(len(overlaps), len(shown_models), size)
    use, use_axes = plot.figure(1, len(shown_models), (3.4 * len(shown_models), 3.4))
    bars, bar_axes = plot.figure(1, len(shown_models), (3.6 * len(shown_models), 3.8))
    front = ("interactivity_tok_s", "throughput_per_gpu_tok_s")
    kept = ("no_exp", "all_exp", "few_tokens", "pimoe_channel", "sieve", "sieve_no_attention")
    for i, model in enumerate(shown_models):
        base = plot.select(table, model=model, setting=BASELINE)
        base = {name: values[np.isin(base["policy"], kept)] for name, values in base.items()}
        for j, overlap in enumerate(overlaps):
            rows = serving.mean_by(plot.select(base, overlap=overlap), ["policy", "batch"], front)
            title = f"{model}, {'Eq. 1' if overlap == 'ideal' else 'graph'}"
            plot.throughput_interactivity(rows, axes[j, i], title=title, legend=False)
        even = plot.select(base, overlap=overlaps[0])
        rows = serving.mean_by(even, ["policy", "batch"], ["channel_utilization"])
        plot.channel_utilization(rows, use_axes[0, i], title=model, legend=False)
        _breakdown(plot.select(base, overlap=overlaps[-1]), bar_axes[0, i], model)
    for figure, drawn in ((fronts, axes), (use, use_axes), (bars, bar_axes)):
        plot.shared_legend(figure, drawn)
    return {"pareto": fronts, "channel_utilization": use, "breakdown": bars}


def _breakdown(table, ax, model: str) -> None:
    """What the critical path waits for at 64 requests, policy by policy."""
    rows = serving.mean_by(plot.select(table, batch=64), ["policy"], LIMIT_COLUMNS)
    named = {"name": [plot.policy_style(name).label for name in rows["policy"]]}
    named |= {name.removeprefix("limited_by_"): rows[name] for name in LIMIT_COLUMNS}
    plot.breakdown(named, ax, parts=serving.LIMITS, title=f"{model}, B = 64", legend=False)
