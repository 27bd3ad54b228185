"""`moejax eval` with prompts, execution graphs, measured GPUs and too little memory."""

import jax
import pytest


COMMAND = ("eval", "--model", "olmoe-1b-7b", "--batch", "4", "--context", "200", "--seeds", "1")
GPU = (*COMMAND, "--system", "1xb200-hbm-pim", "--policy", "few_tokens")


@pytest.fixture(scope="module", autouse=True)
def quick_programs():
    """Little optimized: they run once."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def test_one_row_with_everything_said_about_it(command):
    options = "--overlap coarse --prefill 1 --prefill-length 16 --gpu-efficiency measured"
    status, out, err = command(*GPU, *options.split(), "--context-spread", "0.5")
    assert (status, err) == (0, "")
    assert "few_tokens" in out
    for words in (
        "context 200 (median; log-normal, sigma 0.5), 1 of them prompts of 16 tokens",
        "0.847 of bandwidth, 0.56 of compute, 35.1 us a layer: fitted to MoE layers",
        "tbt: the execution graph, task by task",
    ):
        assert words in out


def test_what_does_not_fit_says_so_and_can_be_timed_all_the_same(command):
    huge = [x if x != "200" else "1e8" for x in GPU]
    status, out, err = command(*huge)
    assert (status, out) == (2, "") and err.count("\n") == 1
    assert "do not fit into memory" in err and "allowed is 192 GB in all" in err
    status, out, _ = command(*huge, "--oversize")
    assert status == 0 and "DOES NOT FIT" in out


@pytest.mark.parametrize(
    "options, words",
    [
        ("--gpu-efficiency mesured", "unknown GPU efficiency 'mesured'; did you mean 'measured'"),
        ("--overlap corse", "invalid choice: 'corse'"),
        ("--halves 2", "Execution.halves = 2: allowed with overlap 'fine' or 'coarse'"),
        ("--halves 3 --overlap coarse", "Execution.halves = 3: allowed is one of 1, 2"),
        ("--prefill 5", "Workload.prefill = 5: allowed is up to the batch, 4"),
        ("--prefill-length 5", "--prefill-length: allowed with --prefill only"),
        ("--context-spread nan", "'nan': allowed is a finite number, 0 or more"),
        ("--set num_gpus=0", "System.num_gpus = 0: allowed is an int of at least 1"),
    ],
)
def test_mistakes_are_one_line(command, options, words):
    status, out, err = command(*GPU, *options.split())
    assert (status, out) == (2, "") and err.count("\n") == 1 and words in err


def test_near_memory_systems_take_none_of_it(command):
    near = (*COMMAND, "--system", "nmp-4x4-5t-50g")
    status, _, err = command(*near, "--overlap", "coarse")
    assert status == 2 and "--overlap: allowed for GPU systems only" in err
