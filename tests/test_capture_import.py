"""Importers on files made by hand, what they say of malformed ones, and exporters."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from moejax import capture, placement, routing
from moejax.cli import main


FIXTURES = Path(__file__).resolve().parent / "fixtures" / "capture"


@pytest.fixture
def torch():
    return pytest.importorskip("torch", reason="torch is not installed (moejax[capture])")


def test_importers_and_the_rest_never_import_torch():
    names = "from_array from_routed_experts load_llama_cpp load_sglang save_counts save_eplb"
    code = f"""
import sys
sys.modules["torch"] = sys.modules["transformers"] = None  # an import of either raises
import moejax
import moejax.cli
from moejax import capture
assert all(hasattr(capture, name) for name in {names.split()!r})
counts = capture.load_sglang([{str(FIXTURES / "sglang_rank0.csv")!r}])
capture.load_llama_cpp({str(FIXTURES / "llama_cpp.csv")!r}, 2, 4)
capture.load_routed_experts({str(FIXTURES / "vllm_response.json")!r}, 4)
print(counts.counts.sum())
try:
    capture.gate_for(None, None)
except ValueError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first, second = done.stdout.splitlines()
    assert first == "22"
    assert second.startswith("capture needs torch (") and "moejax[capture]" in second


def test_sglang_csv_of_two_ranks_is_summed(tmp_path):
    paths = [FIXTURES / "sglang_rank0.csv", FIXTURES / "sglang_rank1.csv"]
    found = capture.load_sglang(paths, num_experts=6)
    assert found.layer_numbers.tolist() == [3, 4]
    assert found.counts.tolist() == [[11, 2, 5, 0, 0, 0], [0, 7, 0, 4, 0, 0]]
    capture.save_counts(found, tmp_path / "counts.csv")
    again = capture.load_sglang(tmp_path / "counts.csv", num_experts=6)
    assert np.array_equal(again.counts, found.counts)
    plan = placement.replicate_and_pack(found.counts.astype(float), 8, 1, 1, 4)
    assert plan.expert_count.shape == (2, 6)


HEAD = "layer_id,expert_id,count\n"


@pytest.mark.parametrize(
    "text, message",
    [
        ("layer,expert,n\n0,0,1\n", "begins with 'layer,expert,n': allowed is layer_id,expert_id"),
        (HEAD, "holds no rows"),
        ("", "holds no rows"),
        (HEAD + "0,1\n", "line 2: '0,1': allowed is layer_id,expert_id,count, whole numbers"),
        (HEAD + "0,1,2\n0,-1,2\n", "line 3: '0,-1,2'"),
        (HEAD + "0,1,2.5\n", "line 2: '0,1,2.5'"),
        (HEAD + "0,1,99999999999999999999\n", "a number beyond 64 bits"),
        (HEAD + "0,1,2\n0,1,3\n", "counts an expert of a layer twice"),
        (HEAD + "0,1,0\n", "every count is 0"),
        (HEAD + "3000000,1,1\n", "layer 3000000, expert 1: not of a model"),
    ],
)
def test_malformed_sglang_csv(tmp_path, text, message):
    path = tmp_path / "dump.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        capture.load_sglang(path)
    assert str(error.value).startswith(str(path)) and "\n" not in str(error.value)


def test_sglang_counts_in_pt(tmp_path, torch):
    steps = torch.zeros(2, 3, 4, dtype=torch.int32)
    steps[0, 1] = torch.tensor([1, 2, 3, 4])
    steps[1, 1] = torch.tensor([5, 0, 0, 1])
    dump = dict(rank=0, logical_count=steps, average_utilization_rate_over_window=None)
    torch.save(dump, tmp_path / "a.pt")
    found = capture.load_sglang(tmp_path / "a.pt")
    assert found.layer_numbers.tolist() == [1] and found.counts.tolist() == [[6, 2, 3, 5]]
    assert capture.load_sglang([tmp_path / "a.pt"] * 2).counts.sum() == 32  # two dumps of rank 0
    torch.save(dump | dict(rank=1), tmp_path / "b.pt")
    with pytest.raises(ValueError, match=r"summed over ranks already; .* not of ranks \[0, 1\]"):
        capture.load_sglang([tmp_path / "a.pt", tmp_path / "b.pt"])
    torch.save(dump | dict(logical_count=steps[..., :3]), tmp_path / "c.pt")
    (tmp_path / "d.csv").write_text(HEAD + "0,9,1\n")
    with pytest.raises(ValueError, match=r"d.csv: counts \[layers, experts\] = \(1, 10\), others"):
        capture.load_sglang([tmp_path / "a.pt", tmp_path / "d.csv"])
    torch.save(dump | dict(rank="zero"), tmp_path / "e.pt")
    with pytest.raises(ValueError, match="e.pt: rank = 'zero': allowed is a whole number"):
        capture.load_sglang(tmp_path / "e.pt")
    with pytest.raises(ValueError, match=r"c.pt: counts \[layers, experts\] = \(3, 3\), others"):
        capture.load_sglang([tmp_path / "a.pt", tmp_path / "c.pt"])


def passes(torch, rank):
    """Two layers, the first dense; four physical experts of three logical ones."""
    ids = torch.full((2, 3, 4), -1, dtype=torch.int32)
    ids[1, :, :2] = torch.tensor([[0, 3], [1, 2], [2, 0]])
    count = torch.tensor([[0, 0, 0, 0], [2, 1, 2, 1]], dtype=torch.int32)
    record = dict(forward_pass_id=0, rank=rank, gatherer_key="primary", input_ids=[5, 6, 7])
    record |= dict(positions=[0, 1, 0], topk_ids_of_layer=ids, global_physical_count=count)
    to_logical = torch.tensor([[0, 1, 2, 0], [0, 1, 2, 1]])
    return dict(records=[record, dict(record)], last_physical_to_logical_map=to_logical)


def test_sglang_passes_of_two_ranks(tmp_path, torch):
    paths = [tmp_path / f"expert_distribution_recorder_1_{rank}.pt" for rank in (0, 1)]
    for rank, path in enumerate(paths):
        torch.save(passes(torch, rank), path)
    found = capture.load_sglang(paths)
    assert found.layer_numbers.tolist() == [1] and found.counts.tolist() == [[8, 8, 8]]
    trace = capture.load_sglang_trace(paths[0])
    assert trace.expert_ids.tolist() == [[[0, 1], [1, 2], [2, 0]] * 2]
    assert trace.sequence_start.tolist() == [0, 2, 3, 5] and trace.num_experts == 3


def test_malformed_sglang_pt(tmp_path, torch):
    path = tmp_path / "dump.pt"

    def refused(content, message, read=capture.load_sglang):
        torch.save(content, path)
        with pytest.raises(ValueError, match=message) as error:
            read(path)
        assert str(path) in str(error.value) and "\n" not in str(error.value)

    good = passes(torch, 0)
    record = good["records"][0]
    refused([1, 2], "holds list: allowed is 'logical_count', or 'records'")
    refused(dict(records=[]), "records is empty")
    refused(dict(logical_count=torch.ones(2, 2)), "logical_count is torch.float32: allowed are wh")
    refused(dict(logical_count=torch.tensor([[-1]])), "logical_count = -1: allowed is 0 or more")
    refused(good | dict(last_physical_to_logical_map=None), "logical_map is NoneType: allowed")
    bad = record | dict(global_physical_count=torch.ones(2, 3, dtype=torch.int32))
    refused(good | dict(records=[bad]), r"records\[0\].global_physical_count is \(2, 3\)")
    read = capture.load_sglang_trace
    bad = record | dict(topk_ids_of_layer=record["topk_ids_of_layer"] + 2)
    refused(good | dict(records=[bad]), "ids 1 to 5: allowed are 2 layers and ids -1 to 3", read)
    bad = record | dict(positions=[0])
    refused(good | dict(records=[bad]), "1 positions for 3 tokens", read)
    bad = {name: value for name, value in record.items() if name != "topk_ids_of_layer"}
    refused(good | dict(records=[bad]), "not of mode per_token", read)
    refused(subprocess.Popen, "not a .pt file of plain tensors")  # would have to be unpickled
    path.write_bytes(b"not a zip")
    with pytest.raises(ValueError, match="dump.pt: not a .pt file of plain tensors"):
        capture.load_sglang(path)
    with pytest.raises(ValueError, match="none.pt: no such file"):
        capture.load_sglang(tmp_path / "none.pt")


def test_vllm_routed_experts(tmp_path):
    trace = capture.load_routed_experts(FIXTURES / "vllm_response.json", 4)
    assert trace.sequence_start.tolist() == [0, 3]
    first = [[0, 1], [1, 2], [2, 0], [0, 1], [1, 2], [3, 1], [0, 3]]
    assert trace.expert_ids[0].tolist() == first and trace.num_layers == 2
    decode = capture.load_routed_experts(FIXTURES / "vllm_response.json", 4, phase="decode")
    assert decode.valid.tolist() == [False, False, True, False, False, True, True]
    one = np.array([[[2, 0], [1, 3]]], np.int16)
    np.save(tmp_path / "one.npy", one)
    np.savez(tmp_path / "two.npz", routed_experts=one, prompt_routed_experts=one[:, :, ::-1])
    trace = capture.load_routed_experts([tmp_path / "one.npy", tmp_path / "two.npz"], 4)
    assert trace.expert_ids[0].tolist() == [[2, 0], [0, 2], [2, 0]]
    assert trace.sequence_start.tolist() == [0, 1]


@pytest.mark.parametrize(
    "array, message",
    [
        (np.zeros((2, 2), np.int16), r"routed experts are int16\[2, 2\]: allowed are whole"),
        (np.zeros((2, 2, 2)), r"routed experts are float64\[2, 2, 2\]"),
        (np.array([[[0, 4]]]), "layer 0, token 0: expert id 4, allowed is 0 to 3"),
        (np.array([[[1, 1]]]), "duplicate expert 1"),
        ([[[0, 1]], [[0]]], "request 0: rows differ in length"),
    ],
)
def test_malformed_routed_experts(array, message):
    with pytest.raises(ValueError, match=message):
        capture.from_routed_experts([array], 4)


def test_malformed_routed_experts_files(tmp_path):
    np.savez(tmp_path / "a.npz", experts=np.zeros(3))
    (tmp_path / "b.json").write_text('{"choices": [{}]}')
    (tmp_path / "c.npy").write_bytes(b"junk")
    for name, message in (
        ("a.npz", r"has no array 'routed_experts' \(arrays: experts\)"),
        ("b.json", r"not a completions response with choices\[\].routed_experts"),
        ("c.npy", "not a readable npy or npz"),
        ("d.npy", "no such file"),
    ):
        with pytest.raises(ValueError, match=f"{name}: {message}"):
            capture.load_routed_experts(tmp_path / name, 4)
    with pytest.raises(ValueError, match="no requests: allowed is at least one"):
        capture.from_routed_experts([], 4)
    two = np.zeros((1, 2, 1), int), np.zeros((1, 3, 1), int)
    with pytest.raises(ValueError, match=r"request 1: \(layers, top_k\) = \(3, 1\)"):
        capture.from_routed_experts(two, 4)


def test_llama_cpp():
    trace = capture.load_llama_cpp(FIXTURES / "llama_cpp.csv", 2, 4)
    first = [[0, 1], [2, 3], [0, 3], [1, 2], [3, 0]]
    last = [[-1, -1], [-1, -1], [2, 0], [1, 3], [0, 1]]
    assert trace.expert_ids[0].tolist() == first and trace.expert_ids[2].tolist() == last
    assert trace.valid.tolist() == [False, False, True, True, True]


@pytest.mark.parametrize(
    "text, message",
    [
        ("0,1\n0,2\n", "one layer only"),
        ("0,1\n1,2\n0,3\n", "3 runs of 2 layers: a pass is cut short"),
        ("0,1\n1,2\n2,0\n1,0\n0,1\n2,2\n", r"pass 1 has layers \[1, 0, 2\]"),
        ("0,1\n0,2\n0,3\n1,2\n1,3\n", "MoE layer 0 has 3 rows: allowed are multiples of top_k = 2"),
        ("0,1\n0,2\n1,2\n1,3\n1,0\n1,1\n", "MoE layer 1 has 2 tokens, the first 1"),
        ("0,1\n0,1\n1,2\n1,3\n", "layer 0, token 0: duplicate expert 1"),
        ("0,9\n0,1\n1,2\n1,3\n", "layer 0, token 0: expert id 9, allowed is 0 to 3"),
        ("0,1,5\n", "line 1: '0,1,5': allowed is layer,expert"),
    ],
)
def test_malformed_llama_cpp(tmp_path, text, message):
    path = tmp_path / "trace.csv"
    path.write_text("layer,expert\n" + text if "line" not in message else text)
    with pytest.raises(ValueError, match=message) as error:
        capture.load_llama_cpp(path, 2, 4)
    assert str(path) in str(error.value)


def test_arrays_are_named_or_told_apart_and_never_put_through_two_softmaxes(tmp_path):
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(2, 5, 6)).astype(np.float32) * 3
    exact = np.exp(logits.astype(np.float64))
    probabilities = exact / exact.sum(-1, keepdims=True)
    ids = np.argsort(-logits, axis=-1)[..., :2]
    assert capture.kind_of(logits) == "logits" and capture.kind_of(ids) == "ids"
    assert capture.kind_of(probabilities.astype(np.float16)) == "probabilities"
    for array in (logits, probabilities):
        trace = capture.from_array(array, top_k=2)
        assert np.array_equal(trace.expert_ids, ids)
        chosen = np.take_along_axis(probabilities, ids, -1)
        assert np.allclose(trace.weights, chosen / chosen.sum(-1, keepdims=True), atol=1e-6)
        again = np.exp(np.asarray(trace.logits, np.float64))
        assert np.allclose(again / again.sum(-1, keepdims=True), probabilities, atol=1e-6)
    assert np.array_equal(capture.from_array(ids, num_experts=6).expert_ids, ids)
    small = (logits - logits.min()) / 100  # logits by name alone
    np.savez(tmp_path / "a.npz", router_logits=small, labels=ids)
    assert np.array_equal(capture.load_array(tmp_path / "a.npz", top_k=2).expert_ids, ids)
    np.save(tmp_path / "b.npy", probabilities)
    assert np.array_equal(capture.load_array(tmp_path / "b.npy", top_k=2).expert_ids, ids)


SIGMOIDS = 1 / (1 + np.exp(-np.linspace(-2, 3, 12).reshape(1, 2, 6)))


@pytest.mark.parametrize(
    "array, options, message",
    [
        (SIGMOIDS, {}, "between 0 and 1 and its rows do not sum to 1: name its kind"),
        (SIGMOIDS, dict(kind="probabilities"), "are they logits or sigmoids"),
        (np.full((1, 2, 6), 3.0), {}, "whole numbers as floats: name its kind"),
        (np.full((1, 2, 6), np.nan), {}, "array is not finite"),
        (np.ones((1, 2, 6), complex), {}, "array is complex128"),
        (np.ones((2, 6)) / 6, {}, r"array has shape \(2, 6\): allowed is \[layers, tokens"),
        (SIGMOIDS, dict(kind="scores"), "unknown kind 'scores'"),
        (SIGMOIDS, dict(kind="logits", top_k=7), "top_k = 7: allowed is 1 to the 6 experts"),
        (
            SIGMOIDS,
            dict(kind="logits", num_experts=8),
            "num_experts = 8: the array of logits has 6",
        ),
        (SIGMOIDS * np.nan, dict(kind="logits"), "logits are NaN or .inf somewhere"),
        (np.zeros((1, 2, 3), int), dict(num_experts=4), "top_k = 2: the array of ids has 3"),
        (np.zeros((1, 2, 2), int), {}, "num_experts is needed for ids"),
        (np.zeros((1, 2, 2), int), dict(num_experts=4), "duplicate expert 0"),
    ],
)
def test_malformed_arrays(array, options, message):
    with pytest.raises(ValueError, match=message):
        capture.from_array(array, **({"top_k": 2} | options))


def test_array_files_of_unknown_content(tmp_path):
    np.savez(tmp_path / "a.npz", one=np.zeros(2), two=np.zeros(2))
    np.save(tmp_path / "b.npy", SIGMOIDS)
    (tmp_path / "c.npz").write_bytes(b"PK junk")
    for name, message in (
        ("a.npz", "has arrays one, two: allowed is one of known name"),
        ("b.npy", "array is between 0 and 1"),
        ("c.npz", "not a readable npy or npz"),
        ("d.npy", "no such file"),
    ):
        with pytest.raises(ValueError, match=f"{name}: {message}"):
            capture.load_array(tmp_path / name, top_k=2)


LOADS = np.array([[90.0, 132, 40, 61], [20, 107, 104, 64]])


def test_eplb_weights_in_and_maps_out(tmp_path):
    np.save(tmp_path / "weights.npy", LOADS)
    found = capture.load_eplb_weights(tmp_path / "weights.npy", layer_numbers=[3, 4])
    assert np.array_equal(found.counts, LOADS) and found.layer_numbers.tolist() == [3, 4]
    plan = placement.replicate_and_pack(found.counts, 6, 1, 1, 2)
    capture.save_eplb(plan, tmp_path / "maps.npz")
    with np.load(tmp_path / "maps.npz") as maps:
        assert {name: maps[name].shape for name in maps.files} == {
            "phy2log": (2, 6), "log2phy": (2, 4, 3), "logcnt": (2, 4)
        }  # fmt: skip
        assert maps["phy2log"].dtype == np.int64
        assert np.array_equal(maps["phy2log"], plan.physical_to_logical_map)
    one = placement.replicate_and_pack(found.counts[0], 6, 1, 1, 2)
    capture.save_eplb(one, tmp_path / "maps.json")
    text = json.loads((tmp_path / "maps.json").read_text())
    assert text == {"physical_to_logical_map": [one.physical_to_logical_map.tolist()]}
    with pytest.raises(ValueError, match="maps.txt: allowed endings are .npz, .json and .pt"):
        capture.save_eplb(plan, tmp_path / "maps.txt")


def test_eplb_tensors_of_torch(tmp_path, torch):
    for content in (torch.tensor(LOADS), {"weight": torch.tensor(LOADS, dtype=torch.float16)}):
        torch.save(content, tmp_path / "weights.pt")
        assert np.array_equal(capture.load_eplb_weights(tmp_path / "weights.pt").counts, LOADS)
    plan = placement.replicate_and_pack(LOADS, 6, 1, 1, 2)
    capture.save_eplb(plan, tmp_path / "maps.pt")
    maps = torch.load(tmp_path / "maps.pt", weights_only=True)
    assert sorted(maps) == ["log2phy", "logcnt", "phy2log", "physical_to_logical_map"]
    assert np.array_equal(maps["log2phy"].numpy(), plan.logical_to_physical_map)
    torch.save(torch.ones(3), tmp_path / "flat.pt")
    with pytest.raises(ValueError, match=r"flat.pt: the weights is .3.: allowed is a"):
        capture.load_eplb_weights(tmp_path / "flat.pt")


@pytest.mark.parametrize(
    "weights, message",
    [
        (np.ones(3), r"weights are \(3,\): allowed is \[layers, experts\]"),
        (-LOADS, "layer 0, expert 0: -90: allowed is finite, 0 or more"),
        (LOADS * np.inf, "layer 0, expert 0: inf"),
    ],
)
def test_malformed_eplb_weights(tmp_path, weights, message):
    np.save(tmp_path / "weights.npy", weights)
    with pytest.raises(ValueError, match=f"weights.npy: {message}"):
        capture.load_eplb_weights(tmp_path / "weights.npy")


def test_a_placement_in_the_shape_of_eplb_is_the_same_placement():
    found = capture.plan_of_share(np.array([[1.0, 0], [0.5, 0.5], [0, 1], [0.5, 0.5]]))
    assert found.physical_to_logical_map.tolist() == [[0, 1, 3, 1, 2, 3]]
    assert found.logical_to_physical_map[0].tolist() == [[0, -1], [1, 3], [4, -1], [2, 5]]
    assert found.expert_count.tolist() == [[1, 2, 1, 2]]
    back = placement.replica_share(found, 2)
    assert back.tolist() == [[[1.0, 0], [0.5, 0.5], [0, 1], [0.5, 0.5]]]
    with pytest.raises(ValueError, match="layer 0, expert 1: share is not even over its nodes"):
        capture.plan_of_share(np.array([[1.0, 0], [0.3, 0.7]]))
    with pytest.raises(ValueError, match="layer 0, node 1 holds 1 experts, the first node 2"):
        capture.plan_of_share(np.array([[1.0, 0], [1, 0], [0, 1]]))


def test_counts_of_a_trace_leave_out_what_is_not_valid(tmp_path):
    ids = [[[0, 1], [2, 1], [3, 0]], [[1, 0], [1, 2], [3, 2]]]
    trace = routing.RoutingTrace(ids, 5, valid=[True, True, False])
    counts = capture.ExpertCounts.of(trace, [3, 7])
    assert counts.counts.tolist() == [[1, 2, 1, 0, 0], [1, 2, 1, 0, 0]]
    capture.save_counts(counts, tmp_path / "counts.csv")
    lines = (tmp_path / "counts.csv").read_text().splitlines()
    assert lines[:3] == ["layer_id,expert_id,count", "3,0,1", "3,1,2"] and len(lines) == 7


@pytest.mark.parametrize(
    "arguments, printed",
    [
        ("sglang sglang_rank0.csv sglang_rank1.csv -o counts.csv", "2 MoE layers, 4 experts, 29"),
        (
            "vllm vllm_response.json --num-experts 4 --phase decode -o t.npz",
            "7 tokens, 3 valid",
        ),
        ("llama.cpp llama_cpp.csv --top-k 2 --num-experts 4 -o t.npz", "5 tokens, 3 valid, in 1"),
        ("llama.cpp llama_cpp.csv --top-k 2 --num-experts 4 -o c.csv", "top-2, 5 tokens"),
    ],
)
def test_the_command(arguments, printed, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(FIXTURES)
    words = arguments.split()
    words[-1] = str(tmp_path / words[-1])
    assert main(["import", *words]) == 0
    assert printed in capsys.readouterr().out
    if words[-1].endswith(".npz"):
        assert routing.load(words[-1]).num_experts == 4
    else:
        assert capture.load_sglang(words[-1]).counts.sum() > 0


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("vllm vllm_response.json -o t.npz", "--num-experts is needed for vllm"),
        ("llama.cpp llama_cpp.csv --num-experts 4 -o t.npz", "--top-k is needed for llama.cpp"),
        ("sglang sglang_rank0.csv -o t.npz", "sglang has counts, no tokens: allowed is .csv"),
        ("sglang sglang_rank0.csv -o t.txt", "allowed endings are .npz (trace) and .csv (counts)"),
        ("llama.cpp a b --top-k 2 --num-experts 4 -o t.npz", "2 files: allowed is one"),
        ("sglang none.csv -o t.csv", "none.csv: no such file"),
        ("sglang sglang_rank0.csv --phase decode -o t.csv", "--phase says nothing of sglang files"),
        ("vllm v.json --num-experts 4 --top-k 2 -o t.npz", "--top-k says nothing of vllm files"),
        ("eplb weights.npy --num-experts 4 -o t.csv", "--num-experts says nothing of eplb files"),
    ],
)
def test_mistakes_at_the_command_line(arguments, message, monkeypatch, capsys):
    monkeypatch.chdir(FIXTURES)
    assert main(["import", *arguments.split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith("moejax import: ") and message in error and error.count("\n") == 1
