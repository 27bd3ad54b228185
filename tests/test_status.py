"""Status codes, and errors that name field, value and what is allowed."""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax import _checks as checks
from moejax._status import Status, flag, is_traced, merge, raise_if_bad


class Inner(eqx.Module):
    rate: jax.Array = eqx.field(converter=checks.as_float)


class Outer(eqx.Module):
    inner: Inner
    count: jax.Array = eqx.field(converter=checks.as_count)
    name: str = eqx.field(static=True, default="custom")


def raises(*words):
    return pytest.raises(ValueError, match=".*".join(re.escape(word) for word in words))


@pytest.fixture
def outer():
    return Outer(Inner(2.0), 3)


def test_flag_marks_where_the_condition_holds():
    marked = flag(jnp.array([True, False]), Status.BAD_RATE)
    assert marked.dtype == jnp.int32
    np.testing.assert_array_equal(marked, [Status.BAD_RATE, Status.OK])


def test_merge_keeps_the_most_severe_and_broadcasts():
    assert int(merge()) == Status.OK
    mixed = merge(jnp.array([0, Status.BAD_COST, Status.EMPTY_BATCH]), jnp.int32(Status.BAD_RATE))
    assert mixed.dtype == jnp.int32
    np.testing.assert_array_equal(mixed, [Status.BAD_RATE, Status.BAD_COST, Status.BAD_RATE])


def test_every_status_has_a_sentence_of_its_own():
    assert len({status.message for status in Status}) == len(Status)


def test_raise_if_bad_says_where_and_why():
    raise_if_bad("evaluate", jnp.zeros(3, jnp.int32))
    statuses = jnp.array([Status.OK, Status.NEGATIVE_COUNT])
    with raises("evaluate", Status.NEGATIVE_COUNT.message, "layer 1"):
        raise_if_bad("evaluate", statuses, "layer 1")


def test_nothing_is_raised_under_tracing():
    def f(status):
        raise_if_bad("f", status)
        return merge(status, flag(status > 0, Status.BAD_COST)), is_traced({"a": [status, 1]})

    status, traced = jax.jit(f)(jnp.int32(Status.NEGATIVE_COUNT))
    assert (int(status), bool(traced)) == (Status.BAD_COST, True)
    assert not is_traced(1.0, jnp.ones(3), {"a": None})


def test_lookup_suggests_the_nearest_name_and_lists_all():
    registry = {"mixtral-8x7b": 1, "gpt-oss-120b": 2}
    assert checks.lookup("model", "gpt-oss-120b", registry) == 2
    with raises("unknown model 'gpt-os-120b'", "did you mean 'gpt-oss-120b'?", "mixtral-8x7b"):
        checks.lookup("model", "gpt-os-120b", registry)
    assert checks.nearest("zzz", registry) == ""


@pytest.mark.parametrize("value", [3, 3.0, np.float64(3), jnp.float32(3), np.int64(3)])
def test_as_float_follows_the_default_float(value):
    assert checks.as_float(value).dtype == jnp.float32


def test_as_float_keeps_the_precision_of_arrays(x64):
    assert checks.as_float(3).dtype == jnp.float64
    assert checks.as_float(jnp.float32(3)).dtype == jnp.float32


@pytest.mark.parametrize("value", [3, 3.0, np.float64(3), jnp.float32(3), np.int64(3)])
def test_as_count_takes_whole_numbers(value):
    count = checks.as_count(value)
    assert (count.dtype, int(count)) == (jnp.int32, 3)


@pytest.mark.parametrize("value", [2.5, np.nan, np.inf, 2**31, -(2.0**40), [1, 2.5]])
def test_as_count_refuses_what_an_int32_can_not_hold(value):
    with raises("whole number"):
        checks.as_count(value)


def test_converters_let_tracers_pass():
    count, rate = jax.jit(lambda x: (checks.as_count(x), checks.as_float(x)))(2.5)
    assert (int(count), float(rate)) == (2, 2.5)


@pytest.mark.parametrize("value", [0.0, -1.0, np.nan, np.inf, [1.0, 0.0]])
def test_positive(value):
    checks.check_positive("GPU", "flops_per_s", 1e15)
    with raises("GPU.flops_per_s", str(value), "allowed is (0, "):
        checks.check_positive("GPU", "flops_per_s", value)


@pytest.mark.parametrize("value", [-1e-9, np.nan, np.inf])
def test_non_negative(value):
    checks.check_non_negative("Link", "latency", 0.0)
    with raises("Link.latency", str(value), "allowed is [0, "):
        checks.check_non_negative("Link", "latency", value)


def test_range_ends():
    for value in (0.0, 1.0):
        checks.check_range("PIM", "contention", value, 0.0, 1.0, open_low=False)
    for value, open_low in ((0.0, True), (1.1, True), (-0.1, False), (jnp.nan, False)):
        with raises("PIM.contention", "1]"):
            checks.check_range("PIM", "contention", value, 0.0, 1.0, open_low=open_low)
    jax.jit(lambda x: checks.check_range("PIM", "contention", x, 0.0, 1.0, open_low=True))(7.0)


def test_replace_reaches_nested_fields_and_copies(outer):
    changed = checks.replace(outer, inner=dict(rate=5), count=4)
    assert (float(changed.inner.rate), int(changed.count), changed.name) == (5.0, 4, "custom")
    assert (float(outer.inner.rate), int(outer.count)) == (2.0, 3)
    assert float(checks.replace(outer, inner=Inner(7)).inner.rate) == 7.0


def test_replace_names_the_nearest_field(outer):
    with raises("Outer has no field 'cuont'", "did you mean 'count'?", "inner, count, name"):
        checks.replace(outer, cuont=1)
    with raises("Inner has no field 'rat'", "did you mean 'rate'?"):
        checks.replace(outer, inner=dict(rat=1))


def test_replace_under_vmap(outer):
    swept = jax.vmap(lambda rate: checks.replace(outer, inner=dict(rate=rate)).inner.rate)
    rates = swept(jnp.arange(3.0))
    np.testing.assert_array_equal(rates, [0.0, 1.0, 2.0])
