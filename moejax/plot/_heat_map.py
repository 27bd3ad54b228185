"""A number over two columns, as colored cells."""

from typing import TYPE_CHECKING, Any

import numpy as np

from moejax.plot._columns import dress_columns, is_log, label_of, tilt
from moejax.plot._style import INK, LABEL, SOFT_INK, TICK, log_ticks, require_matplotlib
from moejax.plot._table import Table, check_unique, column, numbers


if TYPE_CHECKING:
    from matplotlib.axes import Axes


CELL = 0.34  # inches that a number needs


def heat_map(table: Table, ax: "Axes", *, x: str, y: str, value: str, title: str = "") -> "Axes":
    """Draws a number over two columns as colored cells, equally wide whatever their distance.

    **Arguments:**

    - `table`: columns `x`, `y` and `value`; at most one row for each cell. A cell without a row or
        a number is crossed out.

    **Returns:** `ax`, with a color bar, logarithmic where all is above 0 and spans a factor of 10;
    numbers are written into the cells where they have room.

    **Raises:** `ValueError` as `lines`.
    """
    owner = "heat_map"
    require_matplotlib()
    from matplotlib.colors import LogNorm, Normalize

    if len({x, y, value}) < 3:
        raise ValueError(
            f"{owner}: x, y and value are {x}, {y}, {value}: allowed are three columns"
        )
    rows = {name: column(table, name, owner) for name in (x, y)}
    rows |= {value: numbers(table, value, owner)}
    check_unique(rows, (x, y), owner)
    if not np.isfinite(rows[value]).any():
        raise ValueError(f"{owner}: no row has a finite {value}")
    (columns, at_x), (rows_, at_y) = (_places(rows[name]) for name in (x, y))
    if rows[y].dtype.kind in "US":  # text reads from the top
        rows_, at_y = rows_[::-1], len(rows_) - 1 - at_y
    grid = np.full((len(rows_), len(columns)), np.nan)
    grid[at_y, at_x] = rows[value]
    finite = grid[np.isfinite(grid)]
    scale = LogNorm if is_log(finite) else Normalize
    norm = scale(finite.min(), finite.max()) if finite.min() < finite.max() else None
    image = ax.imshow(grid, origin="lower", aspect="auto", cmap="cividis", norm=norm)
    for line, place in np.argwhere(~np.isfinite(grid)):
        ax.text(place, line, "×", ha="center", va="center", color=SOFT_INK, fontsize=TICK)
    if _room(ax) / len(columns) >= CELL and grid.size <= 400:
        _write_cells(ax, grid, image)
    dress_columns(ax, title, f"color: {label_of(value)}", x, y)
    ax.grid(False)
    for axis, words in ((ax.xaxis, columns), (ax.yaxis, rows_)):
        few = np.unique(np.linspace(0, len(words) - 1, min(len(words), 12)).round().astype(int))
        axis.set_ticks(few, [words[i] for i in few])
    tilt(ax, columns)
    bar = ax.figure.colorbar(image, ax=ax, pad=0.02)
    bar.set_label(label_of(value), fontsize=LABEL, color=INK)
    if isinstance(norm, LogNorm):
        log_ticks(bar.ax.yaxis, finite.min(), finite.max())
    bar.ax.tick_params(which="both", labelsize=TICK, colors=SOFT_INK, length=0)
    bar.outline.set_visible(False)  # pyright: ignore
    return ax


def _room(ax: "Axes") -> float:
    """Inches that the cells share, about: words beside them and the color bar take the rest."""
    place = ax.get_subplotspec()
    columns = 1 if place is None else place.get_gridspec().ncols
    return 0.62 * ax.figure.get_figwidth() / columns  # pyright: ignore


def _places(values: np.ndarray) -> tuple[list[str], np.ndarray]:
    """Words for the cells along an axis, and the cell of each row: numbers sorted, text not."""
    if values.dtype.kind in "US":
        words = list(dict.fromkeys(values.tolist()))
        return words, np.array([words.index(word) for word in values.tolist()])
    distinct, at = np.unique(values, return_inverse=True)
    return [f"{value:.4g}" for value in distinct.tolist()], at


def _write_cells(ax: "Axes", grid: np.ndarray, image: Any) -> None:
    for line, place in np.argwhere(np.isfinite(grid)):
        red, green, blue, _ = image.cmap(image.norm(grid[line, place]))
        dark = 0.3 * red + 0.59 * green + 0.11 * blue < 0.5
        ax.text(
            place, line, f"{grid[line, place]:.3g}", ha="center", va="center",
            color="white" if dark else INK, fontsize=TICK - 1,
        )  # fmt: skip
