"""Arithmetic and conditions on columns, as people type them: parsed, never executed as Python."""

import ast
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from moejax._checks import lookup, nearest


LONGEST = 1000
_ASSIGNED = re.compile(r"(?<![<>=!])=(?!=)")

_BINARY: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.BitAnd: np.logical_and,
    ast.BitOr: np.logical_or,
}
_COMPARE: dict[type, Callable[[Any, Any], Any]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": np.abs,
    "ceil": np.ceil,
    "exp": np.exp,
    "floor": np.floor,
    "log": np.log,
    "log10": np.log10,
    "log2": np.log2,
    "max": lambda *values: _reduce(np.maximum, values),
    "min": lambda *values: _reduce(np.minimum, values),
    "round": np.round,
    "sqrt": np.sqrt,
    "where": np.where,
}


class _Name(str):
    """A word that is no column: text, where it is compared with a column of text."""


def evaluate(text: str, columns: Mapping[str, np.ndarray], rows: int) -> np.ndarray:
    """The value of an expression for every row.

    Numbers, text in quotes, names of columns (dots are part of a name), `+ - * / // % **`,
    comparisons (also chained, `in (a, b)`), `and or not & | ~`, and the functions of `FUNCTIONS`.
    A word that is no column is text where it is compared with a column of text.

    **Returns:** [rows] numbers, truth values or text. Division by zero is infinite or NaN.

    **Raises:** `ValueError` quoting the expression: for a name that is no column, with the nearest,
    for text that no row has, with the nearest, and for anything else Python that is not above.
    """
    if len(text) > LONGEST:
        raise ValueError(f"an expression of {len(text)} characters: allowed are {LONGEST}")
    tree = _parse(text)
    reader = _Reader(columns)
    try:
        with np.errstate(all="ignore"):
            value = reader.settled(reader.visit(tree))
    except ValueError as error:
        raise ValueError(f"{text!r}: {error}") from None
    except (TypeError, RecursionError):
        raise ValueError(f"{text!r}: text and numbers do not mix this way") from None
    return np.broadcast_to(np.asarray(value), (rows,)).copy()


def names_in(text: str, columns: Mapping[str, Any]) -> list[str]:
    """The columns that an expression names, in order."""
    found = [_dotted(node) for node in ast.walk(_parse(text))]
    return list(dict.fromkeys(name for name in found if name and name in columns))


def _parse(text: str) -> ast.AST:
    """A single `=` is a comparison: `policy=sieve` is what people type."""
    try:
        return ast.parse(_ASSIGNED.sub("==", text.strip()), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError(f"{text!r} is no expression, such as 'tbt_ms < 20'") from None


def _dotted(node: ast.AST) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        owner = _dotted(node.value)
        return None if owner is None else f"{owner}.{node.attr}"
    return None


def _reduce(function: Callable[[Any, Any], Any], values: tuple[Any, ...]) -> Any:
    if len(values) < 2:
        raise ValueError("min and max take two values or more, row by row")
    result = values[0]
    for value in values[1:]:
        result = function(result, value)
    return result


class _Reader:
    """Goes through the parsed expression. Whatever is not handled is refused."""

    def __init__(self, columns: Mapping[str, np.ndarray]):
        self._columns = columns

    def visit(self, node: ast.AST) -> Any:
        handle = getattr(self, f"_{type(node).__name__}", None)
        if handle is None:
            raise ValueError(f"{type(node).__name__} is not allowed; see --help for what is")
        return handle(node)

    def settled(self, value: Any) -> Any:
        """The value, or an error for a word that stayed one and for a list."""
        if isinstance(value, _Name):
            lookup("column", value, self._columns)
        if isinstance(value, list):
            raise ValueError("a list is allowed after `in` only")
        return value

    def _of(self, node: ast.AST) -> Any:
        return self.settled(self.visit(node))

    def _Constant(self, node: ast.Constant) -> Any:
        if isinstance(node.value, bool | str):
            return node.value
        if isinstance(node.value, int | float):
            # A float: whole numbers of any size would be Python's, and 9**9**9 never ends.
            return np.float64(node.value)
        raise ValueError(f"{node.value!r} is neither a number nor text")

    def _Name(self, node: ast.Name) -> Any:
        return self._columns[node.id] if node.id in self._columns else _Name(node.id)

    def _Attribute(self, node: ast.Attribute) -> Any:
        name = _dotted(node)
        if name is None:
            raise ValueError("a dot is allowed inside of names only")
        return lookup("column", name, self._columns)

    def _BinOp(self, node: ast.BinOp) -> Any:
        if type(node.op) not in _BINARY:
            raise ValueError(f"{type(node.op).__name__} is not allowed; see --help for what is")
        left, right = self._number(node.left), self._number(node.right)
        return _BINARY[type(node.op)](left, right)

    def _number(self, node: ast.AST) -> Any:
        value = np.asarray(self._of(node))
        if value.dtype.kind not in "biuf":
            raise ValueError(f"{ast.unparse(node)} is text, not a number")
        logical = value.dtype == bool
        return value if logical else value.astype(np.float64)

    def _UnaryOp(self, node: ast.UnaryOp) -> Any:
        value = self._number(node.operand)
        if isinstance(node.op, ast.Not | ast.Invert):
            return np.logical_not(value)
        return -value if isinstance(node.op, ast.USub) else value

    def _BoolOp(self, node: ast.BoolOp) -> Any:
        function = np.logical_and if isinstance(node.op, ast.And) else np.logical_or
        return _reduce(function, tuple(self._number(value) for value in node.values))

    def _Compare(self, node: ast.Compare) -> Any:
        values = [self.visit(value) for value in (node.left, *node.comparators)]
        result: Any = True
        for compare, left, right in zip(node.ops, values, values[1:]):
            result = np.logical_and(result, self._compare(compare, left, right))
        return result

    def _compare(self, compare: ast.cmpop, left: Any, right: Any) -> Any:
        if isinstance(compare, ast.In | ast.NotIn):
            choices = right if isinstance(right, list) else [right]
            found = _reduce_or([self._compare(ast.Eq(), left, choice) for choice in choices])
            return np.logical_not(found) if isinstance(compare, ast.NotIn) else found
        if type(compare) not in _COMPARE:
            raise ValueError(f"{type(compare).__name__} is not allowed; see --help for what is")
        left, right = self._pair(left, right), self._pair(right, left)
        return _COMPARE[type(compare)](left, right)

    def _pair(self, value: Any, other: Any) -> Any:
        """One side of a comparison, checked against the other where that is text."""
        text = isinstance(other, np.ndarray) and other.dtype.kind == "U"
        if not text:
            value = self.settled(value)
            if isinstance(value, str) and not isinstance(other, str):
                raise ValueError(f"a number is compared with the text {value!r}")
            return value
        if not isinstance(value, str):
            is_text = isinstance(value, np.ndarray) and value.dtype.kind == "U"
            if not is_text:
                raise ValueError("a column of text is compared with a number")
            return value
        known = np.unique(other).tolist()
        if str(value) not in known:
            shown = ", ".join(known[:20])
            raise ValueError(f"no row has {str(value)!r}{nearest(value, known)} (values: {shown})")
        return str(value)

    def _Tuple(self, node: ast.Tuple | ast.List) -> Any:
        return [self.visit(item) for item in node.elts]

    _List = _Tuple

    def _Call(self, node: ast.Call) -> Any:
        if not isinstance(node.func, ast.Name) or node.keywords:
            raise ValueError("a call is a function and its values, such as max(a, b)")
        function = lookup("function", node.func.id, FUNCTIONS)
        try:
            return function(*(self._number(value) for value in node.args))
        except TypeError:
            raise ValueError(f"{node.func.id} does not take {len(node.args)} values") from None


def _reduce_or(values: list[Any]) -> Any:
    result: Any = False
    for value in values:
        result = np.logical_or(result, value)
    return result
