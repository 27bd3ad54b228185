"""What the exact gate says to input that no choice can be made from."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax import Status, gating


COEFFICIENTS = dict(r_comp=-0.5, r_comm=-0.125, token_time=0.25)
GOOD = dict(scores=np.full((3, 4), 0.25, np.float32), share=np.eye(4), top_k=2, **COEFFICIENTS)
NAN_SCORES = np.where(np.arange(4) == 2, np.nan, GOOD["scores"]).astype(np.float32)
EMPTY_ROW = np.where(np.arange(3)[:, None] == 1, -np.inf, GOOD["scores"]).astype(np.float32)


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(top_k=5), "top_k = 5.*1 to 4"),
        (dict(top_k=2.0), "top_k = 2.0"),
        (dict(top_k=3, num_groups=2, top_groups=1), "top_k = 3.*1 to 2"),
        (dict(num_groups=3), "num_groups = 3 does not divide 4"),
        (dict(top_groups=2), "top_groups = 2.*1 to 1"),
        (dict(group_score="best"), "group score 'best'"),
        (dict(protect=3), "protect = 3.*0 to 2"),
        (dict(chunk=0), "chunk = 0"),
        (dict(combine="sum"), "combine rule 'sum'"),
        (dict(scaling=-1.0), "scaling = -1"),
        (dict(scores=np.zeros(4)), r"scores has shape \(4,\)"),
        (dict(scores=np.zeros((3, 5))), "scores has 5 experts, the cost source 4"),
        (dict(scores=np.zeros((3, 4), int)), "scores is int"),
        (dict(scores=NAN_SCORES), r"scores\[0, 2\] = nan"),
        (dict(scores=-NAN_SCORES), r"scores\[0, 2\] = nan"),
        (dict(scores=-NAN_SCORES, num_groups=2), r"scores\[0, 2\] = nan"),
        (dict(scores=np.full((3, 4), -np.inf)), "fewer than top_k = 2"),
        (dict(scores=EMPTY_ROW), "fewer than top_k = 2"),
        (dict(scores=np.full((3, 4), np.inf)), r"scores\[0, 0\] = inf"),
        (dict(selection_scores=NAN_SCORES), r"selection_scores\[0, 2\] = nan"),
        (dict(selection_scores=np.zeros((4, 3))), "selection_scores has shape"),
        (dict(extra_cost=NAN_SCORES[0]), r"extra_cost\[2\] = nan"),
        (dict(extra_cost=np.full(4, -np.inf)), r"extra_cost\[0\] = -inf"),
        (dict(extra_cost=np.zeros(3)), "extra_cost has shape"),
        (dict(valid=np.ones(4, bool)), "valid has shape"),
        (dict(enabled=np.ones(3, bool)), "enabled has shape"),
        (dict(max_rows=-1), "max_rows = -1: allowed is a whole number, 0 or more"),
        (dict(max_rows=2.5), "max_rows = 2.5"),
        (dict(max_rows=np.ones(3, int)), "max_rows has shape"),
        (dict(share=np.eye(4) * 0.5), "row 0 of share sums to 0.5"),
        (dict(share=np.eye(4) - 0.1), r"share\[0, 1\] = -0.1"),
        (dict(share=np.eye(4)[None]), "share has shape"),
        (dict(share=np.full((4, 4), np.nan)), r"share\[0, 0\] = nan"),
        (dict(r_comp=0.1), "r_comp = 0.1.*0 or less"),
        (dict(r_comm=np.nan), "r_comm = nan"),
        (dict(r_comp=np.zeros(3)), r"r_comp has shape \(3,\)"),
        (dict(token_time=-1.0), "token_time = -1"),
        (dict(initial_load=-np.ones(4)), "initial_load = -1"),
        (dict(initial_load=np.ones(3)), "initial_load has shape"),
        (dict(share=np.full((4, 8), 0.125), max_hosts=1), "max_hosts = 1: an expert has 8"),
    ],
)
def test_impossible_input_is_named(changes, words):
    with pytest.raises(ValueError, match=words):
        gating.hardware_aware_top_k(**(GOOD | changes))


def test_a_source_of_other_experts_is_named():
    table = np.arange(5.0)
    for experts in (1, 5):
        source = gating.PartitionTimes(table, table, r_time=-1.0, num_experts=experts)
        with pytest.raises(ValueError, match=rf"4 experts, the costs of the source \({experts}"):
            gating.cost_aware_top_k(GOOD["scores"], source, top_k=2)


def test_every_function_says_what_its_gradient_is():
    words = ("radient", "ubgradient", "ifferentiable")
    for name in gating.__all__:
        public = getattr(gating, name)
        if isinstance(public, type) or name == "router_options":  # options of a model, no arrays
            continue
        assert any(word in public.__doc__ for word in words), name


def test_impossible_input_is_a_status_under_tracing():
    given = GOOD | dict(initial_load=np.zeros(4), extra_cost=np.zeros(4), top_k=2)
    names = ["scores", "share", "r_comp", "r_comm", "token_time", "initial_load", "extra_cost"]

    @jax.jit
    def gate(arrays):
        found = gating.hardware_aware_top_k(**arrays, top_k=2)
        return found, gating.hardware_aware_top_k(**arrays, top_k=2, num_groups=2, protect=1)

    arrays = {name: jnp.asarray(given[name], jnp.float32) for name in names}
    assert all(found.status == Status.OK for found in gate(arrays))
    for name, value, status in [
        ("scores", NAN_SCORES, Status.BAD_SCORE),
        ("scores", -NAN_SCORES, Status.BAD_SCORE),
        ("scores", EMPTY_ROW, Status.BAD_SCORE),
        ("share", np.eye(4) * 0.5, Status.BAD_SHARE),
        ("r_comp", 1e-3, Status.BAD_COST),
        ("r_comm", np.nan, Status.BAD_COST),
        ("token_time", -1.0, Status.BAD_COST),
        ("initial_load", -np.ones(4), Status.BAD_COST),
        ("extra_cost", NAN_SCORES[0], Status.BAD_SCORE),
    ]:
        for found in gate(arrays | {name: jnp.asarray(value, jnp.float32)}):
            assert found.status == status, name
            assert np.isnan(found.weights).all() and np.isnan(found.node_load).all()
            np.testing.assert_array_equal(found.expert_ids, np.full((3, 2), -1))
