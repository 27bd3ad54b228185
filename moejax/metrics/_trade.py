"""What is bought for what: settings of a gate compared at equal speed-up, or at equal loss.

Host functions of tables, for sweeps.
"""

from typing import Any

import numpy as np


def best_settings(speedup: Any, loss: Any) -> tuple[np.ndarray, np.ndarray]:
    """The settings that no other beats in both, by rising speed-up and loss.

    **Arguments:** one of each for every setting; those that are not finite are left out.

    **Returns:** (speedup, loss). **Raises:** `ValueError` where none is left, or for shapes that
    disagree.
    """
    fast, lost = np.asarray(speedup, float), np.asarray(loss, float)
    if fast.ndim != 1 or fast.shape != lost.shape:
        raise ValueError(
            f"best_settings: speedup {fast.shape}, loss {lost.shape}: allowed is a row"
        )
    known = np.isfinite(fast) & np.isfinite(lost)
    if not known.any():
        raise ValueError("best_settings: no setting has a finite speedup and loss")
    order = np.lexsort((lost[known], -fast[known]))
    fast, lost = fast[known][order], lost[known][order]
    # From the fastest on: what is slower has to lose less than all before.
    best = np.r_[True, lost[1:] < np.minimum.accumulate(lost)[:-1]]
    return fast[best][::-1], lost[best][::-1]


def loss_at(speedup: Any, loss: Any, wanted: float) -> float:
    """The loss at which the best settings, joined by straight lines, reach a speed-up.

    **Arguments, raises:** as `best_settings`. **Returns:** the loss of the slowest where that is
    faster than `wanted`, and NaN where none is so fast.
    """
    fast, lost = best_settings(speedup, loss)
    return float(np.interp(wanted, fast, lost, right=np.nan))


def speedup_at(speedup: Any, loss: Any, wanted: float) -> float:
    """The speed-up that the best settings, joined by lines in the logarithm of the loss, have at a
    loss above 0.

    **Arguments, raises:** as `best_settings`. **Returns:** NaN below the smallest loss above 0 and
    beyond the largest.
    """
    fast, lost = best_settings(speedup, loss)
    there = lost > 0
    if not there.any() or not wanted > 0:
        return float("nan")
    logs = np.log(lost[there])
    return float(np.interp(np.log(wanted), logs, fast[there], left=np.nan, right=np.nan))
