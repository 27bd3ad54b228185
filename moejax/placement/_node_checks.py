"""What `node_balance` refuses."""

from typing import Any

import numpy as np

from moejax._checks import check_range, nearest
from moejax._status import is_traced
from moejax.noc import Topology
from moejax.placement._costs import NodeCosts, check_unbatched, check_values
from moejax.placement._milp import Limits
from moejax.placement._statistics import Statistics
from moejax.placement._validate import check_count, check_memory_factor, check_time_limit


METHODS = ("search", "milp")


def check_sizes(
    where: str,
    scenarios: list[Statistics],
    num_nodes: int,
    topology: Topology | None,
    method: str,
) -> None:
    check_count(where, "num_nodes", num_nodes)
    if method not in METHODS:
        raise ValueError(
            f"{where}: unknown method {method!r}{nearest(str(method), METHODS)} "
            f"(known: {', '.join(METHODS)})"
        )
    if not scenarios:
        raise ValueError(f"{where}: statistics is an empty sequence: allowed is one or more")
    sizes = {(one.num_experts, one.top_k) for one in scenarios}
    if len(sizes) > 1:
        raise ValueError(
            f"{where}: scenarios have (experts, k) {sorted(sizes)}: allowed is one size for all"
        )
    if topology is not None and topology.num_nodes != num_nodes:
        raise ValueError(
            f"{where}: topology has {topology.num_nodes} nodes: allowed is num_nodes = {num_nodes}"
        )


def check_given(
    where: str,
    scenarios: list[Statistics],
    costs: NodeCosts,
    memory_factor: Any,
    quantile: Any,
    method: str,
) -> None:
    for one in scenarios:
        check_unbatched(one, costs)
        check_values(where, one, costs)
    check_memory_factor(where, memory_factor)
    if quantile is not None and not is_traced(quantile):
        check_range(where, "quantile", quantile, 0.0, 1.0, open_low=False)
    if method == "milp":
        if is_traced(scenarios, costs, memory_factor):
            raise ValueError(f"{where}: method 'milp' runs on the host: allowed is no tracing")
        if quantile is not None:
            raise ValueError(f"{where}: quantile = {quantile}: 'milp' minimizes the mean only")


def limits_of(where: str, time_limit: float, relative_gap: float) -> Limits:
    check_time_limit(where, time_limit)
    if not 0 <= relative_gap < np.inf:
        raise ValueError(f"{where}: relative_gap = {relative_gap}: allowed is 0 or more")
    return Limits(float(time_limit), float(relative_gap))


def effort_of(
    where: str, num_chains: int | None, num_steps: int | None, method: str
) -> dict[str, int | None]:
    """The sizes that were asked for."""
    asked = {"num_chains": num_chains, "num_steps": num_steps}
    for name, value in asked.items():
        if method == "milp" and value is not None:
            raise ValueError(f"{where}: {name} = {value}: 'milp' has a time_limit instead")
    return {name: None if n is None else check_count(where, name, n) for name, n in asked.items()}
