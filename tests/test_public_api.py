"""What users may rely on: names, signatures, and an import that costs next to nothing."""

import importlib
import inspect
import json
import os
import pkgutil
import subprocess
import sys

import pytest

import moejax
from moejax.cost import PIMCostTable
from moejax.partition import Partition, PartitionCosts
from moejax.routing import Bimodality, RoutingTrace
from moejax.serving import Report


# `plot` loads what it draws with on first use, so it is importable without matplotlib.
PACKAGES = ["moejax"] + [
    f"moejax.{module.name}" for module in pkgutil.iter_modules(moejax.__path__) if module.ispkg
]
NOT_LOADED = "matplotlib pyarrow tqdm torch pandas transformers hypothesis pytest"


def reading_order(name):
    """Constants, then classes, then functions and modules, as ruff's RUF022 has it."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2, name)


@pytest.mark.parametrize("package", PACKAGES)
def test_all_is_sorted_resolves_and_is_complete(package):
    module = importlib.import_module(package)
    assert module.__doc__
    names = module.__all__
    assert names == sorted(names, key=reading_order)
    assert [name for name in names if not hasattr(module, name)] == []
    # `X as X` is how a package re-exports: each one belongs into `__all__`.
    source = inspect.getsource(module)
    exported = {
        name for name in vars(module) if not name.startswith("_") and f" as {name}" in source
    }
    assert exported == {name for name in names if not name.startswith("_")}


# The promised names with their signatures; more parameters may follow if they have defaults.
SURFACE = {
    "evaluate": "model, system, workload, policy, *, key",
    "Workload": "batch, context, *, max_batch=None",
    "sensitivity": "fn, system",
    "models.get": "name",
    "models.from_hf_config": "cfg",
    "hardware.get": "name",
    "routing.load": "path, *, num_experts=None, model=None",
    "routing.decode_batch": "trace, batch_size, *, key, reuse=False",
    "routing.tokens_per_expert": "expert_ids, num_experts, valid=None",
    "routing.synthesize": "model, num_tokens, *, key",
    "routing.bimodality": "counts",
    "cost.PIMCostTable.create": "max_tokens, roofline_time, beta=0.25",
    "cost.PIMCostTable.lookup": "self, n",
    "cost.PIMCostTable.update": "self, counts, observed, valid",
    "partition.sieve": "tokens_per_expert, costs",
    "partition.no_exp": "tokens_per_expert, costs",
    "partition.all_exp": "tokens_per_expert, costs",
    "partition.best_prefix": "tokens_per_expert, costs",
    "partition.optimal": "tokens_per_expert, costs, *, max_total_tokens=None",
    "sweep.Axis": "name, values, static=False",
    "sweep.Sweep": "axes, fn, seeds=1, prepare=None",
    "sweep.run": "sweep, out=None, *, resume=True, chunk=None, devices=None, shard=None,"
    " progress=None",
    "sweep.load": "path",
}


@pytest.mark.parametrize("name", SURFACE)
def test_promised_signatures(name):
    found = moejax
    for attribute in name.split("."):
        found = getattr(found, attribute)
    found = dict(inspect.signature(found).parameters)
    promised = inspect.signature(eval(f"lambda {SURFACE[name]}: None")).parameters
    for order, (parameter, wanted) in enumerate(promised.items()):
        assert parameter in found, f"no parameter {parameter}"
        given = found[parameter]
        assert (given.kind, given.default) == (wanted.kind, wanted.default), parameter
        if wanted.kind is not wanted.KEYWORD_ONLY:
            assert list(found)[order] == parameter
    extra = [found[parameter] for parameter in found.keys() - promised.keys()]
    needed = [p for p in extra if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    assert [p.name for p in needed if p.default is p.empty] == []


@pytest.mark.parametrize(
    "owner, names",
    [
        (RoutingTrace, "expert_ids weights valid num_experts"),
        (Bimodality, "share_1 share_2 share_3_4 share_more active"),
        (Partition, "on_gpu num_gpu gpu_time pim_time comm_time total_time status"),
        (
            PartitionCosts,
            "pim_time_by_tokens attention_time comm_time expert_bytes token_bytes flops_per_token"
            " fixed_bytes fixed_flops hbm_bandwidth flops_per_s pim_token_bytes contention",
        ),
        (PIMCostTable, "time seen roofline_time beta"),
        (Report, "tbt interactivity throughput_per_gpu memory_fits status"),
    ],
)
def test_promised_fields(owner, names):
    assert set(names.split()) <= inspect.get_annotations(owner).keys()


def test_registries_are_dicts():
    for registry in (moejax.models.MODELS, moejax.hardware.HARDWARE, moejax.POLICIES):
        assert isinstance(registry, dict) and registry


IMPORT_ONLY = f"""
import json, sys, time
import jax, equinox, optax
start = time.process_time()
import moejax
spent = time.process_time() - start
print(json.dumps([spent, [name for name in {NOT_LOADED.split()} if name in sys.modules]]))
"""


def import_in_a_new_interpreter():
    """(CPU seconds, optional packages loaded) of `import moejax` after what it is built on."""
    # With a platform that is not there, whoever makes an array or asks for devices fails.
    environment = os.environ | {"JAX_PLATFORMS": "no_such_platform"}
    command = [sys.executable, "-c", IMPORT_ONLY]
    output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return json.loads(output.stdout)


def test_import_is_light():
    # CPU time and the best of three, because the machine may be busy with something else.
    times, loaded = zip(*[import_in_a_new_interpreter() for _ in range(3)])
    assert loaded == ([], [], [])
    assert min(times) < 0.7
