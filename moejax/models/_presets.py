"""The models moejax knows by name: numbers with their sources, nothing else.

Counts of parameters and bytes are not listed, because `ModelPreset.sources` derives them.
"HF transformers" is the library, release 5.24.0.
"""

from moejax._checks import lookup
from moejax.models._base import MoEModel
from moejax.models._precision import Precision
from moejax.models._preset import (
    ModelPreset,
    SourceRow,
    cite,
    cite_attention,
    cite_published,
    cite_router,
    cite_softmax_router,
    preset,
)
from moejax.models._presets_qwen import QWEN


_GPT_OSS = (
    "original/config.json of openai/gpt-oss-120b (copy at hf witflag/AlphaMind) and HF "
    "transformers 5.24.0 GptOssConfig defaults"
)
_GPT_OSS_20B = (
    "public config.json of openai/gpt-oss-20b; layers, experts and top-k also in the routing "
    "traces of github.com/AmanPriyanshu/GPT-OSS-MoE-ExpertFingerprinting"
)
_GPT_OSS_ROUTER = "HF transformers 5.24.0 modeling_gpt_oss GptOssTopKRouter"
_GPT_OSS_CARD = "OpenAI gpt-oss model card (excludes input embedding from active)"
_GPT_OSS_DTYPE = "public checkpoint quantization_config; Sieve simulates bf16"
_MIXTRAL_8X7B = (
    "HF transformers 5.24.0 MixtralConfig defaults (checkpoint mistralai/Mixtral-8x7B-v0.1)"
)
_MIXTRAL_8X22B = (
    "config.json of mistral-community/Mixtral-8x22B-v0.1 (vocab 32000; Instruct v0.1 uses 32768)"
)
_MIXTRAL_ROUTER = "HF transformers 5.24.0 modeling_mixtral MixtralTopKRouter"
_V2_LITE = (
    "DeepSeek-V2-Lite config.json values as re-hosted in public repositories (hidden 2048, 27 "
    "layers, first dense 1, 64+2 experts, top 6, dense intermediate 10944); MLA ranks also in HF "
    "transformers 5.24.0 DeepseekV2Config"
)
_V2_ROUTER = "HF transformers 5.24.0 modeling_deepseek_v2 DeepseekV2TopkRouter (greedy)"
_V3 = "HF transformers 5.24.0 DeepseekV3Config defaults (same architecture for DeepSeek-R1)"
_V3_ROUTER = "HF transformers 5.24.0 modeling_deepseek_v3 DeepseekV3TopkRouter"
_V3_BIAS = "per-expert correction bias added for selection only"
_V3_GROUPS = "sum of the two best biased scores in the group"
_OLMOE = (
    "HF transformers 5.24.0 OlmoeConfig defaults (checkpoint allenai/OLMoE-1B-7B-0924); expert "
    "intermediate 1024 from total 6.9e9 params"
)
_OLMOE_WIDTH = (
    "OLMoE checkpoint config; the transformers class default is 2048, but 1024 is what reproduces "
    "6.92e9 total and 1.28e9 active parameters"
)
_OLMOE_ROUTER = "HF transformers 5.24.0 modeling_olmoe OlmoeTopKRouter, norm_topk_prob false"


def _gpt_oss(source: str, confidence: str, layers: int, experts: int) -> tuple[SourceRow, ...]:
    """The two gpt-oss models differ in layers and experts only."""
    how = (source, confidence)
    return (
        *cite(*how, layers=layers, moe_layers=layers, hidden=2880, moe_intermediate=2880),
        *cite(*how, routed_experts=experts, top_k=4, vocab=201088, swiglu_limit=7.0),
        *cite(*how, shared_experts=0, shared_intermediate_total=0),
        *cite_attention(*how, type="gqa", heads=64, kv_heads=8, head_dim=64),
        *cite_attention(*how, sliding_window=128, layer_pattern=("sliding", "full")),
        *cite_attention(*how, attention_bias=True, attention_sinks=True),
        *cite(*how, layer_split={"sliding": layers // 2, "full": layers // 2}),
        *cite_softmax_router(_GPT_OSS_ROUTER, "after_topk", True, bias=True),
        *cite_router(
            _GPT_OSS_ROUTER, note="top-k on logits, softmax over the k selected: already sums to 1"
        ),
        *cite(_GPT_OSS_DTYPE, "medium", native_expert_dtype="mxfp4"),
    )


_GPT_OSS_MODELS = (
    preset(
        "gpt-oss-120b",
        "openai/gpt-oss-120b",
        _gpt_oss(_GPT_OSS, "high", layers=36, experts=128),
        cite_published(_GPT_OSS_CARD, 116.83, 5.13),
    ),
    preset(
        "gpt-oss-20b",
        "openai/gpt-oss-20b",
        _gpt_oss(_GPT_OSS_20B, "medium", layers=24, experts=32),
        cite_published(_GPT_OSS_CARD, 20.91, 3.61),
    ),
)
_OTHERS = (
    preset(
        "mixtral-8x7b",
        "mistralai/Mixtral-8x7B-v0.1",
        cite(_MIXTRAL_8X7B, layers=32, moe_layers=32, hidden=4096, moe_intermediate=14336),
        cite(_MIXTRAL_8X7B, routed_experts=8, top_k=2, vocab=32000),
        cite(_MIXTRAL_8X7B, shared_experts=0, shared_intermediate_total=0),
        cite_attention(_MIXTRAL_8X7B, type="gqa", heads=32, kv_heads=8, head_dim=128),
        cite_softmax_router(_MIXTRAL_ROUTER, "before_topk", True),
        cite_published("Mistral AI announcement", 46.7, 12.9),
    ),
    preset(
        "mixtral-8x22b",
        "mistralai/Mixtral-8x22B-v0.1",
        cite(_MIXTRAL_8X22B, layers=56, moe_layers=56, hidden=6144, moe_intermediate=16384),
        cite(_MIXTRAL_8X22B, routed_experts=8, top_k=2),
        cite(_MIXTRAL_8X22B, "high", "32768 in the Instruct checkpoint", vocab=32000),
        cite(_MIXTRAL_8X22B, shared_experts=0, shared_intermediate_total=0),
        cite_attention(_MIXTRAL_8X22B, type="gqa", heads=48, kv_heads=8, head_dim=128),
        cite_softmax_router(_MIXTRAL_ROUTER, "before_topk", True),
        cite_published("Mistral AI announcement", 141, 39),
    ),
    preset(
        "deepseek-v2-lite",
        "deepseek-ai/DeepSeek-V2-Lite",
        cite(_V2_LITE, layers=27, moe_layers=26, hidden=2048, moe_intermediate=1408),
        cite(_V2_LITE, routed_experts=64, top_k=6, vocab=102400),
        cite(_V2_LITE, shared_experts=2, shared_intermediate_total=2816),
        cite(_V2_LITE, first_k_dense=1, dense_intermediate=10944),
        cite_attention(_V2_LITE, type="mla", heads=16, q_lora_rank=0, kv_lora_rank=512),
        cite_attention(_V2_LITE, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128),
        cite_softmax_router(_V2_ROUTER, "before_topk", False, routed_scaling_factor=1.0),
        cite_published("DeepSeek-V2-Lite model card", 15.7, 2.4),
    ),
    preset(
        "deepseek-v3",
        "deepseek-ai/DeepSeek-V3 and deepseek-ai/DeepSeek-R1",
        cite(_V3, layers=61, moe_layers=58, hidden=7168, moe_intermediate=2048),
        cite(_V3, routed_experts=256, top_k=8, vocab=129280),
        cite(_V3, shared_experts=1, shared_intermediate_total=2048),
        cite(_V3, first_k_dense=3, dense_intermediate=18432),
        cite_attention(_V3, type="mla", heads=128, q_lora_rank=1536, kv_lora_rank=512),
        cite_attention(_V3, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128),
        cite_router(_V3_ROUTER, score="sigmoid", softmax_position="none", renormalize_topk=True),
        cite_router(_V3_ROUTER, routed_scaling_factor=2.5, selection_bias=_V3_BIAS),
        cite_router(_V3, group_limited=True, n_group=8, topk_group=4, group_score=_V3_GROUPS),
        cite("public checkpoint", "medium", native_dtype="fp8"),
        cite_published("DeepSeek-V3 technical report", 671, 37),
    ),
    preset(
        "olmoe-1b-7b",
        "allenai/OLMoE-1B-7B-0924",
        cite(_OLMOE, layers=16, moe_layers=16, hidden=2048),
        cite(_OLMOE_WIDTH, "medium", moe_intermediate=1024),
        cite(_OLMOE, routed_experts=64, top_k=8, vocab=50304),
        cite(_OLMOE, shared_experts=0, shared_intermediate_total=0),
        cite_attention(_OLMOE, type="mha", heads=16, kv_heads=16, head_dim=128, qk_norm=True),
        cite_softmax_router(_OLMOE_ROUTER, "before_topk", False),
        cite_published("OLMoE paper", 6.9, 1.3),
    ),
)

MODELS: dict[str, ModelPreset] = {
    entry.name: entry for entry in (*_GPT_OSS_MODELS, *QWEN, *_OTHERS)
}


def get(name: str, precision: str | Precision = "bf16") -> MoEModel:
    """The model called `name`.

    **Arguments:**

    - `name`: a key of `MODELS`.
    - `precision`: `"bf16"` as in Sieve (arXiv 2605.11277), `"native"` for the checkpoint's own
        format, another named format, or a `Precision`.

    **Raises:** `ValueError` suggesting the nearest name for an unknown model or precision.
    """
    return lookup("model", name, MODELS).build(precision)
