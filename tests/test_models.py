"""Sizes of models: counts, bytes, sources and refusals."""

import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax import models
from moejax.models import MODELS, Attention, MoEModel, Precision, Router
from tests.conftest import data_path


# Weight matrices counted by hand from each checkpoint's public config, in units of 1e9: all, and
# those one token uses with both embedding tables. The third column is the vendor's headline total.
COUNTS = {
    "gpt-oss-120b": (116.789, 5.710, 116.83),  # OpenAI gpt-oss model card, table 1
    "gpt-oss-20b": (20.908, 4.186, 20.91),  # the same table
    "qwen3-30b-a3b": (30.532, 3.353, 30.5),  # model cards and papers from here on
    "qwen3-30b-a3b-top4": (30.532, 2.447, 30.5),
    "qwen3-next-80b-a3b": (79.673, 3.873, 80),
    "qwen3.5-397b-a17b": (396.343, 17.346, 397),
    "qwen3.5-35b-a3b": (34.659, 3.454, 35),
    "qwen2-57b-a14b": (57.408, 14.249, 57.4),
    "mixtral-8x7b": (46.703, 12.880, 46.7),
    "mixtral-8x22b": (140.620, 39.152, 141),
    "deepseek-v2-lite": (15.706, 2.661, 15.7),
    "deepseek-v3": (671.025, 37.551, 671),
    "olmoe-1b-7b": (6.919, 1.282, 6.9),
}

SOFTMAX = Router("softmax", "before_topk", True)


def tiny(**changes) -> MoEModel:
    """Two layers of four small experts; the first layer is dense."""
    fields = dict(
        name="tiny",
        hidden=8,
        moe_intermediate=4,
        num_experts=4,
        top_k=2,
        vocab=10,
        num_shared_experts=1,
        shared_intermediate=6,
        layers=[Attention("gqa", 4, 2, 2)] * 2,
        num_dense_layers=1,
        dense_intermediate=16,
        router=SOFTMAX,
        precision=Precision.bf16(),
        native_precision=Precision.bf16(),
    )
    return MoEModel(**{**fields, **changes})


def test_counts_cover_every_preset():
    assert set(COUNTS) == set(MODELS)


@pytest.mark.parametrize("name", MODELS)
def test_parameter_counts(name):
    total, active, headline = COUNTS[name]
    model = models.get(name)
    assert model.num_parameters == pytest.approx(total * 1e9, rel=2e-3)
    assert model.num_active_parameters == pytest.approx(active * 1e9, rel=2e-3)
    assert model.num_parameters == pytest.approx(headline * 1e9, rel=2e-2)


def test_counts_of_the_tiny_model():
    # Attention 8*2*(2*4 + 2*2) = 192 per layer, dense FFN 3*8*16 = 384, router 8*4 = 32,
    # shared experts 3*8*6 = 144, one routed expert 3*8*4 = 96, each table 10*8 = 80.
    model = tiny()
    assert model.num_fixed_parameters == 2 * 192 + 384 + 32 + 144 + 2 * 80
    assert model.num_parameters == 1104 + 4 * 96
    assert model.num_active_parameters == 1104 + 2 * 96
    assert tiny(tied_embeddings=True).num_parameters == model.num_parameters - 80


@pytest.mark.parametrize(
    "attention, hidden, weights",
    [
        (Attention("gqa", 64, 8, 64), 2880, 2880 * 64 * 144),
        (Attention("gqa", 16, 2, 256, output_gate=True), 2048, 2048 * 256 * 52),
        # Queries 7168*1536 + 1536*128*192, latent 7168*576, expansion 512*128*256, output
        # 128*128*7168.
        (
            Attention(
                "mla", 128, q_rank=1536, kv_rank=512, rope_dim=64, nope_dim=128, value_dim=128
            ),
            7168,
            11010048 + 37748736 + 4128768 + 16777216 + 117440512,
        ),
        # Uncompressed queries 2048*16*192, latent 2048*576, expansion 512*16*256, output
        # 16*128*2048.
        (
            Attention("mla", 16, kv_rank=512, rope_dim=64, nope_dim=128, value_dim=128),
            2048,
            6291456 + 1179648 + 2097152 + 4194304,
        ),
        # Projections of q, k, v and gate 2048*(2*2048 + 2*4096), output 4096*2048.
        (
            Attention("linear", key_heads=16, value_heads=32, key_head_dim=128, value_head_dim=128),
            2048,
            25165824 + 8388608,
        ),
    ],
)
def test_attention_weights(attention, hidden, weights):
    assert attention.num_weights(hidden) == weights


def test_layer_patterns():
    gpt_oss = models.get("gpt-oss-120b").layers
    assert [layer.window for layer in gpt_oss[:3]] == [128, None, 128]
    hybrid = models.get("qwen3.5-397b-a17b").layers
    assert [layer.kind for layer in hybrid[:5]] == ["linear"] * 3 + ["gqa", "linear"]
    assert sum(layer.kind == "gqa" for layer in hybrid) == 15


@pytest.mark.parametrize("name, gibibytes", [("gpt-oss-120b", 60.8), ("gpt-oss-20b", 12.8)])
def test_native_bytes_are_the_checkpoints(name, gibibytes):
    # OpenAI gpt-oss model card, table 1: checkpoint sizes.
    native = models.get(name, "native")
    assert float(native.weight_bytes) == pytest.approx(gibibytes * 2**30, rel=5e-3)
    assert float(native.expert_bytes) == 24883200 * 4.25 / 8
    assert float(models.get(name).expert_bytes) == 49766400


def test_precision_by_name():
    model = models.get("deepseek-v3", "native")
    assert model.precision.name == "fp8"
    assert float(model.precision.weight_bits) == pytest.approx(8 + 32 / 128**2)
    assert float(model.with_precision("bf16").precision.weight_bits) == 16
    assert float(model.with_precision("mxfp4").precision.expert_weight_bits) == 4.25
    changed = model.replace(precision=dict(kv_bits=4))
    assert float(changed.precision.kv_bits) == 4
    assert changed.precision.name == "custom"


def test_one_trace_for_five_bit_widths():
    @jax.jit
    @eqx.debug.assert_max_traces(max_traces=1)
    def expert_bytes(model):
        return model.expert_bytes

    model = models.get("olmoe-1b-7b")
    for bits in (4, 4.25, 6, 8, 16):
        swept = model.replace(precision=dict(expert_weight_bits=bits))
        assert float(expert_bytes(swept)) == 6291456 * bits / 8
    assert len(jax.tree.leaves(model)) == 8


def test_static_parts_are_hashable():
    static = [eqx.filter(models.get("gpt-oss-20b"), eqx.is_array, inverse=True) for _ in range(2)]
    assert len(set(static)) == 1


@pytest.mark.parametrize(
    "name, params, experts",
    # Sieve reports 25 % for Mixtral, which is the share of experts; by its own definition, with
    # the weights that always count, one token touches 27.8 % of it and 4.9 % of gpt-oss.
    [("mixtral-8x22b", 0.278, 0.25), ("gpt-oss-120b", 0.0489, 4 / 128)],
)
def test_act_ratio_of_one_token(name, params, experts):
    model = models.get(name)
    activated = jnp.full(model.num_moe_layers, model.top_k)
    assert float(model.act_ratio(activated)) == pytest.approx(params, abs=5e-4)
    assert float(model.act_ratio(activated, mode="experts")) == pytest.approx(experts)
    everything = jnp.full((3, model.num_moe_layers), model.num_experts)
    np.testing.assert_allclose(model.act_ratio(everything), np.ones(3), rtol=1e-6)


def test_act_ratio_refuses():
    model = tiny()
    for bad, match in (([5], "0 to num_experts = 4"), ([1, 1], "1 MoE layers")):
        with pytest.raises(ValueError, match=match):
            model.act_ratio(jnp.array(bad))
    with pytest.raises(ValueError, match="did you mean 'params'"):
        model.act_ratio(jnp.array([1]), mode="param")  # type: ignore[arg-type]
    ratios = jax.jit(jax.vmap(model.act_ratio))(jnp.array([[5], [-1], [4]]))
    np.testing.assert_allclose(ratios, [np.nan, np.nan, 1], rtol=1e-6)


@pytest.mark.parametrize(
    "changes, match",
    [
        (dict(top_k=5), "top_k = 5: allowed is at most num_experts = 4"),
        (dict(hidden=-8), "hidden = -8: allowed is a whole number >= 1"),
        (dict(vocab=1.5), "vocab = 1.5"),
        (dict(layers=()), "layers = .*at least one"),
        (dict(layers=["gqa"]), "layers = .*one Attention per layer"),
        (dict(precision="bf16"), "precision = 'bf16': allowed is a Precision"),
        (dict(num_dense_layers=2), "num_dense_layers = 2: allowed is fewer than the 2 layers"),
        (dict(dense_intermediate=0), "dense_intermediate = 0"),
        (dict(num_shared_experts=0), "shared_intermediate = 6"),
        (dict(router=Router("sigmoid", "none", True, num_groups=3)), "multiple of .* = 3"),
        (dict(router=Router("sigmoid", "none", True, 4, 1)), "top_k = 2: .* 1 experts"),
    ],
)
def test_model_refuses(changes, match):
    with pytest.raises(ValueError, match=match):
        tiny(**changes)


@pytest.mark.parametrize(
    "build, match",
    [
        (lambda: Attention("gqaa", 4, 2, 8), "did you mean 'gqa'.*known: gqa, mla, linear"),
        (lambda: Attention("gqa", 6, 4, 8), "kv_heads = 4: allowed is a divisor of heads = 6"),
        (lambda: Attention("gqa", 4, 2), "head_dim = 0"),
        (lambda: Attention("gqa", 4, 2, 8, window=0), "window = 0"),
        (lambda: Attention("gqa", 4, 2, 8, kv_rank=512), "kv_rank = 512"),
        (lambda: Attention("mla", 16, kv_rank=-1), "kv_rank = -1"),
        (lambda: Router("tanh", "none", True), "score = 'tanh'"),
        (lambda: Router("sigmoid", "before_topk", True), "'none' goes with sigmoid"),
        (lambda: Router("softmax", "before_topk", True, 2, 3), "top_groups = 3"),
        (lambda: Precision(0, 16, 16, 16), "weight_bits = 0"),
        (lambda: Precision.named("mxfp"), "did you mean 'mxfp4'"),
        (lambda: models.get("qwen3-30b"), "did you mean 'qwen3-30b-a3b'"),
        (lambda: models.get("olmoe-1b-7b", "nativ"), "did you mean 'native'"),
        (lambda: tiny().replace(hiden=3), "did you mean 'hidden'"),
    ],
)
def test_small_parts_refuse(build, match):
    with pytest.raises(ValueError, match=match):
        build()


@pytest.mark.parametrize("name", MODELS)
def test_every_number_has_a_source(name):
    rows = MODELS[name].sources
    assert len({row.field for row in rows}) == len(rows)
    assert all(row.source and row.confidence in ("high", "medium", "low") for row in rows)
    cited = {row.field: row.value for row in rows}
    model = models.get(name)
    assert cited["moe_layers"] == model.num_moe_layers
    assert cited["total_params"] == model.num_parameters
    kinds = [layer.kind for layer in model.layers]
    assert cited.get("attention.linear_attention_layers", 0) == kinds.count("linear")
    if "layer_split" in cited:
        assert cited["layer_split"]["sliding"] == sum(bool(x.window) for x in model.layers)


def test_presets_hold_every_reference_number():
    path = data_path().parent / "spec" / "presets.json"
    if not path.is_file():
        pytest.skip(f"no reference numbers at {path}")
    renamed = {"router.renormalise_topk": "router.renormalize_topk"}
    renamed["attention.hybrid"] = "attention.layer_pattern"
    for name, tree in json.loads(path.read_text())["models"].items():
        rows = {row.field: row for row in MODELS[name].sources}
        for field, leaf in _leaves(tree):
            row = rows[renamed.get(field, field)]
            assert bool(row.note) >= bool("note" in leaf), (name, field)
            if isinstance(row.value, tuple):  # a pattern, which the reference describes in words
                continue
            if row.field in ("total_params", "active_params", "weight_bytes_bf16"):
                assert row.value == pytest.approx(leaf["value"], rel=2e-3), (name, field)
            else:
                assert row.value == leaf["value"], (name, field)
            if not row.field.endswith(("params", "bytes_bf16")):
                assert row.confidence == leaf["confidence"], (name, field)


def _leaves(tree, prefix=""):
    for key, value in tree.items():
        if "source" in value:
            yield prefix + key, value
        else:
            yield from _leaves(value, f"{prefix}{key}.")
