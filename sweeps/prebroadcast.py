"""What do copies of busy experts gain, sent to all nodes ahead of their layer, and does it matter
how well the layer's routing is foreseen?

HDA-MoE (arXiv 2609.08682, section V-C; 1.02 to 1.37 times faster in HD-MoE's published results)
broadcasts the most urgent experts of the next layer while this one runs, and spreads their tokens.
Here on the near-memory mesh of the papers, with three guesses at the next layer's load: transition
counts fitted on other text, the next gate applied to the present hidden state (on moejax's own
model "zoo", costed with the sizes of DeepSeek-V2-Lite), and the truth. Static and dynamic runs see
the same tokens. With `--option data=FOLDER` of real traces it takes DeepSeek-V2-Lite and Mixtral
with the placements that HD-MoE's authors published; with `--trace FILE` the file's second half,
the first being what is fitted on.

    moejax run sweeps/prebroadcast.py
"""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from moejax import hardware, models, noc, placement, plot, routing, schedule, serving, zoo
from moejax.sweep import Axis, Sweep


SYSTEMS = ("nmp-4x8-2.5t-75g", "nmp-4x8-5t-50g")
BATCH, CONTEXT, SEEDS = 512, 1024, 4
COUNTS = (2, 5)
ZOO_COST_MODEL = "deepseek-v2-lite"
# Windows of the zoo's held-out text: bytes before the ones that count, and those.
WINDOWS, BEFORE, COUNTED = 96, 256, 64
REAL = {
    # model: (name in the file of placements, folder, counts, {task: fitted on})
    "deepseek-v2-lite": (
        "ds",
        (2, 5),
        {
            "esft-intent": "esft-law",
            "esft-law": "esft-intent",
            "esft-summary": "esft-law",
            "esft-translation": "esft-intent",
        },
    ),
    "mixtral-8x7b": (
        "mixtral",
        (1, 2),
        {
            "mtbench-coding": "mtbench-reasoning",
            "mtbench-math": "mtbench-reasoning",
            "mtbench-roleplay": "mtbench-reasoning",
            "mtbench-writing": "mtbench-reasoning",
        },
    ),
}
PREDICTORS = ("transitions", "next gate", "perfect")
Source: TypeAlias = tuple[str | None, str | None]  # a trace, or a folder of them, or neither


@dataclasses.dataclass(frozen=True)
class Case:
    """Tokens to run, and what is known of them before.

    `expert_ids` and every array of `predicted` are [layers, tokens, k]; `placed` gives shares
    [layers, experts, nodes], positions [layers, nodes] and their kind for a system.
    """

    model: str
    cost_model: str
    task: str
    fitted_on: str
    num_experts: int
    counts: tuple[int, ...]
    expert_ids: jax.Array
    predicted: dict[str, jax.Array]
    placed: Callable[[hardware.NMPSystem], tuple[Any, Any, str]]

    @property
    def batch(self) -> int:
        return min(BATCH, self.expert_ids.shape[1])


class Room(eqx.Module):
    """Messages of a batch, and experts to broadcast: sizes, so no numbers."""

    messages: int = eqx.field(static=True)
    broadcast: int = eqx.field(static=True)


def SWEEP(*, trace: str | None = None, data: str | None = None) -> Sweep:
    """One call runs a batch of one task with every guess."""
    source = trace, data
    cases = _cases(source)
    tasks = [case.task for case in cases]
    counts = sorted({count for case in cases for count in case.counts})
    given = lambda function: functools.partial(function, source)
    return Sweep(
        [
            Axis("task", tasks, resolve=tasks.index),
            Axis("system", SYSTEMS, resolve=_unnamed),
            Axis("num_broadcast", counts),
            Axis("predictor", list(cases[0].predicted), inner=True),
        ],
        speedups,
        seeds=SEEDS,
        prepare=[given(draw), given(place)],
        about=given(about),
        where=given(belongs),
        width=1,
    )


def _unnamed(name: str) -> hardware.NMPSystem:
    """The name is no number: without it, all systems share a compilation."""
    return dataclasses.replace(hardware.get(name), name="any")


@functools.lru_cache(maxsize=2)
def _cases(source: Source) -> list[Case]:
    trace, data = source
    if data is not None:
        return _real(Path(data))
    return [_zoo() if trace is None else _given(trace)]


def _zoo() -> Case:
    model = zoo.load()
    text = zoo.heldout()
    starts = np.linspace(0, len(text) - BEFORE - COUNTED, WINDOWS).astype(int)
    windows = np.stack([text[start : start + BEFORE + COUNTED] for start in starts])
    forward = eqx.filter_jit(lambda model, rows: model.forward(rows))
    found = []
    for chunk in np.split(windows, max(1, WINDOWS // 24)):
        record = forward(model, chunk)
        found.append([_counted(record.expert_ids), _counted(record.gate_inputs)])
    ids, inputs = (np.concatenate(parts, axis=1) for parts in zip(*found))
    half = WINDOWS // 2 * COUNTED
    fit = routing.RoutingTrace(ids[:, :half], model.config.num_experts)
    gates = schedule.predict_next_gate(inputs[:, half:], model.routers, top_k=ids.shape[2])
    case = _case("zoo", ZOO_COST_MODEL, "second half", "first half", fit, ids[:, half:], COUNTS)
    return dataclasses.replace(case, predicted={"next gate": gates, **case.predicted})


def _counted(array) -> np.ndarray:
    """[layers, tokens, ...] without the first bytes of each window."""
    windows = np.asarray(array).reshape(len(array), -1, BEFORE + COUNTED, array.shape[-1])
    return windows[:, :, BEFORE:].reshape(len(array), -1, array.shape[-1])


def _real(folder: Path) -> list[Case]:
    file = folder / "hd-moe-reference" / "placements.npz"
    if not file.is_file():
        raise ValueError(f"data={folder}: no hd-moe-reference/placements.npz there")
    published = np.load(file)
    cases = []
    for model, (short, counts, tasks) in REAL.items():
        names = dict.fromkeys([*tasks, *tasks.values()])
        traces = {task: routing.load(folder / model / f"{task}.npz") for task in names}
        for task, other in tasks.items():
            ids = _valid(traces[task])
            case = _case(model, model, task, other, traces[other], ids, counts)
            placed = functools.partial(_published, published, short)
            cases.append(dataclasses.replace(case, placed=placed))
    return cases


def _given(path: str) -> Case:
    trace = routing.load(path)
    if trace.model not in models.MODELS:
        raise ValueError(f"{path}: no sizes known for its model, {trace.model or 'unnamed'}")
    ids = _valid(trace)
    half = ids.shape[1] // 2
    fit = routing.RoutingTrace(ids[:, :half], trace.num_experts)
    name = Path(path).stem
    fitted_on = f"{name}, first half"
    return _case(trace.model, trace.model, name, fitted_on, fit, ids[:, half:], COUNTS)


def _valid(trace: routing.RoutingTrace) -> np.ndarray:
    return np.asarray(trace.expert_ids)[:, np.asarray(trace.valid)]


def _case(model, cost_model, task, fitted_on, fit, ids, counts) -> Case:
    transitions = schedule.fit_transitions(fit)
    guess = schedule.predict_transitions(transitions, jnp.asarray(ids), top_k=ids.shape[2])
    spread = functools.partial(_expert_parallel, fit.num_experts, ids.shape[0])
    predicted = {"transitions": guess, "perfect": jnp.asarray(ids)}
    return Case(
        model, cost_model, task, fitted_on, fit.num_experts, counts, jnp.asarray(ids), predicted,
        spread,
    )  # fmt: skip


def _expert_parallel(num_experts: int, num_layers: int, system):
    """Whole experts on nodes drawn anew for each layer."""
    deal = lambda key: placement.expert_parallel(num_experts, system.num_nodes, key=key)
    share = jnp.stack([deal(key) for key in jax.random.split(jax.random.key(0), num_layers)])
    position = np.tile(np.arange(system.num_nodes), (num_layers, 1))
    return share, position, "expert parallel"


def _published(file, short: str, system):
    tera, giga = float(system.flops_per_s) / 1e12, float(system.link_bandwidth) / 1e9
    mesh = "x".join(map(str, system.shape))
    name = f"{short}_nodelink_{tera:.1f}T_{giga:.1f}G_{mesh}"
    return file[f"{name}_P"], file[f"{name}_pos"].astype(np.int32), "published"


def belongs(source: Source, task: int, num_broadcast: int) -> bool:
    """Whether a number of experts is one for the task's model."""
    return num_broadcast in _cases(source)[int(task)].counts


def draw(source: Source, task: int, predictor: list[str], seed: int) -> dict[str, Any]:
    """Tokens [layers, batch, k], the guesses at them by predictor, and a key for aggregators."""
    case = _cases(source)[int(task)]
    draw_key, key = jax.random.split(jax.random.key(seed))
    drawn = jax.random.permutation(draw_key, case.expert_ids.shape[1])[: case.batch]
    guesses = jnp.stack([case.predicted[name][:, drawn] for name in predictor])
    return dict(expert_ids=case.expert_ids[:, drawn], guesses=guesses, aggregators=key)


def place(source: Source, task: int, system: hardware.NMPSystem) -> dict[str, Any]:
    """Shares, positions, network and costs, and room for the messages of a batch."""
    case = _cases(source)[int(task)]
    share, position, _ = case.placed(system)
    costs, _ = _costs(case, system)
    room = Room(_room(case.expert_ids, share, case.batch), max(case.counts))
    network = serving.network_of(system)
    return dict(share=share, position=position, network=network, costs=costs, room=room)


def _costs(case: Case, system: hardware.NMPSystem) -> tuple[schedule.ScheduleCosts, int]:
    """Costs, and how many experts fit the time of the layer before."""
    sizes = models.get(case.cost_model)
    budget = functools.partial(
        schedule.broadcast_budget,
        *(sizes.hidden, sizes.moe_intermediate, case.num_experts),
        batch=case.batch,
        context=CONTEXT,
        num_nodes=system.num_nodes,
        flops_per_s=system.flops_per_s,
        dram_bandwidth=system.dram_bandwidth,
    )
    costs = schedule.ScheduleCosts.published(
        *(sizes.hidden, sizes.moe_intermediate),
        flops_per_s=system.flops_per_s,
        bandwidth=system.link_bandwidth,
        alpha=system.start_time,
        other_time=budget(top_k=0),
    )
    fits = schedule.prebroadcast_count(
        *(costs.expert_bytes, costs.alpha, costs.bandwidth, system.num_nodes),
        budget(top_k=case.expert_ids.shape[2]),
        max_broadcast=case.num_experts,
    )
    return costs, int(fits)


def _room(expert_ids, share, batch: int) -> int:
    """Messages of a drawn batch, with half as many again: one program for all draws and tasks."""
    hosts = np.asarray(share) > noc.HOSTING_SHARE
    touched = [hosts[layer][ids].any(1).sum(1) for layer, ids in enumerate(np.asarray(expert_ids))]
    most = 1.5 * max(float(nodes.mean()) for nodes in touched) * batch
    return min(batch * hosts.shape[2], -(-int(most) // 2048) * 2048)


def speedups(config: dict[str, Any], key) -> dict[str, Any]:
    """Times of the run as placed and of the one with broadcasts, [predictors], and their ratio.
    Keys of the aggregators come with the draw."""
    del key
    ids, room = config["expert_ids"], config["room"]

    def one(guess):
        result = schedule.run_layers(
            *(ids, guess, config["share"], config["position"], config["network"], config["costs"]),
            max_broadcast=room.broadcast,
            num_broadcast=config["num_broadcast"],
            key=config["aggregators"],
            max_messages=room.messages,
        )
        known = schedule.prediction_accuracy(guess, ids)[1:].mean()
        return dict(accuracy=known) | _numbers(result)

    return jax.lax.map(one, config["guesses"])


def _numbers(result: schedule.Schedule) -> dict[str, Any]:
    micro = lambda seconds: 1e6 * seconds.sum()
    static, dynamic = result.static, result.dynamic
    return dict(
        static_comp_us=micro(static.comp),
        static_comm_us=micro(static.comm),
        dynamic_comp_us=micro(dynamic.comp),
        dynamic_comm_us=micro(dynamic.comm),
        exposed_us=micro(dynamic.exposed),
        hidden=(dynamic.exposed[1:] == 0).mean(),
        visits=result.visits[1:].mean(),
        speedup=result.speedup,
        status=result.status,
    )


def about(source: Source, task: int, system: hardware.NMPSystem, predictor) -> dict[str, Any]:
    """What a row ran and was fitted on, and how many experts fit the layer before."""
    del predictor
    case = _cases(source)[int(task)]
    *_, placed = case.placed(system)
    found = dict(model=case.model, cost_model=case.cost_model, fitted_on=case.fitted_on)
    return found | dict(placement=placed, batch=case.batch, fits_budget=_costs(case, system)[1])


def summary(table: dict[str, np.ndarray]) -> str:
    """Static over dynamic time by model, system, predictor and number of experts."""
    line = "  {:<13}{:>9}{:>8}{:>17}{:>18}{:>8}"
    lines = ["", "time as placed over time with broadcasts; mean +- 95 % over tasks and draws"]
    studies = zip(*(table[name].tolist() for name in ("model", "system", "placement")))
    for model, system, placed in dict.fromkeys(studies):
        of = plot.select(table, model=model, system=system)
        fits, batch = of["fits_budget"][0], of["batch"][0]
        lines += [
            "",
            f"{model} on {system}, {placed} placement, B = {batch}; {fits} fit the budget",
        ]
        lines.append(line.format("predictor", "experts", "known", "speed-up", "tasks", "hidden"))
        for predictor in (name for name in PREDICTORS if name in of["predictor"]):
            for count in sorted(set(of["num_broadcast"].tolist())):
                lines.append(line.format(*_cells(of, predictor, count)))
    lines += ["", "published (HD-MoE): 1.02 to 1.22 with 2 experts, 1.03 to 1.37 with 5"]
    return "\n".join(lines)


def _cells(table, predictor: str, count: int) -> tuple[str, ...]:
    picked = plot.select(table, predictor=predictor, num_broadcast=count)
    mean, half = serving.mean_and_interval(picked["speedup"])
    tasks = [picked["speedup"][picked["task"] == task].mean() for task in set(picked["task"])]
    known, hidden = picked["accuracy"].mean(), picked["hidden"].mean()
    spread = f"{min(tasks):.2f} to {max(tasks):.2f}"
    return (
        predictor,
        str(count),
        f"{known:.2f}",
        f"{mean:.3f} +-{half:.3f}",
        spread,
        f"{hidden:.2f}",
    )


def figures(table: dict[str, np.ndarray]) -> dict[str, Any]:
    """Speed-up by predictor and number of experts, one panel for each model and system."""
    names = list(dict.fromkeys(table["model"]))
    systems = list(dict.fromkeys(table["system"]))
    figure, axes = plot.figure(len(systems), len(names), (3.2 * len(names), 2.8 * len(systems)))
    for (i, j), ax in np.ndenumerate(axes):
        of = plot.select(table, model=names[j], system=systems[i])
        counts = sorted(set(of["num_broadcast"].tolist()))
        predictors = [name for name in PREDICTORS if name in of["predictor"]]
        for place, predictor in enumerate(predictors):
            picked = [
                plot.select(of, predictor=predictor, num_broadcast=n)["speedup"] for n in counts
            ]
            at = np.arange(len(counts)) + (place - (len(predictors) - 1) / 2) * 0.25
            means, halves = zip(*map(serving.mean_and_interval, picked))
            color = f"C{PREDICTORS.index(predictor)}"
            ax.bar(at, means, 0.22, yerr=halves, capsize=3, color=color, label=predictor)
        ax.axhline(1, color="0.4", linewidth=0.8)
        ax.set_xticks(range(len(counts)), [f"{n} broadcast" for n in counts])
        ax.set_ylabel("static / dynamic time")
        ax.set_title(f"{names[j]}, {systems[i].removeprefix('nmp-')}")
    plot.shared_legend(figure, axes)
    return {"prebroadcast": figure}
