"""What a choice costs, given the load that earlier choices have left behind.

A source is a pytree of arrays with three methods that know one problem and no batch. The gate
subtracts `cost`, in score units, from the selection scores of each token (or chunk of tokens),
chooses, and hands the choices to `update`. Write your own as in `AbstractCostSource`.
"""

import abc
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp

from moejax._status import Status, merge
from moejax._typing import Array, Bool, Float, Int, IntScalar


class Chosen(NamedTuple):
    """The choices of one chunk of tokens, with a trailing axis of lanes: what was chosen by which
    rank of which token, which tokens are valid (one lane or all), and each token's experts."""

    expert_ids: Int[Array, "top_k chunk lanes"]
    valid: Bool[Array, "chunk lanes"]
    members: Bool[Array, "experts chunk lanes"]

    @property
    def counts(self) -> Int[Array, "experts lanes"]:
        """Valid tokens of each expert."""
        return (self.members & self.valid).sum(1)


class InLanes(NamedTuple):
    """`cost(load)` and `update(load, chosen)` of a source for arrays with a trailing axis of
    lanes."""

    cost: Callable[[Any], Array]
    update: Callable[[Any, Chosen], Any]


class AbstractCostSource(eqx.Module):
    """A running cost of experts.

    All fields are arrays (or modules of arrays). A load is any pytree of floating arrays that adds
    up: the load of two sets of choices is the sum of their loads. For example, experts that cost
    0.01 for each token they already have:

    ```python
    class Crowding(AbstractCostSource):
        price: jax.Array  # [experts]

        def initial_load(self):
            return jnp.zeros_like(self.price)

        def cost(self, load):
            return self.price * load

        def update(self, load, counts):
            return load + counts
    ```
    """

    @abc.abstractmethod
    def initial_load(self) -> Any:
        """The load before the first token."""

    @abc.abstractmethod
    def cost(self, load: Any) -> Float[Array, " experts"]:
        """Cost in score units of one more token for each expert; lower is better."""

    @abc.abstractmethod
    def update(self, load: Any, counts: Float[Array, " experts"]) -> Any:
        """The load after `counts` [experts] more tokens."""

    def status(self, load: Any) -> IntScalar:
        """What is wrong with the source or a load of it; nothing by default."""
        return jnp.int32(Status.OK)

    def in_lanes(self, lanes: int) -> InLanes:
        """Both methods where every array, also of this source, has a trailing axis of `lanes` or
        of one. Only a source that wants to be fast brings its own."""
        axes = jax.tree.map(lambda x: -1 if x.shape[-1] == lanes else None, self)
        mine = jax.tree.map(lambda x: x if x.shape[-1] == lanes else x[..., 0], self)
        cost = jax.vmap(lambda source, load: source.cost(load), (axes, -1), -1)
        update = jax.vmap(lambda source, *rest: source.update(*rest), (axes, -1, -1), -1)
        as_float = lambda counts: counts.astype(jnp.result_type(float))
        return InLanes(
            lambda load: cost(mine, load),
            lambda load, chosen: update(mine, load, as_float(chosen.counts)),
        )


class SummedCosts(AbstractCostSource):
    """Several sources at once: their costs add, each keeps a load of its own.

    Fields: `sources`, a tuple. The load is the tuple of theirs.
    """

    sources: tuple[AbstractCostSource, ...]

    def initial_load(self) -> tuple:
        return tuple(source.initial_load() for source in self.sources)

    def cost(self, load: tuple) -> Float[Array, " experts"]:
        costs = [source.cost(part) for source, part in zip(self.sources, load)]
        return sum(costs[1:], start=costs[0])

    def update(self, load: tuple, counts: Float[Array, " experts"]) -> tuple:
        return tuple(source.update(part, counts) for source, part in zip(self.sources, load))

    def status(self, load: tuple) -> IntScalar:
        return merge(*(source.status(part) for source, part in zip(self.sources, load)))

    def in_lanes(self, lanes: int) -> InLanes:
        inner = [source.in_lanes(lanes) for source in self.sources]

        def cost(load):
            costs = [source.cost(part) for source, part in zip(inner, load)]
            return sum(costs[1:], start=costs[0])

        return InLanes(
            cost,
            lambda load, chosen: tuple(s.update(part, chosen) for s, part in zip(inner, load)),
        )
