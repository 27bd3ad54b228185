"""The Pareto mask against its definition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moejax.sweep import pareto_mask
from tests.oracles.pareto import front


# One number of rows for each number of objectives, so that few programs are compiled; more rows
# than there are in a block of comparisons come further down.
ROWS = 12
NUMBER = st.sampled_from([0.0, -0.0, 1.0, 2.0, 3.0, np.inf, -np.inf, np.nan])


@st.composite
def problems(draw):
    objectives = draw(st.integers(1, 4))
    row = st.lists(NUMBER, min_size=objectives, max_size=objectives)
    rows = draw(st.lists(row, min_size=ROWS, max_size=ROWS))
    maximize = draw(st.lists(st.booleans(), min_size=objectives, max_size=objectives))
    return rows, maximize, draw(st.lists(st.booleans(), min_size=ROWS, max_size=ROWS))


@jax.jit
def traced_mask(values, maximize, valid):
    return pareto_mask(values, maximize=maximize, valid=valid)


@settings(max_examples=60)
@given(problems())
def test_is_the_definition(problem):
    rows, maximize, valid = problem
    values, wanted = np.array(rows), front(rows, maximize, valid)
    assert pareto_mask(values, maximize=maximize, valid=valid).tolist() == wanted
    assert traced_mask(values, jnp.array(maximize), jnp.array(valid)).tolist() == wanted


@pytest.mark.parametrize("objectives, kind", [(2, "any"), (3, "any"), (4, "ties"), (3, "front")])
def test_many_blocks(objectives, kind):
    rng = np.random.default_rng(objectives)
    values = rng.normal(size=(700, objectives))
    if kind == "ties":
        values = values.round()
    if kind == "front":  # no row beats another, so the front is as long as can be
        values[:, 0] = -values[:, 1:].sum(axis=1)
    wanted = front(values.tolist(), [False] * objectives, [True] * len(values))
    assert pareto_mask(values).tolist() == wanted
    assert kind != "front" or all(wanted)


def test_a_batch_is_a_loop():
    values = np.random.default_rng(0).integers(0, 6, (3, 40, 3)).astype(np.float32)
    alone = [pareto_mask(v, maximize=[True, False, True]) for v in values]
    batch = jax.vmap(lambda v: pareto_mask(v, maximize=[True, False, True]))(values)
    np.testing.assert_array_equal(batch, alone)


def test_numbers_that_32_bits_do_not_tell_apart():
    ints = np.array([[2**40, 1], [2**40 + 1, 1], [2**40, 1]])
    assert pareto_mask(ints).tolist() == [True, False, True]
    assert pareto_mask(ints, maximize=True).tolist() == [False, True, False]
    floats = np.array([[1.0, 0.0], [1.0 + 1e-12, 0.0]])
    assert pareto_mask(floats).tolist() == [True, False]


def test_whole_numbers_where_traced():
    lowest = np.iinfo(np.int32).min
    values = jnp.array([[lowest, 0], [5, 0], [lowest, 1]])
    masks = jax.jit(lambda v: (pareto_mask(v), pareto_mask(v, maximize=True)))(values)
    assert [mask.tolist() for mask in masks] == [[True, False, False], [False, True, True]]
    assert jax.jit(pareto_mask)(jnp.array([[True, False], [False, False]])).tolist() == [
        False,
        True,
    ]


def test_nothing_and_one():
    assert pareto_mask(np.zeros((0, 2))).shape == (0,)
    assert pareto_mask(np.zeros((0, 3))).shape == (0,)
    assert pareto_mask([[1.0, 2.0, 3.0]]).tolist() == [True]
    assert pareto_mask([[np.nan, 2.0]]).tolist() == [False]
    assert pareto_mask([[3.0], [1.0], [1.0]], valid=[True, False, True]).tolist() == [0, 0, 1]


@pytest.mark.parametrize(
    "arguments, said",
    [
        (dict(values=np.zeros(3)), r"values has shape \(3,\): allowed is \[rows, objectives\]"),
        (dict(values=np.zeros((3, 0))), r"values has shape \(3, 0\)"),
        (dict(values=np.zeros((3, 2)), maximize=[True]), r"maximize has shape \(1,\): allowed is"),
        (dict(values=np.zeros((3, 2)), valid=[True]), r"valid has shape \(1,\): allowed is \(3,\)"),
    ],
)
def test_wrong_shapes(arguments, said):
    with pytest.raises(ValueError, match=said):
        pareto_mask(**arguments)
