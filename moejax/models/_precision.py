"""Bits per element of weights, activations and KV cache."""

from typing import NamedTuple

import equinox as eqx

from moejax._checks import as_float, check_range, lookup
from moejax._typing import FloatScalar


class Bits(NamedTuple):
    """Plain numbers of a storage format, in the order of `Precision`'s fields."""

    weight: float = 16.0
    expert_weight: float = 16.0
    activation: float = 16.0
    kv: float = 16.0


def block_fp8(rows: int = 128, columns: int = 128) -> Bits:
    """8-bit weights with one 32-bit scale per block; 8.00195 bits for the usual 128 x 128.

    DeepSeek-V3 technical report, section 3.3: activations are quantized on the way into a GEMM but
    stored and sent in bf16, so only the weights are narrower here.
    """
    bits = 8 + 32 / (rows * columns)
    return Bits(weight=bits, expert_weight=bits)


# MXFP4: 4-bit values with a shared 8-bit scale per 32 of them (OCP Microscaling Formats v1.0,
# section 5.2). The gpt-oss checkpoints store only routed experts this way, everything else in bf16.
FORMATS = {
    "bf16": Bits(),
    "fp8": block_fp8(),
    "mxfp4": Bits(expert_weight=4 + 8 / 32),
}


class Precision(eqx.Module):
    """How many bits an element takes: traced arrays, so that widths can be swept in one trace.

    Bytes per element are bits / 8. `expert_weight_bits` covers the routed experts, `weight_bits`
    everything else (attention, routers, shared experts, dense FFNs, embeddings).
    """

    weight_bits: FloatScalar = eqx.field(converter=as_float)
    expert_weight_bits: FloatScalar = eqx.field(converter=as_float)
    activation_bits: FloatScalar = eqx.field(converter=as_float)
    kv_bits: FloatScalar = eqx.field(converter=as_float)
    name: str = eqx.field(static=True, default="custom")

    def __check_init__(self):
        for field in ("weight_bits", "expert_weight_bits", "activation_bits", "kv_bits"):
            check_range("Precision", field, getattr(self, field), 0.0, 64.0, open_low=True)

    @classmethod
    def named(cls, name: str) -> "Precision":
        """The format `name`: `"bf16"`, `"fp8"` or `"mxfp4"`.

        **Raises:** `ValueError` suggesting the nearest name for an unknown one.
        """
        return cls(*lookup("precision", name, FORMATS), name=name)

    @classmethod
    def bf16(cls) -> "Precision":
        """16 bits everywhere, as in Sieve (arXiv 2605.11277)."""
        return cls.named("bf16")
