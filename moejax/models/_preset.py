"""A published model as cited numbers, and how a `MoEModel` is built from them."""

import dataclasses
import functools
from typing import Any, NamedTuple

from moejax.models._attention import Attention
from moejax.models._base import MoEModel
from moejax.models._precision import Precision
from moejax.models._router import Router


class SourceRow(NamedTuple):
    """One number of a preset and where it comes from. `confidence` is high, medium or low."""

    field: str
    value: Any
    source: str
    confidence: str
    note: str = ""


def _cite(
    prefix: str, source: str, confidence: str = "high", note: str = "", /, **values: Any
) -> tuple[SourceRow, ...]:
    return tuple(
        SourceRow(prefix + field, value, source, confidence, note)
        for field, value in values.items()
    )


cite = functools.partial(_cite, "")
cite_attention = functools.partial(_cite, "attention.")
cite_router = functools.partial(_cite, "router.")


def cite_published(
    source: str, total_b: float, active_b: float, *, checked: bool = False
) -> tuple[SourceRow, ...]:
    """Headline parameter counts in units of 1e9; `checked` where the source was looked up."""
    how = ("high", "") if checked else ("medium", "quoted from general knowledge, not looked up")
    return cite(source, *how, published_total_b=total_b, published_active_b=active_b)


def cite_softmax_router(
    source: str, position: str, renormalize: bool, **more: Any
) -> tuple[SourceRow, ...]:
    """A router that is not limited to groups of experts."""
    rows = cite_router(source, score="softmax", softmax_position=position)
    rows += cite_router(source, renormalize_topk=renormalize, group_limited=False)
    return rows + cite_router(source, **more)


_COUNTED = ("layers", "hidden", "moe_intermediate", "routed_experts", "top_k", "vocab")
_CONFIDENCES = ("low", "medium", "high")
_COUNTING = (
    "derived by counting weight matrices (norms, biases, vision tower and MTP head excluded)"
)


def preset(name: str, hf_id: str, *groups: tuple[SourceRow, ...]) -> "ModelPreset":
    """A `ModelPreset` out of groups of rows."""
    rows = (row for group in groups for row in group)
    paper = "Sieve (arXiv 2605.11277): weights and activations in bf16 unless stated"
    named = cite("Hugging Face model id", hf_id=hf_id)
    return ModelPreset(name, (*named, *rows, *cite(paper, dtype="bfloat16")))


@dataclasses.dataclass(frozen=True)
class ModelPreset:
    """Plain data: every number of a model with its source beside it.

    Nothing is computed, and no JAX array made, before `build` or `sources` is used.

    **Arguments:**

    - `name`: the preset's name.
    - `cited`: published numbers. Fields that `build` does not read are there for the reader.
    """

    name: str
    cited: tuple[SourceRow, ...]

    def build(self, precision: str | Precision = "bf16") -> MoEModel:
        """The model.

        **Arguments:** `precision`: `"bf16"` as in Sieve (arXiv 2605.11277), `"native"` for the
        checkpoint's own format, another named format, or a `Precision`.

        **Raises:** `ValueError` for an unknown precision.
        """
        facts = {row.field: row.value for row in self.cited}
        native = facts.get("native_expert_dtype", facts.get("native_dtype", "bf16"))
        model = MoEModel(
            name=self.name,
            hidden=facts["hidden"],
            moe_intermediate=facts["moe_intermediate"],
            num_experts=facts["routed_experts"],
            top_k=facts["top_k"],
            vocab=facts["vocab"],
            num_shared_experts=facts["shared_experts"],
            shared_intermediate=facts["shared_intermediate_total"],
            layers=_layers(facts),
            num_dense_layers=facts.get("first_k_dense", 0),
            dense_intermediate=facts.get("dense_intermediate", 0),
            router=_router(facts),
            precision=Precision.bf16(),
            native_precision=Precision.named(native),
        )
        return model.with_precision(precision)

    @property
    def sources(self) -> tuple[SourceRow, ...]:
        """Every number as (field, value, source, confidence, note), derived ones at the end."""
        return self.cited + self._derived()

    def _derived(self) -> tuple[SourceRow, ...]:
        model = self.build()
        counted = [row.confidence for row in self.cited if row.field in _COUNTED]
        weakest = min(counted, key=_CONFIDENCES.index)
        tables = "both embedding and output tables counted as active"
        return (
            *cite(_COUNTING, weakest, total_params=model.num_parameters),
            *cite(_COUNTING, weakest, tables, active_params=model.num_active_parameters),
            *cite("2*total_params", weakest, weight_bytes_bf16=2 * model.num_parameters),
            *cite("3*hidden*moe_intermediate", weakest, expert_params=model.expert_weights),
            *cite("6*hidden*moe_intermediate", weakest, expert_bytes_bf16=2 * model.expert_weights),
        )


def _layers(facts: dict[str, Any]) -> tuple[Attention, ...]:
    attention = {
        field.removeprefix("attention."): value
        for field, value in facts.items()
        if field.startswith("attention.")
    }
    kinds = {"full": _full_attention(attention)}
    if "sliding_window" in attention:
        kinds["sliding"] = dataclasses.replace(kinds["full"], window=attention["sliding_window"])
    if "linear_key_heads" in attention:
        kinds["linear"] = Attention(
            "linear",
            key_heads=attention["linear_key_heads"],
            value_heads=attention["linear_value_heads"],
            key_head_dim=attention["linear_key_head_dim"],
            value_head_dim=attention["linear_value_head_dim"],
        )
    pattern = attention.get("layer_pattern", ("full",))
    return tuple(kinds[pattern[layer % len(pattern)]] for layer in range(facts["layers"]))


def _full_attention(attention: dict[str, Any]) -> Attention:
    if attention["type"] == "mla":
        return Attention(
            "mla",
            heads=attention["heads"],
            q_rank=attention["q_lora_rank"],
            kv_rank=attention["kv_lora_rank"],
            rope_dim=attention["qk_rope_head_dim"],
            nope_dim=attention["qk_nope_head_dim"],
            value_dim=attention["v_head_dim"],
        )
    return Attention(
        "gqa",
        heads=attention["heads"],
        kv_heads=attention["kv_heads"],
        head_dim=attention["head_dim"],
        output_gate=attention.get("q_gate", False),
    )


def _router(facts: dict[str, Any]) -> Router:
    return Router(
        score=facts["router.score"],
        softmax_position=facts["router.softmax_position"],
        renormalize=facts["router.renormalize_topk"],
        num_groups=facts.get("router.n_group", 1),
        top_groups=facts.get("router.topk_group", 1),
        scaling=facts.get("router.routed_scaling_factor", 1.0),
    )
