"""The rules by which faults are planted: from a syntax tree to small edits of its text.

A rule looks at one node and yields `(rule's name, node to replace, text to put there)`. `edits_of` walks a
file, leaves out what is no behaviour (docstrings, annotations, messages, imports) and gives every edit.
Nothing here knows about tests.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate

Proposal = tuple[str, ast.AST, str]

ORDERINGS = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">"}
OPPOSITES = {
    ast.Lt: ">=",
    ast.LtE: ">",
    ast.Gt: "<=",
    ast.GtE: "<",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}
SIGNS = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "*",
    ast.Div: "/",
    ast.FloorDiv: "//",
    ast.Mod: "%",
    ast.Pow: "**",
}
TWINS = {"min": "max", "max": "min", "any": "all", "all": "any", "floor": "ceil", "ceil": "floor"}
TWINS |= {"amin": "amax", "amax": "amin", "minimum": "maximum", "maximum": "minimum"}
WRAPPERS = ("sorted", "reversed", "abs", "set")
UNORDERED = ("isinstance", "issubclass", "getattr", "setattr", "hasattr", "zip", "cast", "field", "TypeVar")
TYPES = (
    "Literal",
    "Annotated",
    "Callable",
    "Iterator",
    "Sequence",
    "Mapping",
    "tuple",
    "list",
    "dict",
    "Union",
)
PLACES = re.compile(r"path|folder|root|dir|file|home|base|place|cwd|target|here|step_name", re.IGNORECASE)
# Settings by name, but also what every tensor has, or a section.
AMBIGUOUS = ("dtype", "device", "optimizer")
# Keywords that speed something up or hold an invariant; none decides a result.
QUIET = ("frozen", "slots", "repr", "strict", "non_blocking", "kw_only")


@dataclass(frozen=True)
class Edit:
    """One fault of one file.

    Attributes:
        rule: its name.
        function: the dotted name of the function or class it lies in; "<module>" outside of all.
        line: counted from 1.
        start, end: characters of the text to replace.
        text: what to put there.
    """

    rule: str
    function: str
    line: int
    start: int
    end: int
    text: str

    def apply(self, source: str) -> str:
        """The file with the fault."""
        return source[: self.start] + self.text + source[self.end :]


class Text:
    """A file's text, with the places of syntax nodes in it. A syntax tree counts in lines and bytes."""

    def __init__(self, source: str):
        self.source = source
        self._lines = source.splitlines(keepends=True)
        self._starts = [0, *accumulate(map(len, self._lines))]

    def span(self, node: ast.AST) -> tuple[int, int]:
        """The first character of a node and the one after its last."""
        start = self._place(node.lineno, node.col_offset)
        return start, self._place(node.end_lineno, node.end_col_offset)

    def _place(self, line: int, column: int) -> int:
        text = self._lines[line - 1]
        return self._starts[line - 1] + (column if text.isascii() else len(text.encode()[:column].decode()))


@dataclass(frozen=True)
class Scope:
    """What a rule may want to know about the place of a node.

    Attributes:
        whole: the file.
        settings: default of each setting that has a plain one, as source text, by its name.
        parameters: the same for the parameters of the function around the node.
    """

    whole: Text
    settings: Mapping[str, str]
    parameters: Mapping[str, str]

    def text(self, node: ast.AST) -> str:
        """The source of an expression, safe to put into another one."""
        start, end = self.whole.span(node)
        segment = self.whole.source[start:end]
        return (
            segment if isinstance(node, (ast.Name, ast.Attribute, ast.Constant, ast.Call)) else f"({segment})"
        )


def edits_of(source: str, settings: Mapping[str, str]) -> list[Edit]:
    """Every edit that the rules propose for a file, in the order of the text. Some may not compile."""
    found: dict[tuple[int, int, str], Edit] = {}
    whole = Text(source)
    for node, function, parameters in _behaviour(ast.parse(source), "<module>", {}):
        scope = Scope(whole, settings, parameters)
        for rule, target, text in _proposals(node, scope):
            start, end = whole.span(target)
            # A constant has no attributes and is not called.
            nonsense = rule.startswith("ignore-") and source[end : end + 1] in (".", "(", "[")
            if source[start:end] != text and not nonsense:
                edit = Edit(rule, function, target.lineno, start, end, text)
                found.setdefault((start, end, text), edit)
    return sorted(found.values(), key=lambda edit: (edit.start, edit.end, edit.rule, edit.text))


def compiles(source: str) -> bool:
    """Whether Python takes a text, and without a warning such as: perhaps you missed a comma?"""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            compile(source, "fault", "exec")
        except (SyntaxError, ValueError, Warning):
            return False
    return True


_DECLARING = ("option", "of_model", "of_training")
"""What declares a setting (`megazero/config/tree/option.py`)."""


def setting_defaults(sources: Mapping[str, str]) -> dict[str, str]:
    """Name -> default's source of every setting of the configuration whose default is a plain value."""
    defaults = {}
    for source in sources.values():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                value = node.value
                if isinstance(value, ast.Call) and ast.unparse(value.func) in _DECLARING and value.args:
                    value = value.args[0]
                if isinstance(value, ast.Constant) and value.value not in (None, ...):
                    defaults[node.target.id] = ast.unparse(value)
    return defaults


def _behaviour(node: ast.AST, function: str, parameters: Mapping[str, str]) -> Iterator[tuple]:
    """Nodes that decide what the program does, with the function around them and its plain defaults."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "bases"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or _is_no_behaviour(child):
                continue
            inside, known = function, parameters
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                inside = child.name if function == "<module>" else f"{function}.{child.name}"
                known = {} if isinstance(child, ast.ClassDef) else {**parameters, **_plain_defaults(child)}
            else:
                yield child, function, parameters
            yield from _behaviour(child, inside, known)


def _is_no_behaviour(node: ast.AST) -> bool:
    if isinstance(node, (ast.Raise, ast.JoinedStr, ast.Import, ast.ImportFrom, ast.Assert)):
        return True
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return True
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        return True
    if isinstance(node, ast.FunctionDef) and node.name in ("__repr__", "__str__"):
        return True
    if isinstance(node, ast.Assign) and any(ast.unparse(each) == "__all__" for each in node.targets):
        return True
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("Error"):
        return True
    if isinstance(node, ast.keyword) and node.arg in QUIET:
        return True
    return isinstance(node, ast.Subscript) and ast.unparse(node.value).split(".")[-1] in TYPES


def _plain_defaults(node: ast.FunctionDef | ast.AsyncFunctionDef) -> dict[str, str]:
    arguments = node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    pairs = [*zip(positional[len(positional) - len(arguments.defaults) :], arguments.defaults, strict=True)]
    pairs += zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    plain = {each.arg: ast.unparse(value) for each, value in pairs if isinstance(value, ast.Constant)}
    # One that the body gives another value is no setting any more.
    assigned = {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and _stores(each)}
    return {name: value for name, value in plain.items() if name not in assigned}


def _stores(node: ast.Name) -> bool:
    return isinstance(node.ctx, (ast.Store, ast.Del))


def _proposals(node: ast.AST, scope: Scope) -> Iterator[Proposal]:
    rules = {
        ast.BinOp: _arithmetic,
        ast.Compare: _comparison,
        ast.BoolOp: _boolean,
        ast.UnaryOp: _unary,
        ast.Call: _call,
        ast.Constant: _constant,
        ast.Attribute: _setting,
        ast.Name: _parameter,
        ast.AugAssign: _augmented,
        ast.Slice: _slice,
        ast.If: _condition,
        ast.While: _condition,
        ast.IfExp: _condition,
        ast.comprehension: _filter,
        ast.Expr: _statement,
        ast.Continue: _jump,
        ast.Break: _jump,
    }
    rule = rules.get(type(node))
    if rule is not None:
        yield from rule(node, scope)


def _arithmetic(node: ast.BinOp, scope: Scope) -> Iterator[Proposal]:
    operator = type(node.op)
    sides = (node.left, node.right)
    if operator not in SIGNS or any(_is_text(side) for side in sides):
        return
    if operator is ast.Div and PLACES.search(ast.unparse(node.left)):
        return
    left, right = (scope.text(side) for side in sides)
    if operator in (ast.Mult, ast.Div, ast.FloorDiv, ast.Pow):
        yield "drop-factor", node, left
        if operator is ast.Mult:
            yield "drop-factor", node, right
    elif operator in (ast.Add, ast.Sub):
        yield "flip-sign", node, f"({left} {SIGNS[operator]} {right})"
        yield "drop-term", node, left
    if operator in (ast.Sub, ast.Div, ast.FloorDiv, ast.Mod):
        sign = "-" if operator is ast.Sub else SIGNS[operator]
        yield "swap-operands", node, f"({right} {sign} {left})"


def _is_text(node: ast.AST) -> bool:
    """Whether an operand is surely text or a list, where arithmetic rules would only make nonsense."""
    if isinstance(node, ast.BinOp):
        return _is_text(node.left) or _is_text(node.right)
    plain = isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes))
    return plain or isinstance(node, (ast.JoinedStr, ast.List, ast.Tuple, ast.Dict, ast.ListComp))


def _comparison(node: ast.Compare, scope: Scope) -> Iterator[Proposal]:
    if len(node.ops) != 1:
        return
    left, right = scope.text(node.left), scope.text(node.comparators[0])
    operator = type(node.ops[0])
    if operator in ORDERINGS:
        yield "boundary", node, f"({left} {ORDERINGS[operator]} {right})"
    yield "flip-comparison", node, f"({left} {OPPOSITES[operator]} {right})"


def _boolean(node: ast.BoolOp, scope: Scope) -> Iterator[Proposal]:
    parts = [scope.text(value) for value in node.values]
    other = " or " if isinstance(node.op, ast.And) else " and "
    same = " and " if isinstance(node.op, ast.And) else " or "
    yield "and-or", node, f"({other.join(parts)})"
    for i in range(len(parts)):
        yield "drop-clause", node, f"({same.join(parts[:i] + parts[i + 1 :])})"


def _unary(node: ast.UnaryOp, scope: Scope) -> Iterator[Proposal]:
    if isinstance(node.op, ast.Not):
        yield "drop-not", node, scope.text(node.operand)
    elif isinstance(node.op, ast.USub) and not isinstance(node.operand, ast.Constant):
        yield "drop-minus", node, scope.text(node.operand)


def _call(node: ast.Call, scope: Scope) -> Iterator[Proposal]:
    name = ast.unparse(node.func).split(".")[-1]
    if name in TWINS:
        whole = scope.text(node.func)
        yield "min-max", node.func, whole[: len(whole) - len(name)] + TWINS[name]
    if name in WRAPPERS and isinstance(node.func, ast.Name) and node.args:
        inner = scope.text(node.args[0])
        yield "drop-wrapper", node, f"list({inner})" if name in ("sorted", "reversed", "set") else inner
    if name not in UNORDERED and len(node.args) >= 2:
        first, second = node.args[:2]
        if all(isinstance(each, (ast.Name, ast.Attribute, ast.Constant)) for each in (first, second)):
            rest = [scope.text(each) for each in node.args[2:] if not isinstance(each, ast.Starred)]
            if len(rest) == len(node.args) - 2:
                keywords = [ast.unparse(each) for each in node.keywords]
                values = ", ".join([scope.text(second), scope.text(first), *rest, *keywords])
                yield "swap-arguments", node, f"{scope.text(node.func)}({values})"


def _constant(node: ast.Constant, scope: Scope) -> Iterator[Proposal]:
    value = node.value
    if value is True or value is False:
        yield "flip-flag", node, str(not value)
    elif isinstance(value, int):
        yield "off-by-one", node, str(value + 1)
        if value > 0:
            yield "off-by-one", node, str(value - 1)
    elif isinstance(value, float) and value:
        yield "other-constant", node, repr(value * 2)


def _setting(node: ast.Attribute, scope: Scope) -> Iterator[Proposal]:
    if isinstance(node.ctx, ast.Load) and node.attr in scope.settings and node.attr not in AMBIGUOUS:
        yield "ignore-setting", node, scope.settings[node.attr]


def _parameter(node: ast.Name, scope: Scope) -> Iterator[Proposal]:
    if isinstance(node.ctx, ast.Load) and node.id in scope.parameters:
        yield "ignore-parameter", node, scope.parameters[node.id]


def _augmented(node: ast.AugAssign, scope: Scope) -> Iterator[Proposal]:
    if _is_text(node.value) or type(node.op) not in SIGNS:
        return
    target, value = scope.text(node.target), scope.text(node.value)
    if isinstance(node.op, (ast.Add, ast.Sub)):
        yield "flip-sign", node, f"{target} {SIGNS[type(node.op)]}= {value}"
    yield "drop-call", node, "pass"


def _slice(node: ast.Slice, scope: Scope) -> Iterator[Proposal]:
    for bound in (node.lower, node.upper):
        if bound is not None and not isinstance(bound, (ast.Constant, ast.UnaryOp)):
            yield "off-by-one", bound, f"{scope.text(bound)} + 1"


def _condition(node: ast.If | ast.While | ast.IfExp, scope: Scope) -> Iterator[Proposal]:
    if isinstance(node, ast.If) and _complains(node):
        yield "skip-check", node.test, "False"
    else:
        yield "negate-condition", node.test, f"not {scope.text(node.test)}"
        if isinstance(node, ast.If):
            yield "skip-branch", node.test, "False"


def _complains(node: ast.If) -> bool:
    """Whether all that a branch does is raise an error or report one."""
    last = node.body[-1]
    if isinstance(last, ast.Raise):
        return True
    said = isinstance(last, ast.Expr) and isinstance(last.value, ast.Yield) and last.value.value is not None
    return said and any(isinstance(each, ast.JoinedStr) for each in ast.walk(last.value.value))


def _filter(node: ast.comprehension, scope: Scope) -> Iterator[Proposal]:
    for test in node.ifs:
        yield "drop-filter", test, "True"


def _statement(node: ast.Expr, scope: Scope) -> Iterator[Proposal]:
    if isinstance(node.value, ast.Call):
        yield "drop-call", node, "pass"


def _jump(node: ast.Continue | ast.Break, scope: Scope) -> Iterator[Proposal]:
    yield "drop-jump", node, "pass"
