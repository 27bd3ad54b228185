"""Functions by content: their source, and everything of the user's own that it refers to.

A helper, a constant at the top of the sweep file or a value in a closure decides rows as much as
`fn` does. Packages are named by their versions instead.
"""

import functools
import hashlib
import inspect
import re
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import jax

from moejax.sweep._values import digest


def code(fn: Any) -> str:
    """SHA-256 of a function, and of the functions, classes, constants and closures that it uses.

    Followed are names in files of the user's own, not in installed packages nor in moejax.
    """
    return _sha(_callable(fn, set()))


def functions_in(value: Any) -> str | None:
    """SHA-256 of the functions and the user's own classes in a value, `None` if there are none."""
    nodes = [node for node in _nodes(value) if _is_code(node) or _is_own(type(node).__module__)]
    return _sha(text for node in nodes for text in _node(node, set())) if nodes else None


def _sha(parts: Iterator[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _callable(fn: Any, seen: set[int]) -> Iterator[str]:
    fn = inspect.unwrap(fn)
    if isinstance(fn, functools.partial):
        yield from _callable(fn.func, seen)
        yield from _value([fn.args, fn.keywords], seen)
    elif isinstance(fn, MethodType):
        yield from _callable(fn.__func__, seen)
        yield from _value(fn.__self__, seen)
    elif isinstance(fn, FunctionType):
        yield from _function(fn, seen)
    elif isinstance(fn, type):
        yield from _class(fn, seen)
    else:
        yield from _callable(type(fn).__call__, seen) if _is_own(type(fn).__module__) else ()
        yield from _value(fn, seen)


def _function(fn: FunctionType, seen: set[int]) -> Iterator[str]:
    if id(fn) in seen:
        return
    seen.add(id(fn))
    yield _source(fn)
    yield from _value([fn.__defaults__, fn.__kwdefaults__], seen)
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or ()):
        try:
            found = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
        yield name
        yield from _value(found, seen)
    if _is_own(fn.__module__):
        yield from _named(sorted(set(_names(fn.__code__))), fn.__globals__, seen)


def _class(cls: type, seen: set[int]) -> Iterator[str]:
    """The source of a class, and what its methods refer to."""
    if id(cls) in seen:
        return
    seen.add(id(cls))
    yield _source(cls)
    for name in vars(cls):
        method = inspect.unwrap(getattr(cls, name, None))  # pyright: ignore[reportArgumentType]
        # Not those that `dataclass` writes.
        if isinstance(method, FunctionType) and method.__code__.co_filename != "<string>":
            yield from _function(method, seen)


def _named(names: list[str], where: dict[str, Any], seen: set[int]) -> Iterator[str]:
    """What names stand for; attributes of the user's own modules among them."""
    for name in names:
        found = where.get(name)
        if isinstance(found, ModuleType):
            if _is_own(found.__name__) and id(found) not in seen:
                seen.add(id(found))
                yield from _named(names, vars(found), seen)
        elif found is not None:
            yield name
            yield from _value(found, seen)


def _value(value: Any, seen: set[int]) -> Iterator[str]:
    for node in _nodes(value):
        yield from _node(node, seen)
    plain = lambda leaf: sorted(map(repr, leaf)) if isinstance(leaf, set | frozenset) else leaf
    try:
        yield digest(jax.tree.map(plain, value))
    except (ValueError, TypeError):  # nothing that has a content
        yield type(value).__name__


def _node(node: Any, seen: set[int]) -> Iterator[str]:
    """A part of a value: the functions, and the user's own classes, are there with their source."""
    if _is_code(node):
        module = node.__module__ or ""
        yield f"{module}.{node.__qualname__}"
        yield from _callable(node, seen) if _is_own(module) else ()
    elif isinstance(node, functools.partial | MethodType):
        yield from _callable(node, seen)
    elif _is_own(type(node).__module__):
        yield from _class(type(node), seen)


def _nodes(value: Any) -> list[Any]:
    """All nodes of a tree, leaves among them."""
    found: list[Any] = []
    try:
        jax.tree.leaves(value, is_leaf=lambda node: bool(found.append(node)))
    except (ValueError, TypeError):  # keys of a dict that do not sort
        return []
    return [inspect.unwrap(node) if callable(node) else node for node in found]


def _is_code(node: Any) -> bool:
    return isinstance(node, FunctionType | type)


def _source(found: Any) -> str:
    try:
        return inspect.getsource(found)
    except (TypeError, OSError):
        pass
    made = getattr(found, "__code__", None)
    return _bytecode(made) if made else re.sub(r" at 0x[0-9a-f]+", "", repr(found))


def _bytecode(made: CodeType) -> str:
    plain = lambda c: repr(sorted(map(repr, c)) if isinstance(c, frozenset) else c)
    inner = [_bytecode(c) if inspect.iscode(c) else plain(c) for c in made.co_consts]
    return f"{made.co_code.hex()} {inner} {made.co_names}"


def _names(made: CodeType) -> Iterator[str]:
    yield from made.co_names
    for constant in made.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


@functools.cache
def _is_own(module: str | None) -> bool:
    """Whether a module is neither installed nor moejax."""
    if module in (None, "", "builtins") or str(module).split(".")[0] == "moejax":
        return False
    file = getattr(sys.modules.get(str(module)), "__file__", None)
    if file is None:  # a notebook
        return module == "__main__"
    kinds = ("stdlib", "platstdlib", "purelib", "platlib")
    installed = [Path(sysconfig.get_path(kind)).resolve() for kind in kinds]
    return not any(Path(file).resolve().is_relative_to(place) for place in installed)
