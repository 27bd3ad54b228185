"""Messages of expert traffic against literal loops over tokens, experts and nodes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moejax._status import Status
from moejax.noc import Messages, expert_traffic
from moejax.noc._traffic import UNPLACED, mirror, pair_messages, traffic_matrix
from tests.oracles import noc_traffic as oracle


# (tokens, top_k, experts, nodes): more nodes than experts, one of everything, the reverse.
SHAPES = [(5, 2, 4, 6), (3, 1, 1, 1), (4, 3, 7, 3)]


@st.composite
def traffic_problems(draw):
    """Experts split over nodes, some of them without a cell; duplicates and padding included."""
    tokens, top_k, experts, nodes = draw(st.sampled_from(SHAPES))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    share = np.zeros((experts, nodes))
    for row in share:
        hosts = rng.choice(nodes, rng.integers(1, nodes + 1), replace=False)
        row[hosts] = rng.dirichlet(np.ones(len(hosts)))
        # Solver dust does not make a host.
        row[rng.integers(nodes)] += 5e-7
    position = rng.permutation(nodes)
    position[rng.random(nodes) < draw(st.sampled_from([0, 0.3]))] = UNPLACED
    expert_ids = rng.integers(0, experts, (tokens, top_k))
    expert_ids[rng.random((tokens, top_k)) < draw(st.sampled_from([0, 0.4]))] = -1
    return expert_ids, share, position, rng.integers(0, 5, tokens).astype(float)


def listed(messages):
    """(source, destination, bytes) of the valid messages, in order."""
    fields = (messages.source, messages.destination, messages.bytes)
    valid = np.asarray(messages.valid)
    return list(zip(*[np.asarray(f)[valid].tolist() for f in fields], strict=True))


@settings(max_examples=60)
@given(traffic_problems(), st.booleans())
def test_expert_traffic_is_the_literal_loop(problem, expected):
    expert_ids, share, position, weight = problem
    kwargs = dict(bytes_per_token=8.0, weight=weight, expected=expected)
    found = expert_traffic(expert_ids, share, position, **kwargs)
    wanted = oracle.expert_traffic(expert_ids, share, position, 8 * weight, expected)
    (tokens, top_k), nodes = expert_ids.shape, len(position)
    rows = [(t * top_k + slot if expected else t) * nodes + n for t, slot, n, *_ in wanted]
    assert found.valid.shape == (tokens * nodes * (top_k if expected else 1),)
    assert np.flatnonzero(found.valid).tolist() == rows
    np.testing.assert_allclose(listed(found), [m[3:] for m in wanted] or np.zeros((0,)), rtol=1e-6)
    assert int(found.status) == 0 and not np.any(found.start_time)

    matrix = traffic_matrix(found, nodes)
    np.testing.assert_allclose(matrix, oracle.traffic_matrix(listed(found), nodes), rtol=1e-6)
    np.testing.assert_allclose(traffic_matrix(mirror(found), nodes), matrix.T, rtol=1e-6)
    if expected:
        return
    packed = expert_traffic(expert_ids, share, position, max_messages=60, **kwargs)
    assert np.asarray(packed.valid).tolist() == [i < len(rows) for i in range(60)]
    assert listed(packed) == listed(found)
    flow = np.asarray(found.flow)
    assert np.asarray(packed.flow)[: len(rows)].tolist() == flow[np.asarray(found.valid)].tolist()


@settings(max_examples=30)
@given(traffic_problems(), st.integers(0, 1000))
def test_random_aggregators_are_experts_of_the_token(problem, seed):
    expert_ids, share, position, weight = problem
    key = jax.random.key(seed)
    kwargs = dict(bytes_per_token=8.0, weight=weight)
    found = expert_traffic(expert_ids, share, position, key=key, **kwargs)
    plain = expert_traffic(expert_ids, share, position, **kwargs)
    assert np.array_equal(found.source, plain.source) and np.array_equal(found.valid, plain.valid)
    cells = np.asarray(found.destination).reshape(len(expert_ids), -1)
    for token, chosen, valid in zip(
        expert_ids, cells, np.asarray(found.valid).reshape(cells.shape), strict=True
    ):
        counted = oracle.experts_that_count(token, share, position)
        allowed = {oracle.aggregator(e, share, position) for e in counted}
        assert valid.any() == bool(counted) and set(chosen[valid]) <= allowed
        assert len(set(chosen[valid])) <= 1


def one_host_each(experts):
    return np.eye(experts), np.arange(experts)


def test_every_expert_aggregates_equally_often():
    share, position = one_host_each(4)
    expert_ids = np.tile([3, -1, 0, 0], (4000, 1))
    found = expert_traffic(expert_ids, share, position, bytes_per_token=1.0, key=jax.random.key(0))
    cells = np.asarray(found.destination).reshape(4000, 4)[:, 0]
    # Expert 0 is listed twice: 2/3 of 4000, give or take five standard deviations of 30.
    assert set(cells) == {0, 3} and abs(np.sum(cells == 0) - 2667) < 150


def test_a_draw_depends_on_key_and_token_only():
    rng = np.random.default_rng(0)
    share, position = one_host_each(4)
    expert_ids = rng.permuted(np.tile(np.arange(4), (40, 1)), axis=1)
    cells = lambda ids, seed: np.asarray(
        expert_traffic(
            ids, share, position, bytes_per_token=1.0, key=jax.random.key(seed)
        ).destination
    ).reshape(-1, 4)[:, 0]
    whole = cells(expert_ids, 1)
    assert np.array_equal(cells(expert_ids[:20], 1), whole[:20])
    assert not np.array_equal(cells(expert_ids, 2), whole)
    other = expert_ids.copy()
    other[:10] = -1
    assert np.array_equal(cells(other, 1)[10:], whole[10:])


def test_precision_changes_no_draw(x64):
    share, position = one_host_each(4)
    expert_ids = np.tile([3, 1, 0, 2], (40, 1))
    key = jax.random.key(1)
    found = expert_traffic(expert_ids, share, position, bytes_per_token=1.0, key=key)
    assert found.bytes.dtype == found.start_time.dtype == jnp.float64
    assert found.source.dtype == found.flow.dtype == found.status.dtype == jnp.int32
    jax.config.update("jax_enable_x64", False)
    single = expert_traffic(expert_ids, share, position, bytes_per_token=1.0, key=key)
    assert single.bytes.dtype == jnp.float32
    assert np.array_equal(single.destination, found.destination)


def test_traffic_by_hand():
    # Expert 0 on node 2, expert 1 split over nodes 0 and 1; node n sits in cell 5 - n.
    share = np.array([[0, 0, 1.0], [0.5, 0.5, 0]])
    found = expert_traffic([[0, 1], [1, 1], [-1, -1]], share, [2, 1, 0], bytes_per_token=3)
    assert listed(found) == [(2, 0, 3), (1, 0, 3), (0, 0, 3), (2, 2, 3), (1, 2, 3)]
    # Without node 0, expert 1 is at node 1 alone; without nodes 0 and 1 it does not count.
    found = expert_traffic([[1, 0]], share, [-1, 1, 0], bytes_per_token=3)
    assert listed(found) == [(1, 1, 3), (0, 1, 3)]
    found = expert_traffic([[1, 0]], share, [-1, -1, 0], bytes_per_token=3)
    assert listed(found) == [(0, 0, 3)]


def test_groups_weigh_by_their_frequency():
    share, position = one_host_each(3)
    groups, frequency, batch = [[0, 1], [1, 2]], np.array([0.25, 0.75]), 16
    found = expert_traffic(
        groups, share, position, bytes_per_token=2.0, weight=frequency * batch, expected=True
    )
    # Each group meets at either of its nodes half the time.
    halves = [4.0, 4.0, 4.0, 4.0, 12.0, 12.0, 12.0, 12.0]
    assert [m[2] for m in listed(found)] == halves
    matrix = traffic_matrix(found, 3)
    assert matrix.tolist() == [[4, 4, 0], [4, 16, 12], [0, 12, 12]]


def test_flow_tells_tokens_and_cells_apart():
    share, position = np.full((1, 8), 1 / 8), np.arange(8)
    flow = expert_traffic(np.zeros((64, 1), int), share, position, bytes_per_token=1.0).flow
    assert flow.min() >= 0 and len(np.unique(flow)) == 512
    # Choices among 2, 4 or 8 routes are spread evenly, within five standard deviations.
    for routes in (2, 4, 8):
        counts = np.bincount(np.asarray(flow) % routes, minlength=routes)
        assert np.abs(counts - 512 / routes).max() < 5 * np.sqrt(512 / routes)


@pytest.mark.parametrize("dtype", [np.uint8, np.int64])
def test_narrow_and_wide_ids(dtype):
    share, position = np.full((256, 2), 0.5), np.arange(2, dtype=dtype)
    found = expert_traffic(np.array([[255]], dtype), share, position, bytes_per_token=1.0)
    assert listed(found) == [(0, 0, 1.0), (1, 0, 1.0)] and int(found.status) == 0


BAD = {
    "expert id": (dict(expert_ids=[[0, 1], [2, 0]]), "token 1 names expert 2", "INVALID_ROUTING"),
    "sum": (dict(share=[[0.5, 0.5], [0.9, 0]]), "expert 1 sums to 0.9", "BAD_SHARE"),
    "negative share": (dict(share=[[1.5, -0.5], [1, 0]]), "entry of -0.5", "BAD_SHARE"),
    "NaN share": (dict(share=[[np.nan, 0.5], [1, 0]]), "expert 0 sums to nan", "BAD_SHARE"),
    "twice": (dict(node_position=[1, 1]), "nodes 0 and 1 both have cell 1", "BAD_POSITION"),
    "outside": (dict(node_position=[0, 2]), "node 1 has cell 2", "BAD_POSITION"),
    "below": (dict(node_position=[0, -2]), "node 1 has cell -2", "BAD_POSITION"),
    "weight": (dict(weight=[1.0, -1.0]), "token 1 has -1", "NEGATIVE_BYTES"),
    "bytes": (dict(bytes_per_token=-1.0), "bytes_per_token = -1", "NEGATIVE_BYTES"),
    "room": (dict(max_messages=3), "max_messages = 3: this traffic has 4", "TOO_MANY_MESSAGES"),
}
GOOD = dict(
    expert_ids=[[0, 1], [1, 0]], share=[[0.5, 0.5], [1, 0]], node_position=[1, 0], weight=[1.0, 1.0]
)


@pytest.mark.parametrize("case", BAD)
def test_bad_input_names_the_offender_and_has_a_status_under_jit(case):
    changes, text, code = BAD[case]
    problem = GOOD | dict(bytes_per_token=1.0) | changes
    with pytest.raises(ValueError, match=text):
        expert_traffic(**problem)
    room = problem.pop("max_messages", None)
    arrays = {name: jnp.asarray(value) for name, value in problem.items()}
    found = jax.jit(lambda p: expert_traffic(**p, max_messages=room))(arrays)
    assert int(found.status) == Status[code]
    assert np.all(np.isnan(found.bytes)) and np.all(found.valid)


def test_one_bad_batch_leaves_the_others_right():
    rows = jnp.array([[[0, 1], [1, 0]], [[0, 5], [1, 0]]])
    share, position = jnp.array(GOOD["share"]), jnp.array(GOOD["node_position"])
    traffic = lambda ids: expert_traffic(ids, share, position, bytes_per_token=1.0)
    found = jax.vmap(traffic)(rows)
    assert found.status.tolist() == [0, Status.INVALID_ROUTING]
    assert np.array_equal(found.bytes[0], traffic(rows[0]).bytes)
    assert mirror(found).source.shape == (2, 4)


@pytest.mark.parametrize(
    "changes, text",
    [
        (dict(expert_ids=[0, 1]), r"expert_ids has shape \(2,\)"),
        (dict(expert_ids=np.zeros((0, 2), int)), "without an empty axis"),
        (dict(expert_ids=[[0.0, 1.0]]), "expert_ids is float"),
        (dict(node_position=[0, 1, 2]), r"node_position has shape \(3,\), expected \(2,\)"),
        (dict(weight=[1.0]), r"weight has shape \(1,\), expected \(2,\)"),
        (dict(bytes_per_token=[1.0]), "bytes_per_token has shape"),
        (dict(max_messages=0), "max_messages = 0"),
        (dict(key=jax.random.key(0), expected=True), "give one"),
    ],
)
def test_shapes_and_options_are_checked(changes, text):
    with pytest.raises(ValueError, match=text):
        expert_traffic(**(GOOD | dict(bytes_per_token=1.0) | changes))


def test_messages_are_checked_and_can_be_stacked():
    made = Messages([0, 1], [1, 0], [1, 2], [True, False])
    assert made.bytes.dtype == jnp.float32 and made.start_time.tolist() == [0, 0]
    assert made.flow is None and int(made.status) == 0 and made.num_messages == 2
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), made, made, made)
    again = jax.vmap(Messages)(
        *(getattr(stacked, n) for n in ("source", "destination", "bytes")), stacked.valid
    )
    assert again.bytes.shape == (3, 2) and again.status.shape == (3,) and again.num_messages == 2
    for change, text in [
        (dict(source=[[0, 1]]), r"source has shape \(1, 2\)"),
        (dict(bytes=[1.0]), r"bytes has shape \(1,\)"),
        (dict(flow=[1, 2, 3]), "flow has shape"),
        (dict(start_time=0.0), "start_time has shape"),
        (dict(source=[0.5, 1]), "source is float32, not an integer"),
        (dict(valid=[1, 0]), "valid is int32, not bool"),
        (dict(destination=np.array([0, 2**31])), "entry of 2"),
    ]:
        fields = dict(source=[0, 1], destination=[1, 0], bytes=[1, 2], valid=[True, False])
        with pytest.raises(ValueError, match=rf"Messages\..*{text}"):
            Messages(**(fields | change))


def test_pairs():
    matrix = np.array([[7.0, 1.0, 0.0], [0.0, 0.0, 2.0], [3.0, 0.0, 0.0]])
    found = pair_messages(matrix)
    assert found.num_messages == 9
    assert listed(found) == [(0, 1, 1.0), (1, 2, 2.0), (2, 0, 3.0)]
    assert traffic_matrix(found, 3).tolist() == (matrix * (1 - np.eye(3))).tolist()
    assert np.all(np.isnan(traffic_matrix(found, 2)))
    with pytest.raises(ValueError, match=r"matrix has shape \(2, 3\)"):
        pair_messages(np.zeros((2, 3)))


def test_published_placements_pass(data_dir):
    stored = np.load(data_dir / "hd-moe-reference" / "placements.npz")
    name = "mixtral_nodelink_5.0T_50.0G_4x8"
    for share, position in zip(stored[f"{name}_P"], stored[f"{name}_pos"], strict=True):
        found = expert_traffic(np.array([[0, 7]]), share, position, bytes_per_token=1.0)
        assert len(listed(found)) == np.sum((share[[0, 7]] > 1e-6).any(axis=0))
