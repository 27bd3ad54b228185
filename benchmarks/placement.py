"""Node Balance: how good, how fast, against HiGHS, published placements and what one has anyway?

    python benchmarks/placement.py [--data DIR] [PART ...]

Parts, all by default: `published` (Mixtral on MT-Bench reasoning, 32 layers x the five settings of
HD-MoE: total against the published placements and the exact optimum), `bound` (DeepSeek-V2-Lite,
six layers: against lower bounds), `large` (256 experts, 64 nodes, synthetic calibrated trace: one
layer against simple placements), `held-out` (placements fitted to one half of a trace and judged on
drawn batches of the rest and of other traces), `pace` (total against time, search and solver).
Traces are read from `--data` or `$MOEJAX_DATA`; `large` needs none.
"""

import argparse
import functools
import os
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np


sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import moejax.placement as mp
from benchmarks import _timing
from moejax import routing


MIXTRAL, DEEPSEEK, QWEN = (4096, 14336), (2048, 1408), (2048, 512)
SETTINGS = {
    "10.0T_25.0G_4x8": (10e12, 25e9, 32),
    "2.5T_75.0G_4x8": (2.5e12, 75e9, 32),
    "5.0T_50.0G_4x8": (5e12, 50e9, 32),
    "5.0T_50.0G_4x4": (5e12, 50e9, 16),
    "5.0T_50.0G_8x8": (5e12, 50e9, 64),
}
HARDWARE = {"10T/25G": (10e12, 25e9), "5T/50G": (5e12, 50e9), "2.5T/75G": (2.5e12, 75e9)}
BATCH = 128
KEY = jax.random.key(0)


def prices(model, flops_per_s, bandwidth) -> mp.NodeCosts:
    hidden, intermediate = model
    return mp.NodeCosts.published(
        hidden, intermediate, flops_per_s=flops_per_s, bandwidth=bandwidth, batch=BATCH
    )


def stack(trees):
    return jax.tree.map(lambda *parts: jnp.stack(parts), *trees)


def item(tree, *index):
    return jax.tree.map(lambda part: part[index], tree)


@functools.partial(jax.jit, static_argnames="num_nodes")
def balance(statistics, costs, num_nodes: int):
    """Layers x hardware in one call."""
    one = lambda layer, costs: mp.node_balance(layer, costs, num_nodes, key=KEY)
    return jax.vmap(jax.vmap(one, (None, 0)), (0, None))(statistics, costs)


def published(data: Path) -> None:
    ids = np.load(data / "mixtral-8x7b" / "mtbench-reasoning.npz")["experts"]
    reference = np.load(data / "hd-moe-reference" / "placements.npz")
    statistics = mp.statistics(ids.astype(np.int32), 8)
    ours, theirs, best = {}, {}, {}
    start = time.perf_counter()
    for num_nodes in (16, 32, 64):
        names = [name for name, setting in SETTINGS.items() if setting[2] == num_nodes]
        costs = stack([prices(MIXTRAL, *SETTINGS[name][:2]) for name in names])
        total = np.asarray(balance(statistics, costs, num_nodes).total)
        ours |= {name: total[:, i] for i, name in enumerate(names)}
    taken = time.perf_counter() - start
    start = time.perf_counter()
    for name, (flops_per_s, bandwidth, num_nodes) in SETTINGS.items():
        costs = prices(MIXTRAL, flops_per_s, bandwidth)
        share = jnp.asarray(reference[f"mixtral_nodelink_{name}_P"])
        theirs[name] = np.asarray(
            jax.vmap(lambda s, layer, c=costs: mp.evaluate(s, layer, c).total)(share, statistics)
        )
        exact = [
            mp.node_balance(item(statistics, layer), costs, num_nodes, key=KEY, method="milp")
            for layer in range(len(ids))
        ]
        best[name] = np.array([float(one.total) for one in exact])
    solved = time.perf_counter() - start
    print(f"\nMixtral, 32 layers x 5 settings: search {taken:.0f} s with compilation, "
          f"HiGHS over host sets {solved:.0f} s")  # fmt: skip
    print(f"{'setting':18} {'ours/published':>24} {'ours/optimum':>16}")
    for name in [*SETTINGS, "all"]:
        pick = lambda table, name=name: (
            np.concatenate([table[n] for n in SETTINGS]) if name == "all" else table[name]
        )
        ratio, gap = pick(ours) / pick(theirs), pick(ours) / pick(best) - 1
        print(f"{name:18} mean {ratio.mean():.5f} max {ratio.max():.7f}   max {gap.max():+.1e}")


def bound(data: Path) -> None:
    layers = [0, 5, 10, 15, 20, 25]
    ids = np.load(data / "deepseek-v2-lite" / "esft-intent.npz")["experts"][layers]
    statistics = mp.statistics(ids.astype(np.int32), 64)
    costs = stack([prices(DEEPSEEK, *setting) for setting in HARDWARE.values()])
    start = time.perf_counter()
    found = balance(statistics, costs, 32)
    jax.block_until_ready(found)
    print(f"\nDeepSeek-V2-Lite (ESFT intent), 6 layers x 3 settings, 32 nodes: "
          f"{time.perf_counter() - start:.0f} s")  # fmt: skip
    print("total above: perfect balance and the busiest expert's traffic | the LP relaxation")
    for i, name in enumerate(HARDWARE):
        relaxed = [
            float(mp.lp_bound(item(statistics, layer), item(costs, i), 32)) for layer in range(6)
        ]
        gaps = " ".join(f"{float(gap):6.2%}" for gap in found.gap[:, i])
        above = np.asarray(found.total)[:, i] / np.array(relaxed) - 1
        print(f"{name:9} {gaps} | " + " ".join(f"{gap:7.1%}" for gap in above))


def large() -> None:
    popularity = routing.calibrated("qwen3.5-35b-a3b").popularity
    ids = routing.sample_expert_ids(popularity, 256, 8, 1, 4096, key=KEY)[0]
    statistics = mp.statistics(np.asarray(ids), 256)
    common = mp.statistics(np.asarray(ids), 256, max_groups=500)
    print("\n256 experts, top-8, 64 nodes, 4096 synthetic tokens; totals over that of the search")
    for name, setting in HARDWARE.items():
        costs = prices(QWEN, *setting)
        start = time.perf_counter()
        found = jax.block_until_ready(mp.node_balance(statistics, costs, 64, key=KEY))
        taken = time.perf_counter() - start
        total = lambda share, costs=costs: float(mp.evaluate(share, statistics, costs).total)
        order = jnp.argsort(-statistics.frequency)
        others = {
            "wrap-around": total(mp.wrap_around(order, statistics.frequency, 64)),
            "EP": np.mean(
                [total(mp.expert_parallel(256, 64, key=k)) for k in jax.random.split(KEY, 8)]
            ),
            "EPLB": total(
                mp.replica_share(mp.replicate_and_pack(statistics.frequency, 320, 1, 1, 64), 64)
            ),
            "TP": total(mp.tensor_parallel(256, 64)),
            "bound": float(found.bound),
            "LP, 500 groups": float(mp.lp_bound(common, costs, 64)),
        }
        told = ", ".join(f"{key} {value / float(found.total):.3f}" for key, value in others.items())
        print(f"{name:9} {taken:5.1f} s: {told}", flush=True)


def held_out(data: Path) -> None:
    folder = data / "mixtral-8x7b"
    cases = [("Mixtral", MIXTRAL, 8, (0, 10, 20, 31), {
        name: _fresh(folder / f"mtbench-{name}.npz") for name in ("reasoning", "coding", "math")
    })]  # fmt: skip
    folder = data / "deepseek-v2-lite"
    cases += [("DeepSeek-V2-Lite", DEEPSEEK, 64, (0, 12, 25), {
        name: _fresh(folder / f"esft-{name}.npz") for name in ("intent", "law", "summary")
    })]  # fmt: skip
    for model, size, num_experts, layers, traces in cases:
        halves = [np.array_split(ids, 2, axis=1) for ids in traces.values()]
        first, second, third = traces
        for name, setting in HARDWARE.items():
            found = [
                _judged(
                    [(a[layer], b[layer]) for a, b in halves], num_experts, prices(size, *setting)
                )
                for layer in layers
            ]
            print(f"\n{model}, {name}, batches of {BATCH}, 32 nodes: mean us, and against what was "
                  f"fitted to the average of the same tokens")  # fmt: skip
            head = [f"rest of {first}", f"rest of {second}", f"rest of {third}"]
            print(" " * 34 + " ".join(f"{column:>24}" for column in head))
            for label, against in ROWS.items():
                totals = np.array([layer[label] for layer in found])
                plain = np.array([layer[against] for layer in found])
                cells = [_interval(totals[:, c], plain[:, c]) for c in range(3)]
                label = label.replace("1", first).replace("2", second)
                print(f"{label:34}" + " ".join(f"{cell:>24}" for cell in cells), flush=True)


# What was fitted, and the row that it is compared with; 1 and 2 stand for halves of traces.
ROWS = {
    "1, average": "1, average",
    "1, 48 drawn batches": "1, average",
    "1, their 0.9 quantile": "1, average",
    "1 + 2, average": "1 + 2, average",
    "1 + 2, as two scenarios": "1 + 2, average",
    "1 + 2, 48 drawn batches": "1 + 2, average",
    "EP": "1, average",
    "TP": "1, average",
}


def _fresh(path: Path) -> np.ndarray:
    """Tokens that do not repeat an earlier prompt, in file order."""
    with np.load(path) as trace:
        ids = trace["experts"].astype(np.int32)
        if "seq_fresh" not in trace:
            return ids
        ends = np.append(trace["seq_start"][1:], ids.shape[1])
        kept = [np.arange(*ends) for ends in zip(trace["seq_fresh"], ends, strict=True)]
    return ids[:, np.concatenate(kept)]


def _judged(halves, num_experts: int, costs) -> dict[str, np.ndarray]:
    """Totals [columns, draws] on the second halves of placements fitted to first halves."""
    one, other = halves[0][0], halves[1][0]
    count = lambda ids: mp.statistics(ids, num_experts)
    draw = lambda ids, n: mp.drawn_statistics(ids, num_experts, BATCH, n, key=KEY)
    drawn = draw(one, 48)
    balance = lambda statistics, **more: (
        mp.node_balance(statistics, costs, 32, key=KEY, **more).share
    )
    shares = [
        balance(count(one)),
        balance(drawn),
        balance(drawn, quantile=0.9),
        balance(count(np.concatenate([one, other]))),
        balance([count(one), count(other)]),
        balance([*draw(one, 24), *draw(other, 24)]),
        mp.expert_parallel(num_experts, 32, key=KEY),
        mp.tensor_parallel(num_experts, 32),
    ]
    judge = lambda share: np.stack(
        [_drawn_totals(share, jnp.asarray(rest), costs) for _, rest in halves]
    )
    return {label: judge(share) for label, share in zip(ROWS, shares, strict=True)}


@jax.jit
def _drawn_totals(share, ids, costs):
    """Totals of 200 random batches, the same ones for every placement."""

    def one(key):
        batch = ids[jax.random.choice(key, len(ids), (BATCH,), replace=False)]
        return mp.evaluate_batch(share, batch, costs).total

    return jax.lax.map(one, jax.random.split(jax.random.key(7), 200))


def _interval(totals: np.ndarray, plain: np.ndarray) -> str:
    """Mean over layers and draws, and its ratio to `plain` with 1.96 standard errors of the mean
    over draws, batch by batch."""
    ratio = (totals / plain).mean(0) - 1
    error = 1.96 * ratio.std(ddof=1) / np.sqrt(len(ratio))
    return f"{1e6 * totals.mean():7.1f} {100 * ratio.mean():+6.1f} +- {100 * error:.1f} %"


def pace(data: Path) -> None:
    print("\nTotal over the best known against time, one layer; the search without compilation")
    mixtral = np.load(data / "mixtral-8x7b" / "mtbench-reasoning.npz")["experts"][14]
    deepseek = np.load(data / "deepseek-v2-lite" / "esft-intent.npz")["experts"][10]
    for name, ids, size, num_experts, chains in (
        ("Mixtral, 8 experts, layer 14", mixtral, MIXTRAL, 8, ((4, 10), (16, 30), (32, 60))),
        (
            "DeepSeek, 64 experts, layer 10",
            deepseek,
            DEEPSEEK,
            64,
            ((2, 30), (4, 100), (8, 150), (16, 300)),
        ),
    ):
        statistics = mp.statistics(ids.astype(np.int32), num_experts)
        costs = prices(size, 5e12, 50e9)
        rows = []
        for num_chains, num_steps in chains:
            run = functools.partial(
                mp.node_balance, statistics, costs, 32, key=KEY,
                num_chains=num_chains, num_steps=num_steps,
            )  # fmt: skip
            taken = _timing.seconds(run, 3)
            rows.append((f"search {num_chains} x {num_steps}", taken, float(run().total)))
        for limit in (2.0, 10.0, 60.0):
            start = time.perf_counter()
            found = mp.node_balance(statistics, costs, 32, key=KEY, method="milp", time_limit=limit)
            taken = time.perf_counter() - start
            rows.append(
                (f"HiGHS, {limit:g} s, gap {float(found.gap):.2%}", taken, float(found.total))
            )
            if float(found.gap) <= 1e-4:
                break
        best = min(total for _, _, total in rows)
        print(name)
        for label, taken, total in rows:
            print(f"  {label:28} {taken:8.2f} s  {total / best - 1:+.3%}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", default=os.environ.get("MOEJAX_DATA", "data"), type=Path)
    parts = {
        "published": published,
        "bound": bound,
        "large": large,
        "held-out": held_out,
        "pace": pace,
    }
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(parts))
    arguments = parser.parse_args()
    print(_timing.machine())
    for part in arguments.parts or parts:
        parts[part](*([] if part == "large" else [arguments.data]))
