"""Writes the reference pages from the tree, the compatibility tables and the rules.

`python -m megazero.config.reference docs` writes docs/configuration.md and docs/compatibility.md.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from megazero.config.compat import FOREIGN_FLAGS, Foreign
from megazero.config.fields import FIELDS, SECTIONS, FieldSpec, Kind, section_title
from megazero.config.flags import COMMANDS
from megazero.config.rule import Rule
from megazero.config.rules import RULES

_HEADER = "<!-- Written by `python -m megazero.config.reference docs`; do not edit. -->"


def configuration_page() -> str:
    """docs/configuration.md: every flag and key by section, then the flags of other trainers."""
    lines = [
        "# Configuration",
        "",
        _HEADER,
        "",
        "A run is determined by one tree of settings. Each setting is a flag and a key of the YAML file",
        "that `--config FILE` reads (`section: {key: value}`). Defaults give way to the file, and the file",
        "to flags. `--check-config` prints the resolved tree and exits: 0 accepted, 2 refused, with every",
        "reason at once. It judges the layout for the number of ranks in the environment's `WORLD_SIZE`",
        "(1 if unset). Names are Megatron-LM's wherever it has one. Rules across settings are in",
        "[compatibility.md](compatibility.md).",
        "",
        "Choices are read in any case. An integer may be written as `1e6`, because that is exact. A switch",
        "takes no value; `--switch=false` turns off what the file turns on. A flag given twice keeps its",
        "last value, with a warning; two different flags that set one thing differently are refused.",
        "",
        *_table(("Command", "Meaning"), ((f"`{name}`", text) for name, text in COMMANDS.items())),
    ]
    for section in SECTIONS:
        rows = (_field_row(spec) for spec in FIELDS if spec.section == section)
        lines += ["", f"## {section_title(section)} (`{section}`)", ""]
        lines += _table(("Flag", "Key", "Type", "Default", "Meaning"), rows)
    return "\n".join([*lines, *_foreign_lines()]) + "\n"


def compatibility_page() -> str:
    """docs/compatibility.md: every rule that spans settings."""
    lines = [
        "# Compatibility",
        "",
        _HEADER,
        "",
        "A combination of settings runs, or one of these rules refuses it before any device is touched. All",
        "broken rules are reported at once, by name.",
        "",
        *_table(("Rule", "What must hold", "Settings", "What to do"), (_rule_row(rule) for rule in RULES)),
    ]
    return "\n".join(lines) + "\n"


def write_pages(folder: Path) -> list[Path]:
    """Write both pages into `folder`; returns their paths."""
    pages = {"configuration.md": configuration_page(), "compatibility.md": compatibility_page()}
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in pages]


def _table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    cells = ([cell.replace("|", "\\|") for cell in row] for row in rows)
    return [
        f"| {' | '.join(heads)} |",
        f"|{'---|' * len(heads)}",
        *(f"| {' | '.join(row)} |" for row in cells),
    ]


def _field_row(spec: FieldSpec) -> tuple[str, ...]:
    spellings = [f"`{name}`" for name in (spec.flag, *spec.aliases)]
    spellings += [
        f"`{name}`" + ("" if spec.kind is Kind.BOOL else f" = {constant}")
        for name, constant in spec.switches.items()
    ]
    unit = f" ({spec.unit})" if spec.unit else ""
    off = "; the flag sets the key to false" if spec.default is True else ""
    return (", ".join(spellings), f"`{spec.name}`", spec.type_name, _default(spec), spec.help + unit + off)


def _default(spec: FieldSpec) -> str:
    if spec.required:
        return "required"
    if isinstance(spec.default, bool):
        return "on" if spec.default else "off"
    return "" if spec.default in (None, ()) else f"`{spec.default}`"


def _rule_row(rule: Rule) -> tuple[str, ...]:
    paths = rule.fields or rule.reads
    return (f"`{rule.name}`", rule.message, ", ".join(f"`{path}`" for path in paths), rule.remedy)


def _foreign_lines() -> list[str]:
    accepted = [row for row in FOREIGN_FLAGS.values() if row.accepted and not row.refused]
    conditional = [row for row in FOREIGN_FLAGS.values() if row.accepted and row.refused]
    refused = [row for row in FOREIGN_FLAGS.values() if not row.accepted]
    return [
        "",
        "## Flags of other trainers",
        "",
        "Scripts for Megatron-LM and Megatron-DeepSpeed carry flags that are no settings here. They are",
        "accepted without effect, with one line of warning, where that keeps the numbers and the intent;",
        "otherwise they are refused with what to do instead.",
        "",
        "### Accepted without effect",
        "",
        *_table(("Flags", "Why"), _by_reason(accepted, lambda row: row.accepted or "")),
        "",
        "### Accepted with some values",
        "",
        *_table(("Flag", "Accepted", "Why", "Otherwise"), (_conditional_row(row) for row in conditional)),
        "",
        "### Refused",
        "",
        *_table(("Flags", "What to do"), _by_reason(refused, lambda row: row.refused or "")),
    ]


def _conditional_row(row: Foreign) -> tuple[str, ...]:
    when = f"beside `{row.beside}`" if row.beside else f"with {' or '.join(row.values)}"
    return (f"`{row.name}`", when, row.accepted or "", row.refused or "")


def _by_reason(rows: list[Foreign], reason_of: Callable[[Foreign], str]) -> Iterable[tuple[str, str]]:
    names: dict[str, list[str]] = {}
    for row in rows:
        names.setdefault(reason_of(row), []).append(f"`{row.name}`")
    return ((", ".join(flags), reason) for reason, flags in names.items())


if __name__ == "__main__":
    for path in write_pages(Path(sys.argv[1] if len(sys.argv) > 1 else "docs")):
        print(path)
