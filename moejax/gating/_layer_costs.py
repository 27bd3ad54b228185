"""What one MoE layer costs a machine, as few numbers as a gate needs to know of it."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np

from moejax._checks import as_float, check_non_negative, check_positive
from moejax._typing import Array, Float, FloatLike, FloatScalar, Int
from moejax.gating._resource_loads import HOSTING_SHARE
from moejax.gating._validate import check_whole


class LayerCosts(eqx.Module):
    """Time of one layer: the busiest node computes, the most visited one communicates, and the gate
    takes its steps (HD-MoE, arXiv 2509.09420, Eq. 1 and 2; the last is ours).

    Times are traced, and may have leading axes, for instance of settings, to be mapped over.

    **Arguments:**

    - `top_k`: choices of a token (static).
    - `token_time`: s that one node takes for one token of one whole expert, above 0.
    - `visit_time`: s for each token that has an expert on a node, for that node, there and back.
    - `gate_step_time`: s of one sequential step of the gate, which is one chunk of tokens.
    """

    token_time: Float[Array, "..."]
    visit_time: Float[Array, "..."]
    gate_step_time: Float[Array, "..."]
    top_k: int = eqx.field(static=True)

    def __init__(
        self,
        token_time: FloatLike,
        visit_time: FloatLike = 0.0,
        gate_step_time: FloatLike = 0.0,
        *,
        top_k: int,
    ):
        check_whole("top_k", top_k, 1, np.inf)
        check_positive("LayerCosts", "token_time", token_time)
        check_non_negative("LayerCosts", "visit_time", visit_time)
        check_non_negative("LayerCosts", "gate_step_time", gate_step_time)
        times = map(as_float, (token_time, visit_time, gate_step_time))
        # One shape for all, so that `jax.vmap` maps over all.
        self.token_time, self.visit_time, self.gate_step_time = jnp.broadcast_arrays(*times)
        self.top_k = top_k

    @classmethod
    def published(
        cls,
        hidden_size: FloatLike,
        intermediate_size: FloatLike,
        *,
        top_k: int,
        flops_per_s: FloatLike,
        bandwidth: FloatLike,
        gamma: FloatLike = 1.0,
        gate_step_time: FloatLike = 0.0,
    ) -> "LayerCosts":
        """The units of the papers: 2 h IS FLOP for a token in an expert, and 4 h bytes to a node,
        twice, times gamma, the ratio of simulated to estimated communication.

        **Arguments:** sizes in elements, FLOP/s of a node, bytes/s of a link, s.
        """
        return cls(
            2 * hidden_size * intermediate_size / as_float(flops_per_s),
            2 * gamma * 4 * hidden_size / as_float(bandwidth),
            gate_step_time,
            top_k=top_k,
        )

    def ideal_time(self, num_tokens: FloatLike, num_nodes: int) -> FloatScalar:
        """s of a layer whose choices lie evenly on the nodes, each visiting one; no gate."""
        return num_tokens * self.top_k / num_nodes * (self.token_time + self.visit_time)

    def gate_time(self, num_tokens: int, chunk: int) -> FloatScalar:
        """s of a gate that takes `chunk` tokens at a step."""
        return self.gate_step_time * -(-num_tokens // chunk)

    def layer_time(
        self, expert_ids: Int[Array, "tokens top_k"], share: Float[Array, "experts nodes"]
    ) -> FloatScalar:
        """s of a layer with these choices, without a gate's own time; negative ids are padding.

        Exact; subgradient in `share`, and exact gradient in the costs.
        """
        chosen = jnp.maximum(expert_ids, 0)
        routed = (expert_ids >= 0)[..., None]
        load = jnp.where(routed, share[chosen], 0).sum((0, 1)).max()
        visited = jnp.any(routed & (share > HOSTING_SHARE)[chosen], axis=1).sum(0).max()
        return self.token_time * load + self.visit_time * visited
