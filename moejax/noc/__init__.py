"""The network-on-chip: topologies, the traffic of experts on them, and how long it takes.

Reading guide:

- `_topology`: `Topology`, rates to sweep beside the route tables that the simulator runs on.
- `_assemble`: how the tables come from routes: dependency layers and ranks of remaining paths.
- `_grids`: `mesh` and `torus`. `_fat_tree`: `fat_tree`. `_graphs`: `custom`, and `ring`,
  `fully_connected`, `mesh_3d` built on it.
- `_messages`, `_traffic`: `Messages`, and those that a batch of expert choices sends.
- `_simulate`: `simulate` and `bookings`; `_run` goes level by level, `_queue` serves one level,
  `_order` sorts it, `_settle` iterates circles of links to their fixed point.
- `_load`: `link_load_bound`, the incidence algebra that needs no simulation.

Shapes and routes are static, rates are traced: one compilation serves all bandwidths of a
topology. SI units throughout.
"""

from moejax.noc._fat_tree import fat_tree as fat_tree
from moejax.noc._graphs import custom as custom
from moejax.noc._graphs import fully_connected as fully_connected
from moejax.noc._graphs import mesh_3d as mesh_3d
from moejax.noc._graphs import ring as ring
from moejax.noc._grids import mesh as mesh
from moejax.noc._grids import torus as torus
from moejax.noc._load import link_load_bound as link_load_bound
from moejax.noc._messages import Messages as Messages
from moejax.noc._run import Bookings as Bookings
from moejax.noc._simulate import LinkReport as LinkReport
from moejax.noc._simulate import bookings as bookings
from moejax.noc._simulate import simulate as simulate
from moejax.noc._topology import NO_LINK as NO_LINK
from moejax.noc._topology import Stage as Stage
from moejax.noc._topology import Topology as Topology
from moejax.noc._traffic import expert_traffic as expert_traffic


__all__ = [
    "NO_LINK",
    "Bookings",
    "LinkReport",
    "Messages",
    "Stage",
    "Topology",
    "bookings",
    "custom",
    "expert_traffic",
    "fat_tree",
    "fully_connected",
    "link_load_bound",
    "mesh",
    "mesh_3d",
    "ring",
    "simulate",
    "torus",
]
