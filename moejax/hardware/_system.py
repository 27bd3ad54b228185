"""GPU, link and the system of several GPUs that serves a model."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np

from moejax._checks import as_float
from moejax._status import is_traced
from moejax._typing import FloatLike, FloatScalar, IntScalar
from moejax.hardware._fields import (
    COUNT,
    EFFICIENCY,
    NON_NEGATIVE,
    POSITIVE,
    AbstractHardware,
    one_of,
    whole,
)
from moejax.hardware._pim import AbstractPIM


class GPU(AbstractHardware):
    """Peak rates of one GPU and the share of them its kernels reach.

    **Arguments:**

    - `flops_per_s`: dense 16-bit peak, FLOP/s.
    - `flops_per_s_8bit`: dense 8-bit peak, FLOP/s; used where activations have at most 8 bits.
    - `hbm_bandwidth`: B/s over the external interface of all HBM stacks.
    - `hbm_bytes`: HBM capacity, bytes.
    - `compute_efficiency`, `bandwidth_efficiency`: reachable share of the peaks, in (0, 1]. Sieve
        (arXiv 2605.11277) takes 1; AttAcc's public simulator uses 0.80 and 0.85.
    """

    flops_per_s: FloatScalar = eqx.field(converter=as_float, metadata=POSITIVE)
    flops_per_s_8bit: FloatScalar = eqx.field(converter=as_float, metadata=POSITIVE)
    hbm_bandwidth: FloatScalar = eqx.field(converter=as_float, metadata=POSITIVE)
    hbm_bytes: FloatScalar = eqx.field(converter=as_float, metadata=POSITIVE)
    compute_efficiency: FloatScalar = eqx.field(
        converter=as_float, default=1.0, metadata=EFFICIENCY
    )
    bandwidth_efficiency: FloatScalar = eqx.field(
        converter=as_float, default=1.0, metadata=EFFICIENCY
    )
    name: str = eqx.field(static=True, default="custom")

    @property
    def effective_bandwidth(self) -> FloatScalar:
        """B/s that kernels reach."""
        return self.hbm_bandwidth * self.bandwidth_efficiency

    def effective_flops_per_s(self, activation_bits: FloatLike) -> FloatScalar:
        """FLOP/s that kernels reach. A GEMM runs at the 8-bit rate where its activations have at
        most 8 bits; narrower weights alone are widened first and save no arithmetic."""
        narrow = jnp.asarray(activation_bits) <= 8
        return jnp.where(narrow, self.flops_per_s_8bit, self.flops_per_s) * self.compute_efficiency


class Link(AbstractHardware):
    """The network of one GPU.

    **Arguments:**

    - `bandwidth`: B/s per direction.
    - `latency`: seconds per communication step.
    - `dedup`: whether a token that several experts of one remote GPU want is sent there once
        (otherwise once per expert, as the Duplex simulator counts).
    """

    bandwidth: FloatScalar = eqx.field(converter=as_float, metadata=POSITIVE)
    latency: FloatScalar = eqx.field(converter=as_float, metadata=NON_NEGATIVE)
    dedup: bool = eqx.field(static=True, default=True, metadata=one_of(True, False))


class System(AbstractHardware):
    """`num_gpus` equal GPUs, each reaching only the PIM inside its own HBM.

    **Arguments:**

    - `gpu`, `pim`, `link`: the parts, per GPU.
    - `num_gpus`: static, because expert placement has that shape.
    - `attention_tp`: GPUs that share one attention block by tensor parallelism; 1 is data-parallel
        attention. Divides `num_gpus`.
    - `scheduler_time`: seconds the partition decision takes; 20 us for a DeepSeek-R1 layer on a
        B200 (Sieve, arXiv 2605.11277).
    - `name`: for reports.
    """

    gpu: GPU
    pim: AbstractPIM
    link: Link
    num_gpus: int = eqx.field(static=True)
    attention_tp: IntScalar = eqx.field(converter=whole, default=1, metadata=COUNT)
    scheduler_time: FloatScalar = eqx.field(
        converter=as_float, default=20e-6, metadata=NON_NEGATIVE
    )
    name: str = eqx.field(static=True, default="custom")

    def __check_init__(self) -> None:
        count = self.num_gpus
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ValueError(f"System.num_gpus = {count!r}: allowed is an int of at least 1")
        shared = self.attention_tp
        if not is_traced(shared) and np.any(np.remainder(count, np.maximum(shared, 1))):
            raise ValueError(
                f"System.attention_tp = {self.attention_tp}: allowed is a divisor of {count} GPUs"
            )
