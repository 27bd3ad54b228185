"""What a popularity family is fitted to: statistics of batches, published or measured."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from moejax._typing import PRNGKeyArray
from moejax.routing._batch import decode_batch
from moejax.routing._statistics import Bimodality, bimodality, tokens_per_expert
from moejax.routing._trace import RoutingTrace


STATISTICS = ("share_1", "share_2", "share_3_4", "share_le4", "share_more", "active")
"""What a `Target` may ask for: the fields of `Bimodality`, and `share_le4`, the share with N <= 4
(memory-bound in Sieve)."""


@dataclasses.dataclass(frozen=True)
class Target:
    """Statistics of batches of one size, averaged over layers and batches; `None` is not asked for.

    **Arguments:**

    - `batch`: tokens in the batch.
    - the others: as in `STATISTICS`, between 0 and 1.

    **Raises:** `ValueError` for a batch below 1, a value outside [0, 1], or nothing asked for.
    """

    batch: int
    share_1: float | None = None
    share_2: float | None = None
    share_3_4: float | None = None
    share_le4: float | None = None
    share_more: float | None = None
    active: float | None = None

    def __post_init__(self):
        if not isinstance(self.batch, int | np.integer) or self.batch < 1:
            raise ValueError(
                f"Target.batch = {self.batch!r}: allowed is a whole number, at least 1"
            )
        if not self.items():
            raise ValueError(f"Target asks for nothing; name one of {', '.join(STATISTICS)}")
        for statistic, value in self.items():
            if not 0 <= value <= 1:
                raise ValueError(f"Target.{statistic} = {value}: allowed is [0, 1]")

    def items(self) -> list[tuple[str, float]]:
        """The statistics asked for, with their values."""
        values = {name: getattr(self, name) for name in STATISTICS}
        return [(name, float(value)) for name, value in values.items() if value is not None]


def measure(
    trace: RoutingTrace, batches: Sequence[int], *, key: PRNGKeyArray, num_draws: int = 64
) -> list[Target]:
    """The `Bimodality` of a trace as targets: the mean over layers and `num_draws` decode batches.

    Batches above the number of sequences use sequences more than once (`decode_batch`).
    """

    def one(batch: int) -> Target:
        draw = lambda key: decode_batch(trace, batch, key=key, reuse=batch > trace.num_sequences)
        ids = jax.lax.map(draw, jax.random.split(key, num_draws))
        means = mean_bimodality(bimodality(tokens_per_expert(ids, trace.num_experts)))
        return Target(batch, **{name: float(value) for name, value in means._asdict().items()})

    return [one(batch) for batch in batches]


def mean_bimodality(statistics: Bimodality) -> Bimodality:
    """The mean over all layers and batches."""
    return Bimodality(*(jnp.mean(value) for value in statistics))
