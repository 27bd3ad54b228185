"""The network-on-chip: topologies, the traffic of experts on them, and how long it takes.

Reading guide:

- `_topology`: `Topology`, rates to sweep beside the route tables that the simulator runs on.
- `_assemble`: how the tables come from routes: dependency layers and ranks of remaining paths.
- `_grids`: `mesh` and `torus`. `_fat_tree`: `fat_tree`. `_graphs`: `custom`, and `ring`,
  `fully_connected`, `mesh_3d` built on it.
- `_messages`, `_traffic`: `Messages`, and those that a batch of expert choices sends;
  `_collectives`, `_broadcast`: those of all-reduces and of weights sent ahead.
- `_simulate`: `simulate` and `bookings`; `_run` goes level by level, `_queue` serves one level,
  `_order` sorts it, `_settle` iterates circles of links to their fixed point.
- `_load`: `link_load_bound`, the incidence algebra that needs no simulation; `_communication`,
  `_gamma`: the papers' linear estimate and the factor that corrects it.
- `_tables`: reports, links and time-lines as columns with units, for pictures and files.

Shapes and routes are static, rates are traced: one compilation serves all bandwidths of a
topology. SI units throughout.
"""

from moejax.noc._broadcast import broadcast as broadcast
from moejax.noc._collectives import Collective as Collective
from moejax.noc._collectives import all_gather_time as all_gather_time
from moejax.noc._collectives import all_to_all as all_to_all
from moejax.noc._collectives import all_to_all_time as all_to_all_time
from moejax.noc._collectives import collective_time as collective_time
from moejax.noc._collectives import direct_all_reduce as direct_all_reduce
from moejax.noc._collectives import reduce_scatter_time as reduce_scatter_time
from moejax.noc._collectives import ring_all_gather as ring_all_gather
from moejax.noc._collectives import ring_all_reduce as ring_all_reduce
from moejax.noc._collectives import ring_all_reduce_time as ring_all_reduce_time
from moejax.noc._collectives import ring_reduce_scatter as ring_reduce_scatter
from moejax.noc._communication import ESTIMATED_BYTES_PER_ELEMENT as ESTIMATED_BYTES_PER_ELEMENT
from moejax.noc._communication import SIMULATED_BYTES_PER_ELEMENT as SIMULATED_BYTES_PER_ELEMENT
from moejax.noc._communication import TP_ESTIMATES_CONFERENCE as TP_ESTIMATES_CONFERENCE
from moejax.noc._communication import TP_ESTIMATES_JOURNAL as TP_ESTIMATES_JOURNAL
from moejax.noc._communication import communication_time as communication_time
from moejax.noc._communication import estimate as estimate
from moejax.noc._communication import tensor_parallel_time as tensor_parallel_time
from moejax.noc._communication import token_bytes as token_bytes
from moejax.noc._fat_tree import fat_tree as fat_tree
from moejax.noc._gamma import GammaFit as GammaFit
from moejax.noc._gamma import calibrate_gamma as calibrate_gamma
from moejax.noc._graphs import custom as custom
from moejax.noc._graphs import fully_connected as fully_connected
from moejax.noc._graphs import mesh_3d as mesh_3d
from moejax.noc._graphs import ring as ring
from moejax.noc._grids import mesh as mesh
from moejax.noc._grids import torus as torus
from moejax.noc._load import link_load_bound as link_load_bound
from moejax.noc._messages import Messages as Messages
from moejax.noc._run import Bookings as Bookings
from moejax.noc._simulate import SWITCHING as SWITCHING
from moejax.noc._simulate import LinkReport as LinkReport
from moejax.noc._simulate import Switching as Switching
from moejax.noc._simulate import bookings as bookings
from moejax.noc._simulate import simulate as simulate
from moejax.noc._tables import columns as columns
from moejax.noc._tables import link_rows as link_rows
from moejax.noc._tables import timeline_rows as timeline_rows
from moejax.noc._topology import NO_LINK as NO_LINK
from moejax.noc._topology import Stage as Stage
from moejax.noc._topology import Topology as Topology
from moejax.noc._traffic import HOSTING_SHARE as HOSTING_SHARE
from moejax.noc._traffic import UNPLACED as UNPLACED
from moejax.noc._traffic import expert_traffic as expert_traffic
from moejax.noc._traffic import mirror as mirror
from moejax.noc._traffic import pair_messages as pair_messages
from moejax.noc._traffic import traffic_matrix as traffic_matrix


__all__ = [
    "ESTIMATED_BYTES_PER_ELEMENT",
    "HOSTING_SHARE",
    "NO_LINK",
    "SIMULATED_BYTES_PER_ELEMENT",
    "SWITCHING",
    "TP_ESTIMATES_CONFERENCE",
    "TP_ESTIMATES_JOURNAL",
    "UNPLACED",
    "Bookings",
    "Collective",
    "GammaFit",
    "LinkReport",
    "Messages",
    "Stage",
    "Switching",
    "Topology",
    "all_gather_time",
    "all_to_all",
    "all_to_all_time",
    "bookings",
    "broadcast",
    "calibrate_gamma",
    "collective_time",
    "columns",
    "communication_time",
    "custom",
    "direct_all_reduce",
    "estimate",
    "expert_traffic",
    "fat_tree",
    "fully_connected",
    "link_load_bound",
    "link_rows",
    "mesh",
    "mesh_3d",
    "mirror",
    "pair_messages",
    "reduce_scatter_time",
    "ring",
    "ring_all_gather",
    "ring_all_reduce",
    "ring_all_reduce_time",
    "ring_reduce_scatter",
    "simulate",
    "tensor_parallel_time",
    "timeline_rows",
    "token_bytes",
    "torus",
    "traffic_matrix",
]
