"""Preset numbers with where they come from: plain data, no arrays."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple


class Source(NamedTuple):
    """One number of a preset: SI units, and confidence `high`, `medium` or `low`."""

    field: str
    value: Any
    source: str
    confidence: str
    note: str = ""


def cite(source: str, confidence: str, note: str = "", **values: Any) -> tuple[Source, ...]:
    """Rows of several fields that share a source. `__` in a name stands for a dot."""
    return tuple(
        Source(field.replace("__", "."), value, source, confidence, note)
        for field, value in values.items()
    )


@dataclass(frozen=True)
class HardwarePreset:
    """A GPU or PIM of the registries.

    **Arguments:**

    - `description`: one line.
    - `sources`: rows `(field, value, source, confidence, note)`. Fields starting with `published.`
        are not inputs: claims to compare derived numbers with, or facts the model does not use.
    - `make`: turns the values by field, and those of the GPU it sits in, into a module.
    """

    description: str
    sources: tuple[Source, ...]
    make: Callable[..., Any]

    @property
    def values(self) -> dict[str, Any]:
        """Numbers by field."""
        return {row.field: row.value for row in self.sources}

    def build(self, host: "HardwarePreset | None" = None) -> Any:
        """A `GPU`, or an `AbstractPIM` in the HBM stacks of the GPU `host`.

        Without a host, a PIM has the stacks its own source describes.
        """
        return self.make(self.values, host.values if host else None)
