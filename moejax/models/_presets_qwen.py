"""The Qwen models as cited numbers. "HF transformers" is the library, release 5.24.0."""

import dataclasses

from moejax.models._preset import (
    ModelPreset,
    SourceRow,
    cite,
    cite_attention,
    cite_published,
    cite_softmax_router,
    preset,
)


_QWEN2 = (
    "Qwen2-57B-A14B config.json (copies at hf nm-testing/Qwen2-57B-A14B-Instruct-FP8-KV and "
    "shuyuej/Qwen2-57B-A14B-GPTQ)"
)
_QWEN2_ROUTER = (
    "HF transformers 5.24.0 modeling_qwen2_moe Qwen2MoeTopKRouter; norm_topk_prob false in config"
)
_QWEN3 = (
    "Qwen/Qwen3-30B-A3B config.json values, via MindSpeed-RL qwen3_30b_a3b.yaml and re-hosted "
    "Qwen3-30B configs"
)
_QWEN3_ROUTER = (
    "HF transformers 5.24.0 modeling_qwen3_moe Qwen3MoeTopKRouter; norm_topk_prob true in the "
    "checkpoint config"
)
_QWEN3_PAPER = "Sieve text: 'GPT-OSS and Qwen3 activate four experts out of 128'"
_QWEN3_NOTE = (
    "contradicts the public config (8 of 128); reported expert statistics fit 8 better; active "
    "params would be 2.447e9"
)
_NEXT = (
    "HF transformers 5.24.0 Qwen3NextConfig defaults (checkpoint "
    "Qwen/Qwen3-Next-80B-A3B-Instruct); model-card layout 12 x (3 GDN-MoE, 1 gated-attention-MoE)"
)
_397B = (
    "Qwen3.5-397B-A17B model card (HF), quoted in several public notes: 60 layers, hidden 4096, "
    "15 x (3 GDN-MoE, 1 gated-attention-MoE), 512 experts, 10+1, expert dim 1024, vocab 248320"
)
_35B = "HF transformers 5.24.0 Qwen3_5MoeTextConfig defaults (checkpoint Qwen/Qwen3.5-35B-A3B)"
_QWEN35_ROUTER = "HF transformers 5.24.0 modeling_qwen3_5_moe Qwen3_5MoeTopKRouter"
_QWEN35_CARD = "Qwen3.5 model card"


def _hybrid(source: str, layers: int, heads: int, value_heads: int) -> tuple[SourceRow, ...]:
    """Three gated delta-net layers, then one of gated full attention, over and over."""
    return (
        *cite_attention(source, type="gqa", heads=heads, kv_heads=2, head_dim=256, q_gate=True),
        *cite_attention(source, layer_pattern=("linear", "linear", "linear", "full")),
        *cite_attention(source, full_attention_layers=layers // 4),
        *cite_attention(source, linear_attention_layers=3 * layers // 4, linear_conv_kernel=4),
        *cite_attention(source, linear_key_heads=16, linear_value_heads=value_heads),
        *cite_attention(source, linear_key_head_dim=128, linear_value_head_dim=128),
    )


_PRESETS = (
    preset(
        "qwen3-30b-a3b",
        "Qwen/Qwen3-30B-A3B",
        cite(_QWEN3, layers=48, moe_layers=48, hidden=2048, moe_intermediate=768),
        cite(_QWEN3, routed_experts=128, top_k=8, vocab=151936),
        cite(_QWEN3, shared_experts=0, shared_intermediate_total=0),
        cite_attention(_QWEN3, type="gqa", heads=32, kv_heads=4, head_dim=128, qk_norm=True),
        cite_softmax_router(_QWEN3_ROUTER, "before_topk", True),
        cite_published("Qwen3 model card", 30.5, 3.3),
        cite(_QWEN3_PAPER, "low", _QWEN3_NOTE, top_k_paper=4),
    ),
    preset(
        "qwen3-next-80b-a3b",
        "Qwen/Qwen3-Next-80B-A3B-Instruct",
        cite(_NEXT, layers=48, moe_layers=48, hidden=2048, moe_intermediate=512),
        cite(_NEXT, routed_experts=512, top_k=10, vocab=151936),
        cite(_NEXT, shared_experts=1, shared_intermediate_total=512),
        _hybrid(_NEXT, layers=48, heads=16, value_heads=32),
        cite_softmax_router(_NEXT, "before_topk", True, shared_expert_gate="sigmoid"),
        cite_published("Qwen3-Next model card", 80, 3),
    ),
    preset(
        "qwen3.5-397b-a17b",
        "Qwen/Qwen3.5-397B-A17B",
        cite(_397B, layers=60, moe_layers=60, hidden=4096, moe_intermediate=1024),
        cite(_397B, routed_experts=512, top_k=10, vocab=248320),
        cite(_397B, shared_experts=1, shared_intermediate_total=1024),
        _hybrid(_397B, layers=60, heads=32, value_heads=64),
        cite_softmax_router(_QWEN35_ROUTER, "before_topk", True, shared_expert_gate="sigmoid"),
        cite_published(_QWEN35_CARD, 397, 17, checked=True),
    ),
    preset(
        "qwen3.5-35b-a3b",
        "Qwen/Qwen3.5-35B-A3B",
        cite(_35B, layers=40, moe_layers=40, hidden=2048, moe_intermediate=512),
        cite(_35B, routed_experts=256, top_k=8, vocab=248320),
        cite(_35B, shared_experts=1, shared_intermediate_total=512),
        _hybrid(_35B, layers=40, heads=16, value_heads=32),
        cite_softmax_router(_QWEN35_ROUTER, "before_topk", True, shared_expert_gate="sigmoid"),
        cite_published(_QWEN35_CARD, 35, 3, checked=True),
    ),
    preset(
        "qwen2-57b-a14b",
        "Qwen/Qwen2-57B-A14B",
        cite(_QWEN2, layers=28, moe_layers=28, hidden=3584, moe_intermediate=2560),
        cite(_QWEN2, routed_experts=64, top_k=8, vocab=151936),
        cite(_QWEN2, shared_experts=1, shared_intermediate_total=20480),
        cite_attention(_QWEN2, type="gqa", heads=28, kv_heads=4, head_dim=128, qkv_bias=True),
        cite_softmax_router(_QWEN2_ROUTER, "before_topk", False, shared_expert_gate="sigmoid"),
        cite_published("Qwen2 model card", 57.4, 14),
    ),
)


def _with_paper_top_k(qwen3: ModelPreset) -> ModelPreset:
    """Qwen3 as Sieve's text describes it. The published sizes of the real model do not apply."""
    top_k = cite(_QWEN3_PAPER, "low", _QWEN3_NOTE, top_k=4)[0]
    dropped = ("top_k_paper", "published_active_b")
    kept = (row for row in qwen3.cited if row.field not in dropped)
    rows = tuple(top_k if row.field == "top_k" else row for row in kept)
    return dataclasses.replace(qwen3, name=f"{qwen3.name}-top4", cited=rows)


QWEN = (_PRESETS[0], _with_paper_top_k(_PRESETS[0]), *_PRESETS[1:])
