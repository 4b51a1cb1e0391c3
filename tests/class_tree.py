"""The project's classes as syntax trees: who derives from whom, and what each has."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from functools import cache, cached_property

from tests.source_tree import Source


class ClassTree:
    """All top-level classes of some files, by their dotted names."""

    def __init__(self, files: Iterable[Source]):
        self.files = {source.module: source for source in files}
        self.nodes = {
            f"{source.module}.{node.name}": node
            for source in self.files.values()
            for node in source.tree.body
            if isinstance(node, ast.ClassDef)
        }
        self.ancestors = cache(self._ancestors)
        self.members = cache(self._members)

    def find(self, module: str, name: str) -> str | None:
        """The class that a name means in a module, followed through imports; None for any other class."""
        target = f"{module}.{name}"
        while target not in self.nodes:
            home, _, last = target.rpartition(".")
            imported = self.files[home].imports() if home in self.files else ()
            further = [each.target for each in imported if each.target.rpartition(".")[2] == last]
            if not further or further[0] == target:
                return None
            target = further[0]
        return target

    def bases(self, name: str) -> list[str]:
        """The bases of a class: dotted names of these classes, and other names as they are written."""
        bases = (base.value if isinstance(base, ast.Subscript) else base for base in self.nodes[name].bases)
        written = (ast.unparse(base) for base in bases)
        return [self.find(name.rpartition(".")[0], base) or base for base in written]

    def is_protocol(self, name: str) -> bool:
        """Whether a class is itself a Protocol."""
        return "Protocol" in self.bases(name)

    @cached_property
    def declared(self) -> frozenset[tuple[str, str]]:
        """(Protocol, class) for every line such as `_: type[Protocol] = Class`, tuples of them included."""
        pairs = set()
        for source in self.files.values():
            for node in ast.walk(source.tree):
                if isinstance(node, ast.AnnAssign) and node.value and ast.unparse(node.target) == "_":
                    for protocol in self._named(source, node.annotation):
                        pairs |= {(protocol, found) for found in self._named(source, node.value)}
        return frozenset(pairs)

    def protocols_of(self, name: str) -> set[str]:
        """The Protocols that a class is declared to follow: bases, bases' bases, and declared lines."""
        line = self.ancestors(name)
        lines = {protocol for protocol, follower in self.declared if follower in line}
        followed = line.union(*(self.ancestors(protocol) for protocol in lines))
        return {each for each in followed if self.is_protocol(each)}

    def _named(self, source: Source, node: ast.expr) -> Iterator[str]:
        for part in ast.walk(node):
            if isinstance(part, ast.Name) and (name := self.find(source.module, part.id)):
                yield name

    def _ancestors(self, name: str) -> frozenset[str]:
        """A class and all of these classes that it derives from."""
        known = (base for base in self.bases(name) if base in self.nodes)
        return frozenset({name}.union(*(self.ancestors(base) for base in known)))

    def _members(self, name: str) -> frozenset[str]:
        """The public methods and attributes of a class, inherited ones included."""
        names = {member for each in self.ancestors(name) for member in _defined(self.nodes[each])}
        return frozenset(member for member in names if not member.startswith("_"))


def _defined(node: ast.ClassDef) -> Iterator[str]:
    for statement in node.body:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield statement.name
            yield from _attributes_set(statement)
        elif isinstance(statement, ast.AnnAssign):
            yield ast.unparse(statement.target)
        elif isinstance(statement, ast.Assign):
            yield from map(ast.unparse, statement.targets)


def _attributes_set(method: ast.AST) -> Iterator[str]:
    for node in ast.walk(method):
        stored = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if stored and ast.unparse(node.value) == "self":
            yield node.attr
