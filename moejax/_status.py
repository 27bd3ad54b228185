"""Status codes: how a result says, under `jax.jit` and `jax.vmap`, that its input made no sense.

Called eagerly, moejax raises `ValueError`. Under tracing nothing can be raised for one row of a
batch, so results carry an int32 ``status``: 0 means fine, anything else is a `Status`, and the
floating-point fields beside it are NaN (infinite for `Status.DEAD_LINK`, and the best found
for `Status.STOPPED_EARLY`).
"""

import enum

import jax
import jax.core
import jax.numpy as jnp

from moejax._typing import BoolScalar, IntScalar


class Status(enum.IntEnum):
    """What went wrong. Larger codes win when the results of several layers are merged."""

    OK = 0
    TOO_MANY_TOKENS = 1
    COUNT_BEYOND_TABLE = 2
    EMPTY_BATCH = 3
    BATCH_ABOVE_MAX = 4
    NEGATIVE_COUNT = 5
    INVALID_ROUTING = 6
    BAD_RATE = 7
    BAD_COST = 8
    INVALID_NODE = 9
    NEGATIVE_BYTES = 10
    DEAD_LINK = 11
    TOO_MANY_MESSAGES = 12
    NOT_CONVERGED = 13
    BAD_SHARE = 14
    BAD_POSITION = 15
    INFEASIBLE_MEMORY = 16
    BAD_SCORE = 17
    STOPPED_EARLY = 18
    OUT_OF_MEMORY = 19

    @property
    def message(self) -> str:
        """One sentence for people."""
        return _MESSAGES[self]


_MESSAGES = {
    Status.OK: "okay",
    Status.TOO_MANY_TOKENS: "the tokens of all experts add up to more than max_total_tokens",
    Status.COUNT_BEYOND_TABLE: "an expert has more tokens than the PIM time table covers",
    Status.EMPTY_BATCH: "the batch has no tokens",
    Status.BATCH_ABOVE_MAX: "batch is larger than the static max_batch",
    Status.NEGATIVE_COUNT: "an expert has a negative number of tokens",
    Status.INVALID_ROUTING: "an expert id lies outside 0 .. num_experts - 1",
    Status.BAD_RATE: "a bandwidth or FLOP rate is zero, negative or NaN",
    Status.BAD_COST: "a time, size or FLOP count is negative or NaN",
    Status.INVALID_NODE: "a message names a node outside the topology",
    Status.NEGATIVE_BYTES: "the bytes or the start time of a message are negative or not finite",
    Status.DEAD_LINK: "traffic crosses a link without bandwidth: it never arrives",
    Status.TOO_MANY_MESSAGES: "there are more messages or packets than the static room for them",
    Status.NOT_CONVERGED: "the schedule of a cyclic network did not settle within max_iterations",
    Status.BAD_SHARE: "a row of share has a negative entry or does not sum to 1",
    Status.BAD_POSITION: "node_position does not give each node a place of its own",
    Status.INFEASIBLE_MEMORY: "no placement meets the memory cap",
    Status.BAD_SCORE: "a score is NaN or infinite, or fewer than top_k experts can be chosen",
    Status.STOPPED_EARLY: "the solver stopped at its limit and returns the best it found",
    Status.OUT_OF_MEMORY: "weights and caches do not fit into memory",
}


def flag(condition: BoolScalar, code: Status) -> IntScalar:
    """`code` where `condition` holds, `Status.OK` elsewhere. int32, the shape of `condition`."""
    return jnp.where(condition, jnp.int32(code), jnp.int32(Status.OK))


def merge(*statuses: IntScalar) -> IntScalar:
    """The most severe of several statuses, elementwise after broadcasting."""
    merged = jnp.int32(Status.OK)
    for status in statuses:
        merged = jnp.maximum(merged, status)
    return merged


def is_traced(*trees: object) -> bool:
    """Whether any leaf is a tracer, that is, whether values can not be looked at here and now."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(trees))


def raise_if_bad(where: str, status: IntScalar, detail: str = "") -> None:
    """Raises `ValueError` for the first status that is not okay. Does nothing under tracing."""
    if is_traced(status):
        return
    worst = int(jnp.max(status))
    if worst != Status.OK:
        raise ValueError(f"{where}: {Status(worst).message}{'; ' + detail if detail else ''}")
