"""Shapes of one layer's attention block, and how many weights they imply."""

import dataclasses
from typing import Literal

from moejax._checks import nearest


# For each kind: fields that must be positive, and fields that may be set. `kv_heads` and
# `head_dim` are ignored where a kind has no use for them (MLA shares one latent over all heads).
_NEEDED = {
    "gqa": ("heads", "kv_heads", "head_dim"),
    "mla": ("heads", "kv_rank", "rope_dim", "nope_dim", "value_dim"),
    "linear": ("key_heads", "value_heads", "key_head_dim", "value_head_dim"),
}
_ALLOWED = {"gqa": ("window", "output_gate"), "mla": ("q_rank",), "linear": ()}
_COMMON = ("heads", "kv_heads", "head_dim")

AttentionKind = Literal["gqa", "mla", "linear"]


@dataclasses.dataclass(frozen=True)
class Attention:
    """The attention block of one layer: static and hashable.

    **Arguments:**

    - `kind`: `"gqa"` (grouped-query; multi-head attention is `kv_heads == heads`), `"mla"`
        (multi-head latent attention, DeepSeek-V2 section 2.1) or `"linear"` (gated delta-net).
    - `heads`, `kv_heads`, `head_dim`: query heads, KV heads and their width.
    - `window`: tokens that a sliding layer looks back at; `None` for full attention.
    - `output_gate`: the block also projects a gate as wide as its queries (Qwen3-Next, Qwen3.5).
    - `q_rank`, `kv_rank`, `rope_dim`, `nope_dim`, `value_dim`: MLA's query rank (0 where queries
        are not compressed), KV rank, and the widths per head with and without rotary position, and
        of the values.
    - `key_heads`, `value_heads`, `key_head_dim`, `value_head_dim`: gated delta-net; keys and
        queries share heads and width.

    **Raises:** `ValueError` naming the field where a size is missing, negative, does not divide,
    or belongs to another kind.
    """

    kind: AttentionKind
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    window: int | None = None
    output_gate: bool = False
    q_rank: int = 0
    kv_rank: int = 0
    rope_dim: int = 0
    nope_dim: int = 0
    value_dim: int = 0
    key_heads: int = 0
    value_heads: int = 0
    key_head_dim: int = 0
    value_head_dim: int = 0

    def __post_init__(self):
        if self.kind not in _NEEDED:
            hint = nearest(str(self.kind), _NEEDED)
            raise ValueError(f"Attention.kind = {self.kind!r}{hint} (known: {', '.join(_NEEDED)})")
        needed = _NEEDED[self.kind]
        for name in (field.name for field in dataclasses.fields(self)[1:]):
            value = getattr(self, name)
            if value is None and name == "window":
                continue
            if not isinstance(value, int) or value < 0 or (name == "window" and value == 0):
                raise ValueError(f"Attention.{name} = {value!r}: allowed is a whole number >= 0")
            if name in needed and value == 0:
                raise ValueError(f"Attention.{name} = 0: kind {self.kind!r} needs it above 0")
            if value and name not in (*needed, *_ALLOWED[self.kind], *_COMMON):
                raise ValueError(f"Attention.{name} = {value}: kind {self.kind!r} has no such size")
        self._check_sharing("heads", "kv_heads", "gqa")
        self._check_sharing("value_heads", "key_heads", "linear")

    def _check_sharing(self, many: str, few: str, kind: str) -> None:
        if self.kind == kind and getattr(self, many) % getattr(self, few):
            raise ValueError(
                f"Attention.{few} = {getattr(self, few)}: allowed is a divisor of "
                f"{many} = {getattr(self, many)}"
            )

    def num_weights(self, hidden: int) -> int:
        """Weights of the block, in elements; norms, biases and convolutions are left out.

        With `d` the hidden size: GQA `d h (2 n_q + 2 n_kv)`, plus `d h n_q` with an output gate;
        MLA `d c_q + c_q n_q (h_n + r)` (or `d n_q (h_n + r)` where queries are not compressed)
        `+ d (c + r) + c n_q (h_n + h_v) + n_q h_v d`; gated delta-net
        `d (2 n_k h_k + 2 n_v h_v) + n_v h_v d`, the small decay and beta projections aside.

        **Arguments:** `hidden`: width of the residual stream.
        """
        if self.kind == "gqa":
            gate = self.heads if self.output_gate else 0
            return hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads + gate)
        if self.kind == "linear":
            keys = self.key_heads * self.key_head_dim
            values = self.value_heads * self.value_head_dim
            return hidden * (2 * keys + 3 * values)
        queries = self.heads * (self.nope_dim + self.rope_dim)
        query = self.q_rank * (hidden + queries) if self.q_rank else hidden * queries
        latent = hidden * (self.kv_rank + self.rope_dim)
        expand = self.kv_rank * self.heads * (self.nope_dim + self.value_dim)
        return query + latent + expand + self.heads * self.value_dim * hidden
