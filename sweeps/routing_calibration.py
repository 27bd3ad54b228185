"""Can one popularity per model explain the routing statistics of every batch size at once?

Sieve (arXiv 2605.11277) states, for three models, how many of the active experts see one token and
how many at most four, at batch sizes from 4 to 256. This sweep fits three families of synthetic
routing to all numbers of a model together and samples what they give. It then fits the richest
family to measured traces (folder `MOEJAX_DATA`) and judges it on files it has not seen. The
parameters it prints are the ones stored in moejax.

    moejax run sweeps/routing_calibration.py
"""

import dataclasses
import functools
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np

from moejax import models, routing
from moejax.routing import Bimodality, Dirichlet, LambdaTails, LogitNormal, RoutingTrace, Target
from moejax.sweep import Axis, Sweep, zipped


REPOSITORY = Path(__file__).resolve().parent.parent
DATA = Path(os.environ.get("MOEJAX_DATA", REPOSITORY.parent / "shared" / "data"))

QWEN3 = [Target(64, share_1=0.202, share_le4=0.476), Target(256, share_1=0.119)]
PUBLISHED = {
    "qwen3-30b-a3b": QWEN3,
    # The paper says top-4, the checkpoint has top-8.
    "qwen3-30b-a3b-top4": QWEN3,
    "qwen3-next-80b-a3b": [
        Target(4, share_1=0.925),
        Target(64, share_1=0.442, share_le4=0.893),
        Target(256, share_1=0.239),
    ],
    # The act-ratio of 0.479 counts the 2.2e9 parameters outside the experts: 0.470 of the experts.
    "gpt-oss-120b": [
        Target(64, share_1=0.326, share_le4=0.659),
        Target(256, share_1=0.235, active=0.470),
    ],
}
# Two numbers are stated for B = 256 without saying which model has which. None is fitted; these
# are the ones that come out.
UNASSIGNED = {"qwen3-next-80b-a3b": 0.566, "gpt-oss-120b": 0.501}

TRACES = {
    # model: (files to fit, files to judge on, batch sizes to fit, to judge)
    "mixtral-8x7b": (
        "mtbench-coding mtbench-extraction mtbench-humanities mtbench-math mtbench-reasoning "
        "mtbench-roleplay",
        "mtbench-stem mtbench-writing",
        (4, 16),
        (4, 16),
    ),
    "deepseek-v2-lite": (
        "esft-intent esft-law esft-summary",
        "esft-translation",
        (4, 16, 64),
        (4, 16),
    ),
    "gpt-oss-20b": (
        "decode-mmlu-dev decode-mmlu-test decode-mmlu-validation decode-misc decode-mmlu-pro",
        "decode-gpqa",
        (4, 16, 64),
        (4, 16, 64),
    ),
}

TAILS = LambdaTails(scale=2.5, left=0.3, right=0.5)
FAMILIES = (Dirichlet(0.3), LogitNormal(1.5), TAILS)


def SWEEP(*, trace: str | None = None) -> Sweep:
    """One row per number asked for; `trace` is a file to fit instead of everything else.

    Fits are work for the host, so they are prepared, and `fn` only hands the numbers on.
    """
    jobs = _jobs(trace)
    asked = [
        (model, family, against, batch, statistic)
        for (model, family), job in jobs.items()
        for against, batch, statistic in _asked(job)
    ]
    names = ("model", "family", "against", "batch", "statistic")

    def numbers(model, family, against, batch, statistic):
        for fit in _fits(trace, model, family)[against].fits:
            if (fit.batch, fit.statistic) == (batch, statistic):
                return dict(fit=np.array([fit.target, fit.expected, fit.sampled, fit.error]))
        raise ValueError(f"{model} gives no {statistic} at B = {batch}")

    def about(model, family):
        calibration = _fits(trace, model, family)["fitted"]
        return dict(parameters=_parameters(calibration.popularity))

    def hand_on(config, key):
        return dict(zip(("target", "expected", "sampled", "error"), config["fit"]))

    axes = [Axis(name, list(values)) for name, values in zip(names, zip(*asked))]
    return Sweep([zipped(*axes)], hand_on, prepare=numbers, about=about, width=1)


def summary(table: dict[str, np.ndarray]) -> str:
    """Target against result, then the worst error of each model and family."""
    rows = [dict(zip(table, values)) for values in zip(*(of.tolist() for of in table.values()))]
    line = "{model:20} {family:12} {against:12} B={batch:<4} {statistic:10} {target:7.3f} "
    line += "{expected:9.3f} {sampled:8.3f} {error:+7.3f}"
    head = f"{'model':20} {'family':12} {'against':12} {'batch':6} {'statistic':10} "
    text = [head + " target  expected  sampled   error"]
    text += [line.format(**row) for row in rows]
    worst, parameters = {}, {}
    for row in rows:
        name = row["model"], row["family"], row["against"]
        worst[name] = max(worst.get(name, 0.0), abs(row["error"]))
        parameters[name] = row["parameters"]
    text += ["", "worst error, and the parameters behind it"]
    for name, error in worst.items():
        text.append("{:20} {:12} {:12} {:.3f}  {}".format(*name, error, parameters[name]))
    return "\n".join(text)


@functools.lru_cache(maxsize=2)
def _jobs(path: str | None) -> dict[tuple[str, str], dict[str, Any]]:
    """What is to be fitted, by model and family."""
    jobs = _published() + _measured() if path is None else _given(path)
    return {(job["model"], type(job["family"]).__name__): job for job in jobs}


def _asked(job: dict[str, Any]) -> list[tuple[str, int, str]]:
    """(against, batch, statistic) of every number that comes out."""
    found = []
    seen = [("fitted", job["targets"], job.get("batches", ()))]
    if job.get("unseen") is not None:
        seen.append((job.get("against", "unseen"), job["unseen"], job.get("unseen_batches", ())))
    for against, targets, batches in seen:
        if isinstance(targets, RoutingTrace):
            pairs = [(batch, name) for batch in batches for name in Bimodality._fields]
        else:
            pairs = [(target.batch, name) for target in targets for name, _ in target.items()]
        found += [(against, *pair) for pair in pairs]
    return found


def _published() -> list[dict]:
    shape = {name: (model.num_experts, model.top_k) for name, model in _models(PUBLISHED)}
    unassigned = {name: [Target(256, share_le4=value)] for name, value in UNASSIGNED.items()}
    return [
        dict(model=model, shape=shape[model], targets=targets, family=family)
        | dict(unseen=unassigned.get(model), against="unassigned")
        for model, targets in PUBLISHED.items()
        for family in FAMILIES
    ]


def _measured() -> list[dict]:
    jobs = []
    for model, (fit, unseen, batches, unseen_batches) in TRACES.items():
        if not (DATA / model).is_dir():
            continue
        fit, unseen = (_load(model, files) for files in (fit, unseen))
        job = dict(model=model, shape=(fit.num_experts, fit.top_k), targets=fit, family=TAILS)
        job |= dict(batches=batches, unseen=unseen, unseen_batches=unseen_batches)
        jobs.append(job)
    if (DATA / "olmoe-1b-7b").is_dir():
        job = dict(model="olmoe-1b-7b", shape=(64, 8), targets=_olmoe(), family=TAILS)
        jobs.append(job)
    return jobs


def _given(path: str) -> list[dict]:
    trace = routing.load(path)
    job = dict(model=trace.model or "trace", shape=(trace.num_experts, trace.top_k), targets=trace)
    job |= dict(batches=[b for b in (4, 16, 64) if b <= trace.num_sequences] or [4])
    return [job | dict(family=family) for family in FAMILIES]


@functools.cache
def _fits(path: str | None, model: str, family: str) -> dict[str, routing.Calibration]:
    """A fit, and the same parameters against what it has not seen."""
    job = _jobs(path)[model, family]
    # One parameter needs neither the steps nor the draws that three do.
    steps, num_layers = (150, 192) if family == "LambdaTails" else (40, 64)
    fit_key, judge_key = jax.random.split(jax.random.key(0))
    fitted = routing.calibrate(
        job["shape"],
        job["targets"],
        job["family"],
        key=fit_key,
        steps=steps,
        num_layers=num_layers,
        batches=job.get("batches", ()),
    )
    found = {"fitted": fitted}
    if job.get("unseen") is not None:
        arguments = dict(key=judge_key, batches=job.get("unseen_batches", ()))
        judged = routing.judge(fitted, job["unseen"], job["shape"], **arguments)
        found[job.get("against", "unseen")] = judged
    return found


def _parameters(family: routing.AbstractPopularity) -> str:
    fields = [(field.name, getattr(family, field.name)) for field in dataclasses.fields(family)]
    return ", ".join(f"{name}={float(value):.4g}" for name, value in fields)


def _models(names) -> list[tuple[str, models.MoEModel]]:
    return [(name, models.get(name)) for name in names]


def _load(model: str, files: str) -> RoutingTrace:
    return routing.concat([routing.load(DATA / model / f"{file}.npz") for file in files.split()])


def _olmoe() -> list[Target]:
    """OLMoE has no trace: batches drawn from its expert counts, six kinds of text pooled."""
    counts = np.load(DATA / "olmoe-1b-7b" / "popularity.npz")["counts"].sum(0)
    chance = 8 * counts / counts.sum(-1, keepdims=True)
    rng = np.random.default_rng(0)

    def target(batch: int) -> Target:
        shares = routing.bimodality(rng.binomial(batch, chance, (400, *chance.shape)))
        return Target(batch, **{k: float(v.mean()) for k, v in shares._asdict().items()})

    return [target(batch) for batch in (4, 16, 64)]
