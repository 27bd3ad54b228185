"""Link Balance: which endpoint of the network each logical node becomes."""

from typing import Literal

import jax.numpy as jnp

from moejax._checks import as_float, check_non_negative, lookup
from moejax._status import Status, is_traced
from moejax._typing import Array, Float, FloatLike, Int, PRNGKeyArray
from moejax.noc import SWITCHING, Switching, Topology
from moejax.placement._costs import NodeCosts, check_unbatched, check_values
from moejax.placement._link_kernel import LinkBalance, link_search
from moejax.placement._link_traffic import MODES
from moejax.placement._statistics import Statistics
from moejax.placement._swap_search import ROUND
from moejax.placement._validate import check_count, check_position, check_share


DISPATCH = {"double": False, "mirror": True}
TRAFFIC = {"sampled": False, "expected": True}


def link_balance(
    share: Float[Array, "experts nodes"],
    topology: Topology,
    statistics: Statistics,
    costs: NodeCosts,
    *,
    key: PRNGKeyArray,
    start: Int[Array, " nodes"] | None = None,
    switching: Switching = "store_and_forward",
    dispatch: Literal["double", "mirror"] = "double",
    traffic: Literal["sampled", "expected"] = "sampled",
    message_bytes: FloatLike | None = None,
    num_batches: int = 16,
    num_tokens: int | None = None,
    chains: int = 4,
    steps: int = 8000,
    polish: int = 0,
    max_messages: int | None = None,
) -> LinkBalance:
    """Maps the logical nodes of a placement to the endpoints of a network, one to one.

    The problem of HD-MoE (arXiv 2509.09420) and HDA-MoE (arXiv 2609.08682), section V, called Link
    Balance there. Batches of tokens are drawn once and are the same for every map. Several
    chains anneal over swaps on the time of the busiest link, then the simulator judges the best map
    of each, and the start, on batches of their own. Never worse than the start on these.

    **Arguments:**

    - `share`: [experts, nodes], rows sum to 1; as many nodes as the topology has endpoints (columns
        of zeros are idle nodes).
    - `topology`: any `moejax.noc.Topology`; its bandwidths count, `costs.bandwidth` does not.
    - `statistics`: of one layer, what batches are drawn from.
    - `costs`: read for `batch` and `bytes_per_token`.
    - `key`: draws batches and swaps.
    - `start`: a map to improve, default node n on endpoint n. One chain starts from it, the
        others at random.
    - `switching`: as in `moejax.noc.simulate`; decides the choice among candidates.
    - `dispatch`: ``"double"`` takes it to be as long as the gather, ``"mirror"`` routes it.
    - `traffic`: ``"sampled"`` minimizes the mean over drawn batches, ``"expected"`` the time
        of the mean traffic (one message for each group, sender and possible aggregator, so
        keep `max_groups` of the statistics small).
    - `message_bytes`: B of one partial result of a token; default `costs.bytes_per_token`. The
        papers' simulations take h, a quarter of the 4 h of their estimate.
    - `num_batches`: for the search, and as many again for the judgement.
    - `num_tokens`: of one batch, static; default `costs.batch`, rounded. Messages are scaled so
        that a batch carries the bytes of `costs.batch` tokens. Needed where costs are traced.
    - `chains`, `steps`: independent searches, and swaps that each tries (in rounds of 250).
    - `polish`: further swaps that the simulator itself decides on. Worth its time where long hop
        latencies make the makespan more than the time of the busiest link.
    - `max_messages`: static room for the messages of one batch, default tokens * nodes. Less room
        makes the judgement faster; too little is `Status.TOO_MANY_MESSAGES`.

    **Returns:** a `LinkBalance`. One compilation serves all layers, rates and keys; layers are
    batched by `jax.vmap` over `share`, `statistics` and `key`.

    **Raises:** `ValueError` for shapes that disagree, options that do not exist, counts below 1,
    and, eagerly, impossible shares, statistics, costs or a start that is no permutation. Under
    tracing these are a `status`.
    """
    where = "link_balance"
    share = as_float(share)
    check_share(where, share, statistics.num_experts)
    check_unbatched(statistics, costs)
    check_values(where, statistics, costs)
    num_nodes = share.shape[1]
    if num_nodes != topology.num_nodes:
        raise ValueError(
            f"{where}: share has {num_nodes} nodes, the {topology.kind} {topology.num_nodes} "
            "endpoints: allowed is as many (columns of zeros are idle nodes)"
        )
    start = jnp.arange(num_nodes) if start is None else jnp.asarray(start)
    check_position(where, start, num_nodes)
    if not is_traced(start) and jnp.any(start < 0):
        raise ValueError(f"{where}: start has a node without a place: allowed is a permutation")
    if message_bytes is None:
        message_bytes = costs.bytes_per_token
    check_non_negative(where, "message_bytes", message_bytes)
    for name, count in dict(num_batches=num_batches, chains=chains, steps=steps).items():
        check_count(where, name, count)
    lookup("switching", switching, SWITCHING)
    options = dict(
        mirrored=lookup("dispatch", dispatch, DISPATCH),
        expected=lookup("traffic", traffic, TRAFFIC),
        num_batches=num_batches,
        num_tokens=_tokens(costs, num_tokens),
        chains=chains,
        rounds=-(-steps // ROUND),
        polish_swaps=check_count(where, "polish", polish, low=0),
        polish_mode=switching if polish else MODES[0],
        max_messages=max_messages,
    )
    mode = jnp.int32(MODES.index(switching))
    bytes_and_start = as_float(message_bytes), start.astype(jnp.int32)
    found = link_search(share, topology, statistics, costs, *bytes_and_start, mode, key, **options)
    if not is_traced(found) and int(found.status) not in (Status.OK, Status.DEAD_LINK):
        raise ValueError(f"{where}: {Status(int(found.status)).message}")
    return found


def _tokens(costs: NodeCosts, num_tokens: int | None) -> int:
    if num_tokens is not None:
        return check_count("link_balance", "num_tokens", num_tokens)
    if is_traced(costs.batch):
        raise ValueError("link_balance: num_tokens must be given where costs are traced")
    return max(1, round(float(costs.batch)))
