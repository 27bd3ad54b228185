"""What a processing-in-memory device owes the rest of moejax, and its simplest form."""

from abc import abstractmethod
from typing import TYPE_CHECKING

import equinox as eqx
import jax.numpy as jnp
from equinox import AbstractVar

from moejax._checks import as_float, check_non_negative
from moejax._typing import Array, FloatLike, FloatScalar, IntLike
from moejax.hardware._fields import NON_NEGATIVE, POSITIVE, SHARE, AbstractHardware


class AbstractPIM(AbstractHardware):
    """The PIM of all HBM stacks of one GPU.

    A GEMV uses every channel, so GEMVs run one after another. Subclasses own these numbers:

    - `contention`: in [0, 1]. 0 where GPU loads and PIM run side by side (dual row buffers,
        NeuPIMs), 1 where they exclude each other.
    - `attention_overhead`: decode attention over its roofline time (at least 1; 1.5 by default, a
        choice of moejax, since Sieve does not state it).
    - `turn_time`: seconds per token between the two GEMVs of an expert, while the GPU applies the
        activation function (0: hidden).
    - `internal_bandwidth`: B/s inside all stacks together.
    """

    contention: AbstractVar[FloatScalar]
    attention_overhead: AbstractVar[FloatScalar]
    turn_time: AbstractVar[FloatScalar]

    # A field where it is given, a property where it is derived; type checkers know no such thing.
    if TYPE_CHECKING:

        @property
        def internal_bandwidth(self) -> FloatScalar: ...

    else:
        internal_bandwidth: AbstractVar[FloatScalar]

    @property
    @abstractmethod
    def flops_per_s(self) -> FloatScalar:
        """Peak FLOP/s at 16-bit weights, over all stacks."""

    @abstractmethod
    def gemv_time(
        self,
        outputs: int,
        inputs: int,
        tokens: IntLike,
        *,
        weight_bits: FloatLike,
        activation_bits: FloatLike,
    ) -> FloatScalar:
        """Seconds for `tokens` vectors through one `[outputs, inputs]` matrix on all channels.

        **Arguments:**

        - `outputs`, `inputs`: static shape of the matrix.
        - `tokens`: a scalar, traced or not. 0 tokens take 0 s.
        - `weight_bits`, `activation_bits`: bits per element, traced or not.

        **Returns:** a scalar; NaN where traced numbers make no sense (negative tokens, channels
        that do not divide, tokens beyond a table).
        """

    @abstractmethod
    def fraction(self, num_groups: IntLike) -> "AbstractPIM":
        """The same device with 1/`num_groups` of its channels (experts parallel over channels)."""

    @abstractmethod
    def token_bytes(
        self,
        hidden: int,
        intermediate: int,
        *,
        weight_bits: FloatLike,
        activation_bits: FloatLike,
    ) -> FloatScalar:
        """Bytes over the external HBM bus per token of one expert that runs on PIM.

        At least the vector in and the result out, `2 * hidden` activations (Sieve, arXiv
        2605.11277, T_offchip: intermediate values count).
        """

    def expert_time(
        self,
        hidden: int,
        intermediate: int,
        tokens: IntLike,
        *,
        weight_bits: FloatLike,
        activation_bits: FloatLike,
    ) -> FloatScalar:
        """Seconds for the `tokens` of one gated expert.

        Gate and up share the vector, so they are one `[2 * intermediate, hidden]` GEMV; then comes
        the down projection `[hidden, intermediate]`. `turn_time` is added per token.
        """
        bits = dict(weight_bits=weight_bits, activation_bits=activation_bits)
        up = self.gemv_time(2 * intermediate, hidden, tokens, **bits)
        down = self.gemv_time(hidden, intermediate, tokens, **bits)
        return up + down + tokens * self.turn_time


class RatePIM(AbstractPIM):
    """PIM known by two numbers: internal bandwidth and arithmetic per byte read.

    A matrix is streamed once for every `flop_per_byte` tokens: at 16 bits a weight is 2 bytes and
    does 2 FLOP for a token, so units of 1 FLOP/B (bank PIM) re-read it for every token, and units
    of 8 FLOP/B (logic-die PIM) use it for 8 tokens. The N-token GEMV time is
    `max(weight bytes / internal_bandwidth, 2 * outputs * inputs * N / flops)`.

    Bits: weight bytes follow `weight_bits`, and so does `flops = flops_per_s * 16 / weight_bits`:
    units are fed by the data path, so narrower weights mean more lanes, as in `BankPIM`.
    `activation_bits` plays no part, since vectors are buffered beside the units.

    **Arguments:** `internal_bandwidth` in B/s over all stacks of a GPU, `flop_per_byte` at 16-bit
    weights, and the numbers of `AbstractPIM`.
    """

    internal_bandwidth: FloatScalar = eqx.field(  # pyright: ignore
        converter=as_float, metadata=POSITIVE
    )
    flop_per_byte: FloatScalar = eqx.field(converter=as_float, default=1.0, metadata=POSITIVE)
    contention: FloatScalar = eqx.field(converter=as_float, default=0.0, metadata=SHARE)
    attention_overhead: FloatScalar = eqx.field(converter=as_float, default=1.5, metadata=POSITIVE)
    turn_time: FloatScalar = eqx.field(converter=as_float, default=0.0, metadata=NON_NEGATIVE)

    @property
    def flops_per_s(self) -> FloatScalar:
        """Peak FLOP/s at 16-bit weights."""
        return self.internal_bandwidth * self.flop_per_byte

    def gemv_time(
        self,
        outputs: int,
        inputs: int,
        tokens: IntLike,
        *,
        weight_bits: FloatLike,
        activation_bits: FloatLike,
    ) -> FloatScalar:
        del activation_bits
        check_gemv(outputs, inputs, tokens)
        weights = float(outputs * inputs)
        weight_bits = as_float(weight_bits)
        stream = weights * weight_bits / 8 / self.internal_bandwidth
        compute = 2 * weights * tokens / (self.flops_per_s * 16 / weight_bits)
        return zero_without_tokens(tokens, jnp.maximum(stream, compute))

    def fraction(self, num_groups: IntLike) -> "RatePIM":
        return self.replace(internal_bandwidth=self.internal_bandwidth / num_groups)

    def token_bytes(
        self,
        hidden: int,
        intermediate: int,
        *,
        weight_bits: FloatLike,
        activation_bits: FloatLike,
    ) -> FloatScalar:
        del intermediate, weight_bits
        return 2 * hidden * as_float(activation_bits) / 8


def check_gemv(outputs: int, inputs: int, tokens: IntLike) -> None:
    """Raises `ValueError` for a matrix without elements or a concrete negative token count."""
    for name, size in (("outputs", outputs), ("inputs", inputs)):
        if size < 1:
            raise ValueError(f"gemv_time: {name} = {size}: allowed is 1 or more")
    check_non_negative("gemv_time", "tokens", tokens)


def zero_without_tokens(tokens: IntLike, time: Array) -> FloatScalar:
    """`time`, but 0 for no tokens and NaN for a (traced) negative number of them."""
    tokens = jnp.asarray(tokens)
    return jnp.where(tokens > 0, time, jnp.where(tokens == 0, 0.0, jnp.nan))
