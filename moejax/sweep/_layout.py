"""What `fn` gets, and where in the arguments of a program each of its values is."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from moejax._checks import nearest
from moejax.sweep._host import SEED, with_fields
from moejax.sweep._values import Structure


class Config(dict):
    """What `fn` gets: a dict that knows what has been read and suggests names."""

    read: set[str]
    host: tuple[str, ...] = ()

    def __missing__(self, name: str) -> Any:
        if name in self.host:
            raise ValueError(f"axis {name!r} is text, which fn gets with static=True or inner=True")
        raise ValueError(
            f"config has no {name!r}{nearest(str(name), self)} (known: {', '.join(self)})"
        )

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.read.add(name)
        return super().get(name, default)

    def pop(self, name: str, *default: Any) -> Any:
        self.read.add(name)
        return super().pop(name, *default)

    def __iter__(self) -> Iterator[str]:
        self.read.update(super().keys())
        return super().__iter__()

    def items(self) -> Any:
        self.read.update(super().keys())
        return super().items()

    def values(self) -> Any:
        self.read.update(super().keys())
        return super().values()


def _config_of(names: tuple[str, ...], values: Any) -> Config:
    config = Config(zip(names, values))
    config.read = set()
    return config


# So that it may be an argument of a jitted function.
jax.tree_util.register_pytree_node(
    Config, lambda config: (tuple(config.values()), tuple(config)), _config_of
)


class Rows(NamedTuple):
    """What changes from call to call, of the calls of a launch.

    Fields: `floats`, `ints`: numbers, one column an axis; `trees`: arrays of what is prepared for
    every call; `shared`: [devices, ...], arrays that the calls of a tile share.
    """

    floats: np.ndarray
    ints: np.ndarray
    trees: tuple[Any, ...]
    shared: tuple[Any, ...]


class Layout(NamedTuple):
    """Where in `Rows` and in the tables each value of the config is; `truths` are in `ints`.

    `order` are the keys of what `fn` returns, as it has them: trees of dicts are sorted.
    `host` are axes that it does not get.
    """

    floats: list[str]
    ints: list[str]
    truths: list[str]
    trees: dict[str, tuple[Structure, slice]]
    shared: dict[str, tuple[Structure, slice]]
    tables: dict[str, tuple[Structure, slice]]
    constants: dict[str, Any]
    order: list[str]
    host: tuple[str, ...]


def config_from(values: dict[str, Any], read: set[str]) -> Config:
    """Nested fields go into their modules."""
    values.pop(SEED)
    nested = {name: values.pop(name) for name in list(values) if "." in name}
    for owner in {name.split(".")[0] for name in nested}:
        own = {name: value for name, value in nested.items() if name.split(".")[0] == owner}
        values[owner] = with_fields(values[owner], own)
    config = Config(values)
    config.read = read
    return config
