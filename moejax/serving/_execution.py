"""How a layer is executed: what overlaps with what, and whether half batches take turns."""

import dataclasses
from typing import Literal

from moejax._checks import lookup


OVERLAPS = ("ideal", "fine", "coarse")
"""Of all work of a layer (Sieve's Eq. 1); of all work between two decisions; and of what the
execution graph allows, task by task."""


_ORDERED = ("halves", "exposed", "early_shared", "early_load", "shared_bus")


@dataclasses.dataclass(frozen=True)
class Execution:
    """How the tasks of a layer are put in order. Static.

    **Arguments:**

    - `overlap`: `"ideal"`, a layer takes `max(communication, GPU, PIM)` (Sieve, arXiv 2605.11277,
        Eq. 1); `"fine"`, the attention block and the experts each take as long as their busiest
        resource; `"coarse"`, the list schedule of the execution graph (`schedule.layer_graph`).
    - `halves`: 1, or 2 for two half batches that take turns, each loading the experts it needs.
        Needs `"fine"` or `"coarse"`.
    - `attention`: `"pim"`, or `"gpu"` for decode attention of every kind on the GPU.
    - `exposed`: dispatch waits for the decision, so that nothing hides it.
    - `early_shared`: shared experts are loaded before the decision. Without it: `"coarse"` only,
        since `"fine"` overlaps all loads of a layer anyway.
    - `early_load`: so are routed experts with two or more tokens of the GPU's own, wherever they
        are then run.
    - `shared_bus`: tokens to and from PIM queue behind the GPU's weights.

    The last four are for `"coarse"` and `"fine"` only.

    **Raises:** `ValueError` naming field, value and what is allowed.
    """

    overlap: Literal["ideal", "fine", "coarse"] = "ideal"
    halves: Literal[1, 2] = 1
    attention: Literal["pim", "gpu"] = "pim"
    exposed: bool = False
    early_shared: bool = True
    early_load: bool = False
    shared_bus: bool = False

    def __post_init__(self):
        allowed: dict[str, tuple] = dict(overlap=OVERLAPS, halves=(1, 2))
        allowed["attention"] = ("pim", "gpu")
        for field in _ORDERED[1:]:
            allowed[field] = (False, True)
        for field, values in allowed.items():
            value = getattr(self, field)
            if value not in values or type(value) is not type(values[0]):
                known = ", ".join(map(repr, values))
                raise ValueError(f"Execution.{field} = {value!r}: allowed is one of {known}")
        if self.overlap == "fine" and not self.early_shared:
            raise ValueError(
                "Execution.early_shared = False: allowed with overlap 'coarse', since 'fine' "
                "overlaps all loads of a layer"
            )
        if self.overlap == "ideal":
            default = {field.name: field.default for field in dataclasses.fields(self)}
            for field in _ORDERED:
                if getattr(self, field) != default[field]:
                    raise ValueError(
                        f"Execution.{field} = {getattr(self, field)!r}: allowed with overlap "
                        "'fine' or 'coarse', which order the tasks of a layer"
                    )


@dataclasses.dataclass(frozen=True)
class Mode:
    """One way to use PIM: an execution and the policy that places experts."""

    description: str
    execution: Execution
    policy: str


def _mode(description: str, policy: str, **options) -> Mode:
    return Mode(description, Execution(overlap="coarse", **options), policy)


MODES: dict[str, Mode] = {
    "a": _mode("GPU alone, attention too", "no_exp", attention="gpu"),
    "b": _mode("attention on PIM, experts on the GPU: they wait for each other", "no_exp"),
    "c": _mode("the same with two half batches that take turns", "no_exp", halves=2),
    "d": _mode("two half batches, experts split by Sieve", "sieve", halves=2),
    "e": _mode("one batch, experts split by Sieve", "sieve"),
}
"""From dense-style use of PIM to Sieve's. The letters are those of the panels of Sieve's Fig. 6 as
moejax reads its text: the figure itself was not at hand."""


def mode(name: str) -> Mode:
    """One of `MODES`.

    **Raises:** `ValueError` for another letter.
    """
    return lookup("mode", name, MODES)
