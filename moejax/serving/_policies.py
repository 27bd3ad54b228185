"""Policies by name: who decides what runs where, and what it is allowed to know."""

import dataclasses
from collections.abc import Callable
from typing import Any

from moejax import partition
from moejax._checks import lookup
from moejax._typing import Array, Bool, Int
from moejax.partition import Partition, PartitionCosts


@dataclasses.dataclass(frozen=True)
class Policy:
    """A partition function with the circumstances that it runs in.

    **Arguments:**

    - `name`, `description`: for tables.
    - `decide`: `(tokens_per_expert, costs) -> Partition`; only its `on_gpu` and `status` count.
    - `blind_to`: fields of the costs that the decision takes to be zero.
    - `num_groups`: `None` where every expert on PIM uses all channels (tensor parallel); else
        the number of channel groups that experts are dealt out over (expert parallel). `decide`
        is given the same number.
    - `shared_on_pim`: whether shared experts run on PIM too.
    - `scheduled`: whether experts are weighed against each other in each batch, which takes
        `System.scheduler_time`; comparing counts with a constant takes none.
    - `exact`: `decide` needs the static bound `max_total_tokens`.
    - `compared`: whether `--policy all` includes it.
    """

    name: str
    description: str
    decide: Callable[..., Partition]
    blind_to: tuple[str, ...] = ()
    num_groups: int | None = None
    shared_on_pim: bool = False
    scheduled: bool = True
    exact: bool = False
    compared: bool = True

    @property
    def layout(self) -> tuple[int | None, bool]:
        """How experts lie on PIM: `num_groups` and `shared_on_pim`."""
        return self.num_groups, self.shared_on_pim

    def choose(
        self,
        tokens_per_expert: Int[Array, " experts"],
        believed: PartitionCosts,
        max_total_tokens: int,
    ) -> tuple[Bool[Array, " experts"], Int[Array, ""]]:
        """Experts on the GPU and the status of the decision, for one GPU and layer."""
        known = dataclasses.replace(believed, **dict.fromkeys(self.blind_to, 0.0))
        options: dict[str, Any] = {}
        if self.num_groups is not None:
            options["num_groups"] = self.num_groups
        if self.exact:
            options["max_total_tokens"] = max_total_tokens
        decision = self.decide(tokens_per_expert, known, **options)
        return decision.on_gpu, decision.status


_ALL = (
    Policy(
        "no_exp", "all experts on the GPU; PIM runs attention", partition.no_exp, scheduled=False
    ),
    Policy(
        "all_exp",
        "all experts on PIM, shared ones too (PAPI, Stratum)",
        partition.all_exp,
        shared_on_pim=True,
        scheduled=False,
    ),
    Policy(
        "few_tokens",
        "experts with at most 4 tokens on PIM",
        partition.few_tokens,
        scheduled=False,
    ),
    Policy(
        "pimoe_threshold",
        "PIMoE's static rule: each expert where it is faster on its own",
        partition.pimoe_threshold,
        scheduled=False,
    ),
    Policy(
        "pimoe_channel",
        "PIMoE: experts dealt out over 8 channel groups, the busiest group is relieved",
        partition.pimoe_channel,
        num_groups=8,
    ),
    Policy(
        "pimoe_tensor",
        "PIMoE's balance with every expert over all channels",
        partition.pimoe_channel,
        num_groups=1,
    ),
    Policy("sieve", "Sieve: greedy on max(communication, GPU, PIM)", partition.sieve),
    Policy(
        "sieve_no_attention",
        "Sieve that forgets PIM is busy with attention",
        partition.sieve,
        blind_to=("attention_time",),
    ),
    Policy(
        "sieve_no_comm",
        "Sieve that forgets communication",
        partition.sieve,
        blind_to=("comm_time",),
    ),
    Policy(
        "best_prefix",
        "the best prefix of Sieve's order (not only the first)",
        partition.best_prefix,
    ),
    Policy(
        "optimal",
        "the exact optimum over all subsets; slow, for small models and batches",
        partition.optimal,
        exact=True,
        compared=False,
    ),
)

POLICIES: dict[str, Policy] = {policy.name: policy for policy in _ALL}


def policy_of(policy: "str | Policy | Callable[..., Partition]") -> Policy:
    """The policy of a name, of a partition function, or itself.

    **Raises:** `ValueError` suggesting the nearest name.
    """
    if isinstance(policy, Policy):
        return policy
    if callable(policy):
        return Policy(getattr(policy, "__name__", "custom"), "given by the caller", policy)
    return lookup("policy", policy, POLICIES)
