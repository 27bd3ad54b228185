"""Partition policies: who runs on the GPU, tried as a sweep tries it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moejax._status import Status
from moejax._typing import Array
from moejax.partition import Partition, PartitionCosts, score
from moejax.serving import Policy, policy_of
from moejax.testing._contract import (
    Contract,
    Kept,
    require,
    require_error,
    require_finite,
    require_same,
    row,
    shapes,
    stack,
)


Problem = tuple[Array, PartitionCosts]
Decide = Callable[[Array, PartitionCosts], Partition]

EXPERTS, MAX_TOKENS = 12, 16
MOST_TOKENS = 64
TIMES = ("pim_time_by_tokens", "attention_time", "comm_time", "channel_time_by_tokens")
BYTES = ("expert_bytes", "token_bytes", "fixed_bytes", "pim_token_bytes")
FLOPS = ("flops_per_token", "fixed_flops")
RATES = ("hbm_bandwidth", "flops_per_s")


def check_policy(policy: str | Policy | Callable[..., Partition]) -> Kept:
    """Tries a policy: `(tokens_per_expert, costs) -> Partition`, a `moejax.Policy`, or a name.

    The promises, in this order:

    - `shape`: `on_gpu` is bool [experts] and False for experts without tokens; times are float
        scalars, `num_gpu` and `status` whole numbers.
    - `score`: the times are those of `partition.score` for its `on_gpu`. Return that, and most of
        the others hold by themselves.
    - `jit`: it can be traced, to the same shapes and kinds of numbers.
    - `grad`: the gradient of `total_time` in every cost is finite.
    - `vmap`: a compiled batch of different counts and costs makes the same decisions.
    - `units`: other units of time, of bytes or of FLOPs change no decision, and times only by the
        unit. A constant in seconds or bytes inside the policy breaks it.
    - `determinism`: the same input twice gives the same bits.
    - `status`: impossible counts or costs are a `ValueError` eagerly; compiled, `status` is not 0,
        `total_time` is NaN. (That the other rows of the batch are right is part of `vmap`.)

    **Returns:** `Kept`, which prints as a sentence.

    **Raises:** `ContractError` naming every promise that is broken.
    """
    named = policy_of(policy)
    decide = _bind(named)
    contract = Contract(f"policy {named.name!r}")
    problems = _problems()
    with contract.promise("shape", first=True):
        alone = [decide(*problem) for problem in problems]
        for problem, partition in zip(problems, alone):
            _check_shape(problem, partition)
    with contract.promise("score"):
        _check_score(named, problems, alone)
    with contract.promise("jit"):
        # Traced only: what is compiled, is compiled for a batch.
        traced, found = jax.eval_shape(decide, *problems[0]), alone[0]
        require_same(shapes(traced), shapes(found), "compiled")
    # The bad ones beside the good ones: one compilation for three promises.
    bad = _bad(problems[0])
    together, batch = stack([*problems, *bad.values()]), None
    with contract.promise("grad"):
        batch, gradients = jax.jit(jax.vmap(_with_gradient(decide)))(*together)
        good = jax.tree.map(lambda x: x[: len(problems)], gradients)
        require_finite(good, "the gradient of total_time in")
    with contract.promise("vmap"):
        batch = jax.jit(jax.vmap(decide))(*together) if batch is None else batch
        for i, partition in enumerate(alone):
            _same(row(batch, i), partition, f"row {i} of a batch")
    with contract.promise("units"):
        _check_units(decide, problems, alone)
    with contract.promise("determinism"):
        for problem, partition in zip(problems, alone):
            require_same(decide(*problem), partition, "called again with the same input")
    with contract.promise("status"):
        if batch is not None:
            _check_flags(bad, batch, len(problems))
        for what, problem in bad.items():
            require_error(lambda p=problem: decide(*p), f"no ValueError for {what}, eagerly")
    return contract.settle()


def _bind(policy: Policy) -> Decide:
    """The decision with the static options that its circumstances give it."""
    options: dict[str, Any] = {}
    if policy.num_groups is not None:
        options["num_groups"] = policy.num_groups
    if policy.exact:
        options["max_total_tokens"] = MOST_TOKENS
    return lambda counts, costs: policy.decide(counts, costs, **options)


def _problems() -> list[Problem]:
    """Layers of different kinds. All numbers are small multiples of powers of two, so that sums
    are exact in any order, and two ways of computing one decision may not disagree."""
    rng = np.random.default_rng(0)
    counts = [
        rng.multinomial(MOST_TOKENS, rng.dirichlet(np.full(EXPERTS, alpha))).clip(0, MAX_TOKENS)
        for alpha in (0.3, 0.3, 0.3, 1.0, 1.0, 10.0)
    ]
    counts += [np.zeros(EXPERTS), np.eye(EXPERTS)[3], np.full(EXPERTS, 4)]
    contentions = (0.0, 0.5, 1.0)
    costs = [_costs(rng, contentions[i % 3]) for i in range(len(counts))]
    return [(jnp.asarray(n, jnp.int32), c) for n, c in zip(counts, costs)]


def _costs(rng: np.random.Generator, contention: float) -> PartitionCosts:
    """Costs near those of an expert of some MB on a GPU of some TB/s."""
    step = rng.integers(1, 9) * 2.0**-22  # s, about a quarter of a microsecond
    by_tokens = step * np.cumsum(np.r_[0, rng.integers(1, 3, MAX_TOKENS)])
    return PartitionCosts(
        pim_time_by_tokens=by_tokens,
        attention_time=rng.integers(0, 9) * 2.0**-20,
        comm_time=rng.integers(0, 5) * 2.0**-20,
        expert_bytes=rng.integers(1, 17) * 2.0**20,
        token_bytes=2.0**13,
        flops_per_token=rng.integers(1, 5) * 2.0**23,
        fixed_bytes=rng.integers(0, 9) * 2.0**20,
        fixed_flops=2.0**30,
        hbm_bandwidth=2.0**42,
        flops_per_s=2.0**50,
        pim_token_bytes=2.0**12,
        contention=contention,
        channel_time_by_tokens=4 * by_tokens,
    )


def _check_shape(problem: Problem, partition: Partition) -> None:
    require(
        isinstance(partition, Partition),
        f"returns {type(partition).__name__}, not a moejax.partition.Partition",
    )
    on_gpu = jnp.asarray(partition.on_gpu)
    require(
        on_gpu.dtype == bool and on_gpu.shape == (EXPERTS,),
        f"on_gpu is {on_gpu.dtype} {list(on_gpu.shape)}, not bool [experts]",
    )
    require(not np.any(on_gpu & (problem[0] == 0)), "on_gpu is True for an expert without tokens")
    for field in dataclasses.fields(partition)[1:]:
        value = jnp.asarray(getattr(partition, field.name))
        kind = "f" if field.name.endswith("_time") else "i"
        allowed = {"f": "a float", "i": "a whole number"}[kind]
        require(
            value.shape == () and value.dtype.kind == kind,
            f"{field.name} is {value.dtype} {list(value.shape)}, not {allowed}",
        )
    require(int(partition.status) == Status.OK, f"status is {partition.status} for good input")


def _check_score(policy: Policy, problems: list[Problem], alone: list[Partition]) -> None:
    for (counts, costs), partition in zip(problems, alone):
        wanted = score(partition.on_gpu, counts, costs, num_groups=policy.num_groups)
        _same(partition, wanted, "its times are not those of partition.score")


def _same(found: Partition, wanted: Partition, why: str, scale: float = 1.0) -> None:
    """Decisions to the bit; times up to rounding, which another order of a sum is allowed."""
    times = [field.name for field in dataclasses.fields(wanted) if field.name.endswith("_time")]
    discrete = lambda p: {name: getattr(p, name) for name in ("on_gpu", "num_gpu", "status")}
    require_same(discrete(found), discrete(wanted), why)
    for name in times:
        value = {name: np.asarray(getattr(wanted, name)) * scale}
        require_same({name: getattr(found, name)}, value, why, rtol=1e-5)


def _with_gradient(decide: Decide) -> Callable[[Array, PartitionCosts], Any]:
    """The decision, and the gradient of its time in the costs."""

    def total(costs, counts):
        partition = decide(counts, costs)
        return partition.total_time, partition

    def both(counts, costs):
        gradient, partition = jax.grad(total, has_aux=True)(costs, counts)
        return partition, gradient

    return both


def _check_units(decide: Decide, problems: list[Problem], alone: list[Partition]) -> None:
    times = (dict.fromkeys(TIMES, 1) | dict.fromkeys(RATES, -1), 1.0)
    units = {
        "time": times,
        "bytes": (dict.fromkeys((*BYTES, "hbm_bandwidth"), 1), 0.0),
        "FLOPs": (dict.fromkeys((*FLOPS, "flops_per_s"), 1), 0.0),
    }
    for unit, (powers, power_of_time) in units.items():
        for scale in (2.0**-10, 2.0**10):
            for i, (counts, costs) in enumerate(problems):
                changes = {name: getattr(costs, name) * scale**p for name, p in powers.items()}
                found = decide(counts, dataclasses.replace(costs, **changes))
                why = f"{unit} in a unit of {1 / scale:g} instead of 1, problem {i}"
                _same(found, alone[i], why, scale**power_of_time)


def _bad(problem: Problem) -> dict[str, Problem]:
    """Input that makes no sense, by what is wrong with it."""
    counts, costs = problem
    return {
        "a negative count": (counts.at[1].set(-1), costs),
        "more tokens than the PIM table covers": (counts.at[1].set(MAX_TOKENS + 1), costs),
        "hbm_bandwidth = 0": (counts, dataclasses.replace(costs, hbm_bandwidth=0.0)),
        "attention_time = NaN": (counts, dataclasses.replace(costs, attention_time=jnp.nan)),
    }


def _check_flags(bad: dict[str, Problem], batch: Partition, first: int) -> None:
    for i, what in enumerate(bad, first):
        found = row(batch, i)
        require(int(found.status) != Status.OK, f"status is 0 for {what}, compiled")
        require(np.isnan(found.total_time), f"total_time is {found.total_time} for {what}")
