"""What does a placement cost on traffic that it was not fitted to, and does a robust one cost less?

    python benchmarks/placement_held_out.py [--data DIR] [SETTING ...]

Fitted to the first half of one trace, or of two, judged on random batches of the second half and of
other traces. Plain placements minimize the time of the average traffic, robust ones the mean over
drawn batches (`drawn_statistics`) as scenarios. Mixtral-8x7B on MT-Bench and DeepSeek-V2-Lite on
the tasks of ESFT, 32 nodes; times by the estimate that both minimize. All placements see the same
batches. Traces are read from `--data` or `$MOEJAX_DATA`.
"""

import argparse
import os
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np


sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import moejax.placement as mp
from benchmarks import _timing
from benchmarks.placement import BATCH, DEEPSEEK, HARDWARE, KEY, MIXTRAL, prices


NODES, JUDGED, DRAWN = 32, 200, 48
# Name, sizes, experts, layers, folder, start of the files' names, traces: two to fit, one new.
MODELS = (
    ("Mixtral", MIXTRAL, 8, (0, 10, 20, 31), "mixtral-8x7b", "mtbench",
     ("reasoning", "coding", "math")),
    ("DeepSeek-V2-Lite", DEEPSEEK, 64, (0, 12, 25), "deepseek-v2-lite", "esft",
     ("intent", "law", "summary")),
)  # fmt: skip
# What was fitted, and the row that it is compared with; 1 and 2 stand for halves of traces.
ROWS = {
    "1, average": "1, average",
    "1, drawn batches": "1, average",
    "1 + 2, average": "1 + 2, average",
    "1 + 2, drawn batches": "1 + 2, average",
    "EP": "1, average",
    "TP": "1, average",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", default=os.environ.get("MOEJAX_DATA", "data"), type=Path)
    parser.add_argument("settings", nargs="*", metavar="SETTING", help=", ".join(HARDWARE))
    arguments = parser.parse_args()
    print(_timing.machine())
    for name, sizes, num_experts, layers, folder, start, traces in MODELS:
        files = [arguments.data / folder / f"{start}-{trace}.npz" for trace in traces]
        halves = [np.array_split(fresh(file), 2, axis=1) for file in files]
        for setting in arguments.settings or HARDWARE:
            costs = prices(sizes, *HARDWARE[setting])
            found = [
                judged([(a[layer], b[layer]) for a, b in halves], num_experts, costs)
                for layer in layers
            ]
            print(f"\n{name}, {setting}, batches of {BATCH}, {NODES} nodes: mean us; against what "
                  "was fitted to the average of the same tokens")  # fmt: skip
            table(found, traces)


def fresh(path: Path) -> np.ndarray:
    """Tokens that do not repeat an earlier prompt, in file order."""
    with np.load(path) as trace:
        ids = trace["experts"].astype(np.int32)
        if "seq_fresh" not in trace:
            return ids
        ends = np.append(trace["seq_start"][1:], ids.shape[1])
        kept = [np.arange(*ends) for ends in zip(trace["seq_fresh"], ends, strict=True)]
    return ids[:, np.concatenate(kept)]


def judged(halves, num_experts: int, costs) -> dict[str, np.ndarray]:
    """Totals [columns, batches] of placements of one layer fitted to first halves: on the half
    fitted to, and on the second halves."""
    (one, _), (other, _) = halves[:2]
    # As many groups as tokens, so that all layers have one shape.
    count = lambda ids: mp.statistics(ids, num_experts, max_groups=len(ids))
    draw = lambda ids, n: mp.drawn_statistics(ids, num_experts, BATCH, n, key=KEY)
    balance = lambda statistics: mp.node_balance(statistics, costs, NODES, key=KEY).share
    shares = (
        balance(count(one)),
        balance(draw(one, DRAWN)),
        balance(count(np.concatenate([one, other]))),
        balance([*draw(one, DRAWN // 2), *draw(other, DRAWN // 2)]),
        mp.expert_parallel(num_experts, NODES, key=KEY),
        mp.tensor_parallel(num_experts, NODES),
    )
    columns = [jnp.asarray(ids) for ids in (one, *(rest for _, rest in halves))]
    judge = lambda share: np.stack(
        [drawn_totals(share, jnp.asarray(ids), costs) for ids in columns]
    )
    return {label: judge(share) for label, share in zip(ROWS, shares, strict=True)}


@jax.jit
def drawn_totals(share, ids, costs):
    """Totals of random batches, the same ones for every placement."""

    def one(key):
        batch = ids[jax.random.choice(key, len(ids), (BATCH,), replace=False)]
        return mp.evaluate_batch(share, batch, costs).total

    return jax.lax.map(one, jax.random.split(jax.random.key(7), JUDGED))


def table(found: list[dict[str, np.ndarray]], traces) -> None:
    first, second, third = traces
    heads = (f"{first}, fitted", f"{first}, rest", f"{second}, rest", f"{third}, rest")
    print(" " * 34 + " ".join(f"{column:>24}" for column in heads))
    for label, against in ROWS.items():
        totals = np.array([layer[label] for layer in found])
        plain = np.array([layer[against] for layer in found])
        cells = [interval(totals[:, c], plain[:, c]) for c in range(len(heads))]
        label = label.replace("1", first).replace("2", second)
        print(f"{label:34}" + " ".join(f"{cell:>24}" for cell in cells), flush=True)


def interval(totals: np.ndarray, plain: np.ndarray) -> str:
    """Mean over layers and batches, and its ratio to `plain` with 1.96 standard errors of the mean
    over batches, batch by batch."""
    ratio = (totals / plain).mean(0) - 1
    error = 1.96 * ratio.std(ddof=1) / np.sqrt(len(ratio))
    return f"{1e6 * totals.mean():7.1f} {100 * ratio.mean():+6.1f} +- {100 * error:.1f} %"


if __name__ == "__main__":
    main()
