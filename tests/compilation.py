"""A fixture for files of tests whose programs are large and run a few times each.

from tests.compilation import quick_compilation as quick_compilation
"""

import jax
import pytest


@pytest.fixture(scope="module", autouse=True)
def quick_compilation():
    """Programs little optimized, for all tests of the file: compilation is most of their time."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
