"""The PIM cost table: what a scheduler has learnt about expert times on PIM, by token count."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np

from moejax._checks import as_float, check_non_negative, check_range
from moejax._status import is_traced
from moejax._typing import Array, Bool, Float, FloatLike, FloatScalar, Int


class PIMCostTable(eqx.Module):
    """Expert time on PIM by token count, learnt at run time (Sieve, PIM cost table).

    A count that was seen is looked up; any other falls back to a roofline. Updates return a new
    table: the whole run can be a `lax.scan`.

    Fields: `time` [max_tokens + 1] in s, `seen` bool [max_tokens + 1], `roofline_time`
    [max_tokens + 1] in s, `beta` the weight of a new observation.
    """

    time: Float[Array, " counts"]
    seen: Bool[Array, " counts"]
    roofline_time: Float[Array, " counts"]
    beta: FloatScalar

    @classmethod
    def create(
        cls, max_tokens: int, roofline_time: FloatLike | Array, beta: FloatLike = 0.25
    ) -> "PIMCostTable":
        """A table that has seen nothing.

        **Arguments:**

        - `max_tokens`: the largest count the table covers (static).
        - `roofline_time`: s; either a scalar, the time of one token, so that n tokens take n
            times as long, or [max_tokens + 1], the fallback for each count.
        - `beta`: weight of a new observation in (0, 1]; not published, 0.25 by default.

        **Raises:** `ValueError` for `max_tokens` below 1, a fallback of another shape, or a beta
        outside its range.
        """
        if max_tokens < 1:
            raise ValueError(f"max_tokens = {max_tokens}: allowed is 1 or more")
        check_range("PIMCostTable", "beta", beta, 0.0, 1.0, open_low=True)
        check_non_negative("PIMCostTable", "roofline_time", roofline_time)
        fallback = as_float(roofline_time)
        if fallback.ndim == 0:
            fallback = fallback * jnp.arange(max_tokens + 1)
        if fallback.shape != (max_tokens + 1,):
            raise ValueError(
                f"roofline_time has shape {fallback.shape}: allowed are () and ({max_tokens + 1},)"
            )
        seen = jnp.zeros(max_tokens + 1, bool)
        # All in the dtype of the fallback, or the table could not be carried through a scan.
        return cls(jnp.zeros_like(fallback), seen, fallback, as_float(beta).astype(fallback.dtype))

    @property
    def max_tokens(self) -> int:
        """The largest count the table covers."""
        return self.time.shape[0] - 1

    @property
    def times(self) -> Float[Array, " counts"]:
        """The whole table as a policy sees it, [max_tokens + 1] in s."""
        return jnp.where(self.seen, self.time, self.roofline_time)

    def lookup(self, n: Int[Array, "..."]) -> Float[Array, "..."]:
        """Believed time in s of one expert with `n` tokens, any shape.

        **Raises:** `ValueError` for counts outside 0 .. max_tokens; NaN under tracing.
        """
        self._check(n, "lookup")
        n = jnp.asarray(n)
        inside = (n >= 0) & (n <= self.max_tokens)
        return jnp.where(inside, self.times[jnp.clip(n, 0, self.max_tokens)], jnp.nan)

    def update(
        self,
        counts: Int[Array, " experts"],
        observed: Float[Array, " experts"],
        valid: Bool[Array, " experts"],
    ) -> "PIMCostTable":
        """The table after one iteration.

        The observations of one count are averaged; the first ever of a count replaces the
        fallback, a later one moves the entry by `beta` of the difference.

        **Arguments:**

        - `counts`: int [experts], tokens of each expert that was timed.
        - `observed`: [experts], its time in s.
        - `valid`: bool [experts]; only experts that ran on PIM were observed.

        **Raises:** `ValueError` for arrays of different shapes, valid counts outside
        0 .. max_tokens, or valid times that are negative or not finite. Under tracing such an
        entry turns the row of the table that it would have changed (the last one, for a count
        outside) into NaN, which every policy reports as a bad cost.
        """
        counts, valid = jnp.asarray(counts), jnp.asarray(valid, bool)
        observed = as_float(observed).astype(self.time.dtype)
        if not counts.shape == observed.shape == valid.shape:
            raise ValueError(
                f"update: counts {counts.shape}, observed {observed.shape} and valid {valid.shape}:"
                " allowed is one shape for the three"
            )
        self._check(jnp.where(valid, counts, 0), "update")
        sane = (counts >= 0) & (counts <= self.max_tokens) & (observed >= 0)
        sane &= jnp.isfinite(observed)
        if not is_traced(valid, sane) and bool(jnp.any(valid & ~sane)):
            raise ValueError("update: a valid observation is negative or not finite")
        poisoned = jnp.where(valid & ~sane, jnp.nan, jnp.where(valid, observed, 0.0))
        row = jnp.where(counts < 0, self.max_tokens, jnp.clip(counts, 0, self.max_tokens))
        how_many = jnp.zeros_like(self.time).at[row].add(valid.astype(self.time.dtype))
        total = jnp.zeros_like(self.time).at[row].add(poisoned)
        mean = total / jnp.maximum(how_many, 1)
        moved = jnp.where(self.seen, self.time + self.beta * (mean - self.time), mean)
        observed_now = how_many > 0
        return PIMCostTable(
            jnp.where(observed_now, moved, self.time),
            self.seen | observed_now,
            self.roofline_time,
            self.beta,
        )

    def _check(self, counts: Any, where: str) -> None:
        # In NumPy, which cuts no 64-bit number to 32 bits first.
        if is_traced(counts) or np.size(counts) == 0:
            return
        low, high = int(np.min(counts)), int(np.max(counts))
        if low < 0 or high > self.max_tokens:
            raise ValueError(f"{where}: counts {low} to {high}, allowed is 0 to {self.max_tokens}")
