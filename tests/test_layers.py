"""The house: who may import whom, held by reading every file under `moejax/` and `sweeps/`."""

import ast
from pathlib import Path

import pytest


REPOSITORY = Path(__file__).resolve().parent.parent
FOUNDATION = {"_typing", "_units", "_status", "_checks"}
MAX_LINES = 400

# What each part may import beyond itself and the foundation, always from above: no cycles. A name
# that is not here has no place in the house yet.
LAYERS = {
    "models": set(),
    "hardware": set(),
    "metrics": set(),
    "sweep": set(),
    "plot": set(),
    "routing": {"models"},
    "cost": {"models", "hardware"},
    "partition": {"cost"},
    "noc": {"hardware"},
    "placement": {"models", "routing", "cost", "noc"},
    "gating": {"routing", "metrics"},
    "schedule": {"routing", "cost", "noc", "placement"},
    "zoo": {"routing"},
    "report": {"sweep", "plot"},
    "testing": {"hardware", "partition", "noc", "serving"},
    "serving": {
        *("models", "hardware", "routing", "cost", "partition", "noc", "placement", "schedule"),
    },
    "capture": {"models", "routing", "metrics", "gating", "placement", "serving"},
}
# The foundation itself is in order, and the lowest two import nothing.
LAYERS |= {"_typing": set(), "_units": set(), "_status": {"_typing"}}
LAYERS |= {"_checks": {"_typing", "_status"}}
# `moejax/__init__.py` offers the core; the command line may use everything.
LAYERS["__init__"] = set(LAYERS) - {"plot"}
LAYERS["cli"] = LAYERS["__main__"] = {*LAYERS, "cli"}

OPTIONAL = {"matplotlib", "pyarrow", "tqdm", "torch", "pandas", "xarray", "transformers"}
TEST_TOOLS = {"pytest", "hypothesis"}


def part_of(path):
    """The line of the table that a file belongs to: its package, or its own name at the root."""
    return path.parts[1].removesuffix(".py")


def imported_modules(tree, path):
    """(node, dotted name) of every import; `from a import b` is `a.b`, relative ones resolved."""
    package = path.with_suffix("").parts[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            base += [node.module] if node.module else []
            yield from ((node, ".".join([*base, alias.name])) for alias in node.names)


def deferred(tree):
    """Imports that `import moejax` does not run: in functions, or only for a type checker."""
    nodes = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            nodes.update(ast.walk(node))
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            nodes.update(inner for statement in node.body for inner in ast.walk(statement))
    return nodes


def layer_violation(part, name):
    """Why a file of `part` may not import the dotted `name` of moejax, or an empty string."""
    target, *inner = [*name.split(".")[1:], ""][:3]
    if target == part or (part == "__main__" and target == "cli"):
        return ""
    if target not in LAYERS:
        # `from moejax import evaluate`: what the root re-exports is for users.
        return "" if part == "cli" else f"{target or 'moejax'} is not in the layer table"
    if target not in LAYERS[part] | (set() if part in FOUNDATION else FOUNDATION):
        return f"{part} may not import {target}"
    if inner and inner[0].startswith("_"):
        return f"{name} is private to {target}: import it from moejax.{target}"
    return ""


def import_violation(path, name, is_deferred):
    """Why `path` may not import the dotted `name` where it does, or an empty string."""
    root = name.split(".")[0]
    if name == "__future__.annotations":
        return "jaxtyping needs real annotations"
    if root in TEST_TOOLS or (root in OPTIONAL and not is_deferred):
        return f"{root} is optional: import it inside a function"
    if root != "moejax":
        return ""
    if path.parts[0] == "moejax":
        return layer_violation(part_of(path), name)
    return f"{name} is private" if "._" in name else ""


def violations(path, source):
    """Everything wrong with one file, as `path:line: why`."""
    if path.parts[0] == "moejax" and part_of(path) not in LAYERS:
        return [f"{path}: {part_of(path)} is not in the layer table"]
    tree = ast.parse(source)
    late = deferred(tree)
    found = [
        f"{path}:{node.lineno}: {why}"
        for node, name in imported_modules(tree, path)
        if (why := import_violation(path, name, node in late))
    ]
    if (length := len(source.splitlines())) > MAX_LINES:
        found.append(f"{path}: {length} lines, longer than {MAX_LINES}")
    return found


def test_every_file_keeps_to_its_layer():
    folders = ("moejax", "sweeps", "benchmarks")
    files = [file for folder in folders for file in sorted((REPOSITORY / folder).rglob("*.py"))]
    assert len(files) > 40
    found = []
    for file in files:
        found += violations(file.relative_to(REPOSITORY), file.read_text())
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    "path, source, why",
    [
        (
            "moejax/models/_a.py",
            "from moejax.hardware import GPU",
            "models may not import hardware",
        ),
        ("moejax/models/_a.py", "import moejax.serving", "models may not import serving"),
        ("moejax/models/_a.py", "from moejax import routing", "models may not import routing"),
        ("moejax/models/_a.py", "from ..cost import Work", "models may not import cost"),
        ("moejax/models/_a.py", "from moejax import evaluate", "evaluate is not in the layer"),
        ("moejax/cost/_a.py", "from moejax.models._base import MoEModel", "private to models"),
        ("moejax/cost/_a.py", "from moejax.models import _base", "private to models"),
        ("moejax/cost/_a.py", "def f():\n    from moejax.routing import load", "cost may not"),
        ("moejax/plot/_a.py", "from matplotlib import pyplot", "inside a function"),
        ("moejax/_typing.py", "from moejax._status import flag", "_typing may not"),
        ("moejax/_new.py", "", "_new is not in the layer table"),
        ("moejax/cost/_a.py", "from __future__ import annotations", "real annotations"),
        ("moejax/cost/_a.py", "\n" * 401, "401 lines, longer than 400"),
        ("moejax/__init__.py", "from moejax import plot", "may not import plot"),
        ("sweeps/a.py", "from moejax.routing._trace import RoutingTrace", "private"),
    ],
)
def test_the_checker_sees(path, source, why):
    (found,) = violations(Path(path), source)
    assert why in found


@pytest.mark.parametrize(
    "path, source",
    [
        ("moejax/cost/_a.py", "from moejax.models import MoEModel\nfrom moejax import models"),
        ("moejax/cost/_a.py", "from moejax.cost._work import Work\nfrom . import _work"),
        ("moejax/cost/_a.py", "from moejax._checks import lookup\nimport numpy as np"),
        ("moejax/plot/_a.py", "def draw():\n    import matplotlib.pyplot as plt"),
        ("moejax/plot/_a.py", "if TYPE_CHECKING:\n    from matplotlib.axes import Axes"),
        ("moejax/cli/_a.py", "import moejax as mj\nfrom moejax import evaluate, plot"),
        ("sweeps/a.py", "import moejax as mj\nfrom moejax import routing"),
    ],
)
def test_the_checker_lets_pass(path, source):
    assert violations(Path(path), source) == []
