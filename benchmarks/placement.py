"""Node Balance: how good, how fast, against HiGHS, published placements and what one has anyway?

    python benchmarks/placement.py [--data DIR] [PART ...]

Parts, all by default: `published` (Mixtral on MT-Bench reasoning, 32 layers x the five settings of
HD-MoE: total against the published placements and the exact optimum), `bound` (DeepSeek-V2-Lite,
six layers: against lower bounds, and the shape of what was published), `large` (256 experts, 64
nodes, synthetic calibrated trace: one layer, with Link Balance, against simple placements), `pace`
(total against time, search and solver). Traces are read from `--data` or `$MOEJAX_DATA`; `large`
needs none. `placement_held_out.py` is about traffic that a placement was not fitted to.
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
from moejax import noc, routing


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
    shapes(data, found.share)


def shapes(data: Path, ours) -> None:
    """Nodes that hold a part of an expert: of ours, and of what was published for other traces."""
    reference = np.load(data / "hd-moe-reference" / "placements.npz")
    hosts = lambda share: (np.asarray(share) > mp.HOSTING_SHARE).sum(-1)
    told = lambda share: f"{hosts(share).mean():.2f} (at most {hosts(share).max()})"
    print("nodes per expert: ours | published for DeepSeek-V2-Lite | published for Qwen2-57B")
    for i, (name, (flops_per_s, bandwidth)) in enumerate(HARDWARE.items()):
        at = f"{flops_per_s / 1e12:.1f}T_{bandwidth / 1e9:.1f}G_4x8"
        theirs = [told(reference[f"{model}_nodelink_{at}_P"]) for model in ("ds", "qwen")]
        print(f"{name:9} {told(ours[:, i])} | {theirs[0]} | {theirs[1]}")


def large() -> None:
    popularity = routing.calibrated("qwen3.5-35b-a3b").popularity
    ids = routing.sample_expert_ids(popularity, 256, 8, 1, 4096, key=KEY)[0]
    statistics = mp.statistics(np.asarray(ids), 256)
    common = mp.statistics(np.asarray(ids), 256, max_groups=500)
    print("\n256 experts, top-8, 64 nodes, 4096 synthetic tokens: time with compilation; gather "
          "with random places over that with ours; totals over that of the search")  # fmt: skip
    for name, setting in HARDWARE.items():
        costs = prices(QWEN, *setting)
        start = time.perf_counter()
        found = jax.block_until_ready(mp.node_balance(statistics, costs, 64, key=KEY))
        taken = time.perf_counter() - start
        linked = jax.block_until_ready(mapped(found.share, statistics, costs, setting[1]))
        both = time.perf_counter() - start
        total = lambda share, of=statistics, costs=costs: float(mp.evaluate(share, of, costs).total)
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
            "LP": float(mp.lp_bound(statistics, costs, 64)),
        }
        told = ", ".join(f"{key} {value / float(found.total):.3f}" for key, value in others.items())
        relaxed = float(mp.lp_bound(common, costs, 64) / total(found.share, common))
        gain = float(linked.start_makespan / linked.makespan)
        print(f"{name:9} {taken:5.1f} s, with Link Balance {both:5.1f} s, {gain:.2f}: {told}; "
              f"LP of the 500 commonest groups {relaxed:.3f}", flush=True)  # fmt: skip


def mapped(share, statistics, costs, bandwidth) -> mp.LinkBalance:
    """Link Balance on an 8 x 8 mesh, from nodes at random endpoints."""
    room = mp.message_room(share, statistics, BATCH)
    start = jax.random.permutation(KEY, 64)
    mesh = noc.mesh(8, 8, bandwidth=bandwidth)
    options = dict(start=start, max_messages=room, message_bytes=QWEN[0])
    return mp.link_balance(share, mesh, statistics, costs, key=KEY, **options)


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
        "pace": pace,
    }
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(parts))
    arguments = parser.parse_args()
    print(_timing.machine())
    for part in arguments.parts or parts:
        parts[part](*([] if part == "large" else [arguments.data]))
