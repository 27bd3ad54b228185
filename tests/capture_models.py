"""Tiny models of all families with random weights, made from their config classes."""

import functools

import pytest


SHAPE = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    num_experts_per_tok=2,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
MLA = dict(
    num_key_value_heads=4,
    n_routed_experts=8,
    moe_intermediate_size=16,
    n_shared_experts=1,
    first_k_dense_replace=1,
    kv_lora_rank=8,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=8,
    n_group=4,
    topk_group=2,
    routed_scaling_factor=1.5,
)
SYMBOLS = "abcdefghijklmnopqrstuvwxyz .,;:'!?-()0123456789\n"
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
LINEAR = dict(
    linear_num_value_heads=4,
    linear_num_key_heads=2,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    layer_types=["linear_attention", "full_attention", "linear_attention"],
)
QWEN = dict(num_experts=8, moe_intermediate_size=16)
FAMILIES = {
    "Mixtral": dict(num_local_experts=8),
    "Qwen2Moe": QWEN | dict(shared_expert_intermediate_size=16, norm_topk_prob=False),
    "Qwen3Moe": QWEN | dict(head_dim=8, norm_topk_prob=True),
    "Qwen3Next": QWEN | LINEAR | dict(shared_expert_intermediate_size=16, head_dim=8),
    "Olmoe": dict(num_experts=8, norm_topk_prob=False),
    "DeepseekV2": MLA | dict(q_lora_rank=None, topk_method="group_limited_greedy"),
    "DeepseekV3": MLA | dict(q_lora_rank=8, norm_topk_prob=True),
    "GptOss": dict(num_local_experts=8, head_dim=8, sliding_window=16, rope_parameters=ROPE),
}


def needs_torch():
    """Skips the module, with a reason, where torch or transformers is not installed."""
    torch = pytest.importorskip("torch", reason="torch is not installed (moejax[capture])")
    pytest.importorskip("transformers", reason="transformers is not installed (moejax[capture])")
    # Two processes of tests and JAX's own threads share the cores already.
    torch.set_num_threads(1)


@functools.cache
def tiny(family, dtype="float32"):
    """A model whose routers and head are decided enough that rounding changes no choice."""
    needs_torch()
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    config = getattr(transformers, f"{family}Config")(**(SHAPE | FAMILIES[family]))
    torch.manual_seed(7)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, weight in [*model.named_parameters(), *model.named_buffers()]:
            if weight.ndim > 1:
                weight.normal_(0, 1 / weight.shape[-1] ** 0.5)
            if "correction_bias" in name:
                weight.normal_(0, 0.2)
            if name.endswith(("gate.weight", "router.weight")) and "shared" not in name:
                weight.mul_(2)
    return model.to(getattr(torch, dtype))


def padded(rows, side="left"):
    """(input_ids, attention_mask) of rows of different length."""
    import torch

    length = max(map(len, rows))
    fill = lambda row, value: [value] * (length - len(row))
    join = lambda row, value: fill(row, value) + row if side == "left" else row + fill(row, value)
    ids = torch.tensor([join(row, 0) for row in rows])
    return ids, torch.tensor([join([1] * len(row), 0) for row in rows])


def save_checkpoint(family, folder):
    """A tiny model with a tokenizer of single letters, as `from_pretrained` reads them."""
    tiny(family).save_pretrained(folder)
    import tokenizers
    import transformers

    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2} | {c: i + 3 for i, c in enumerate(SYMBOLS)}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token=" "))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    special = dict(pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token=" ")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=plain, **special)
    tokenizer.save_pretrained(folder)
