"""Near-memory systems: nodes that compute below their own DRAM, joined by a network on chip."""

import math
from collections.abc import Callable
from typing import Any

import equinox as eqx

from moejax._checks import as_float
from moejax._typing import FloatLike, FloatScalar
from moejax.hardware._fields import NON_NEGATIVE, POSITIVE, AbstractHardware, one_of


# How many sizes the shape of each kind of network has.
_DIMENSIONS = {"mesh": 2, "torus": 2, "fat_tree": 3}


def _check_network(owner: str, field: str, value: Any) -> None:
    """A name, or a function: `moejax.serving` calls it."""
    if not callable(value):
        one_of(*_DIMENSIONS)["check"](owner, field, value)


class NMPSystem(AbstractHardware):
    """Equal nodes, each with DRAM stacked on its logic, on a network (HDA-MoE, arXiv 2609.08682,
    section VI-B).

    **Arguments:**

    - `flops_per_s`: of one node, FLOP/s.
    - `dram_bandwidth`: B/s from a node's own DRAM to its logic.
    - `dram_bytes`: capacity of a node's DRAM, bytes.
    - `link_bandwidth`: B/s of one link of the network in one direction.
    - `start_time`: s to start each chunk of a pipelined broadcast at each hop (alpha).
    - `hop_latency`: s that a message takes from one link to the next beside its transfer.
    - `gate_step_time`: s of one sequential step of a hardware-aware gate, which is one chunk of
        tokens scored against one load (`moejax.gating.LayerCosts`).
    - `network`: `"mesh"` or `"torus"` of shape (rows, columns), or `"fat_tree"` of shape (pods,
        leaf switches of a pod, nodes of a leaf switch). Or a network of your own, of shape
        (nodes,): a function of the keywords `bandwidth` and `hop_latency` that gives a
        `moejax.noc.Topology`. Static.
    - `shape`: static; its product is the number of nodes. Node (row, column) is number
        `row * columns + column`; in a fat-tree the nodes of a leaf are neighbors.
    - `name`: for reports.
    """

    flops_per_s: FloatScalar = eqx.field(converter=as_float, metadata=POSITIVE)
    dram_bandwidth: FloatScalar = eqx.field(converter=as_float, metadata=POSITIVE)
    dram_bytes: FloatScalar = eqx.field(converter=as_float, metadata=POSITIVE)
    link_bandwidth: FloatScalar = eqx.field(converter=as_float, metadata=POSITIVE)
    start_time: FloatScalar = eqx.field(converter=as_float, default=1e-7, metadata=NON_NEGATIVE)
    hop_latency: FloatScalar = eqx.field(converter=as_float, default=0.0, metadata=NON_NEGATIVE)
    gate_step_time: FloatScalar = eqx.field(converter=as_float, default=1e-8, metadata=NON_NEGATIVE)
    network: str | Callable[..., Any] = eqx.field(
        static=True, default="mesh", metadata={"check": _check_network}
    )
    shape: tuple[int, ...] = eqx.field(static=True, converter=tuple, default=(4, 8))
    name: str = eqx.field(static=True, default="custom")

    def __check_init__(self) -> None:
        own = callable(self.network)
        sizes, wanted = self.shape, 1 if own else _DIMENSIONS.get(str(self.network))
        whole = all(isinstance(s, int) and not isinstance(s, bool) and s >= 1 for s in sizes)
        # An unknown network has an error of its own.
        if wanted is not None and not (whole and len(sizes) == wanted):
            kind = "network of your own" if own else self.network
            raise ValueError(
                f"NMPSystem.shape = {sizes}: allowed for a {kind} is {wanted} whole numbers of at "
                "least 1"
            )

    @property
    def num_nodes(self) -> int:
        """Nodes that compute."""
        return math.prod(self.shape)

    def roofline_time(self, flops: FloatLike, moved: FloatLike) -> FloatScalar:
        """Seconds for FLOPs and bytes that all nodes share evenly, one after the other: nothing
        overlaps, as in the authors' model."""
        return (flops / self.flops_per_s + moved / self.dram_bandwidth) / self.num_nodes
