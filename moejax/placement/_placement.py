"""A placement of a whole model: every layer's shares, and where its nodes lie on the network."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np

from moejax._checks import as_float
from moejax._status import is_traced
from moejax._typing import Array, Float, Int
from moejax.placement._validate import check_position, check_share


class Placement(eqx.Module):
    """Which node of the network holds which share of which expert.

    **Arguments:**

    - `share`: [layers, experts, nodes], rows sum to 1; nodes are logical ones.
    - `node_position`: int [layers, nodes], the endpoint of the network that each logical node is.
        Default: endpoint n for node n.
    - `all_reduce`: static. Every node works on every token, so that sums of all nodes are added up
        by all-reduces instead of being gathered: tensor parallelism.
    - `name`: static, for reports.

    **Raises:** `ValueError` for shapes that disagree, rows that do not sum to 1, and positions that
    are no permutation.
    """

    share: Float[Array, "layers experts nodes"] = eqx.field(converter=as_float)
    node_position: Int[Array, "layers nodes"]
    all_reduce: bool = eqx.field(static=True)
    name: str = eqx.field(static=True)

    def __init__(
        self, share, node_position=None, *, all_reduce: bool = False, name: str = "custom"
    ):
        self.share = as_float(share)
        if self.share.ndim != 3:
            raise ValueError(
                f"Placement.share has shape {self.share.shape}, expected [layers, experts, nodes]"
            )
        layers, _, nodes = self.share.shape
        if node_position is None:
            node_position = jnp.broadcast_to(jnp.arange(nodes, dtype=jnp.int32), (layers, nodes))
        self.node_position = jnp.asarray(node_position, jnp.int32)
        if self.node_position.shape != (layers, nodes):
            raise ValueError(
                f"Placement.node_position has shape {self.node_position.shape}, expected "
                f"{(layers, nodes)}, [layers, nodes]"
            )
        self.all_reduce, self.name = all_reduce, name
        if not is_traced(self.share, self.node_position):
            for layer in range(layers):
                check_share("Placement", np.asarray(self.share[layer]))
                check_position("Placement", np.asarray(self.node_position[layer]), nodes)

    @property
    def num_layers(self) -> int:
        """MoE layers."""
        return self.share.shape[0]

    @property
    def num_nodes(self) -> int:
        """Nodes, the same for all layers."""
        return self.share.shape[2]
