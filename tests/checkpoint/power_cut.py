"""A model of a file system that knows what has been synced: what a power cut may leave of it."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Change:
    """One change of the file system that is about to happen.

    `name` is the name of `Disk`'s method, `data` the bytes of a write, `target` the new name of a rename.
    """

    name: str
    path: Path
    data: memoryview | None = None
    target: Path | None = None


Tree = Mapping[str, object]
"""Name -> bytes of a file, or the tree of a folder."""


@dataclass(eq=False)
class _File:
    content: bytes = b""
    synced: bytes = b""


@dataclass(frozen=True, eq=False)
class _Step:
    """A change of a folder's names: one is removed, one is added, or both at once; both name `node`."""

    node: _File | _Folder
    old: str | None = None
    new: str | None = None


@dataclass(eq=False)
class _Folder:
    """A folder's names on the medium, and the steps since its last sync."""

    synced: dict[str, _File | _Folder] = field(default_factory=dict)
    steps: list[_Step] = field(default_factory=list)

    def after(self, steps: Iterable[_Step]) -> dict[str, _File | _Folder] | None:
        """The names if these steps alone reached the medium; None if no system could do that."""
        names = dict(self.synced)
        for step in steps:
            if step.old is not None and names.pop(step.old, None) is not step.node:
                return None
            if step.new is not None:
                if isinstance(names.get(step.new), _Folder):
                    return None
                names[step.new] = step.node
        return names

    @property
    def shown(self) -> dict[str, _File | _Folder]:
        """The names as programs see them before the cut."""
        return self.after(self.steps)

    @property
    def nodes(self) -> list[_File | _Folder]:
        """All nodes that one of its names may stand for."""
        return [*self.synced.values(), *(step.node for step in self.steps)]


class Medium:
    """A model of the file system below `root`, with all states that POSIX allows after a power cut.

    A file's bytes since its last sync are there or not. Of the changes of a folder's names since its last
    sync, any subset has reached the medium, independently of other folders.
    """

    def __init__(self, root: Path):
        self.root = root
        self.lock = threading.Lock()
        self._top = _load(root)

    def note(self, change: Change) -> None:
        """Note a change that has happened."""
        folder, name = self._at(change.path.parent), change.path.name
        match change.name:
            case "make_folder":
                folder.steps.append(_Step(_Folder(), new=name))
            case "create":
                folder.steps.append(_Step(_File(), new=name))
            case "write":
                folder.shown[name].content += bytes(change.data)
            case "sync":
                file = folder.shown[name]
                file.synced = file.content
            case "rename":
                assert change.target.parent == change.path.parent, "moves between folders are not modelled"
                folder.steps.append(_Step(folder.shown[name], old=name, new=change.target.name))
            case "sync_folder":
                synced = self._at(change.path)
                synced.synced, synced.steps = synced.shown, []
            case "remove_file" | "remove_folder":
                folder.steps.append(_Step(folder.shown[name], old=name))
            case other:
                raise AssertionError(other)

    def found_after_cut(self) -> Iterator[Tree]:
        """The states in which the file system may be after a power cut."""
        folders = [each for each in _folders(self._top) if each.steps]
        for choice in itertools.product(*(self._possible(each) for each in folders)):
            names = dict(zip(map(id, folders), choice, strict=True))
            for synced_only in (True, False):
                yield _tree(self._top, names, synced_only)

    def shown(self) -> Tree:
        """The state that programs see without a power cut."""
        return _tree(self._top, {}, synced_only=False)

    def _possible(self, folder: _Folder) -> list[dict[str, _File | _Folder]]:
        """The possible contents of a folder; below a run's folder, only whether they are complete matters."""
        run = any(each is folder for each in self._top.nodes)
        sizes = range(len(folder.steps) + 1) if run else (0, len(folder.steps))
        subsets = (s for n in sizes for s in itertools.combinations(folder.steps, n))
        return [names for names in map(folder.after, subsets) if names is not None]

    def _at(self, path: Path) -> _Folder:
        if not path.is_relative_to(self.root):  # above what is modelled
            return _Folder()
        found = self._top
        for name in path.relative_to(self.root).parts:
            found = found.shown[name]
        return found


def tree_of(path: Path) -> Tree:
    """The real content of a folder."""
    return _tree(_load(path), {}, synced_only=False)


def put(tree: Tree, path: Path) -> None:
    """Write a tree into a new folder."""
    path.mkdir()
    for name, node in tree.items():
        if isinstance(node, bytes):
            (path / name).write_bytes(node)
        else:
            put(node, path / name)


def _load(path: Path) -> _Folder:
    folder = _Folder()
    for each in path.iterdir():
        content = b"" if each.is_dir() else each.read_bytes()
        folder.synced[each.name] = _load(each) if each.is_dir() else _File(content, content)
    return folder


def _folders(folder: _Folder) -> list[_Folder]:
    """The folder and all folders below it, each once."""
    found = {id(folder): folder}
    for node in folder.nodes:
        if isinstance(node, _Folder):
            found |= {id(each): each for each in _folders(node)}
    return list(found.values())


def _tree(folder: _Folder, names: Mapping[int, Mapping[str, _File | _Folder]], synced_only: bool) -> Tree:
    def content(node: _File | _Folder) -> object:
        if isinstance(node, _Folder):
            return _tree(node, names, synced_only)
        return node.synced if synced_only else node.content

    return {name: content(node) for name, node in names.get(id(folder), folder.shown).items()}
