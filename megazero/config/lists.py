"""Lists of integers as Megatron-LM's scripts write them: `([0]*3+[1]*21)`, read without evaluating them."""

from __future__ import annotations

import ast

_LONGEST_TEXT = 2000  # characters
_MOST_ITEMS = 10_000
_FORM = "must be integers, or a list such as ([0]*3+[1]*21)"


class Unreadable(ValueError):
    """A value does not have the field's type. The message says what it must be: "must be an integer"."""


def plain_text(text: str) -> str:
    """Return the text.

    Raises:
        Unreadable: it has a lone surrogate, other than one for a byte of a name that is not UTF-8 (PEP 383).
    """
    if any("\ud800" <= c <= "\udfff" and not "\udc80" <= c <= "\udcff" for c in text):
        raise Unreadable("must be text that can be written, without half a surrogate pair")
    return text


def read_list(text: str) -> list[int]:
    """Read an expression of lists, integers, `+`, `*` and parentheses, as in Python, and return its list.

    Raises:
        Unreadable: `text` is not such an expression, or the list would be too long.
    """
    if len(text) > _LONGEST_TEXT:
        raise Unreadable(f"must be written in at most {_LONGEST_TEXT} characters")
    try:
        items = _value(ast.parse(text.strip(), mode="eval").body)
    except Unreadable:
        raise
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise Unreadable(_FORM) from error
    if not isinstance(items, list):
        raise Unreadable(_FORM)
    return items


def _value(node: ast.expr) -> list[int] | int:
    if isinstance(node, ast.List):
        return [_integer(item) for item in node.elts]
    if not isinstance(node, ast.BinOp):
        return _integer(node)
    left, right = _value(node.left), _value(node.right)
    if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
        return _joined(left + right, 1)
    if isinstance(node.op, ast.Mult) and isinstance(left, list) and isinstance(right, int):
        return _joined(left, right)
    if isinstance(node.op, ast.Mult) and isinstance(left, int) and isinstance(right, list):
        return _joined(right, left)
    raise Unreadable(_FORM)


def _joined(items: list[int], times: int) -> list[int]:
    if len(items) * times > _MOST_ITEMS:
        raise Unreadable(f"must have at most {_MOST_ITEMS} items")
    return items * times


def _integer(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    raise Unreadable(_FORM)
