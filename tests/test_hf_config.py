"""Models from a `config.json`: one public config per family, and what is refused."""

import dataclasses
import json

import pytest

from moejax import models


def without(config: dict, *keys: str) -> dict:
    return {key: value for key, value in config.items() if key not in keys}


MIXTRAL = dict(
    architectures=["MixtralForCausalLM"],
    model_type="mixtral",
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    num_local_experts=8,
    num_experts_per_tok=2,
    sliding_window=None,
    tie_word_embeddings=False,
    torch_dtype="bfloat16",
    vocab_size=32000,
)
QWEN2_MOE = dict(
    model_type="qwen2_moe",
    decoder_sparse_step=1,
    hidden_size=3584,
    intermediate_size=18944,
    max_window_layers=28,
    moe_intermediate_size=2560,
    norm_topk_prob=False,
    num_attention_heads=28,
    num_experts=64,
    num_experts_per_tok=8,
    num_hidden_layers=28,
    num_key_value_heads=4,
    shared_expert_intermediate_size=20480,
    sliding_window=65536,
    use_sliding_window=False,
    torch_dtype="bfloat16",
    vocab_size=151936,
)
QWEN3_MOE = dict(
    model_type="qwen3_moe",
    decoder_sparse_step=1,
    head_dim=128,
    hidden_size=2048,
    intermediate_size=6144,
    mlp_only_layers=[],
    moe_intermediate_size=768,
    norm_topk_prob=True,
    num_attention_heads=32,
    num_experts=128,
    num_experts_per_tok=8,
    num_hidden_layers=48,
    num_key_value_heads=4,
    sliding_window=None,
    use_sliding_window=False,
    vocab_size=151936,
)
GATED_DELTA_NET = dict(
    linear_conv_kernel_dim=4,
    linear_key_head_dim=128,
    linear_num_key_heads=16,
    linear_num_value_heads=32,
    linear_value_head_dim=128,
)
QWEN3_NEXT = dict(
    **GATED_DELTA_NET,
    model_type="qwen3_next",
    decoder_sparse_step=1,
    full_attention_interval=4,
    head_dim=256,
    hidden_size=2048,
    intermediate_size=5120,
    mlp_only_layers=[],
    moe_intermediate_size=512,
    norm_topk_prob=True,
    num_attention_heads=16,
    num_experts=512,
    num_experts_per_tok=10,
    num_hidden_layers=48,
    num_key_value_heads=2,
    shared_expert_intermediate_size=512,
    vocab_size=151936,
)
QWEN35_TEXT = dict(
    **GATED_DELTA_NET,
    model_type="qwen3_5_moe_text",
    attn_output_gate=True,
    dtype="bfloat16",
    head_dim=256,
    hidden_size=2048,
    layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 10,
    moe_intermediate_size=512,
    num_attention_heads=16,
    num_experts=256,
    num_experts_per_tok=8,
    num_hidden_layers=40,
    num_key_value_heads=2,
    shared_expert_intermediate_size=512,
    vocab_size=248320,
)
QWEN35 = dict(
    architectures=["Qwen3_5MoeForConditionalGeneration"],
    model_type="qwen3_5_moe",
    text_config=QWEN35_TEXT,
    tie_word_embeddings=False,
    vision_config=dict(model_type="qwen3_5_moe", hidden_size=1152, depth=27),
)
GPT_OSS = dict(
    model_type="gpt_oss",
    attention_bias=True,
    experts_per_token=4,
    head_dim=64,
    hidden_size=2880,
    intermediate_size=2880,
    layer_types=["sliding_attention", "full_attention"] * 18,
    num_attention_heads=64,
    num_experts_per_tok=4,
    num_hidden_layers=36,
    num_key_value_heads=8,
    num_local_experts=128,
    quantization_config=dict(
        quant_method="mxfp4",
        modules_to_not_convert=["model.layers.*.self_attn", "model.embed_tokens", "lm_head"],
    ),
    sliding_window=128,
    tie_word_embeddings=False,
    vocab_size=201088,
)
DEEPSEEK_V2 = dict(
    model_type="deepseek_v2",
    first_k_dense_replace=1,
    hidden_size=2048,
    intermediate_size=10944,
    kv_lora_rank=512,
    moe_intermediate_size=1408,
    moe_layer_freq=1,
    n_group=1,
    n_routed_experts=64,
    n_shared_experts=2,
    norm_topk_prob=False,
    num_attention_heads=16,
    num_experts_per_tok=6,
    num_hidden_layers=27,
    num_key_value_heads=16,
    q_lora_rank=None,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    routed_scaling_factor=1.0,
    scoring_func="softmax",
    topk_group=1,
    topk_method="greedy",
    torch_dtype="bfloat16",
    v_head_dim=128,
    vocab_size=102400,
)
DEEPSEEK_V3 = dict(
    model_type="deepseek_v3",
    first_k_dense_replace=3,
    hidden_size=7168,
    intermediate_size=18432,
    kv_lora_rank=512,
    moe_intermediate_size=2048,
    moe_layer_freq=1,
    n_group=8,
    n_routed_experts=256,
    n_shared_experts=1,
    norm_topk_prob=True,
    num_attention_heads=128,
    num_experts_per_tok=8,
    num_hidden_layers=61,
    num_key_value_heads=128,
    num_nextn_predict_layers=1,
    q_lora_rank=1536,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    quantization_config=dict(quant_method="fp8", fmt="e4m3", weight_block_size=[128, 128]),
    routed_scaling_factor=2.5,
    scoring_func="sigmoid",
    topk_group=4,
    topk_method="noaux_tc",
    v_head_dim=128,
    vocab_size=129280,
)
OLMOE = dict(
    model_type="olmoe",
    hidden_size=2048,
    intermediate_size=1024,
    norm_topk_prob=False,
    num_attention_heads=16,
    num_experts=64,
    num_experts_per_tok=8,
    num_hidden_layers=16,
    num_key_value_heads=16,
    tie_word_embeddings=False,
    vocab_size=50304,
)

FAMILIES = {
    "mixtral-8x7b": MIXTRAL,
    "qwen2-57b-a14b": QWEN2_MOE,
    "qwen3-30b-a3b": QWEN3_MOE,
    "qwen3-next-80b-a3b": QWEN3_NEXT,
    "qwen3.5-35b-a3b": QWEN35,
    "gpt-oss-120b": GPT_OSS,
    "deepseek-v2-lite": DEEPSEEK_V2,
    "deepseek-v3": DEEPSEEK_V3,
    "olmoe-1b-7b": OLMOE,
}


def sizes(model: models.MoEModel) -> dict:
    """All static fields but the name, and the bits of the checkpoint's own format."""
    fields = {field.name: getattr(model, field.name) for field in dataclasses.fields(model)}
    native = fields.pop("native_precision")
    bits = [float(getattr(native, field)) for field in ("weight_bits", "expert_weight_bits")]
    return {**without(fields, "name", "precision"), "native": (native.name, *bits)}


@pytest.mark.parametrize("name", FAMILIES)
def test_config_gives_the_preset(name):
    assert sizes(models.from_hf_config(FAMILIES[name])) == sizes(models.get(name))


def test_reads_files_and_folders(tmp_path):
    folder = tmp_path / "olmoe-copy"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(OLMOE))
    for path in (folder, folder / "config.json", str(folder)):
        assert models.from_hf_config(path).name == "olmoe-copy"
    assert models.from_hf_config(folder, name="mine", precision="fp8").precision.name == "fp8"
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "list.json").write_text("[]")
    for file, match in (
        ("nowhere", "nowhere: no config.json to read"),
        ("broken.json", "not valid JSON"),
        ("list.json", "no JSON object"),
    ):
        with pytest.raises(ValueError, match=match):
            models.from_hf_config(tmp_path / file)


def test_native_precision():
    assert models.from_hf_config(GPT_OSS, precision="native").precision.name == "mxfp4"
    full = models.from_hf_config({**OLMOE, "dtype": "float32"}, precision="native")
    assert float(full.precision.kv_bits) == 32
    coarse = dict(quant_method="fp8")
    scales = models.from_hf_config({**OLMOE, "quantization_config": coarse}).native_precision
    assert float(scales.expert_weight_bits) == 8


def test_family_from_nested_or_class_name():
    reference = sizes(models.get("qwen3.5-35b-a3b"))
    outer = dict(model_type="some_vision_model", text_config=QWEN35_TEXT)
    assert sizes(models.from_hf_config(outer)) == reference
    renamed = {**DEEPSEEK_V3, "model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"]}
    assert models.from_hf_config(renamed).name == "deepseek_v3"


def test_defaults_of_the_model_classes():
    assert sizes(models.from_hf_config(without(GPT_OSS, "layer_types"))) == sizes(
        models.get("gpt-oss-120b")
    )
    v3 = without(
        DEEPSEEK_V3, "scoring_func", "topk_method", "norm_topk_prob", "routed_scaling_factor"
    )
    assert models.from_hf_config(v3).router == models.get("deepseek-v3").router
    sliding = models.from_hf_config({**MIXTRAL, "sliding_window": 4096})
    assert {layer.window for layer in sliding.layers} == {4096}
    multi_head = models.from_hf_config({**MIXTRAL, "num_key_value_heads": None})
    assert multi_head.layers[0].kv_heads == 32
    unshared = models.from_hf_config({**DEEPSEEK_V2, "n_shared_experts": None})
    assert unshared.num_shared_experts == unshared.shared_intermediate == 0
    tied = models.from_hf_config({**OLMOE, "tie_word_embeddings": True})
    assert tied.num_parameters == models.get("olmoe-1b-7b").num_parameters - 50304 * 2048
    grouped = dict(topk_method="group_limited_greedy", n_group=8, topk_group=3)
    router = models.from_hf_config({**DEEPSEEK_V2, **grouped}).router
    assert (router.num_groups, router.top_groups) == (8, 3)


def test_leading_dense_layers_by_list():
    model = models.from_hf_config({**QWEN3_MOE, "mlp_only_layers": [0, 1]})
    assert (model.num_dense_layers, model.dense_intermediate) == (2, 6144)


@pytest.mark.parametrize(
    "config, match",
    [
        ({}, "missing key 'model_type' .supported: mixtral"),
        (dict(model_type="llama"), "'llama' .supported.*missing key for the number of experts"),
        ({**OLMOE, "model_type": "olmo"}, "unknown model_type 'olmo' .supported"),
        (3, "dict or the path"),
        (without(MIXTRAL, "num_local_experts"), "mixtral config: missing key 'num_local_experts'"),
        (without(QWEN3_NEXT, "head_dim"), "missing key 'head_dim'"),
        (without(QWEN2_MOE, "shared_expert_intermediate_size"), "missing key 'shared_expert_"),
        (without(DEEPSEEK_V3, "first_k_dense_replace"), "missing key 'first_k_dense_replace'"),
        (without(DEEPSEEK_V3, "q_lora_rank"), "missing key 'q_lora_rank'"),
        (without(DEEPSEEK_V3, "n_group"), "missing key 'n_group'"),
        (without(DEEPSEEK_V3, "intermediate_size"), "missing key 'intermediate_size'"),
        (without(GPT_OSS, "sliding_window"), "missing key 'sliding_window'"),
        ({**MIXTRAL, "num_attention_heads": 24}, "without the key 'head_dim'"),
        ({**MIXTRAL, "hidden_size": "4096"}, "hidden_size = '4096': allowed is a whole number"),
        ({**MIXTRAL, "num_experts_per_tok": 9}, "top_k = 9: allowed is at most"),
        ({**QWEN3_MOE, "decoder_sparse_step": 2}, "decoder_sparse_step = 2.*before all MoE"),
        ({**QWEN3_MOE, "mlp_only_layers": [5]}, r"mlp_only_layers = \[5\].*not at \[5\]"),
        ({**QWEN3_MOE, "norm_topk_prob": 1}, "norm_topk_prob = 1: allowed is true or false"),
        ({**DEEPSEEK_V2, "moe_layer_freq": 2}, "moe_layer_freq = 2"),
        ({**DEEPSEEK_V2, "first_k_dense_replace": 27}, "first_k_dense_replace = 27"),
        ({**DEEPSEEK_V3, "topk_method": "hash"}, "topk_method = 'hash': allowed is greedy"),
        ({**DEEPSEEK_V3, "routed_scaling_factor": "x"}, "routed_scaling_factor = 'x'"),
        ({**QWEN2_MOE, "use_sliding_window": True}, "needs the key 'layer_types'"),
        ({**GPT_OSS, "layer_types": ["full_attention"]}, "one entry per layer, 36 in all"),
        ({**OLMOE, "layer_types": ["chunked_attention"] * 16}, "'chunked_attention' is unknown"),
        ({**OLMOE, "quantization_config": dict(quant_method="gptq")}, "mxfp4 and fp8"),
        ({**OLMOE, "torch_dtype": "int8"}, "torch_dtype = 'int8': allowed is bfloat16"),
    ],
)
def test_refuses(config, match):
    with pytest.raises(ValueError, match=match):
        models.from_hf_config(config)
