"""What a MoE layer costs a node, and whether the numbers make sense."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np

from moejax._checks import as_float
from moejax._status import Status, flag, is_traced, merge
from moejax._typing import FloatLike, FloatScalar, IntScalar
from moejax.placement._statistics import Statistics
from moejax.placement._validate import check_count, load_status


RATES = ("flops_per_s", "bandwidth")


class NodeCosts(eqx.Module):
    """What one MoE layer costs a node (HD-MoE, arXiv 2509.09420, Eq. 1-3). All fields are traced.

    **Arguments:**

    - `flops_per_token`: FLOP of one token in one whole expert (2 h IS as published).
    - `flops_per_s`: rate of one node, FLOP/s.
    - `bytes_per_token`: bytes that a node which holds an expert of a token moves for it (4 h as
        published: partial sums of 4 bytes).
    - `bandwidth`: of a link of the network, bytes/s.
    - `batch`: tokens of a step.
    - `gamma`: ratio of simulated to estimated communication.
    """

    flops_per_token: FloatScalar = eqx.field(converter=as_float)
    flops_per_s: FloatScalar = eqx.field(converter=as_float)
    bytes_per_token: FloatScalar = eqx.field(converter=as_float)
    bandwidth: FloatScalar = eqx.field(converter=as_float)
    batch: FloatScalar = eqx.field(converter=as_float)
    gamma: FloatScalar = eqx.field(converter=as_float)

    @classmethod
    def published(
        cls,
        hidden_size: FloatLike,
        intermediate_size: FloatLike,
        *,
        flops_per_s: FloatLike,
        bandwidth: FloatLike,
        batch: FloatLike,
        gamma: FloatLike = 1.0,
    ) -> "NodeCosts":
        """The units of the papers: 2 h IS FLOP for one token in one expert and 4 h bytes.

        A SwiGLU expert really takes 6 h IS FLOP.
        """
        work = 2 * hidden_size * intermediate_size
        return cls(work, flops_per_s, 4 * hidden_size, bandwidth, batch, gamma)


def load_time(costs: NodeCosts) -> FloatScalar:
    """Time of a node for a load of 1, in s: batch * flops_per_token / flops_per_s."""
    return costs.batch * (costs.flops_per_token / costs.flops_per_s)


def traffic_time(costs: NodeCosts) -> FloatScalar:
    """Time of a node for all tokens, one direction, in s: gamma * batch * bytes / bandwidth."""
    return costs.gamma * costs.batch * (costs.bytes_per_token / costs.bandwidth)


def compute_comm_ratio(costs: NodeCosts, num_nodes: int, top_k: int) -> FloatScalar:
    """R_cc: compute over communication time of tensor parallelism (HD-MoE, Eq. 12), gamma = 1.

    Equal to BW IS k / (2 D C) in the published units.

    **Raises:** `ValueError` for no nodes or experts.
    """
    nodes = check_count("compute_comm_ratio", "num_nodes", num_nodes)
    share = check_count("compute_comm_ratio", "top_k", top_k) / nodes
    work = share * (costs.flops_per_token / costs.flops_per_s)
    return work / (costs.bytes_per_token / costs.bandwidth)


def compute_bound(costs: NodeCosts, num_nodes: int, top_k: int) -> FloatScalar:
    """Largest `node_load` that HD-MoE allows (its Eq. 11): (1 / R_cc + 1) k / D.

    A node may then cost one tensor parallel computation and one of its communications.
    """
    return (1 / compute_comm_ratio(costs, num_nodes, top_k) + 1) * (top_k / num_nodes)


def statistics_status(statistics: Statistics) -> IntScalar:
    """What is wrong with the values of one layer's statistics."""
    groups = statistics.groups
    return merge(
        load_status(statistics.frequency),
        load_status(statistics.group_frequency),
        flag(jnp.any(groups >= statistics.num_experts), Status.INVALID_ROUTING),
    )


def cost_status(costs: NodeCosts) -> IntScalar:
    """Rates that are not above zero, and other costs that are negative or not finite."""
    codes = []
    for name, value in vars(costs).items():
        rate = name in RATES
        sane = value > 0 if rate else (value >= 0) & (value < jnp.inf)
        codes.append(flag(~jnp.all(sane), Status.BAD_RATE if rate else Status.BAD_COST))
    return merge(*codes)


def check_unbatched(statistics: Statistics, costs: NodeCosts) -> None:
    if statistics.frequency.ndim != 1:
        raise ValueError(
            f"placement: statistics.frequency has shape {statistics.frequency.shape}: allowed is "
            "[experts] (layers: jax.vmap)"
        )
    for name, value in vars(costs).items():
        if value.shape != ():
            raise ValueError(f"placement: costs.{name} has shape {value.shape}: allowed is ()")


def check_values(where: str, statistics: Statistics, costs: NodeCosts) -> None:
    """The eager half of `statistics_status` and `cost_status`. Tracers pass."""
    named: list[tuple[str, Any]] = [(f"costs.{name}", value) for name, value in vars(costs).items()]
    named += [("statistics.frequency", statistics.frequency)]
    named += [("statistics.group_frequency", statistics.group_frequency)]
    for name, value in named:
        if is_traced(value):
            continue
        rate = name.removeprefix("costs.") in RATES
        array = np.asarray(value)
        sane = array > 0 if rate else (array >= 0) & (array < np.inf)
        if not sane.all():
            allowed = "above 0" if rate else "finite, 0 or more"
            raise ValueError(f"{where}: {name} = {array[~sane].flat[0]:g}: allowed is {allowed}")
    if not is_traced(statistics.groups):
        highest = np.asarray(statistics.groups).max()
        if highest >= statistics.num_experts:
            last = statistics.num_experts - 1
            raise ValueError(f"{where}: expert id {highest} in groups: allowed is 0 to {last}")
