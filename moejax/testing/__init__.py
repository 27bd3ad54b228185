"""Does an extension of your own keep the promises that sweeps rely on? For your tests.

`check_policy`, `check_cost_model`, `check_topology` and `check_metric` take your object, try it as
a sweep would, and raise one `ContractError` that names every promise which is broken and how:
`jit`, `vmap` (a batch gives what a loop gives), `grad` (finite), shapes, units, determinism, and
what happens to input that makes no sense.

    from moejax import testing

    def test_my_policy():
        testing.check_policy(my_policy)

`_contract.py` collects what is kept and broken; one file per kind of extension beside it. Nothing
here needs pytest.
"""

from moejax.testing._contract import ContractError as ContractError
from moejax.testing._contract import Kept as Kept
from moejax.testing._cost_model import check_cost_model as check_cost_model
from moejax.testing._metric import check_metric as check_metric
from moejax.testing._policy import check_policy as check_policy
from moejax.testing._topology import check_topology as check_topology


__all__ = [
    "ContractError",
    "Kept",
    "check_cost_model",
    "check_metric",
    "check_policy",
    "check_topology",
]
