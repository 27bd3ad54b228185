"""The network-on-chip: topologies, the traffic of experts on them, and how long it takes.

Reading guide:

- `_topology`: `Topology`, rates to sweep beside the route tables that the simulator runs on.
- `_assemble`: how the tables come from routes: dependency layers and ranks of remaining paths.
- `_grids`: `mesh` and `torus`.

Shapes and routes are static, rates are traced: one compilation serves all bandwidths of a
topology. SI units throughout.
"""

from moejax.noc._grids import mesh as mesh
from moejax.noc._grids import torus as torus
from moejax.noc._topology import NO_LINK as NO_LINK
from moejax.noc._topology import Stage as Stage
from moejax.noc._topology import Topology as Topology


__all__ = [
    "NO_LINK",
    "Stage",
    "Topology",
    "mesh",
    "torus",
]
