"""Models out of the `config.json` that accompanies a Hugging Face checkpoint."""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from moejax.models._attention import Attention
from moejax.models._base import MoEModel
from moejax.models._hf_families import FAMILIES, Family
from moejax.models._hf_reader import ConfigReader, find_family, load_config
from moejax.models._precision import Bits, Precision, block_fp8
from moejax.models._router import Router


def from_hf_config(
    cfg: Mapping[str, Any] | str | os.PathLike[str],
    *,
    name: str | None = None,
    precision: str | Precision = "bf16",
) -> MoEModel:
    """A model from the `config.json` of a Hugging Face checkpoint.

    Knows the model types `mixtral`, `qwen2_moe`, `qwen3_moe`, `qwen3_next`, `qwen3_5_moe`,
    `gpt_oss`, `deepseek_v2`, `deepseek_v3` and `olmoe`, also inside a `text_config`, and model
    types whose `architectures` entry is one of their classes. Vision towers and
    multi-token-prediction heads are left out. Keys that say how experts are routed fall back to the
    defaults of HF transformers; sizes do not, they must be there.

    **Arguments:**

    - `cfg`: the parsed dict, the path of the file, or the folder that holds it.
    - `name`: for tables; by default the checkpoint's name in the config, the folder's name, or the
        model type.
    - `precision`: `"bf16"`, `"native"` for the format in `quantization_config` (`mxfp4`, `fp8`) or
        `dtype`, another named format, or a `Precision`.

    **Raises:** `ValueError` naming the key for a missing or malformed one, for an unknown model
    type, and for what `MoEModel` cannot represent, such as dense layers between MoE layers.
    """
    raw, found_name = load_config(cfg)
    model_type = find_family(raw, {key: family.classes for key, family in FAMILIES.items()})
    family, reader = FAMILIES[model_type], ConfigReader(raw, model_type)
    dense = _num_dense_layers(reader, family)
    shared, shared_width = _shared_experts(reader, family)
    model = MoEModel(
        name=name or found_name or model_type,
        hidden=reader.size("hidden_size"),
        moe_intermediate=reader.size(family.width),
        num_experts=reader.size(*family.experts),
        top_k=reader.size("num_experts_per_tok", "experts_per_token"),
        vocab=reader.size("vocab_size"),
        num_shared_experts=shared,
        shared_intermediate=shared_width,
        layers=_layers(reader, family),
        num_dense_layers=dense,
        dense_intermediate=reader.size("intermediate_size") if dense else 0,
        router=_router(reader, family),
        precision=Precision.bf16(),
        native_precision=_native_precision(reader),
        tied_embeddings=reader.flag("tie_word_embeddings", False),
    )
    return model.with_precision(precision)


def _num_dense_layers(reader: ConfigReader, family: Family) -> int:
    layers = reader.size("num_hidden_layers")
    first = reader.size("first_k_dense_replace", least=0, default=None if family.mla else 0)
    frequency = reader.size("moe_layer_freq", default=1)
    step = reader.size("decoder_sparse_step", default=1)
    listed = reader.items("mlp_only_layers", ())
    dense = [
        layer < first or layer % frequency > 0 or (layer + 1) % step > 0 or layer in listed
        for layer in range(layers)
    ]
    count = sum(dense)
    if dense != sorted(dense, reverse=True) or count == layers:
        where = [layer for layer, is_dense in enumerate(dense) if is_dense]
        reader.refuse(
            f"dense layers are supported before all MoE layers only, not at {where}",
            "first_k_dense_replace",
            "moe_layer_freq",
            "decoder_sparse_step",
            "mlp_only_layers",
        )
    return count


def _shared_experts(reader: ConfigReader, family: Family) -> tuple[int, int]:
    """Their number and total inner width."""
    if family.mla:
        count = reader.size("n_shared_experts", least=0, null=0)
        return count, count * reader.size(family.width)
    width = reader.size(family.shared, least=0) if family.shared else 0
    return int(width > 0), width


def _layers(reader: ConfigReader, family: Family) -> tuple[Attention, ...]:
    count = reader.size("num_hidden_layers")
    types = reader.items("layer_types", _default_layer_types(reader, family, count))
    if len(types) != count:
        reader.refuse(f"allowed is one entry per layer, {count} in all", "layer_types")
    full = _mla(reader) if family.mla else _gqa(reader, family)
    kinds = {"full_attention": full}
    if "sliding_attention" in types:
        window = reader.size("sliding_window")
        kinds["sliding_attention"] = dataclasses.replace(full, window=window)
    if family.hybrid:
        kinds["linear_attention"] = _linear(reader)
    unknown = [kind for kind in types if kind not in kinds]
    if unknown:
        known = ", ".join(kinds)
        reader.refuse(f"{unknown[0]!r} is unknown here; allowed is {known}", "layer_types")
    return tuple(kinds[kind] for kind in types)


def _default_layer_types(reader: ConfigReader, family: Family, count: int) -> list[str]:
    """What the model class does where the config lists no `layer_types`."""
    if family.hybrid:
        interval = reader.size("full_attention_interval", default=4)
        kinds = ["linear_attention"] * (interval - 1) + ["full_attention"]
    elif reader.family == "gpt_oss":
        kinds = ["sliding_attention", "full_attention"]
    elif reader.family == "mixtral" and "sliding_window" in reader:
        kinds = ["sliding_attention"]
    elif reader.flag("use_sliding_window", False) and "layer_types" not in reader:
        reader.refuse("needs the key 'layer_types' to say which layers slide", "use_sliding_window")
    else:
        kinds = ["full_attention"]
    return [kinds[layer % len(kinds)] for layer in range(count)]


def _gqa(reader: ConfigReader, family: Family) -> Attention:
    hidden, heads = reader.size("hidden_size"), reader.size("num_attention_heads")
    derived = None if family.own_head_dim else hidden // heads
    if derived and "head_dim" not in reader and hidden % heads:
        why = f"without the key 'head_dim' it must divide hidden_size = {hidden}"
        reader.refuse(why, "num_attention_heads")
    return Attention(
        "gqa",
        heads=heads,
        kv_heads=reader.size("num_key_value_heads", null=heads),
        head_dim=reader.size("head_dim", default=derived),
        output_gate=reader.flag("attn_output_gate", family.hybrid),
    )


def _mla(reader: ConfigReader) -> Attention:
    return Attention(
        "mla",
        heads=reader.size("num_attention_heads"),
        q_rank=reader.size("q_lora_rank", least=0, null=0),
        kv_rank=reader.size("kv_lora_rank"),
        rope_dim=reader.size("qk_rope_head_dim"),
        nope_dim=reader.size("qk_nope_head_dim"),
        value_dim=reader.size("v_head_dim"),
    )


def _linear(reader: ConfigReader) -> Attention:
    return Attention(
        "linear",
        key_heads=reader.size("linear_num_key_heads"),
        value_heads=reader.size("linear_num_value_heads"),
        key_head_dim=reader.size("linear_key_head_dim"),
        value_head_dim=reader.size("linear_value_head_dim"),
    )


def _router(reader: ConfigReader, family: Family) -> Router:
    renormalize = reader.flag("norm_topk_prob", family.renormalize)
    if not family.mla:
        position = "after_topk" if reader.family == "gpt_oss" else "before_topk"
        return Router("softmax", position, renormalize)
    v3 = reader.family == "deepseek_v3"
    score = reader.choice("scoring_func", "sigmoid" if v3 else "softmax", ("softmax", "sigmoid"))
    methods = ("greedy", "group_limited_greedy", "noaux_tc")
    method = reader.choice("topk_method", "noaux_tc" if v3 else "greedy", methods)
    grouped = method != "greedy"
    return Router(
        score,  # type: ignore[arg-type]
        "none" if score == "sigmoid" else "before_topk",
        renormalize,
        num_groups=reader.size("n_group", null=1) if grouped else 1,
        top_groups=reader.size("topk_group", null=1) if grouped else 1,
        scaling=reader.number("routed_scaling_factor", 2.5 if v3 else 1.0),
    )


def _native_precision(reader: ConfigReader) -> Precision:
    quantization = reader.get("quantization_config", {})
    method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
    if method == "mxfp4":
        return Precision.named("mxfp4")
    if method == "fp8":
        return Precision(*_fp8(reader, quantization.get("weight_block_size")), name="fp8")
    if quantization:
        why = "supported methods are mxfp4 and fp8; without the key the weights count as plain"
        reader.refuse(why, "quantization_config")
    key = "dtype" if "dtype" in reader else "torch_dtype"
    dtype = reader.choice(key, "bfloat16", ("bfloat16", "float16", "float32"))
    bits = 32 if dtype == "float32" else 16
    return Precision(*(bits,) * 4, name="bf16" if dtype == "bfloat16" else dtype)


def _fp8(reader: ConfigReader, block: Any) -> Bits:
    if block is None:  # one scale for a whole matrix: nothing per weight
        return Bits(weight=8, expert_weight=8)
    sizes = block if isinstance(block, list | tuple) else ()
    if len(sizes) != 2 or not all(isinstance(size, int) and size > 0 for size in sizes):
        reader.refuse("weight_block_size must be two whole numbers", "quantization_config")
    return block_fp8(*sizes)
