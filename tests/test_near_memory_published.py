"""Tensor parallelism on near-memory systems: every published row, through the whole evaluation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax import hardware, models
from moejax.placement import Placement, tensor_parallel
from moejax.routing import RoutingTrace
from moejax.serving import Workload, evaluate_placement


NAMES = {"ds": "deepseek-v2-lite", "mixtral": "mixtral-8x7b", "qwen": "qwen2-57b-a14b"}
BATCHES = (16, 32, 64, 128)
# HDA-MoE (arXiv 2609.08682), the authors' stored end-to-end results: us of one decode step under
# tensor parallelism by batch size: (computation, communication, sum with attention and memory).
PUBLISHED = {
    ("qwen", "4x8-2.5t-75g"): [
        (822.08, 342.53, 3997.23),
        (1644.17, 685.07, 6113.3),
        (3288.33, 1370.14, 10345.45),
        (6576.67, 2740.28, 18809.74),
    ],
    ("qwen", "4x8-5t-50g"): [
        (411.04, 513.8, 3283.15),
        (822.08, 1027.6, 4685.15),
        (1644.17, 2055.21, 7489.14),
        (3288.33, 4110.42, 13097.12),
    ],
    ("qwen", "4x8-10t-25g"): [
        (205.52, 1027.6, 3354.28),
        (411.04, 2055.21, 4827.41),
        (822.08, 4110.42, 7773.66),
        (1644.17, 8220.84, 13666.15),
    ],
    ("qwen", "4x4-2.5t-75g"): [
        (1644.17, 342.53, 7651.93),
        (3288.33, 685.07, 11541.54),
        (6576.67, 1370.14, 19320.76),
        (13153.34, 2740.28, 34879.21),
    ],
    ("qwen", "8x8-2.5t-75g"): [
        (411.04, 342.53, 2169.88),
        (822.08, 685.07, 3399.19),
        (1644.17, 1370.14, 5857.79),
        (3288.33, 2740.28, 10775.01),
    ],
    ("ds", "4x8-2.5t-75g"): [
        (179.94, 181.75, 1001.25),
        (359.87, 363.51, 1491.23),
        (719.74, 727.01, 2471.19),
        (1439.49, 1454.03, 4431.12),
    ],
    ("ds", "4x8-5t-50g"): [
        (89.97, 272.63, 938.09),
        (179.94, 545.26, 1364.91),
        (359.87, 1090.52, 2218.56),
        (719.74, 2181.04, 3925.85),
    ],
    ("ds", "4x8-10t-25g"): [
        (44.98, 545.26, 1133.7),
        (89.97, 1090.52, 1756.14),
        (179.94, 2181.04, 3001.0),
        (359.87, 4362.08, 5490.74),
    ],
    ("ds", "4x4-5t-50g"): [
        (179.94, 272.63, 1603.55),
        (359.87, 545.26, 2184.56),
        (719.74, 1090.52, 3346.59),
        (1439.49, 2181.04, 5670.66),
    ],
    ("ds", "8x8-5t-50g"): [
        (44.98, 272.63, 605.36),
        (89.97, 545.26, 955.09),
        (179.94, 1090.52, 1654.54),
        (359.87, 2181.04, 3053.44),
    ],
    ("mixtral", "4x8-2.5t-75g"): [
        (1503.24, 447.39, 4008.41),
        (3006.48, 894.78, 6406.21),
        (6012.95, 1789.57, 11201.8),
        (12025.91, 3579.14, 20792.98),
    ],
    ("mixtral", "4x8-5t-50g"): [
        (751.62, 671.09, 3264.06),
        (1503.24, 1342.18, 4917.51),
        (3006.48, 2684.35, 8224.4),
        (6012.95, 5368.71, 14838.19),
    ],
    ("mixtral", "4x8-10t-25g"): [
        (375.81, 1342.18, 3451.13),
        (751.62, 2684.35, 5291.64),
        (1503.24, 5368.71, 8972.66),
        (3006.48, 10737.42, 16334.72),
    ],
    ("mixtral", "4x4-5t-50g"): [
        (1503.24, 671.09, 5857.03),
        (3006.48, 1342.18, 8492.84),
        (6012.95, 2684.35, 13764.45),
        (12025.91, 5368.71, 24307.67),
    ],
    ("mixtral", "8x8-5t-50g"): [
        (375.81, 671.09, 1967.57),
        (751.62, 1342.18, 3129.84),
        (1503.24, 2684.35, 5454.38),
        (3006.48, 5368.71, 10103.45),
    ],
}


@pytest.fixture(scope="module", autouse=True)
def quick_programs():
    """Little optimized: each runs once."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@jax.jit
def times(model, system, placed, batches):
    def one(batch):
        # Whatever tokens choose: every node holds its share of every expert.
        shape = (model.num_moe_layers, BATCHES[-1], model.top_k)
        ids = np.broadcast_to(np.arange(model.top_k), shape)
        trace = RoutingTrace(ids, model.num_experts, sequence_start=np.arange(BATCHES[-1]))
        workload = Workload(batch, 64.0, max_batch=BATCHES[-1], routing=trace)
        return evaluate_placement(
            model, system, workload, placed, key=jax.random.key(0), accounting="published"
        )

    return jax.vmap(one)(batches)


@pytest.mark.parametrize("name, system", PUBLISHED)
def test_tensor_parallel_rows(name, system, x64):
    """Sizes of the three meshes differ, rates do not: nine programs for sixty rows."""
    model = models.get(NAMES[name])
    # One name for all rates, which would compile a program each.
    chip = hardware.get(f"nmp-{system}").replace(name="nmp")
    even = tensor_parallel(model.num_experts, chip.num_nodes)
    share = jnp.broadcast_to(even, (model.num_moe_layers, *even.shape))
    placed = Placement(share, all_reduce=True, name="tensor_parallel")
    found = times(model, chip, placed, jnp.array(BATCHES))
    comp, comm, tbt = np.array(PUBLISHED[name, system]).T
    np.testing.assert_allclose(1e6 * found.comp_time, comp, atol=0.0051)
    np.testing.assert_allclose(1e6 * found.comm_time, comm, atol=0.0051)
    # Their four summands were rounded before they were added.
    np.testing.assert_allclose(1e6 * found.tbt, tbt, atol=0.0251)
