"""The text of `--help`, generated from the tree."""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from itertools import pairwise

from megazero.config.fields import FIELDS, SECTIONS, FieldSpec, Kind, section_title, spoken
from megazero.config.flags import COMMANDS
from megazero.config.tree.option import Section


def format_help(program: str = "pretrain_gpt.py", width: int = 100) -> str:
    """The text of `--help`: all flags by section, with values, meanings, units, defaults and aliases."""
    lines = [
        f"usage: {program} [--config FILE] [flags]",
        "",
        *textwrap.wrap(
            "Settings come from defaults, then the YAML file, then the DeepSpeed JSON, then flags. Choices "
            "are read in any case; "
            "--SWITCH=false turns off a switch that the file turns on. docs/configuration.md lists the "
            "same, docs/foreign_flags.md the flags of other trainers that are accepted or refused.",
            width,
        ),
        "",
        "Commands",
    ]
    for name, text in COMMANDS.items():
        lines += _entry(name, text, width)
    for section in SECTIONS:
        lines += ["", section_title(section)]
        texts = meanings(section)
        for spec in (spec for spec in FIELDS if spec.section == section):
            lines += _entry(_usage(spec), _with_notes(texts[spec.name], spec), width)
    return "\n".join(lines) + "\n"


def meanings(section: str) -> dict[str, str]:
    """Each field of a section -> its meaning: the text below its declaration.

    The text is read from the source when it is asked for, so that a run does not pay for it.
    """
    model = SECTIONS[section]
    parts = [part for part in model.__mro__ if issubclass(part, Section)]
    names, texts = {part.__name__ for part in parts}, dict[str, str]()
    for module in {part.__module__ for part in parts}:
        for definition in ast.parse(inspect.getsource(sys.modules[module])).body:
            if isinstance(definition, ast.ClassDef) and definition.name in names:
                texts |= _texts_below_fields(definition)
    return {name: info.description or texts.get(name, "") for name, info in model.model_fields.items()}


def _texts_below_fields(definition: ast.ClassDef) -> dict[str, str]:
    return {
        ast.unparse(field.target): " ".join(str(text.value.value).split())
        for field, text in pairwise(definition.body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
    }


def _entry(head: str, text: str, width: int) -> list[str]:
    body = textwrap.wrap(
        text, width, initial_indent=" " * 6, subsequent_indent=" " * 6, break_on_hyphens=False
    )
    return [f"  {head}", *body]


def _usage(spec: FieldSpec) -> str:
    if spec.kind is Kind.BOOL:
        return spec.flag
    if spec.kind is Kind.CHOICE:
        return f"{spec.flag} {{{','.join(map(str, spec.choices))}}}"
    if spec.kind is Kind.CHOICES:
        return f"{spec.flag} {{{','.join(map(str, spec.choices))}}} ..."
    if spec.length is not None:
        return f"{spec.flag} {' '.join(['INT'] * spec.length)}"
    return f"{spec.flag} {spec.type_name.upper()}"


def _with_notes(meaning: str, spec: FieldSpec) -> str:
    notes = []
    if spec.unit:
        notes.append(f"unit: {spec.unit}")
    if spec.required:
        notes.append("required")
    elif spec.kind is not Kind.BOOL and spec.default_text is not None:
        notes.append(f"default: {spec.default_text}")
    if spec.aliases:
        notes.append("also " + ", ".join(spec.aliases))
    notes += [f"{name} sets {spoken(constant)}" for name, constant in spec.switches.items()]
    return f"{meaning} ({'; '.join(notes)})" if notes else meaning
