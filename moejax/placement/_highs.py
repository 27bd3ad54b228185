"""The border to HiGHS through SciPy, which is imported on first use."""

from typing import Any

import numpy as np


def highs(
    cost: np.ndarray,
    matrix: Any,
    rows: tuple[np.ndarray, np.ndarray],
    columns: tuple[Any, Any],
    *,
    whole: np.ndarray,
    time_limit: float,
    relative_gap: float,
) -> Any:
    """Minimizes `cost` with `rows` and `columns` between (lowest, highest), some columns `whole`.

    **Returns:** SciPy's `OptimizeResult`; `x` and `mip_dual_bound` may be `None`.
    """
    from scipy import optimize

    # The stubs know single numbers only.
    bounds: Any = optimize.Bounds
    constraint: Any = optimize.LinearConstraint
    return optimize.milp(
        cost,
        constraints=constraint(matrix, *rows),
        integrality=whole,
        bounds=bounds(*columns),
        options={"time_limit": time_limit, "mip_rel_gap": relative_gap},
    )
