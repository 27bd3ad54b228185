"""How the tokens of a model pick their experts."""

import dataclasses
from typing import Literal


_SCORES = ("softmax", "sigmoid")
_POSITIONS = ("before_topk", "after_topk", "none")


@dataclasses.dataclass(frozen=True)
class Router:
    """How tokens pick experts: static and hashable.

    **Arguments:**

    - `score`: `"softmax"` over the experts, or `"sigmoid"` of each (DeepSeek-V3, which also adds a
        bias per expert for the choice only).
    - `softmax_position`: `"before_topk"`, `"after_topk"` (gpt-oss), or `"none"` with sigmoids.
    - `renormalize`: the weights of the chosen experts are scaled to sum to 1.
    - `num_groups`, `top_groups`: experts stand in `num_groups` equal groups and are chosen from the
        `top_groups` best ones. A group's score is its best expert's with softmax (DeepSeek-V2), the
        sum of its two best with sigmoid (DeepSeek-V3).
    - `scaling`: factor on the weights of the routed experts.
    """

    score: Literal["softmax", "sigmoid"]
    softmax_position: Literal["before_topk", "after_topk", "none"]
    renormalize: bool
    num_groups: int = 1
    top_groups: int = 1
    scaling: float = 1.0

    def __post_init__(self):
        for name, allowed in (("score", _SCORES), ("softmax_position", _POSITIONS)):
            if getattr(self, name) not in allowed:
                known = ", ".join(allowed)
                raise ValueError(f"Router.{name} = {getattr(self, name)!r}: allowed is {known}")
        if (self.score == "sigmoid") != (self.softmax_position == "none"):
            raise ValueError(
                f"Router.softmax_position = {self.softmax_position!r}: 'none' goes with sigmoid "
                f"scores and only with them (score = {self.score!r})"
            )
        if not 1 <= self.top_groups <= self.num_groups:
            raise ValueError(
                f"Router.top_groups = {self.top_groups}: allowed is 1 to num_groups = "
                f"{self.num_groups}"
            )
