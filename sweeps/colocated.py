"""Do Sieve's gains over running all experts on the GPU hold when prompts join the batch?

Qwen3-30B-A3B on one B200 with HBM-PIM, batches in which some requests are prompts of 1024 tokens
and the others decode (Sieve, arXiv 2605.11277, colocated batches: eight prompts from 64 requests
on, two below; its text also has eight at 16). Prompts of 64 tokens beside them show how short they
would have to be. Prompts are attended to on the GPU; their tokens leave no expert with few.
Contexts are log-normal around 512 tokens; the decision takes the published 20 us, or nothing.

    moejax run sweeps/colocated.py
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import moejax as mj
from moejax import hardware, models, plot, serving
from moejax.serving import context_lengths
from moejax.sweep import Axis, Sweep, zipped


BATCHES = (16, 32, 64)
PROMPTS = (0, 2, 8)
LENGTHS = (64, 1024)
POLICIES = ("no_exp", "all_exp", "few_tokens", "pimoe_channel", "sieve")
# Sieve over NoExp as published: prompts, batch, ratio.
PUBLISHED = ((8, 16, 2.4), (2, 16, 2.4), (2, 32, 2.3), (8, 32, 2.3))
NEAR = 0.10


def evaluate(config, key) -> serving.Report:
    """Every policy and batch size on one draw: [policies, batches]."""
    most = max(BATCHES)
    spread = dict(spread=0.8, key=jax.random.fold_in(key, 1))
    context = context_lengths(most, 512.0, **spread)

    def one(batch):
        workload = mj.Workload(
            batch,
            context,
            max_batch=most,
            prefill=config["prompts"],
            prefill_length=config["length"],
        )
        reports = mj.compare(
            config["model"], config["system"], workload, list(config["policy"]), key=key
        )
        return jax.tree.map(lambda *x: jnp.stack(x), *reports.values())

    return jax.vmap(one, out_axes=1)(config["batch"])


SWEEP = Sweep(
    [
        zipped(
            Axis("model", ["qwen3-30b-a3b"], resolve=models.get),
            Axis("system", ["1xb200-hbm-pim"], resolve=hardware.get),
        ),
        Axis("prompts", list(PROMPTS), static=True),
        Axis("length", list(LENGTHS), static=True),
        Axis("system.scheduler_time", [20e-6, 0.0]),
        Axis("policy", list(POLICIES), static=True, inner=True),
        Axis("batch", list(BATCHES), inner=True),
    ],
    evaluate,
    seeds=2,
    columns=serving.columns,
    where=lambda prompts, length: prompts > 0 or length == LENGTHS[-1],
    width=1,
)


def gain(table, prompts: int, length: int, batch: int, policy: str, time: float) -> np.ndarray:
    """Throughput of a policy over NoExp's, [seeds]."""
    at = {"prompts": prompts, "length": length, "batch": batch, "system.scheduler_time": time}
    pick = lambda name: plot.select(table, policy=name, **at)["tbt_ms"]
    return pick("no_exp") / pick(policy)


def summary(table) -> str:
    """Speed-up over NoExp by prompts and batch size, and the published ones beside it."""
    times = sorted(set(table["system.scheduler_time"].tolist()), reverse=True)
    batches = sorted(set(table["batch"].tolist()))
    cases = list(dict.fromkeys(zip(table["prompts"], table["length"], strict=True)))
    lines = ["", "tbt of no_exp over tbt of the policy, mean over seeds"]
    for time in times:
        for prompts, length in cases:
            of = f" of {length} tokens" if prompts else ""
            lines.append(f"\n{prompts} prompts{of}, decision {1e6 * time:.0f} us")
            lines.append(f"  {'policy':<16}" + "".join(f"{f'B={b}':>9}" for b in batches))
            for policy in [name for name in POLICIES[1:] if name in table["policy"]]:
                means = [np.mean(gain(table, prompts, length, b, policy, time)) for b in batches]
                lines.append(f"  {policy:<16}" + "".join(f"{mean:>9.2f}" for mean in means))
    lines += ["", "Sieve over NoExp, published and ours (decision free in parentheses)"]
    known = [row for row in PUBLISHED if row[1] in batches and "sieve" in table["policy"]]
    for prompts, batch, ratio in known:
        for length in [case[1] for case in cases if case[0] == prompts]:
            ours = [float(np.mean(gain(table, prompts, length, batch, "sieve", t))) for t in times]
            said = "holds" if abs(ours[-1] / ratio - 1) < NEAR else "in kind"
            said = said if ours[-1] > 1.02 else "fails"
            free = f" ({ours[-1]:.2f})" if len(ours) > 1 else ""
            at = f"{prompts} prompts of {length}, B={batch}"
            lines.append(f"  {at}: {ratio} {ours[0]:.2f}{free}: {said}")
    return "\n".join(lines)


def figures(table) -> dict[str, Any]:
    """Throughput against interactivity, one picture per number of prompts."""
    numbers = sorted(set(table["prompts"].tolist()))
    figure, axes = plot.figure(1, len(numbers), (3.4 * len(numbers), 3.8))
    front = ("interactivity_tok_s", "throughput_per_gpu_tok_s")
    free = min(table["system.scheduler_time"])
    for i, prompts in enumerate(numbers):
        rows = plot.select(table, **{"prompts": prompts, "system.scheduler_time": free})
        rows = plot.select(rows, length=max(rows["length"]))
        rows = serving.mean_by(rows, ["policy", "batch"], front)
        title = f"{prompts} prompts, decision free"
        plot.throughput_interactivity(rows, axes[0, i], title=title, legend=False)
    plot.shared_legend(figure, axes)
    return {"colocated": figure}
