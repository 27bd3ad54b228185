"""The README's section on real models: its snippets run, on a tiny model in place of the hub's."""

import re
from pathlib import Path

from moejax import capture, routing
from tests.capture_models import needs_torch, save_checkpoint


needs_torch()
README = (Path(__file__).resolve().parent.parent / "README.md").read_text()
HUB = "allenai/OLMoE-1B-7B-0924"


def test_both_snippets_run(tmp_path, monkeypatch, capsys):
    _, heading, section = README.partition("\n## Your model\n")
    assert heading
    section = section.partition("\n## ")[0]
    record, gate = re.findall(r"^```py\n(.*?)^```$", section, flags=re.MULTILINE | re.DOTALL)
    assert HUB in record
    save_checkpoint("Olmoe", tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    namespace = {}
    exec(compile(record.replace(HUB, str(tmp_path / "model")), "README.md", "exec"), namespace)
    trace = routing.load("trace.npz")
    assert trace.num_sequences == 2 and trace.num_tokens == namespace["recording"].num_tokens
    assert namespace["decode"].valid.sum() == trace.decode.sum() > 0
    exec(compile(gate, "README.md", "exec"), namespace)
    assert namespace["log"].num_steps > 0
    assert "top-1 retention 1.0000" in capsys.readouterr().out
    assert capture.load_gate("gate.eqx").top_k == routing.load("trace.npz").top_k
