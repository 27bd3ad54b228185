"""Fixtures shared by all tests."""

import os
from pathlib import Path

import jax
import pytest
from hypothesis import HealthCheck, settings

from moejax.cli import main


# The first example of a property pays for compilation, so a deadline would only measure XLA.
settings.register_profile(
    "moejax",
    deadline=None,
    derandomize=bool(os.environ.get("CI")),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("moejax")

REPOSITORY = Path(__file__).resolve().parent.parent


def data_path() -> Path:
    """Where the real traces lie: `MOEJAX_DATA`, else `../shared/data` beside the repository."""
    default = REPOSITORY.parent / "shared" / "data"
    return Path(os.environ.get("MOEJAX_DATA", default))


# Linux allows a process 65,530 maps of memory, and XLA aborts there.
MOST_MAPS = 25_000


@pytest.fixture(scope="module", autouse=True)
def few_programs():
    """Forgets compiled programs, each of which keeps some maps, before there are too many."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > MOST_MAPS:
        jax.clear_caches()


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of real routing traces; skips the test where it is absent."""
    path = data_path()
    if not path.is_dir():
        pytest.skip(f"no routing traces at {path} (set MOEJAX_DATA)")
    return path


@pytest.fixture
def x64():
    """Double precision for one test."""
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


@pytest.fixture
def command(capsys):
    """Runs one command and gives (exit status, standard output, standard error)."""

    def run(*arguments):
        capsys.readouterr()
        try:
            status = main([str(argument) for argument in arguments])
        except SystemExit as stop:
            status = stop.code
        return status, *capsys.readouterr()

    return run


@pytest.fixture
def refused(command):
    """Runs a command that must fail with one line, and gives that line."""

    def run(*arguments):
        status, out, err = command(*arguments)
        assert (status, out) == (2, "")
        assert err.endswith("\n") and err.count("\n") == 1, err
        assert err.startswith("moejax")
        return err

    return run
