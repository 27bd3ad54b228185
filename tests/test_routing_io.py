"""Traces from files: the three formats, the shared data, and every way a file can be wrong."""

import json

import jax
import numpy as np
import pytest

from moejax.routing import NOT_ROUTED, RoutingTrace, load, save


IDS = np.array([[[0, 1], [2, 3], [1, 0]], [[3, 2], [1, 0], [2, 1]]])  # 2 layers, 3 tokens, k = 2


def hd_moe(path, layers):
    path.write_text(json.dumps(layers))
    return path


def npz(path, sidecar=None, **arrays):
    np.savez(path, **arrays)
    if sidecar is not None:
        path.with_suffix(".json").write_text(json.dumps(sidecar))
    return path


def replaced(position, value):
    ids = IDS.copy()
    ids[position] = value
    return ids


def test_npz_with_sidecar(tmp_path):
    path = npz(
        tmp_path / "trace.npz",
        dict(model="Mixtral-8x7B-Instruct-v0.1", experts=4),
        experts=IDS.astype(np.uint8),
        probs_e4=np.full((2, 3, 2), 2500, np.uint16),
        seq_start=np.array([0, 2], np.int32),
        seq_fresh=np.array([1, 2], np.int32),
    )
    trace = load(path)
    assert (trace.model, trace.num_experts) == ("mixtral-8x7b", 4)
    assert np.array_equal(trace.expert_ids, IDS)
    assert np.allclose(trace.weights, 0.25)
    assert trace.valid.tolist() == [False, True, True]
    assert trace.sequence_start.tolist() == [0, 2]


def test_npz_alone_needs_num_experts_and_keeps_half_precision_weights(tmp_path):
    weights = np.array([0.75, 0.25], np.float16) * np.ones((2, 3, 1), np.float16)
    path = npz(tmp_path / "trace.npz", experts=IDS.astype(np.uint8), probs=weights)
    with pytest.raises(ValueError, match="trace.npz: does not say how many experts"):
        load(path)
    trace = load(path, num_experts=4)
    assert np.array_equal(trace.weights, weights.astype(np.float32)) and trace.model is None
    assert trace.valid.all() and trace.sequence_start.tolist() == [0]


def test_hd_moe_json_sorts_layers_by_number(tmp_path):
    path = hd_moe(tmp_path / "t.json", {"10": IDS[1].tolist(), "9": IDS[0].tolist()})
    trace = load(path, num_experts=4)
    assert np.array_equal(trace.expert_ids, IDS)
    with pytest.raises(ValueError, match="pass num_experts"):
        load(path)


def test_own_format_comes_back_unchanged(tmp_path):
    trace = RoutingTrace(
        replaced((0, 1), NOT_ROUTED),
        4,
        weights=np.linspace(0, 1, 12).reshape(2, 3, 2),
        logits=np.arange(24.0).reshape(2, 3, 4),
        valid=[True, False, True],
        sequence_start=[0, 1],
        decode=[False, True, True],
        model="own",
    )
    plain = RoutingTrace(IDS, 4)
    for original in (trace, plain):
        save(original, tmp_path / "own")
        read = load(tmp_path / "own")
        assert jax.tree.structure(read) == jax.tree.structure(original)
        assert all(jax.tree.leaves(jax.tree.map(np.array_equal, read, original)))
        assert [x.dtype for x in jax.tree.leaves(read)] == [
            x.dtype for x in jax.tree.leaves(original)
        ]
    with pytest.raises(ValueError, match="own: has 4 experts a layer, asked for 8"):
        load(tmp_path / "own", num_experts=8)


@pytest.mark.parametrize(
    "ids, message",
    [
        (replaced((1, 2, 0), 4), "layer 1, token 2: expert id 4, allowed is 0 to 3"),
        (replaced((0, 1, 1), -1), "layer 0, token 1: expert id -1"),
        (replaced((1, 1), 2), "layer 1, token 1: duplicate expert 2"),
        (IDS[:, :0], "empty"),
        (IDS[:0], "empty"),
        (IDS[0], r"allowed is \[layers, tokens, top_k\]"),
        (IDS.astype(float), "whole numbers"),
        (np.broadcast_to(np.arange(5), (1, 2, 5)), "top_k = 5 is more than num_experts = 4"),
    ],
)
def test_bad_npz(tmp_path, ids, message):
    path = npz(tmp_path / "bad.npz", experts=ids)
    with pytest.raises(ValueError, match=f"bad.npz: .*{message}") as caught:
        load(path, num_experts=4)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "arrays, message",
    [
        (dict(counts=IDS), "holds counts, not a trace"),
        (dict(other=IDS), r"holds no routing trace \(arrays: other\)"),
        (dict(experts=IDS, probs=np.ones((2, 3))), "weights has shape"),
        (dict(experts=IDS, seq_start=np.array([1, 2])), "sequence starts must ascend from 0"),
        (dict(experts=IDS, seq_start=np.array([0, 2]), seq_fresh=np.array([0])), "seq_fresh"),
        (dict(experts=np.array([{}])), "not a readable npz"),
    ],
)
def test_npz_with_other_contents(tmp_path, arrays, message):
    with pytest.raises(ValueError, match=f"x.npz: .*{message}"):
        load(npz(tmp_path / "x.npz", **arrays), num_experts=4)


@pytest.mark.parametrize(
    "layers, message",
    [
        ({"0": [[0, 1], [2, 3]], "7": [[0, 1], [4, 3]]}, "layer 7, token 1: expert id 4"),
        ({"0": [[0, 1], [-1, 3]]}, "layer 0, token 1: expert id -1"),
        ({"0": [[0, 1]], "1": [[2, 2]]}, "layer 1, token 0: duplicate expert 2"),
        ({"0": [[0, 1], [2]]}, "layer 0, token 1: ragged, 1 experts where token 0 has 2"),
        ({"0": [[0, 1]], "1": [[0]]}, "layer 1 has 1 tokens of 1 experts, layer 0 has 1 of 2"),
        ({"0": [[0, 1]], "1": [[0, 1]] * 2}, "layer 1 has 2 tokens of 2 experts, layer 0 has 1"),
        ({"0": [[0, 1]], "1": []}, "layer 1 is empty"),
        ({}, "the trace is empty"),
        ({"0": [[0, 1.5]]}, r"layer 0, token 0: \[0, 1.5\] is not a list of expert ids"),
        ({"0": [[0, 1], None]}, "layer 0, token 1: None is not a list of expert ids"),
        ({"0": [[]]}, r"layer 0, token 0: \[\] is not a list of expert ids"),
        ({"0": 3}, "layer 0 is not a list of tokens"),
        ({"0": [[2**70, 1]]}, "does not fit 64 bits"),
        ({"model": "x"}, "key 'model' is not the number of a layer"),
        ([1], "the JSON is a list"),
    ],
)
def test_bad_json(tmp_path, layers, message):
    with pytest.raises(ValueError, match=f"bad.json: .*{message}") as caught:
        load(hd_moe(tmp_path / "bad.json", layers), num_experts=4)
    assert "\n" not in str(caught.value)


def test_missing_and_unreadable_files(tmp_path):
    with pytest.raises(ValueError, match="absent.npz: no such file"):
        load(tmp_path / "absent.npz")
    (tmp_path / "noise.npz").write_bytes(b"\x93\xff noise")
    with pytest.raises(ValueError, match="noise.npz: neither an npz nor JSON"):
        load(tmp_path / "noise.npz", num_experts=4)
    path = npz(tmp_path / "cut.npz", dict(model="x"), experts=IDS)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ValueError, match="cut.npz"):
        load(path, num_experts=4)
    npz(path, experts=IDS)
    with pytest.raises(ValueError, match="cut.json: .* the trace is in cut.npz"):
        load(path.with_suffix(".json"), num_experts=4)


def test_trace_of_another_model(tmp_path):
    ids = np.broadcast_to(np.arange(2), (32, 3, 2))
    path = npz(tmp_path / "m.npz", dict(model="Mixtral-8x7B", experts=8), experts=ids)
    assert load(path, model="mixtral-8x7b").model == "mixtral-8x7b"
    with pytest.raises(
        ValueError, match=r"trace of mixtral-8x7b .*\(32, 8, 2\); asked for deepseek-v2-lite .*26"
    ):
        load(path, model="deepseek-v2-lite")
    with pytest.raises(ValueError, match="did you mean 'mixtral-8x7b'"):
        load(path, model="mixtral-8x7")
    layers = {str(layer): ids[0].tolist() for layer in range(32)}
    plain = hd_moe(tmp_path / "plain.json", layers)
    trace = load(plain, model="mixtral-8x7b")
    assert (trace.model, trace.num_experts) == ("mixtral-8x7b", 8)
    layers.pop("31")
    with pytest.raises(ValueError, match=r"unnamed model .*\(31, 8, 2\); asked for mixtral-8x7b"):
        load(hd_moe(plain, layers), model="mixtral-8x7b")


@pytest.mark.parametrize(
    "name, model, shape, sequences, valid",
    [
        # Shapes and numbers of sequences from the descriptions beside the files.
        ("mixtral-8x7b/mtbench-math", "mixtral-8x7b", (32, 10307, 2), 10, 3400),
        ("gpt-oss-20b/decode-misc", "gpt-oss-20b", (24, 821, 4), 4, 821),
        ("deepseek-v2-lite/esft-intent", "deepseek-v2-lite", (26, 8222, 6), 127, 8222),
    ],
)
def test_real_traces(data_dir, name, model, shape, sequences, valid):
    trace = load(data_dir / f"{name}.npz", model=model)
    assert trace.model == load(data_dir / f"{name}.npz").model == model
    assert trace.expert_ids.shape == shape and trace.num_sequences == sequences
    assert int(trace.valid.sum()) == valid
    file = np.load(data_dir / f"{name}.npz")
    assert np.array_equal(trace.expert_ids, file["experts"])
    if "probs" in file.files:
        assert np.allclose(trace.weights.sum(-1), 1, atol=0.02)
    assert (trace.weights is None) == model.startswith("mixtral")


def test_aggregates_are_no_traces(data_dir):
    with pytest.raises(ValueError, match="popularity.npz: holds counts, not a trace"):
        load(data_dir / "olmoe-1b-7b" / "popularity.npz")
