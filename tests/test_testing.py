"""The contract tests for extensions: everything built in passes, and what is broken is named."""

import dataclasses
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax import hardware, metrics, noc, partition, testing


RNG = np.random.default_rng(0)


@pytest.fixture(scope="module", autouse=True)
def quick_compilation():
    """Programs run once here, so optimizing them costs more than it gains."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def broken_promises(check, *arguments, **options):
    """The promises that a check says are broken; the message names each."""
    with pytest.raises(testing.ContractError) as caught:
        check(*arguments, **options)
    error = caught.value
    assert error.broken
    for promise, why in error.broken.items():
        assert f"\n  {promise}: {why}" in str(error)
    return error.broken


# --- policies ---

# One of each kind: rules on counts, channel groups, a ladder of prefixes, a dynamic program. The
# others differ from these by a constant or by what they believe.
KINDS = ("pimoe_threshold", "pimoe_channel", "sieve", "optimal")


@pytest.mark.parametrize("name", KINDS)
def test_built_in_policies_keep_the_contract(name):
    kept = testing.check_policy(name)
    assert kept.promises == (
        "shape", "score", "jit", "grad", "vmap", "units", "determinism", "status",
    )  # fmt: skip
    assert str(kept).startswith(f"policy '{name}' keeps shape, score")


def popular_first(tokens_per_expert, costs):
    return partition.score(tokens_per_expert >= 4, tokens_per_expert, costs)


def test_a_policy_of_ones_own():
    assert testing.check_policy(popular_first).what == "policy 'popular_first'"
    with pytest.raises(ValueError, match="unknown policy 'siev'; did you mean 'sieve'"):
        testing.check_policy("siev")


def changed(**changes):
    """`popular_first` with something in its answer changed."""

    def policy(counts, costs):
        answer = popular_first(counts, costs)
        made = {name: change(answer, counts, costs) for name, change in changes.items()}
        return dataclasses.replace(answer, **made)

    return policy


def looks_at_a_value(counts, costs):
    return popular_first(counts, costs) if counts[0] > 1 else partition.no_exp(counts, costs)


def numpy_inside(counts, costs):
    return partition.score(jnp.asarray(np.asarray(counts) >= 4), counts, costs)


def only_one_layer(counts, costs):
    shape = jax.ShapeDtypeStruct(counts.shape, bool)
    return partition.score(jax.pure_callback(lambda n: n >= 4, shape, counts), counts, costs)


def microseconds_inside(counts, costs):
    return partition.score(costs.pim_time_by_tokens[counts] > 2e-6, counts, costs)


def megabytes_inside(counts, costs):
    return partition.score(counts * costs.expert_bytes > 20e6, counts, costs)


def draws_lots(counts, costs):
    return partition.score(jnp.asarray(RNG.random(counts.shape) < 0.5), counts, costs)


def raises_nothing(counts, costs):
    return jax.jit(popular_first)(counts, costs)


@pytest.mark.parametrize(
    "policy, promise, said",
    [
        (lambda counts, costs: counts > 3, "shape", "not a moejax.partition.Partition"),
        (changed(on_gpu=lambda p, *_: p.on_gpu * 1), "shape", "on_gpu is int32 [12], not bool"),
        (changed(on_gpu=lambda p, *_: ~p.on_gpu), "shape", "True for an expert without tokens"),
        (changed(num_gpu=lambda p, *_: p.gpu_time), "shape", "num_gpu is float32"),
        (lambda counts: counts, "shape", "raises TypeError"),
        (changed(total_time=lambda p, *_: p.gpu_time + p.pim_time), "score", "total_time is"),
        (looks_at_a_value, "jit", "`if`, `and` or `while` on a traced value; use jnp.where"),
        (numpy_inside, "jit", "NumPy on a traced value; use jax.numpy"),
        (only_one_layer, "vmap", "raises NotImplementedError"),
        (
            changed(total_time=lambda p, _, c: p.total_time + jnp.sqrt(0 * c.comm_time)),
            "grad",
            "the gradient of total_time in comm_time is",
        ),
        (microseconds_inside, "units", "time in a unit of 1024 instead of 1, problem"),
        (megabytes_inside, "units", "bytes in a unit of 1024 instead of 1, problem"),
        (draws_lots, "determinism", "called again with the same input: on_gpu is"),
        (changed(status=lambda p, *_: 0 * p.status), "status", "status is 0 for a negative count"),
        (raises_nothing, "status", "no ValueError for a negative count, eagerly"),
    ],
)  # fmt: skip
def test_broken_policies_are_told_what_is_broken(policy, promise, said):
    assert said in broken_promises(testing.check_policy, policy)[promise]


def test_what_is_kept_is_said_too():
    with pytest.raises(testing.ContractError) as caught:
        testing.check_policy(microseconds_inside)
    assert list(caught.value.broken) == ["units"]
    assert caught.value.kept == ("shape", "score", "jit", "grad", "vmap", "determinism", "status")
    message = str(caught.value)
    assert message.startswith("policy 'microseconds_inside' breaks 1 promise:\n  units: time in a")
    assert message.endswith("\nkept: " + ", ".join(caught.value.kept))


# --- cost models ---


@pytest.mark.parametrize("name", list(hardware.PIMS))
def test_built_in_cost_models_keep_the_contract(name):
    kept = testing.check_cost_model(hardware.get(f"1xb200-{name}").pim, max_tokens=3)
    assert kept.promises[-4:] == ("units", "fraction", "determinism", "status")


def test_a_measured_table_keeps_it(tmp_path):
    base = hardware.get("1xb200-hbm-pim").pim
    bits = dict(weight_bits=16, activation_bits=16)
    lines = ["outputs,inputs,tokens,order,ns"]
    for m, k in ((256, 256), (256, 128)):
        times = [(n, 1.3e9 * float(base.gemv_time(m, k, n, **bits))) for n in (1, 4)]
        lines += [f"{m},{k},{n},token_outer,{ns}" for n, ns in times]
    (tmp_path / "times.csv").write_text("\n".join(lines))
    table = hardware.load_pim_table(tmp_path / "times.csv", base)
    assert testing.check_cost_model(table, hidden=256, intermediate=128, max_tokens=4)


class Linear(hardware.RatePIM):
    """A PIM of somebody's own: so long per token, whatever the matrix."""

    per_token: jax.Array = eqx.field(converter=jnp.asarray, default=1e-6)

    def gemv_time(self, outputs, inputs, tokens, *, weight_bits, activation_bits):
        rest = super().gemv_time(
            outputs, inputs, tokens, weight_bits=weight_bits, activation_bits=activation_bits
        )
        return rest + tokens * self.per_token


def test_a_cost_model_of_ones_own_needs_its_units_said():
    pim = Linear(internal_bandwidth=64e12)
    broken = broken_promises(testing.check_cost_model, pim)
    assert list(broken) == ["units"] and "(see `seconds`)" in broken["units"]
    assert testing.check_cost_model(pim, seconds={"per_token": 1})
    with pytest.raises(ValueError, match="no number 'per_tokn'; did you mean 'per_token'"):
        testing.check_cost_model(pim, seconds={"per_tokn": 1})


class BrokenPIM(hardware.RatePIM):
    """Its time is `twist(time, pim, tokens)`."""

    twist: object = eqx.field(static=True, default=None)

    def gemv_time(self, outputs, inputs, tokens, *, weight_bits, activation_bits):
        bits = dict(weight_bits=weight_bits, activation_bits=activation_bits)
        return self.twist(super().gemv_time(outputs, inputs, tokens, **bits), self, tokens)


@pytest.mark.parametrize(
    "twist, promise, said",
    [
        (lambda t, pim, n: t * jnp.ones(2), "shape", "gemv_time (up) is float32 [2]"),
        (lambda t, pim, n: t + 1e-9, "tokens", "0 tokens take"),
        (lambda t, pim, n: t * jnp.where(jnp.asarray(n) == 5, 0.5, 1.0), "tokens", "5 tokens take"),
        (lambda t, pim, n: t if n else 0 * t, "jit", "use jnp.where"),
        (lambda t, pim, n: t * (1 + RNG.random()), "determinism", "asked again for"),
        (lambda t, pim, n: t + jnp.sqrt(0 * pim.turn_time), "grad", "turn_time is"),
        (lambda t, pim, n: t * 1e9, "units", "are times in s and rates in B/s?"),
        (lambda t, pim, n: jnp.maximum(t, jnp.where(t > 0, 1e-6, 0)), "units", "in a unit of 0.25"),
        (lambda t, pim, n: jnp.nan_to_num(t), "status", "-1 tokens, compiled: up is"),
        (
            lambda t, pim, n: t / jnp.where(pim.internal_bandwidth < 50e12, 4, 1),
            "fraction",
            "half of the channels: up",
        ),
    ],
)
def test_broken_cost_models_are_told_what_is_broken(twist, promise, said):
    pim = BrokenPIM(internal_bandwidth=64e12, twist=twist)
    assert said in broken_promises(testing.check_cost_model, pim)[promise]


def test_a_pim_that_ignores_a_batch_of_itself():
    seen = []

    def keeps_the_first(time, pim, tokens):
        if not isinstance(time, jax.core.Tracer):
            seen.append(time * 0 + 1)
            return time
        return time * jnp.where(pim.internal_bandwidth > 100e12, 2, 1)

    pim = BrokenPIM(internal_bandwidth=64e12, twist=keeps_the_first)
    broken = broken_promises(testing.check_cost_model, pim)
    assert "PIM 1 in a batch: down is" in broken["vmap"]


def test_what_is_no_pim():
    broken = broken_promises(testing.check_cost_model, lambda tokens: 1e-6 * tokens)
    assert broken == {"shape": "is no moejax.hardware.AbstractPIM"}


# --- topologies ---


def tree(**options):
    """Four nodes below two pods and two cores: switches, and routes to choose from."""
    sizes = dict(pods=2, leaves_per_pod=1, endpoints_per_leaf=2, cores=2)
    return noc.fat_tree(**sizes, **options)


def test_built_in_topologies_keep_the_contract():
    ring = functools.partial(noc.torus, 1, 3, hop_latency=1e-9, port_bandwidth=2.0**36)
    for name, build in (("tree", tree), ("torus", ring)):
        kept = testing.check_topology(build)
        assert kept.what == f"topology '{name}'"
        assert kept.promises == (
            *("shape", "routes", "order", "jit", "vmap", "time", "grad"),
            *("units", "determinism", "status"),
        )


def rounded(*, bandwidth):
    return tree(bandwidth=float(bandwidth))


def unchecked(*, bandwidth):
    return tree(bandwidth=jnp.abs(bandwidth))


def test_builders():
    assert "float(), int()" in broken_promises(testing.check_topology, rounded)["jit"]
    broken = broken_promises(testing.check_topology, unchecked)
    assert broken == {"status": "no ValueError for bandwidth = -1"}
    lots = lambda bandwidth: tree(bandwidth=bandwidth * (1 + RNG.random()))
    assert (
        "built again: link_bandwidth"
        in broken_promises(testing.check_topology, lots)["determinism"]
    )
    assert "no moejax.noc.Topology" in broken_promises(testing.check_topology, dict)["shape"]


def with_table(name, change):
    net = tree(bandwidth=2.0**36)
    table = np.array(getattr(net, name))
    change(table)
    return eqx.tree_at(lambda n: getattr(n, name), net, jnp.asarray(table))


def swap(table, a, b):
    table[a], table[b] = table[b].copy(), table[a].copy()


@pytest.mark.parametrize(
    "name, change, promise, said",
    [
        ("route_resource", lambda t: t.fill(99), "shape", "route_resource holds 99 .. 99"),
        ("num_routes", lambda t: t.fill(0), "shape", "num_routes holds 0 .. 0, allowed is 1 .. "),
        # From 0 to 1 as from 0 to 2.
        ("route_resource", lambda t: swap(t.T, 1, 2), "routes", "route 0 from 0 to 1 ends at 2"),
        ("route_resource", lambda t: t[:, 0, 0].fill(0), "routes", "from 0 to 0 is not empty"),
        ("route_rank", lambda t: t.fill(0), "order", "in order, is [0, 0"),
        ("segment", lambda t: t.fill(0), "order", "not dense from 0"),
    ],
)
def test_broken_topologies_are_told_what_is_broken(name, change, promise, said):
    assert said in broken_promises(testing.check_topology, with_table(name, change))[promise]


def test_a_shape_that_does_not_fit():
    net = eqx.tree_at(lambda n: n.segment, tree(bandwidth=1.0), jnp.zeros(2, jnp.int32))
    broken = broken_promises(testing.check_topology, net)
    assert broken == {"shape": f"segment has shape (2,), not {tree(bandwidth=1.0).segment.shape}"}


# --- metrics ---

IDS = np.argsort(RNG.random((2, 6, 8)), axis=-1)[..., :2]
WEIGHTS = RNG.random((6, 2)).astype(np.float32)
LOGITS = RNG.normal(size=(2, 3, 4, 7)).astype(np.float32)
TARGETS = RNG.integers(0, 7, (3, 4))
BUILT_IN = {
    "changed_weight_mass": (IDS[0], WEIGHTS, IDS[1]),
    "rms_shift": (*LOGITS, TARGETS),
    "top_k_overlap": tuple(IDS),
}


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_metrics_keep_the_contract(name):
    metric = getattr(metrics, name)
    kept = testing.check_metric(metric, *BUILT_IN[name])
    assert {"shape", "jit", "vmap", "mask", "determinism"} <= set(kept.promises)
    assert ("grad" in kept.promises) == (BUILT_IN[name][0].dtype.kind == "f" or "mass" in name)


def test_units_of_a_metric():
    time = lambda work, rate: work["bytes"].sum() / rate
    arguments = dict(bytes=np.ones(3, np.float32), count=np.arange(3)), 2.0
    assert "units" in testing.check_metric(time, *arguments, power={0: 1, 1: -1}).promises
    broken = broken_promises(testing.check_metric, time, *arguments, power={0: 1, 1: 1})
    assert broken["units"].startswith("argument 1 times 4 (its power: 1): the result is 0.375")
    with pytest.raises(ValueError, match="power: no argument 2; there are 2"):
        testing.check_metric(time, *arguments, power={2: 1})


def masked(total):
    return lambda x, mask=True: total(jnp.where(mask, x, 0), jnp.sum(mask * jnp.ones(x.shape)))


@pytest.mark.parametrize(
    "metric, promise, said",
    [
        (lambda x: x[x > x.mean()], "shape", "depends on the values"),
        (lambda x: "much", "shape", "returns str, not arrays"),
        (lambda x: None, "shape", "returns nothing"),
        (lambda x: float(x.sum()), "jit", "float(), int() or a size taken from a traced value"),
        (lambda x: np.sort(x)[0], "jit", "NumPy on a traced value"),
        (lambda x: jnp.sqrt(x - x).sum(), "grad", "the gradient in argument [0] is"),
        (lambda x: x.sum() * RNG.random(), "determinism", "called again"),
        (masked(lambda kept, count: kept.sum() / jnp.maximum(count, 1)), "mask", "not NaN"),
        (lambda x, mask=True: jnp.mean(x) / jnp.any(mask), "mask", "other values where mask is"),
    ],
)
def test_broken_metrics_are_told_what_is_broken(metric, promise, said):
    x = np.array([3.0, 1.0, 2.0, 5.0], np.float32)
    if "depends" in said:
        metric = lambda ids: ids[: int(ids[0])]
        x = np.array([3, 1, 2])
    assert said in broken_promises(testing.check_metric, metric, x)[promise]


def test_a_metric_without_vmap():
    shape = jax.ShapeDtypeStruct((), jnp.float32)
    metric = lambda ids: jax.pure_callback(lambda x: np.float32(x.sum()), shape, ids)
    broken = broken_promises(testing.check_metric, metric, np.arange(3))
    assert list(broken) == ["vmap"]
