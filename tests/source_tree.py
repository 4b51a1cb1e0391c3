"""The project's sources as syntax trees, for tests that hold the architecture."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Import:
    """One imported name, whether at the top, in a function or for types only.

    A call of `import_module` with a literal name is an import too.
    """

    target: str
    line: int


@dataclass(frozen=True)
class Source:
    """A file of Python. `module` is its dotted name, `package` true for an `__init__.py`."""

    module: str
    text: str
    package: bool = False

    @classmethod
    def read(cls, path: Path, root: Path = ROOT) -> Source:
        """The file at `path`, named relative to `root`."""
        parts = list(path.relative_to(root).with_suffix("").parts)
        package = parts[-1] == "__init__"
        return cls(".".join(parts[:-1] if package else parts), path.read_text(encoding="utf-8"), package)

    @cached_property
    def tree(self) -> ast.Module:
        """The syntax tree."""
        return ast.parse(self.text)

    def imports(self) -> tuple[Import, ...]:
        """Every import; `from a import b` counts as a.b, the caller knows whether that is a module."""
        return self._imports

    @cached_property
    def _imports(self) -> tuple[Import, ...]:
        return tuple(self._find_imports())

    def _find_imports(self) -> Iterator[Import]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for name in node.names:
                    yield Import(name.name, node.lineno)
            elif isinstance(node, ast.ImportFrom):
                base = self._base(node)
                for name in node.names:
                    yield Import(f"{base}.{name.name}", node.lineno)
            elif isinstance(node, ast.Call) and (target := _called_import(node)):
                yield Import(target, node.lineno)

    def _base(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = self.module.split(".")
        here = parts[: len(parts) - node.level + self.package]
        return ".".join([*here, *([node.module] if node.module else [])])

    def classes(self) -> Iterator[ast.ClassDef]:
        """Every class, those within classes and functions included."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ClassDef):
                yield node

    def doors(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        """The module behind each door (see `megazero/door.py`), and the names that the door shows."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "through_door":
                _, _, annex, *names = node.args
                yield ast.literal_eval(annex), tuple(map(ast.literal_eval, names))

    def functions(self) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
        """Every function and method."""
        for node in ast.walk(self.tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield node


def _called_import(call: ast.Call) -> str | None:
    """The module that `import_module("name")` or `__import__("name")` imports; None for other calls."""
    name = getattr(call.func, "attr", getattr(call.func, "id", None))
    named = name in ("import_module", "__import__") and call.args and isinstance(call.args[0], ast.Constant)
    return str(call.args[0].value) if named else None


def sources(*folders: str) -> tuple[Source, ...]:
    """The Python files below these folders of the project, in a fixed order; each is read and parsed once."""
    return tuple(source for folder in folders for source in _sources_of(folder))


@cache
def _sources_of(folder: str) -> tuple[Source, ...]:
    return tuple(Source.read(path) for path in sorted((ROOT / folder).rglob("*.py")))


def find_cycle(graph: dict[str, set[str]]) -> list[str]:
    """Some cycle of a directed graph, as its nodes in order with the first again at the end; or nothing."""
    done: set[str] = set()

    def visit(node: str, path: list[str]) -> list[str]:
        if node in path:
            return [*path[path.index(node) :], node]
        if node in done:
            return []
        for target in sorted(graph.get(node, ())):
            if cycle := visit(target, [*path, node]):
                return cycle
        done.add(node)
        return []

    for start in sorted(graph):
        if cycle := visit(start, []):
            return cycle
    return []
