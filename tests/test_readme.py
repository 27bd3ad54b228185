"""The examples of README and docs run, and the catalog holds every entry of the registries."""

import re
from pathlib import Path

import pytest

import moejax as mj
from moejax.cli import main


ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(language: str, text: str = README) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def run_examples(path: Path) -> int:
    """Runs the page's examples in order, as somebody would who types them into one session."""
    namespace = {}
    examples = blocks("python", path.read_text())
    for example in examples:
        exec(compile(example, path.name, "exec"), namespace)
    return len(examples)


def test_python_examples_run_in_order(capsys):
    assert run_examples(ROOT / "README.md") >= 3
    printed = capsys.readouterr().out
    assert "gpu.hbm_bandwidth" in printed
    assert "(4, 50) 0" in printed
    assert "popular_first" in printed


@pytest.mark.parametrize("page", PAGES[1:], ids=lambda page: page.stem)
def test_python_examples_of_the_docs_run(page, capsys):
    run_examples(page)


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
def test_the_catalog_is_complete(registry):
    catalog = (ROOT / "docs" / "catalog.md").read_text()
    missing = [name for name in registry if f"`{name}`" not in catalog]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target
