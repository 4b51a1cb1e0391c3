"""Which tests run which functions: a copy of the sources in which every function reports that it was called.

`instrument` puts one line into every function. All processes of a test run, Gloo workers and command lines
too, append what they reach to one file in the folder that `MEGAZERO_HITS` names. They say a function once
per test: `JobNotes.next_test` turns a page that all of them have mapped, and on a new page everything is new.
"""

from __future__ import annotations

import ast
import builtins
import json
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

VARIABLE = "MEGAZERO_HITS"
MOST = 100_000  # functions
Function = tuple[str, str]  # path of its file and dotted name


def instrument(root: Path, folders: Iterable[str]) -> None:
    """Change the sources in these folders so that functions report; their names go to `functions.json`."""
    functions: list[Function] = []
    for path in sorted(path for folder in folders for path in (root / folder).rglob("*.py")):
        name = path.relative_to(root).as_posix()
        text = path.read_text(encoding="utf-8")
        path.write_text(_instrumented(text, name, functions), encoding="utf-8")
    (root / "functions.json").write_text(json.dumps(functions))
    package = root / "megazero/__init__.py"
    text = package.read_text(encoding="utf-8")
    package.write_text(f"{text}\nimport proofs.mutation.hits\n", encoding="utf-8")


def _instrumented(text: str, name: str, functions: list[Function]) -> str:
    lines = text.splitlines()
    insertions = []
    for node, function in _functions(ast.parse(text), ""):
        body = node.body[1:] if ast.get_docstring(node) is not None else node.body
        if body:
            number = len(functions)
            functions.append((name, function))
            first = body[0]
            line = min([first.lineno, *(each.lineno for each in getattr(first, "decorator_list", []))])
            insertions.append((line, first.col_offset, number, node.lineno == line))
    for line, column, number, same_line in sorted(insertions, reverse=True):
        call = f"_hits_seen[{number}] != _hits_page[0] and _hits_hit({number})"
        if same_line:
            old = lines[line - 1].encode()
            lines[line - 1] = (old[:column] + f"{call}; ".encode() + old[column:]).decode()
        else:
            lines.insert(line - 1, " " * column + call)
    return "\n".join(lines) + "\n"


def _functions(node: ast.AST, prefix: str):
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            name = f"{prefix}.{child.name}" if prefix else child.name
            if not isinstance(child, ast.ClassDef):
                yield child, name
            yield from _functions(child, name)
        else:
            yield from _functions(child, prefix)


class JobNotes:
    """Where the processes of one test run write down the functions they reach."""

    def __init__(self, folder: str | None):
        self.page = memoryview(bytes(8)).cast("Q")
        self.seen = [0] * MOST  # the page on which this process last reported each function
        self._write = os.write  # a test may replace it
        if folder is not None:
            self._log = os.open(f"{folder}/log", os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
            page = os.open(f"{folder}/page", os.O_RDWR | os.O_CREAT, 0o600)
            os.ftruncate(page, 8)
            self.page = memoryview(mmap.mmap(page, 8)).cast("Q")
            os.close(page)
            self._at = os.fstat(self._log).st_size

    def hit(self, number: int) -> None:
        """This function was called, for the first time on this page."""
        self.seen[number] = self.page[0]
        self._write(self._log, b"%07d\n" % number)

    def next_test(self) -> list[int]:
        """What all processes have reached since the last call; from now on everything is new again."""
        size = os.fstat(self._log).st_size
        text = os.pread(self._log, size - self._at, self._at)
        self._at = size
        self.page[0] += 1
        # A process that is killed, or whose disk a test fills, may leave half a line.
        return sorted({int(number) for number in text.split() if len(number) == 7})


BOARD = JobNotes(os.environ.get(VARIABLE))
# What every function looks at, as names that need no import: some are called millions of times.
vars(builtins).update(_hits_seen=BOARD.seen, _hits_page=BOARD.page, _hits_hit=BOARD.hit)
