"""The configuration as a YAML document: read with line numbers, written so that it reads back equal.

A document may build on another one, which it names (`base: FILE`, relative to its own folder). Its own keys
take precedence.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from megazero.config.bounded import bounded_text, expansion_fault
from megazero.config.coerce import coerce
from megazero.config.fields import FIELD_BY_PATH, FIELDS, SECTIONS, FieldSpec, Kind
from megazero.config.flags import Setting
from megazero.config.metric_text import as_mapping, repeated_key
from megazero.config.numbers import Unreadable, plain_text
from megazero.config.tree.config import Config
from megazero.config.tree.roles import Role
from megazero.config.tree.secret import hidden
from megazero.config.words import Few, nearest
from megazero.regular_file import why_unreadable

BASE = "base"
"""The key that names the document on which another one is built."""


@dataclass
class Document:
    """The result of reading a file and those it is built on.

    Attributes:
        settings: one for each field that any of them sets.
        problems: why they are refused.
        broken: paths of the fields whose value could not be read; all fields if a whole file could not be.
        unknown: counts the unknown keys of the file.
        repeated: counts the keys that are given again.
    """

    settings: list[Setting] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)
    unknown: Few = field(default_factory=lambda: Few("unknown keys"))
    repeated: Few = field(default_factory=lambda: Few("repeated keys"))

    def over(self, base: Document) -> Document:
        """Merge this document with `base`; its own settings take precedence."""
        said = {setting.spec.path for setting in self.settings} | self.broken
        return Document(
            [setting for setting in base.settings if setting.spec.path not in said] + self.settings,
            base.problems + self.problems,
            (base.broken - said) | self.broken,
        )


@dataclass(frozen=True)
class _YamlKey:
    """One `key: value` of a mapping, before its value is read."""

    key: str
    node: yaml.Node
    line: int


def read_file(path: str) -> Document:
    """Read a YAML file. A file that cannot be read is a problem of the document, not an exception."""
    return _read_file(path, "`--config`", ())


def read_text(text: str, name: str = "<text>") -> Document:
    """Read a YAML document; `name` stands before the line numbers of problems."""
    return _read_text(text, name, ())


def _read_file(path: str, what: str, above: tuple[Path, ...]) -> Document:
    """Read a file; `what` named it, and the documents `above` are built on it."""
    try:
        text = bounded_text(path)
    except OSError as error:
        return _unread(f"{what} must name a readable file, but {path}: {why_unreadable(error)}.")
    except UnicodeDecodeError as error:
        return _unread(
            f"{what} must name a UTF-8 file, but {path} has {error.reason} at byte {error.start + 1}."
        )
    if not text.strip():
        return _unread(f"{what} must name a file with settings, but {path} is empty.")
    return _read_text(text, path, (*above, Path(path).resolve()))


def _unread(problem: str) -> Document:
    """Return the result of an unreadable file: all fields count as unread, so that no rule refuses them."""
    return Document(problems=[problem], broken=set(FIELD_BY_PATH))


def _read_text(text: str, name: str, above: tuple[Path, ...]) -> Document:
    document, base = Document(), None
    try:
        loader = yaml.SafeLoader(text)
        # Nodes keep the line numbers that messages name; constructed values would have lost them.
        root = loader.get_single_node()
        fault = None if root is None else expansion_fault(root)
        if fault is not None:
            return _unread(f"{name}: the document must {fault}.")
        if root is not None:
            for entry in _entries(document, root, name):
                if entry.key == BASE:
                    base = _base_of(document, entry, name)
                else:
                    _read_section(document, loader, entry, name)
    except yaml.YAMLError as error:
        return _unread(_syntax_problem(error, name))
    except RecursionError:
        return _unread(f"{name}: the document must not be nested this deeply.")
    rest = [*document.unknown.rest(), *document.repeated.rest()]
    document.problems += [f"{name}: {line}" for line in rest]
    if base is None:
        return document
    path, where = base
    if path.resolve() in above:
        document.problems.append(f"{where} must not lead back to a file built on it, but is {path}.")
        return document
    return document.over(_read_file(str(path), where, above))


def _base_of(document: Document, entry: _YamlKey, name: str) -> tuple[Path, str] | None:
    """Return the file that the key `base` names, and the key's place; None and a problem if it names none."""
    where = f"{name}:{entry.line}: `{BASE}`"
    if isinstance(entry.node, yaml.ScalarNode) and entry.node.tag == "tag:yaml.org,2002:str":
        try:
            return Path(name).parent / plain_text(entry.node.value), where
        except Unreadable as error:
            document.problems.append(f"{where} {error}, but is {_shown(entry.node)}.")
            return None
    document.problems.append(f"{where} must be the name of a file, but is {_shown(entry.node)}.")
    return None


def _syntax_problem(error: yaml.YAMLError, name: str) -> str:
    mark = getattr(error, "problem_mark", None)
    where = f"{name}:{mark.line + 1}:{mark.column + 1}" if mark else name
    reason = getattr(error, "problem", None) or " ".join(str(error).split())
    return f"{where}: the document must be valid YAML, but is not: {reason}."


def _entries(
    document: Document, node: yaml.Node, name: str, section: str | None = None
) -> Iterator[_YamlKey]:
    """Yield the entries of the document or a section; repeated keys and other nodes are problems."""
    if isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:null":
        return
    where = f"{name}:{node.start_mark.line + 1}"
    if not isinstance(node, yaml.MappingNode) or node.tag != "tag:yaml.org,2002:map":
        what = "the document" if section is None else f"`{section}`"
        document.problems.append(f"{where}: {what} must be a mapping of names to values.")
        document.broken |= {spec.path for spec in FIELDS if section in (None, spec.section)}
        return
    seen: dict[str, int] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        key = key_node.value if isinstance(key_node, yaml.ScalarNode) else str(key_node.tag)
        # PyYAML itself takes the last of repeated keys, and says nothing.
        if key in seen:
            document.repeated.add(document.problems, partial(_given_again, f"{name}:{line}", key, seen[key]))
            continue
        seen[key] = line
        yield _YamlKey(key, value_node, line)


def _given_again(where: str, key: str, line: int) -> str:
    return f"{where}: `{key}` must be given once, but is given on line {line} too."


def _read_section(document: Document, loader: yaml.SafeLoader, entry: _YamlKey, name: str) -> None:
    if entry.key not in SECTIONS:
        document.unknown.add(document.problems, partial(_unknown_key, entry, name))
        return
    for item in _entries(document, entry.node, name, entry.key):
        spec = FIELD_BY_PATH.get(f"{entry.key}.{item.key}")
        if spec is None:
            document.unknown.add(document.problems, partial(_unknown_key, item, name, entry.key))
        else:
            _read_value(document, loader, spec, item.node, f"{name}:{item.line}")


def _read_value(
    document: Document, loader: yaml.SafeLoader, spec: FieldSpec, node: yaml.Node, where: str
) -> None:
    try:
        value = _construct(loader, spec, node)
        document.settings.append(Setting(spec, coerce(spec, value), where))
    except Unreadable as error:
        document.problems.append(f"{where}: `{spec.path}` {error}, but is {_shown(node)}.")
        document.broken.add(spec.path)


def _shown(node: yaml.Node) -> str:
    if isinstance(node, yaml.ScalarNode):
        return f"`{node.value[:80]}`"
    return "a mapping" if isinstance(node, yaml.MappingNode) else "a sequence"


def _construct(loader: yaml.SafeLoader, spec: FieldSpec, node: yaml.Node) -> object:
    """Return the node's value.

    Where a text does not fit its tag, such as the date 2026-99-99 or an empty `!!int`, PyYAML passes on
    whatever Python raises; all of these become Unreadable.
    """
    again = repeated_key(node)
    if again is not None:
        raise Unreadable(f"must have each key once (`{again}` is given again)")
    try:
        return loader.construct_object(node, deep=True)
    except (ValueError, LookupError, ArithmeticError, TypeError, AttributeError) as error:
        raise Unreadable(f"must be a valid {spec.type_name}") from error


def _unknown_key(entry: _YamlKey, name: str, section: str | None = None) -> str:
    """Return the problem of an unknown key, with the section that has it, or else the nearest key."""
    path = f"{section}.{entry.key}" if section else entry.key
    elsewhere = next((spec.section for spec in FIELDS if spec.name == entry.key), None)
    own = [spec.name for spec in FIELDS if spec.section == section] if section else [*SECTIONS, BASE]
    close = nearest(entry.key, own)
    if elsewhere:
        hint = f"it belongs in section `{elsewhere}`"
    elif close:
        hint = f"did you mean `{section + '.' if section else ''}{close}`?"
    else:
        hint = "docs/configuration.md lists the keys"
    return f"{name}:{entry.line}: unknown key `{path}`; {hint}{'' if hint.endswith('?') else '.'}"


def to_yaml(config: Config) -> str:
    """The whole tree as YAML; reading it back gives an equal `Config`."""
    tree = {
        section: {
            key: _plain(FIELD_BY_PATH[f"{section}.{key}"], value) for key, value in getattr(config, section)
        }
        for section in SECTIONS
    }
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def _plain(spec: FieldSpec, value: Any) -> object:
    """A value as YAML writes it."""
    if spec.kind is Kind.METRICS:
        return as_mapping(value)
    if Role.SECRET in spec.roles:
        return hidden(value)
    return list(value) if isinstance(value, tuple) else value


class _Dumper(yaml.SafeDumper):
    """A dumper that quotes Unicode's line breaks, which PyYAML writes plainly and reads back as blanks."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        style = '"' if set(data) & set("\x85\u2028\u2029\ufeff") else None
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)


_Dumper.add_representer(str, _Dumper.represent_str)
