"""Fidelity of a gated model on a text, the commands, and the README's snippets."""

import json
import re

import numpy as np
import pytest

from moejax import capture, gating, metrics, routing
from moejax.capture import _families as families
from moejax.capture._bridge import to_jax
from moejax.cli import main
from tests.capture_models import needs_torch, save_checkpoint, tiny


needs_torch()
SHARE = np.eye(4)[[0, 1, 2, 3, 1, 0, 3, 2]]
TEXT = "a mixture of experts sends each token to a few of many. some are popular!\n" * 8
COSTS = gating.LayerCosts(1e-6, 1e-7, 1e-8, top_k=2)
# One shape for all tests: each new one is compiled.
TOKENS = np.random.default_rng(0).integers(3, 64, (4, 12))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A folder with a tiny model, its tokenizer, prompts, a text and a gate."""
    folder = tmp_path_factory.mktemp("checkpoint")
    save_checkpoint("Mixtral", folder)
    (folder / "prompts.txt").write_text("hello there\n\nwhat is it?\nonce upon a time\n")
    (folder / "text.txt").write_text(TEXT)
    options = dict(r_comp=-1e5, r_comm=-0.01, token_time=1e-6)
    capture.save_gate(capture.gate_for(tiny("Mixtral"), SHARE, **options), folder / "gate.eqx")
    return folder


@pytest.mark.parametrize("family", ["Mixtral", "DeepseekV3", "GptOss"])
def test_every_metric_is_that_of_the_arrays(family):
    """Measured again from logits and choices of the same calls."""
    import torch

    model = tiny(family)
    gate = capture.gate_for(model, SHARE, r_comp=-1e5, r_comm=-0.01, token_time=1e-6)
    costs = COSTS
    found = capture.fidelity(
        model, TOKENS, gate, batch=2, decode_from=6, costs=costs, expert_rows=16
    )
    windows = torch.from_numpy(TOKENS)
    rows, kept, logs = [], [], []
    for ids in windows.split(2):
        with torch.no_grad():
            a = model(ids).logits
            options = dict(decode_from=6, keep_choices=True, costs=costs)
            with capture.gated(model, gate, **options) as log:
                b = model(ids).logits
        a, b, target = to_jax(a[:, 6:-1]), to_jax(b[:, 6:-1]), to_jax(ids[:, 7:].int())
        for one in zip(a, b, target):
            kl, ratio = metrics.kl(*one[:2]), metrics.ppl_ratio(*one)
            rows.append((kl, np.log(ratio), metrics.rms_shift(*one) ** 2))
        kept.append(log.kept[0])
        logs.append(log)
    kl, ratio, shift = np.mean(rows, axis=0)
    mean = lambda name: found.measures[name].mean
    close = lambda name, value: np.isclose(mean(name), value, rtol=1e-4, atol=1e-7)
    assert close("kl", kl) and close("ppl_ratio", np.exp(ratio))
    assert close("rms_shift", np.sqrt(shift)) and mean("kl") > 1e-5
    join = lambda part: np.concatenate([k[part] for k in kept], axis=1)
    own, weights, new = join(0), join(1), join(2)
    assert close("top_k_overlap", metrics.top_k_overlap(own, new))
    assert close("top1_retention", metrics.top1_retention(own, new))
    assert close("changed_weight_mass", metrics.changed_weight_mass(own, weights, new))
    replaced = metrics.replacement_ratio(own, new)
    assert close("replaced_rank_1", replaced[0]) and close("replaced_rank_2", replaced[1])
    assert close("speedup", np.mean([log.own_tbt.mean() / log.tbt.mean() for log in logs]))
    assert found.log.num_steps == 12 and found.log.moved_choices == sum(x.moved.sum() for x in logs)
    assert all(np.isfinite(measure.mean) for measure in found.measures.values())
    assert all(measure.half >= 0 for measure in found.measures.values())
    assert 0 < mean("output_change") < mean("output_change_max") < 4
    assert -1 <= mean("substitutability") <= 1 and 0 < mean("neighbor_sensitivity") < 1


def test_output_change_is_that_of_the_experts_outputs():
    """One layer, so that hidden states are the same with and without the gate."""
    import torch

    model = tiny("Olmoe")
    gate = capture.gate_for(
        model, SHARE, r_comp=np.array([-1e6, 0, 0]), r_comm=0.0, token_time=1e-6
    )
    seen = []
    layer = families.find_layers(model)[0]
    hook = layer.experts.register_forward_hook(lambda module, args, output: seen.append(output))
    found = capture.fidelity(model, TOKENS[:2], gate, batch=2, decode_from=6, expert_rows=16)
    hook.remove()
    plain, gated = (output.reshape(2, 12, -1)[:, 6:] for output in (seen[0], seen[-1]))
    prompt = [output.reshape(2, 12, -1)[:, :6] for output in (seen[0], seen[-1])]
    assert torch.allclose(*prompt, atol=1e-6)
    change = metrics.moe_output_change(to_jax(plain), to_jax(gated))
    assert found.measures["top_k_overlap"].mean < 1
    maximum = found.measures["output_change_max"]
    assert np.isclose(3 * maximum.mean, change.maximum, rtol=1e-4)  # two of three layers: 0
    assert np.isclose(3 * found.measures["output_change"].mean, change.mean, rtol=1e-4)


def test_substitutability_is_that_of_all_experts():
    import torch

    model = tiny("Mixtral")
    gate = capture.gate_for(model, SHARE, r_comp=0.0, r_comm=0.0, token_time=1e-6)
    inputs = []
    layers = families.find_layers(model)
    watch = lambda module, args, output: inputs.append((args, output))
    hooks = [layer.router.register_forward_hook(watch) for layer in layers]
    with torch.no_grad():
        model(torch.from_numpy(TOKENS[:2]), use_cache=False)
    for hook in hooks:
        hook.remove()
    expected = []
    for layer, ((hidden,), (logits, _, _)) in zip(layers, inputs):
        rows = torch.linspace(0, 23, 16).long()
        ids = torch.arange(8)[:, None, None].expand(8, 16, 1)
        with torch.no_grad():
            outputs = [layer.experts(hidden[rows], one, torch.ones(16, 1)) for one in ids]
        score = to_jax(logits[rows].softmax(-1))
        expected.append(
            metrics.substitutability(score, to_jax(torch.stack(outputs, 1)), top_k=2).mean()
        )
    found = capture.fidelity(model, TOKENS[:2], gate, batch=2, costs=COSTS, expert_rows=16)
    assert np.isclose(found.measures["substitutability"].mean, np.mean(expected), rtol=1e-5)
    assert found.measures["kl"].mean == 0 and found.measures["output_change_max"].mean == 0


@pytest.mark.parametrize(
    "tokens, options, message",
    [
        (TOKENS[0], {}, r"tokens has shape \(12,\): allowed is \[windows, length\]"),
        (TOKENS, dict(batch=5), "with at least batch = 5 windows"),
        (TOKENS, dict(decode_from=11), r"decode_from = 11: allowed is 0 to 10 \(length - 2\)"),
        (TOKENS, dict(decode_from=-1), "decode_from = -1: allowed is 0 to 10"),
        (TOKENS + 0.5, {}, "tokens are float64, 3.5 to .*allowed are whole numbers, 0 to 63"),
        (TOKENS - 9, {}, "tokens are int64, -6 to "),
        (TOKENS + 64, {}, "allowed are whole numbers, 0 to 63"),
        (TOKENS, dict(expert_rows=-1), "expert_rows = -1: allowed is 0 or more"),
    ],
)
def test_windows_that_leave_nothing_to_score(tokens, options, message):
    model = tiny("Mixtral")
    gate = capture.gate_for(model, SHARE, r_comp=0.0, r_comm=0.0, token_time=1e-6)
    with pytest.raises(ValueError, match=message):
        capture.fidelity(model, tokens, gate, **({"batch": 2} | options))


def test_capture_from_the_command_line(checkpoint, tmp_path, capsys):
    out = tmp_path / "trace.npz"
    arguments = [str(checkpoint), str(checkpoint / "prompts.txt"), "-o", str(out)]
    assert main(["capture", *arguments, "--new-tokens", "4", "--batch", "2"]) == 0
    printed = capsys.readouterr().out
    assert "3 MoE layers, 8 experts, top-2" in printed and "us a token and layer" in printed
    trace = routing.load(out)
    assert trace.num_sequences == 3 and trace.logits is not None
    prompt_tokens = len("hello there" + "what is it?" + "once upon a time")
    assert int((~trace.decode).sum()) == prompt_tokens
    arguments += [
        "--max-tokens",
        "20",
        "--no-logits",
        "--phase",
        "prompt",
        "--spill",
        str(tmp_path),
    ]
    assert main(["capture", *arguments]) == 0
    assert "20 tokens (full: " in capsys.readouterr().out
    trace = routing.load(out)
    assert trace.num_tokens == 20 and trace.logits is None


@pytest.mark.parametrize("option", ["--gate-step-us", "--visit-us", "--rest-us"])
def test_times_that_are_none(option, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["fidelity", "model", "text.txt", "--gate", "gate.eqx", option, "-1"])
    assert "'-1': allowed is a finite number, 0 or more" in capsys.readouterr().err


def test_fidelity_from_the_command_line(checkpoint, tmp_path, capsys):
    arguments = [
        str(checkpoint),
        str(checkpoint / "text.txt"),
        "--gate",
        str(checkpoint / "gate.eqx"),
    ]
    arguments += ["--length", "12", "--batch", "2", "--windows", "4", "--expert-rows", "16"]
    out = tmp_path / "fidelity.json"
    assert main(["fidelity", *arguments, "--gate-step-us", "0.1", "-o", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "4 windows of 12 tokens, 2 side by side" in printed
    rows = json.loads(out.read_text())
    for name in (
        "kl",
        "ppl_ratio",
        "top1_retention",
        "output_change",
        "substitutability",
        "speedup",
    ):
        assert re.search(rf"^{name} +\S+ +\+-", printed, flags=re.MULTILINE), name
        assert np.isfinite(rows[name]["mean"]) and np.isfinite(rows[name]["half"])


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("capture /no/such/model prompts.txt -o t.npz", "/no/such/model: no model to load ("),
        ("capture . empty.txt -o t.npz", "empty.txt: holds no prompt"),
        ("capture . none.txt -o t.npz", "none.txt: No such file or directory"),
        ("capture . prompts.txt -o /no/such/t.npz", "/no/such/t.npz: no such folder"),
        ("capture . prompts.txt -o .", ".: is a folder, allowed is a file"),
        ("capture . prompts.txt -o t.npz --dtype float3", "--dtype float3: allowed is auto"),
        ("capture . prompts.txt -o t.npz --dtype float64", "--dtype float64: allowed is auto"),
        ("capture . prompts.txt -o t.npz --device tape", "--device tape: allowed is cpu, auto"),
        ("capture . prompts.txt -o t.npz --device meta", "--device meta: allowed is cpu, auto"),
        ("capture broken prompts.txt -o t.npz", "broken: no model to load ("),
        ("fidelity . text.txt --gate gate.eqx -o /no/f.json", "/no/f.json: no such folder"),
        ("fidelity . text.txt --gate none.eqx", "none.eqx: no such file"),
        ("fidelity . prompts.txt --gate gate.eqx", "tokens are 0 windows of 128: allowed is at"),
        ("fidelity . bytes.txt --gate gate.eqx", "bytes.txt: not UTF-8 text"),
    ],
)
def test_mistakes_at_the_command_line(checkpoint, arguments, message, monkeypatch, capsys):
    monkeypatch.chdir(checkpoint)
    (checkpoint / "empty.txt").write_text("\n\n")
    (checkpoint / "broken").mkdir(exist_ok=True)
    for file in checkpoint.glob("*.json"):
        (checkpoint / "broken" / file.name).write_bytes(file.read_bytes())
    (checkpoint / "broken" / "model.safetensors").write_bytes(b"\0" * 100)
    (checkpoint / "bytes.txt").write_bytes(b"\xff\xfe\x00")
    assert main(arguments.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith("moejax ") and message in error and error.count("\n") == 1
