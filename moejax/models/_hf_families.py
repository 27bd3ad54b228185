"""The Hugging Face model types that `from_hf_config` reads, and how they differ."""

from typing import NamedTuple


class Family(NamedTuple):
    """What sets one `model_type` apart. Defaults are those of its class in HF transformers."""

    classes: tuple[str, ...]
    experts: tuple[str, ...] = ("num_experts", "num_local_experts")
    width: str = "moe_intermediate_size"
    shared: str = ""  # key of the shared experts' total width
    renormalize: bool = False
    mla: bool = False
    hybrid: bool = False
    own_head_dim: bool = False  # without the key, the class does not take hidden / heads


_LOCAL = ("num_local_experts", "num_experts")
_ROUTED = ("n_routed_experts",)
_SHARED = "shared_expert_intermediate_size"
FAMILIES = {
    "mixtral": Family(("MixtralForCausalLM",), _LOCAL, "intermediate_size", renormalize=True),
    "qwen2_moe": Family(("Qwen2MoeForCausalLM",), shared=_SHARED),
    "qwen3_moe": Family(("Qwen3MoeForCausalLM",)),
    "qwen3_next": Family(
        ("Qwen3NextForCausalLM",), shared=_SHARED, renormalize=True, hybrid=True, own_head_dim=True
    ),
    "qwen3_5_moe": Family(
        ("Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeForCausalLM"),
        shared=_SHARED,
        renormalize=True,
        hybrid=True,
        own_head_dim=True,
    ),
    "gpt_oss": Family(
        ("GptOssForCausalLM",), _LOCAL, "intermediate_size", renormalize=True, own_head_dim=True
    ),
    "deepseek_v2": Family(("DeepseekV2ForCausalLM",), _ROUTED, mla=True),
    "deepseek_v3": Family(("DeepseekV3ForCausalLM",), _ROUTED, renormalize=True, mla=True),
    "olmoe": Family(("OlmoeForCausalLM",), width="intermediate_size"),
}
