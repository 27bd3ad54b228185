"""What the layers of a schedule cost: rates of the nodes and sizes of experts and tokens."""

import dataclasses

import equinox as eqx
import jax.numpy as jnp
import numpy as np

from moejax._checks import as_float
from moejax._status import Status, flag, is_traced, merge
from moejax._typing import FloatLike, FloatScalar, IntScalar


_RATES = ("flops_per_s", "bandwidth")


class ScheduleCosts(eqx.Module):
    """What a layer costs, whatever its routing. All fields are traced.

    **Arguments:**

    - `flops_per_token`: FLOP of one token in one whole expert.
    - `flops_per_s`: of one node, FLOP/s.
    - `bytes_per_token`: B of one partial result of one token on the network.
    - `expert_bytes`: B of one expert's weights, the payload of a broadcast.
    - `bandwidth`: B/s of a link, for the closed form of the broadcast time.
    - `alpha`: s to start a chunk of a broadcast at each hop; HD-MoE's (arXiv 2509.09420) 0.1 us.
    - `other_time`: s that each layer spends beside its experts (attention, memory): a broadcast
        may hide in it too.
    """

    flops_per_token: FloatScalar = eqx.field(converter=as_float)
    flops_per_s: FloatScalar = eqx.field(converter=as_float)
    bytes_per_token: FloatScalar = eqx.field(converter=as_float)
    expert_bytes: FloatScalar = eqx.field(converter=as_float)
    bandwidth: FloatScalar = eqx.field(converter=as_float)
    alpha: FloatScalar = eqx.field(converter=as_float, default=1e-7)
    other_time: FloatScalar = eqx.field(converter=as_float, default=0.0)

    @classmethod
    def published(
        cls,
        hidden: int,
        intermediate: int,
        *,
        flops_per_s: FloatLike,
        bandwidth: FloatLike,
        alpha: FloatLike = 1e-7,
        other_time: FloatLike = 0.0,
    ) -> "ScheduleCosts":
        """The units of the papers: 2 h IS FLOP for a token in an expert, as many bytes of weights
        (two matrices of 8 bits), and one byte for each of the h values of a result.

        A SwiGLU expert really takes 6 h IS FLOP and has three matrices.
        """
        size = 2.0 * hidden * intermediate
        return cls(size, flops_per_s, float(hidden), size, bandwidth, alpha, other_time)

    def check(self, owner: str) -> None:
        """Raises `ValueError` for a batched field, a rate that is not above zero, or another number
        that is negative or not finite. Tracers pass."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value.shape != ():
                raise ValueError(
                    f"{owner}: costs.{field.name} has shape {value.shape}: allowed is () (batches: "
                    "jax.vmap)"
                )
            if not is_traced(value) and not _sane(field.name, np.asarray(value)):
                allowed = "above 0" if field.name in _RATES else "finite, 0 or more"
                raise ValueError(f"{owner}: costs.{field.name} = {value:g}: allowed is {allowed}")

    @property
    def status(self) -> IntScalar:
        """`Status.BAD_RATE` or `Status.BAD_COST` for what `check` raises for."""
        codes = []
        for field in dataclasses.fields(self):
            code = Status.BAD_RATE if field.name in _RATES else Status.BAD_COST
            codes.append(flag(~jnp.asarray(_sane(field.name, getattr(self, field.name))), code))
        return merge(*codes)


def _sane(name: str, value):
    above = value > 0 if name in _RATES else value >= 0
    return above & (value < np.inf)
