"""Several processes: `jax.distributed` where a launcher started them."""

import inspect
import os
from typing import Any

import jax


# Variables that say how many processes a launcher started, with their numbers.
LAUNCHERS = (
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("PMI_SIZE", "PMI_RANK"),
    ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID"),
)

COORDINATOR, OPEN_MPI_4 = "JAX_COORDINATOR_ADDRESS", "OMPI_MCA_orte_hnp_uri"
PATIENCE = 7 * 24 * 3600
"""Seconds that a process waits at its end for the slowest one."""


def join_cluster() -> bool:
    """Joins the other processes of a launcher, before JAX has started.

    Slurm's `srun` and `mpirun` of Open MPI 4 say where the first process is. `mpirun` of Open MPI 5
    and of MPICH need `JAX_COORDINATOR_ADDRESS` (host:port of the first process), and processes that
    were started in any other way `JAX_NUM_PROCESSES` and `JAX_PROCESS_ID` besides.

    **Returns:** whether there are others. Does nothing where a process is alone.

    **Raises:** `ValueError` where the variables do not make sense, or the others do not answer.
    """
    if jax.distributed.is_initialized():
        return jax.process_count() > 1
    for size, rank in LAUNCHERS:
        if size in os.environ and rank in os.environ:
            return _join(os.environ[size], os.environ[rank], size)
    return False


def _join(size: str, rank: str, name: str) -> bool:
    if not (size.isdecimal() and rank.isdecimal() and int(rank) < int(size)):
        raise ValueError(
            f"{name} = {size!r}, process {rank!r}: allowed are numbers, process < {name}"
        )
    if int(size) < 2:
        return False
    options: dict[str, Any] = {}
    if "shutdown_timeout_seconds" in inspect.signature(jax.distributed.initialize).parameters:
        # Whoever is done first waits for the others: when the first process goes, all have to.
        options = dict(shutdown_timeout_seconds=PATIENCE)
    if not (name.startswith("SLURM") or OPEN_MPI_4 in os.environ):
        # JAX finds the first process itself only where the launcher says where it is.
        options |= dict(num_processes=int(size), process_id=int(rank))
        if COORDINATOR not in os.environ:
            raise ValueError(
                f"{name} = {size}, and nothing says where the first process is: set {COORDINATOR}="
                "HOST:PORT, or give each process its --shard and run them one by one"
            )
    try:
        jax.distributed.initialize(**options)
    except RuntimeError as error:
        raise ValueError(f"the other {int(size) - 1} processes do not answer: {error}") from None
    return True
