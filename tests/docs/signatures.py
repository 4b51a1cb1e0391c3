"""Whether the signatures that pages show are the code's.

A block of Python in a page is either a program or a list of signatures: `Name(parameters)`,
`Owner.method(parameters)`, or methods indented below their owner. A signature shows every parameter, in order
and with its default (`...` stands for any); one that ends with `...` shows the first ones. Annotations may be
left out.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache

from tests.docs.pages import Block, Document
from tests.source_tree import Source, sources

Function = ast.FunctionDef | ast.AsyncFunctionDef
HEAD = re.compile(r"(?:class |def |with |async def )?(?P<name>[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)\(")


@dataclass(frozen=True)
class Parameter:
    """A parameter; `default` and `annotation` are text, None if there is none. A lone `*` is one too."""

    name: str
    default: str | None = None
    annotation: str | None = None

    def agrees_with(self, code: Parameter) -> bool:
        """Whether a page may show the code's parameter like this."""
        same_default = self.default == code.default or (self.default == "..." and code.default is not None)
        same_annotation = None in (self.annotation, code.annotation) or self.annotation == code.annotation
        return self.name == code.name and same_default and same_annotation

    def __str__(self) -> str:
        annotation = f": {self.annotation}" if self.annotation else ""
        if self.default is None:
            return self.name + annotation
        return f"{self.name}{annotation} = {self.default}" if annotation else f"{self.name}={self.default}"


@dataclass(frozen=True)
class Signature:
    """What a page or the code says of a callable; `open_ended` is a page's `...`."""

    name: str
    parameters: tuple[Parameter, ...]
    returns: str | None = None
    open_ended: bool = False

    def __str__(self) -> str:
        returns = f" -> {self.returns}" if self.returns else ""
        return f"{self.name}({', '.join(map(str, self.parameters))}){returns}"

    def agrees_with(self, code: Signature) -> bool:
        """Whether a page may show the code's signature like this."""
        theirs = code.parameters[: len(self.parameters)] if self.open_ended else code.parameters
        return len(self.parameters) == len(theirs) and all(
            ours.agrees_with(other) for ours, other in zip(self.parameters, theirs, strict=True)
        )


def plain(text: str) -> str:
    """An expression as Python writes it; text that is none, as it is."""
    try:
        return ast.unparse(ast.parse(text.strip(), mode="eval"))
    except SyntaxError:
        return text.strip()


class Index:
    """The definitions of some sources, by name."""

    def __init__(self, files: Iterable[Source]) -> None:
        self._homes: dict[str, list[tuple[str, ast.ClassDef | Function]]] = defaultdict(list)
        self._doors: dict[tuple[str, str], str] = {}
        for source in files:
            for node in source.tree.body:
                if isinstance(node, (ast.ClassDef, *Function.__args__)):
                    self._homes[node.name].append((source.module, node))
            for annex, names in source.doors():
                self._doors |= {(source.module, name): annex for name in names}

    def signatures(self, name: str, package: str) -> list[Signature]:
        """The signatures of `Name` or `Owner.method`; if several things have the name, those in `package`."""
        owner, _, method = name.rpartition(".")
        homes = self._homes[(owner or method).rpartition(".")[2]]
        nodes = [node for module, node in homes if module.split(".")[1:2] == [package]] or [
            node for _, node in homes
        ]
        if not owner:
            calls = [self._call(node) for node in nodes]
        else:
            calls = [self._method(node, method) for node in nodes if isinstance(node, ast.ClassDef)]
        return [replace(signature, name=name) for signature in calls if signature is not None]

    def defines(self, module: str, name: str) -> bool:
        """Whether a module defines a class or function, or a package below it or behind its door does."""
        module = self._doors.get((module, name), module)
        homes = (home for home, _ in self._homes[name])
        return any(home == module or home.startswith(f"{module}.") for home in homes)

    def _call(self, node: ast.ClassDef | Function) -> Signature | None:
        if not isinstance(node, ast.ClassDef):
            return of_function(node)
        constructor = self._method(node, "__init__")
        if constructor is not None:
            return replace(constructor, returns=None)
        fields = self._fields(node).values()
        positional = [parameter for parameter, keyword_only in fields if not keyword_only]
        keyword = [parameter for parameter, keyword_only in fields if keyword_only]
        return Signature(node.name, (*positional, *([Parameter("*")] if keyword else []), *keyword))

    def _method(self, node: ast.ClassDef, name: str) -> Signature | None:
        for member in node.body:
            if isinstance(member, Function.__args__) and member.name == name:
                static = "staticmethod" in map(ast.unparse, member.decorator_list)
                signature = of_function(member)
                return signature if static else replace(signature, parameters=signature.parameters[1:])
        return next((method for base in self._bases(node) if (method := self._method(base, name))), None)

    def _bases(self, node: ast.ClassDef) -> Iterator[ast.ClassDef]:
        for base in node.bases:
            name = ast.unparse(base).partition("[")[0].rpartition(".")[2]
            yield from (
                home for _, home in self._homes[name] if isinstance(home, ast.ClassDef) and home is not node
            )

    def _fields(self, node: ast.ClassDef) -> dict[str, tuple[Parameter, bool]]:
        """The fields of a dataclass or the like, by name, each with whether it is passed by keyword only."""
        fields: dict[str, tuple[Parameter, bool]] = {}
        for base in reversed([*self._bases(node)]):
            fields |= self._fields(base)
        keyword_only = any("kw_only=True" in ast.unparse(decorator) for decorator in node.decorator_list)
        for member in node.body:
            if isinstance(member, ast.AnnAssign) and isinstance(member.target, ast.Name):
                name, annotation = member.target.id, ast.unparse(member.annotation)
                default = default_of(member.value)
                if annotation == "KW_ONLY":
                    keyword_only = True
                elif "ClassVar" not in annotation and default != "init=False":
                    fields[name] = (Parameter(name, default, annotation), keyword_only)
        return fields


def default_of(value: ast.expr | None) -> str | None:
    """The default of a dataclass's field, as text; "init=False" for one that is not passed."""
    if isinstance(value, ast.Call) and ast.unparse(value.func).endswith("field"):
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in value.keywords}
        if given.get("init") == "False":
            return "init=False"
        factory = given.get("default_factory")
        empty = {"dict": "{}", "list": "[]", "tuple": "()", "set": "set()"}
        return given.get("default") if factory is None else empty.get(factory, f"{factory}()")
    return None if value is None else ast.unparse(value)


def of_function(node: Function) -> Signature:
    """The signature of a function or method, `self` included."""
    arguments = node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + list(arguments.defaults)
    pairs = [*zip(positional, defaults, strict=True)]
    parameters = [parameter_of(argument, default) for argument, default in pairs]
    if arguments.vararg:
        parameters.append(parameter_of(arguments.vararg, None, "*"))
    elif arguments.kwonlyargs:
        parameters.append(Parameter("*"))
    named = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    parameters += [parameter_of(argument, default) for argument, default in named]
    if arguments.kwarg:
        parameters.append(parameter_of(arguments.kwarg, None, "**"))
    returns = None if node.returns is None else ast.unparse(node.returns)
    return Signature(node.name, tuple(parameters), returns)


def parameter_of(argument: ast.arg, default: ast.expr | None, stars: str = "") -> Parameter:
    """A parameter of a function."""
    annotation = None if argument.annotation is None else ast.unparse(argument.annotation)
    return Parameter(stars + argument.arg, None if default is None else ast.unparse(default), annotation)


def split(text: str, separator: str) -> list[str]:
    """The parts of a text between separators that are in no brackets and no string."""
    parts, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        else:
            depth += (character in "([{") - (character in ")]}")
        if character == separator and depth == 0 and not quote:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def closing(text: str, start: int) -> int:
    """The place of the bracket that closes the one at `start`."""
    depth = 0
    for place in range(start, len(text)):
        depth += (text[place] in "([{") - (text[place] in ")]}")
        if depth == 0:
            return place
    raise ValueError(f"no bracket closes `{text[start:]}`")


def parameter_shown(text: str) -> Parameter:
    """A parameter as a page writes it."""
    before, *default = split(text, "=")
    name, *annotation = split(before, ":")
    return Parameter(
        name, plain(default[0]) if default else None, plain(annotation[0]) if annotation else None
    )


def shown_in(statement: str, owner: str) -> Iterator[Signature]:
    """The signatures in a statement: its first, those after a dot behind it, and those of what it returns."""
    match = HEAD.match(statement)
    if match is None:
        return
    end = closing(statement, match.end() - 1)
    name = f"{owner}.{match['name']}" if owner else match["name"]
    written = [part for part in split(statement[match.end() : end], ",") if part]
    parameters = tuple(parameter_shown(part) for part in written if part not in ("...", "self"))
    rest = statement[end + 1 :]
    if rest and not rest.startswith((".", "(", " ->", ":", "]", ",", " or ")):
        raise ValueError(f"`{rest.strip()}` follows a signature; put `;` between two")
    yield Signature(name, parameters, open_ended="..." in written)
    if rest.startswith("."):
        yield from shown_in(rest[1:], name)
    arrow = re.match(r"\s*->\s*(?:\w+\[)?", rest)
    if arrow:
        yield from shown_in(rest[arrow.end() :], "")


def statements(text: str) -> Iterator[tuple[str, bool]]:
    """The statements of a block, each with whether it is indented; comments are left out."""
    pending, indented = "", False
    for line in text.splitlines():
        code = re.sub(r"(^|\s)#.*", "", line).rstrip()
        if not pending:
            indented = code.startswith(" ")
        pending = f"{pending} {code.strip()}".strip()
        if pending and sum(map(pending.count, "([{")) <= sum(map(pending.count, ")]}")):
            yield from ((part, indented) for part in split(pending, ";") if part)
            pending = ""


def is_program(text: str) -> bool:
    """Whether a block is a piece of a program, not a list of signatures."""
    try:
        nodes = [*ast.walk(ast.parse(text))]
    except SyntaxError:
        return False
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    doing = (ast.Import, ast.ImportFrom, ast.Assign, ast.With, ast.Return)
    return any(isinstance(node, doing) for node in nodes) or any(
        isinstance(value, ast.Constant) for call in calls for value in call.args
    )


def shown(block: Block) -> Iterator[Signature]:
    """The signatures that a block shows."""
    owner = ""
    for statement, indented in statements(block.text):
        if statement.startswith("class "):
            owner = re.split(r"\W", statement.removeprefix("class "))[0]
            continue
        yield from shown_in(statement, owner if indented else "")
        if not indented and (match := re.match(r"\w+", statement)):
            owner = match[0]


@cache
def project() -> Index:
    """The definitions of the project."""
    return Index(sources("megazero"))


def import_violations(document: Document, index: Index) -> Iterator[str]:
    """Names that a page's programs import from the package, which has none such."""
    for block in document.blocks():
        if block.language == "python" and is_program(block.text):
            for imported in Source("page", block.text).imports():
                module, _, name = imported.target.rpartition(".")
                if module.startswith("megazero.") and not index.defines(module, name):
                    name = imported.target
                    yield f"{document.path}:{block.line} imports `{name}`, which the code does not have"


def signature_violations(document: Document, index: Index) -> Iterator[str]:
    """Signatures that are not the code's, each with the right one."""
    package = document.path.removeprefix("docs/").removesuffix(".md")
    for block in document.blocks():
        if block.language != "python" or is_program(block.text):
            continue
        try:
            signatures = [*shown(block)]
        except ValueError as error:
            yield f"{document.path}:{block.line}: {error}"
            continue
        for signature in signatures:
            right = index.signatures(signature.name, package)
            if not right:
                yield f"{document.path}:{block.line} shows `{signature}`, which the code does not have"
            elif not any(signature.agrees_with(code) for code in right):
                expected = " or ".join(f"`{code}`" for code in right)
                yield f"{document.path}:{block.line} shows `{signature}`, but the code has {expected}"
