"""Attention and memory terms of near-memory systems, against the published rows."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax import hardware, models
from moejax.serving._near_memory import counted_work, near_memory_time, published_work


NAMES = {"ds": "deepseek-v2-lite", "mixtral": "mixtral-8x7b", "qwen": "qwen2-57b-a14b"}
BATCHES = (16, 32, 64, 128)
# us of one decode step in the stored results of HDA-MoE (arXiv 2609.08682), by batch size.
# Attention, by TFLOP/s of all nodes together.
ATTENTION = {
    "ds": {
        80: (128.14, 256.27, 512.54, 1025.09),
        160: (64.07, 128.14, 256.27, 512.54),
        320: (32.03, 64.07, 128.14, 256.27),
    },
    "mixtral": {
        80: (432.85, 865.70, 1731.41, 3462.82),
        160: (216.43, 432.85, 865.70, 1731.41),
        320: (108.21, 216.43, 432.85, 865.70),
    },
    "qwen": {
        40: (1897.21, 3794.43, 7588.86, 15177.72),
        80: (948.61, 1897.21, 3794.43, 7588.86),
        160: (474.30, 948.61, 1897.21, 3794.43),
        320: (237.15, 474.30, 948.61, 1897.21),
    },
}
# Memory, by number of nodes.
MEMORY = {
    "ds": {
        16: (1022.85, 1023.16, 1023.79, 1025.05),
        32: (511.42, 511.58, 511.89, 512.52),
        64: (255.71, 255.79, 255.95, 256.26),
    },
    "mixtral": {
        16: (3249.85, 3278.48, 3335.73, 3450.23),
        32: (1624.93, 1639.24, 1667.86, 1725.12),
        64: (812.46, 819.62, 833.93, 862.56),
    },
    "qwen": {
        16: (3768.01, 3773.71, 3785.09, 3807.87),
        32: (1884.01, 1886.85, 1892.55, 1903.94),
        64: (942.00, 943.43, 946.27, 951.97),
    },
}
WIDE = ("4x8-2.5t-75g", "4x8-5t-50g", "4x8-10t-25g")
SYSTEMS = {
    "ds": (*WIDE, "4x4-5t-50g", "8x8-5t-50g"),
    "mixtral": (*WIDE, "4x4-5t-50g", "8x8-5t-50g"),
    "qwen": (*WIDE, "4x4-2.5t-75g", "8x8-2.5t-75g"),
}
ROWS = [(name, system) for name, systems in SYSTEMS.items() for system in systems]


def raises(*words):
    return pytest.raises(ValueError, match=".*".join(re.escape(word) for word in words))


@jax.jit
def times(model, system, batches):
    each = jax.vmap(lambda batch: published_work(model, batch))(batches)
    return near_memory_time(each, system, model.num_moe_layers)


@pytest.mark.parametrize("name, system", ROWS)
def test_all_sixty_published_rows(name, system, x64):
    system = hardware.get(f"nmp-{system}")
    found = times(models.get(NAMES[name]), system, jnp.array(BATCHES))
    together = round(float(system.flops_per_s) * system.num_nodes / 1e12)
    np.testing.assert_allclose(found.attention * 1e6, ATTENTION[name][together], atol=0.0051)
    np.testing.assert_allclose(found.memory * 1e6, MEMORY[name][system.num_nodes], atol=0.0051)


def test_single_precision_and_eager_agree():
    model, system = models.get("mixtral-8x7b"), hardware.get("nmp-4x8-2.5t-75g")
    found = near_memory_time(published_work(model, 16), system, model.num_moe_layers)
    np.testing.assert_allclose([f * 1e6 for f in found], [432.85, 1624.93], rtol=1e-5)


def test_counted_work_of_a_small_model():
    """Grouped-query attention counted by hand: h = 8, one head of 4, 2 layers, 3 experts."""
    small = models.get("qwen3-next-80b-a3b").replace(
        hidden=8,
        moe_intermediate=5,
        num_experts=3,
        top_k=2,
        vocab=11,
        shared_intermediate=7,
        layers=(models.Attention("gqa", heads=1, kv_heads=1, head_dim=4),) * 2,
        precision=dict(weight_bits=16.0, expert_weight_bits=8.0, activation_bits=16.0, kv_bits=8.0),
    )
    batch, context = 3, 10
    attention = 8 * 4 * 4  # q, k, v, o
    shared, router = 3 * 8 * 7, 8 * 3
    weights = 2 * (attention + shared + router) + 8 * 11
    flops = 2 * weights * batch + 2 * (4 * context * 4) * batch
    moved = 2 * weights + 2 * (3 * 3 * 8 * 5)  # routed experts in 8 bits
    moved += 2 * batch * (2 * context * 4)  # the cache in 8 bits
    moved += 2 * batch * 2 * (3 * 4 + 2 * 8)  # written q, k, v; shared experts' input and output
    found = counted_work(small, batch, context)
    np.testing.assert_allclose([found.flops, found.bytes], [flops, moved])


@pytest.mark.parametrize("name", models.MODELS)
def test_counted_work_covers_the_weights_of_every_model(name):
    model = models.get(name)
    found = counted_work(model, 1.0, 0.0)
    tables = model.hidden * model.vocab * model.precision.weight_bits / 8
    embedding = 0 if model.tied_embeddings else tables
    # One token moves next to nothing beside the weights.
    np.testing.assert_allclose(found.bytes, model.weight_bytes - embedding, rtol=0.01)


def test_the_published_form_reads_the_experts_as_two_matrices_in_bytes():
    model = models.get("deepseek-v2-lite")
    published = published_work(model, 16).bytes * model.num_moe_layers
    counted = counted_work(model, 16, 64).bytes
    # Three matrices of 16 bits are three times that; attention and the head add a little.
    assert 2.9 < counted / published < 3.2


def test_bad_input():
    model = models.get("mixtral-8x7b")
    with raises("unknown model with a published form 'olmoe-1b-7b'", "mixtral-8x7b"):
        published_work(models.get("olmoe-1b-7b"), 16)
    with raises("published_work.batch = 0", "(0,"):
        published_work(model, 0)
    with raises("counted_work.context = -1", "[0,"):
        counted_work(model, 1, -1)
    traced = jax.jit(lambda batch: published_work(model, batch).flops)(-1.0)
    assert np.isnan(traced)
