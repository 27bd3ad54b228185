"""The README's examples run, and its tables hold every entry of the registries."""

import re
from pathlib import Path

import pytest

import moejax as mj
from moejax.cli import main


README = (Path(__file__).resolve().parent.parent / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)


def test_python_examples_run_in_order(capsys):
    namespace = {}
    examples = blocks("python")
    assert len(examples) >= 3
    for example in examples:
        exec(compile(example, "README.md", "exec"), namespace)
    printed = capsys.readouterr().out
    assert "gpu.hbm_bandwidth" in printed
    assert "(4, 50) 0" in printed
    assert "popular_first" in printed


def test_the_table_of_the_command_line_example_is_the_real_one(capsys, tmp_path, monkeypatch):
    console = next(block for block in blocks("console") if "moejax eval" in block)
    command, header = console.splitlines()[:2]
    arguments = command.removeprefix("$ moejax ").split()
    arguments[arguments.index("all")] = "no_exp"
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))
    assert main([*arguments, "--seeds", "2"]) == 0
    shown = capsys.readouterr().out.splitlines()[0]
    assert shown.split() == header.split()


@pytest.mark.parametrize("registry", [mj.models.MODELS, mj.hardware.HARDWARE, mj.POLICIES])
def test_tables_are_complete(registry):
    missing = [name for name in registry if f"`{name}`" not in README]
    assert not missing


def test_links_lead_somewhere():
    root = Path(__file__).resolve().parent.parent
    targets = re.findall(r"\]\(([^)#]+)\)", README)
    assert targets
    for target in targets:
        assert (root / target).exists(), target
