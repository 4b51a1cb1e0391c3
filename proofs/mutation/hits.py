"""Which tests run which functions: a copy of the sources in which every function reports that it was called.

`instrument` puts one line into every function. All processes of a test run, Gloo workers and command lines
too, append what they reach to one file in the folder that `MEGAZERO_HITS` names. They say a function once
per test: `JobNotes.next_test` turns a page that all of them have mapped, and on a new page everything is new.
"""

from __future__ import annotations

import ast
import json
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

VARIABLE = "MEGAZERO_HITS"
Function = tuple[str, str]  # path of its file and dotted name


def instrument(root: Path, folders: Iterable[str]) -> None:
    """Change the sources in these folders so that functions report; their names go to `functions.json`."""
    functions: list[Function] = []
    for path in sorted(path for folder in folders for path in (root / folder).rglob("*.py")):
        name = path.relative_to(root).as_posix()
        text = path.read_text(encoding="utf-8")
        path.write_text(_instrumented(text, name, functions), encoding="utf-8")
    (root / "functions.json").write_text(json.dumps(functions))


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
        call = f"__import__('proofs.mutation.hits').mutation.hits.BOARD.hit({number})"
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
        self._page = None
        self._write = os.write  # a test may replace it
        self._seen: dict[int, bytes] = {}
        if folder is not None:
            self._log = os.open(f"{folder}/log", os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
            page = os.open(f"{folder}/page", os.O_RDWR | os.O_CREAT, 0o600)
            os.ftruncate(page, 8)
            self._page = mmap.mmap(page, 8)
            os.close(page)
            self._at = os.fstat(self._log).st_size

    def hit(self, number: int) -> None:
        """This function was called."""
        if self._page is None:
            return
        page = self._page[:8]
        if self._seen.get(number) != page:
            self._seen[number] = page
            self._write(self._log, b"%07d\n" % number)

    def next_test(self) -> list[int]:
        """What all processes have reached since the last call; from now on everything is new again."""
        size = os.fstat(self._log).st_size
        text = os.pread(self._log, size - self._at, self._at)
        self._at = size
        self._page[:8] = (int.from_bytes(self._page[:8], "little") + 1).to_bytes(8, "little")
        # A process that is killed, or whose disk a test fills, may leave half a line.
        return sorted({int(number) for number in text.split() if len(number) == 7})


BOARD = JobNotes(os.environ.get(VARIABLE))
