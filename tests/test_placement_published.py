"""Numbers that HD-MoE (arXiv 2509.09420) and HDA-MoE (arXiv 2609.08682) printed, to the digit.

Latencies are in microseconds, summed over the layers, from the result files in the authors'
repositories. Placements and trace are theirs as well; a test is skipped where they are absent.
"""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax import noc
from moejax import placement as mp
from tests.compilation import quick_compilation as quick_compilation


US = 1e6
PRINTED = 0.006
"""Half a digit of two decimals, and room for a tie."""
# Layers, experts per token, hidden and intermediate size.
MODELS = {
    "mixtral": (32, 2, 4096, 14336),
    "ds": (26, 6, 2048, 1408),
    "qwen": (28, 8, 3584, 2560),
}
EXPERTS = {"mixtral": 8, "ds": 64, "qwen": 64}

# Tensor parallel at batch 128: computation and communication (HDA-MoE, end-to-end results).
TENSOR_PARALLEL = [
    ("qwen", (4, 8), 2.5, 75, 6576.67, 2740.28),
    ("qwen", (4, 8), 5, 50, 3288.33, 4110.42),
    ("qwen", (4, 8), 10, 25, 1644.17, 8220.84),
    ("qwen", (4, 4), 2.5, 75, 13153.34, 2740.28),
    ("qwen", (8, 8), 2.5, 75, 3288.33, 2740.28),
    ("ds", (4, 8), 2.5, 75, 1439.49, 1454.03),
    ("ds", (4, 8), 5, 50, 719.74, 2181.04),
    ("ds", (4, 8), 10, 25, 359.87, 4362.08),
    ("ds", (4, 4), 5, 50, 1439.49, 2181.04),
    ("ds", (8, 8), 5, 50, 359.87, 2181.04),
    ("mixtral", (4, 8), 2.5, 75, 12025.91, 3579.14),
    ("mixtral", (4, 8), 5, 50, 6012.95, 5368.71),
    ("mixtral", (4, 8), 10, 25, 3006.48, 10737.42),
    ("mixtral", (4, 4), 5, 50, 12025.91, 5368.71),
    ("mixtral", (8, 8), 5, 50, 3006.48, 5368.71),
]
# Mixtral, batches 16 and 128, first 512 tokens: computation of expert parallelism, the hybrid and
# node balance, and communication of the hybrid (HDA-MoE, end-to-end results).
MIXTRAL = [
    ((4, 8), 2.5, 75, 16, 2486.44, 1610.49, 1820.40, 302.47),
    ((4, 8), 2.5, 75, 128, 19891.49, 12883.96, 14563.19, 2442.34),
    ((4, 8), 5, 50, 16, 1243.22, 804.33, 917.76, 390.14),
    ((4, 8), 10, 25, 16, 621.61, 403.31, 488.35, 676.21),
    ((4, 8), 10, 25, 128, 4972.87, 3226.49, 3906.80, 5403.93),
    ((4, 4), 5, 50, 16, 2486.44, 1608.66, 1818.48, 472.39),
    ((8, 8), 5, 50, 16, 621.61, 402.17, 477.05, 335.35),
]


def costs_of(model, tflops, gbps, batch):
    _, _, hidden, intermediate = MODELS[model]
    rates = dict(flops_per_s=tflops * 1e12, bandwidth=gbps * 1e9)
    return mp.NodeCosts.published(hidden, intermediate, batch=batch, **rates)


@functools.cache
def reasoning_tokens(data_dir):
    """Expert ids [layers, tokens, 2] in the order of the file, repeated prompts included."""
    file = data_dir / "mixtral-8x7b" / "mtbench-reasoning.npz"
    if not file.is_file():
        pytest.skip(f"no trace at {file}")
    return np.load(file)["experts"]


def published_share(data_dir, kind, mesh, tflops, gbps):
    file = data_dir / "hd-moe-reference" / "placements.npz"
    if not file.is_file():
        pytest.skip(f"no published placements at {file}")
    name = f"mixtral_{kind}_{float(tflops)}T_{float(gbps)}G_{mesh[0]}x{mesh[1]}_P"
    return jnp.asarray(np.load(file)[name], jnp.result_type(float))


def evaluate_layers(share, statistics, costs):
    return jax.vmap(mp.evaluate, (0, 0, None))(share, statistics, costs)


@pytest.mark.parametrize("model, mesh, tflops, gbps, compute, communication", TENSOR_PARALLEL)
def test_tensor_parallel(model, mesh, tflops, gbps, compute, communication, x64):
    layers, k, *_ = MODELS[model]
    experts, nodes = EXPERTS[model], mesh[0] * mesh[1]
    even = mp.Statistics(np.full(experts, k / experts), np.arange(k)[None], [1.0])
    share, costs = mp.tensor_parallel(experts, nodes), costs_of(model, tflops, gbps, 128)
    found = mp.evaluate(share, even, costs, transfers=4)
    assert float(found.comp_time) * layers * US == pytest.approx(compute, abs=PRINTED)
    # The journal pays the estimate four times, the conference twice.
    sent = float(found.total - found.comp_time) * layers * US
    assert sent == pytest.approx(communication, abs=PRINTED)
    ratio = float(found.comp_time / found.comm_time)
    assert float(mp.compute_comm_ratio(costs, nodes, k)) == pytest.approx(ratio)


def test_tensor_parallel_of_the_conference(data_dir, x64):
    file = data_dir / "hd-moe-reference" / "results.json"
    if not file.is_file():
        pytest.skip(f"no published results at {file}")
    rows = [
        row for row in json.loads(file.read_text())["result3_e2e"] if row["config"]["model"] == "ds"
    ]
    assert len(rows) >= 20
    for row in rows:
        setting = row["config"]
        k, experts = MODELS["ds"][1], EXPERTS["ds"]
        even = mp.Statistics(np.full(experts, k / experts), np.arange(k)[None], [1.0])
        costs = costs_of("ds", setting["comp_TFLOPS"], setting["BW_GBPS"], setting["batch"])
        share = mp.tensor_parallel(experts, int(np.prod(setting["mesh_shape"])))
        found = mp.evaluate(share, even, costs)
        compute, total = float(found.comp_time) * 26 * US, float(found.total) * 26 * US
        assert compute == pytest.approx(row["TP"]["computation_us"], abs=PRINTED)
        assert total - compute == pytest.approx(row["TP"]["communication_us"], abs=PRINTED)


@pytest.mark.parametrize("mesh, tflops, gbps, batch, expert, hybrid, node, _", MIXTRAL)
def test_computation(data_dir, x64, mesh, tflops, gbps, batch, expert, hybrid, node, _):
    first = mp.statistics(reasoning_tokens(data_dir)[:, :512], 8)
    costs = costs_of("mixtral", tflops, gbps, batch)
    # Four nodes for each expert, or eight or two: which ones makes no difference.
    draw = mp.expert_parallel(8, mesh[0] * mesh[1], key=jax.random.key(1))
    shares = dict(expert=jnp.broadcast_to(draw, (32, *draw.shape)))
    for name, kind in (("hybrid", "comp"), ("node", "nodelink")):
        shares[name] = published_share(data_dir, kind, mesh, tflops, gbps)
    printed = dict(expert=expert, hybrid=hybrid, node=node)
    for name, share in shares.items():
        found = evaluate_layers(share, first, costs)
        assert not np.any(found.status)
        assert float(found.comp_time.sum()) * US == pytest.approx(printed[name], abs=PRINTED), name


def test_computation_on_the_whole_trace(data_dir, x64):
    whole = mp.statistics(reasoning_tokens(data_dir), 8)
    share = published_share(data_dir, "nodelink", (4, 8), 2.5, 75)
    found = evaluate_layers(share, whole, costs_of("mixtral", 2.5, 75, 16))
    assert float(found.comp_time.sum()) * US == pytest.approx(1505.04, abs=PRINTED)


@functools.partial(jax.jit, static_argnames="bytes_per_token")
def hybrid_communication(topology, shares, balanced, statistics, costs, position, bytes_per_token):
    """(correct, published) sums over layers of one direction, in s."""

    def layer(share, balanced, statistics, key):
        messages = noc.expert_traffic(
            statistics.groups,
            share,
            position,
            bytes_per_token=bytes_per_token,
            weight=statistics.group_frequency,
            key=key,
        )
        between = noc.simulate(topology, messages).makespan
        hybrid = functools.partial(mp.hybrid_comm_time, between, share, statistics, costs)
        return hybrid(), hybrid(paper_faithful=True, node_balanced=balanced)

    keys = jax.random.split(jax.random.key(0), len(shares))
    times = jax.vmap(layer)(shares, balanced, statistics, keys)
    return [time.sum() for time in times]


def test_communication_of_the_hybrid(data_dir):
    """One random aggregator for each group, so within 1 % and not to the digit."""
    first = mp.statistics(reasoning_tokens(data_dir)[:, :512], 8)
    rows = [row for row in MIXTRAL if row[0] == (4, 8) and row[3] == 16]
    assert len(rows) == 3
    for mesh, tflops, gbps, batch, *_, printed in rows:
        correct, published = hybrid_communication(
            noc.mesh(*mesh, bandwidth=gbps * 1e9),
            published_share(data_dir, "comp", mesh, tflops, gbps),
            published_share(data_dir, "nodelink", mesh, tflops, gbps),
            first,
            costs_of("mixtral", tflops, gbps, batch),
            mp.region_position(mesh, (1, 2), 0),
            # The simulator carries one byte for each element of a token.
            batch * MODELS["mixtral"][2],
        )
        assert 2 * float(published) * US == pytest.approx(printed, rel=0.01)
        assert 0 < 2 * float(correct) * US < 1.01 * printed


def test_regions_are_at_least_as_balanced_as_published(data_dir):
    whole = mp.statistics(reasoning_tokens(data_dir), 8)
    share = published_share(data_dir, "comp", (4, 8), 2.5, 75)
    ours = jax.vmap(lambda frequency: mp.hybrid(frequency, 32, 2))(whole.frequency)
    costs = costs_of("mixtral", 2.5, 75, 16)
    theirs, ours = (evaluate_layers(one, whole, costs).comp_time for one in (share, ours))
    assert float(ours.sum()) < float(theirs.sum())
    assert np.mean(np.asarray(ours <= theirs * (1 + 1e-6))) > 0.9


def test_bound_on_the_load_of_a_node():
    # DeepSeek-V2-Lite, 4x8, 5 TFLOP/s and 50 GB/s: the right-hand side in the solver's log.
    costs = costs_of("ds", 5, 50, 128)
    assert float(mp.compute_comm_ratio(costs, 32, 6)) == pytest.approx(1.32, abs=0.005)
    assert float(mp.compute_bound(costs, 32, 6)) == pytest.approx(0.3295, abs=5e-5)
