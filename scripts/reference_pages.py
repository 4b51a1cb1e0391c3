"""Write the reference pages from the tree, the compatibility tables and the rules.

`python scripts/reference_pages.py docs` writes configuration.md, foreign_flags.md, compatibility.md and
deepspeed_json.md.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

from megazero.config import tables
from megazero.config.compat.foreign import FOREIGN_FLAGS, Foreign
from megazero.config.condition import Condition, Need
from megazero.config.deepspeed.section import NOTHING, KeyRow
from megazero.config.deepspeed.table import ALIASES, GROUPS
from megazero.config.fields import FIELDS, SECTIONS, FieldSpec, Kind, section_title, spoken
from megazero.config.flags import COMMANDS
from megazero.config.help import meanings
from megazero.config.rules.needs import must
from megazero.config.rules.notes import NOTES, Note
from megazero.config.rules.rule import Rule
from megazero.config.rules.table import RULES

_HEADER = "<!-- Written by `python scripts/reference_pages.py docs`; do not edit. -->"

_DEEPSPEED_INTRODUCTION = """\
`--deepspeed --deepspeed_config FILE` reads a DeepSpeed JSON into the same tree of settings as flags and YAML.
It takes precedence over the YAML file. Flags take precedence over its batch sizes, its learning rate and its
folder of TensorBoard events, and a line of the log names both values; a flag that sets another field
differently is refused, and all such conflicts are listed at once. `megazero.initialize(config=...)` reads the
same table.

Each key either sets fields of the tree, or has no effect here (one warning names all such keys with the
reasons), or is refused with what to do instead. Unknown keys of a section that DeepSpeed checks, keys given
twice and values of the wrong type are refused. `null` leaves a key out. An integer may be written as `5e8`,
`"500"` or `true`, and a switch as `1` or `"yes"`, as DeepSpeed takes them. Nothing below a key of type object
is read. Keys that DeepSpeed does not know and leaves alone are named in one warning by
`megazero.initialize`, with the keys that they resemble, and refused by a training script. Remarks
(`_comment`, `//`) and `cuda_visible_devices` are passed over by both.

The file may have comments, keys without quotes, texts in single quotes, and commas before a closing bracket
or missing at the end of a line, as DeepSpeed's reader takes them. A word such as `True` or `.5` is refused
with its place: DeepSpeed reads it as text, and text is true.

Of an optimizer, the table says what a training script does. `megazero.initialize` passes `optimizer.params`
and `scheduler.params` to the class of that name, which takes or refuses them: see
[Optimizers and schedules](deepspeed/json.md). Where `gradient_clipping` is absent, it clips at 1.0 as
DeepSpeed does, and a script at the value of `--clip-grad`, which is 1.0 too unless it is given.

A key that counts only beside another one, such as `fp16.loss_scale` beside `fp16.enabled`, has no effect
without it and is named in the same warning. `--loss-scale` has no effect beside a JSON whose `fp16` scales
the loss dynamically, where Megatron-DeepSpeed's scripts pass the exponent of `initial_scale_power`, or beside
`bf16`, which is not scaled.

Where "auto" is allowed, the value is what flags, YAML or the caller give. In `zero_optimization`, `fp16`,
`bf16` and the sections of monitors, it leaves any other key out. For `reduce_bucket_size`,
`stage3_prefetch_bucket_size` and `stage3_param_persistence_threshold` it is h x h, 0.9 x h x h and 10 x h,
where h is the hidden size, as in transformers, unless a flag sets the field.

`train_batch_size` is `train_micro_batch_size_per_gpu` x `gradient_accumulation_steps` x data-parallel ranks.
What is missing or "auto" is taken from `--global-batch-size` and `--micro-batch-size`. Two sizes then
determine the third, and one alone implies one accumulation step."""


def configuration_page() -> str:
    """Return docs/configuration.md: every flag and key by section, and the defaults decided here."""
    lines = [
        "# Configuration",
        "",
        _HEADER,
        "",
        "A run is determined by one tree of settings. Each setting is a flag and a key of the YAML file",
        "that `--config FILE` reads (`section: {key: value}`). Defaults give way to the file, and the file",
        "to flags. A DeepSpeed JSON is read into the same tree ([DeepSpeed JSON](deepspeed_json.md)).",
        "`--check-config` prints the resolved tree, in which what follows from other settings is filled in,",
        "and exits: 0 accepted, 2 refused, with every reason at once. It judges the layout for the number of",
        "ranks in the environment's `WORLD_SIZE` (1 if unset). Names are Megatron-LM's wherever it has one.",
        "Rules across settings are in [compatibility](compatibility.md), the flags of Megatron-LM and",
        "Megatron-DeepSpeed that are not settings here in [flags of other trainers](foreign_flags.md).",
        "",
        "A YAML file may say `base: FILE`, relative to its own folder. It is then built on that file, whose",
        "settings give way to its own, so it needs to say only what differs.",
        "",
        "Choices are read in any case. An integer may be written as `1e6`, because that is exact. A switch",
        "takes no value; `--switch=false` turns off what the file turns on. The items of a list follow one",
        "another; one of integers may also be written as in Python, such as `[32]*10+[64]*2`. A flag given",
        "twice keeps its last value, with a warning; two different flags that set the same thing differently",
        "are refused. Settings that have no effect beside the others, such as `--save-interval` without",
        "`--save`, are named in a line of the log.",
        "",
        *_table(("Command", "Meaning"), ((f"`{name}`", text) for name, text in COMMANDS.items())),
    ]
    for section in SECTIONS:
        texts = meanings(section)
        rows = (_field_row(spec, texts[spec.name]) for spec in FIELDS if spec.section == section)
        lines += ["", f"## {section_title(section)} (`{section}`)", ""]
        lines += _table(("Flag", "Key", "Type", "Default", "Meaning"), rows)
    return "\n".join([*lines, *_default_lines()]) + "\n"


def foreign_flags_page() -> str:
    """Return docs/foreign_flags.md: what becomes of each flag of other trainers that is no setting here."""
    lines = [
        "# Flags of other trainers",
        "",
        _HEADER,
        "",
        "Scripts for Megatron-LM and Megatron-DeepSpeed carry flags that are not settings here.",
        "Where that keeps the numbers and the intent, such a flag has no effect, and a warning says so;",
        "otherwise it is refused, with what to do instead. Flags that are settings here are in",
        "[configuration](configuration.md).",
    ]
    by_name = sorted(FOREIGN_FLAGS.values(), key=_plain_name)
    for letter, rows in groupby(by_name, key=lambda row: _plain_name(row)[0]):
        lines += ["", f"## {letter.upper()}", ""]
        lines += _table(("Flag", "What becomes of it", "Why, or what to do"), map(_foreign_row, rows))
    return "\n".join(lines) + "\n"


def compatibility_page() -> str:
    """Return docs/compatibility.md: every rule that spans settings."""
    lines = [
        "# Compatibility",
        "",
        _HEADER,
        "",
        "A combination of settings runs, or a rule refuses it before any device is touched. All broken rules",
        "are reported at once, by name.",
        "",
        *_table(("Rule", "What must hold", "Settings", "What to do"), (_rule_row(rule) for rule in RULES)),
        "",
        "## Settings that need others",
        "",
        "These must be left at their defaults where what they need is missing (rule `needs_of_SETTING`).",
        "",
        *_table(("Settings", "What must hold", "Why"), _need_rows()),
        "",
        "## Accepted without effect",
        "",
        "Both Megatrons accept these settings in silence where another one is missing, and do nothing.",
        "Here a line of the log says so.",
        "",
        *_table(("Settings", "Without", "What does not happen"), (_note_row(note) for note in NOTES)),
    ]
    return "\n".join(lines) + "\n"


def deepspeed_page() -> str:
    """Return docs/deepspeed_json.md: what happens to every key of a DeepSpeed JSON."""
    lines = ["# DeepSpeed JSON", "", _HEADER, "", *_DEEPSPEED_INTRODUCTION.splitlines()]
    for title, rows in GROUPS.items():
        lines += ["", f"## {title}", ""]
        lines += _table(("Key", "Type", '"auto"', "What happens to it"), map(_deepspeed_row, rows))
    names = ", ".join(f"`{old}` for `{new}`" for old, new in ALIASES.items())
    lines += ["", "## Other names", "", f"{names}; and `zero_optimization: true` for stage 1."]
    return "\n".join(lines) + "\n"


def _deepspeed_row(row: KeyRow) -> tuple[str, ...]:
    if row.fields:
        effects = ["sets " + ", ".join(f"`{path}`" for path in row.fields)]
    elif row.extra:
        script = f"refused in a script: {row.script_refused}" if row.script_refused else None
        without = f"no effect in a script: {row.accepted}" if row.accepted else None
        effects = ["`megazero.initialize` reads it", *filter(None, (script or without,))]
    else:
        effects = [f"no effect: {row.accepted}"] if row.accepted else []
        effects += [f"refused in a script: {row.script_refused}"] if row.script_refused else []
    if row.when:
        effects.append(f"with `{row.when}`")
    if row.upstream.absent is not NOTHING:
        effects.append(f"default {row.upstream.absent}")
    if row.refused:
        effects.append(f"refused{f' unless {row.only.says}' if row.only else ''}: {row.refused}")
    return (f"`{row.key}`", row.shape.says, "yes" if row.auto else "", "; ".join(effects))


def write_pages(folder: Path) -> list[Path]:
    """Write the pages into `folder`; returns their paths."""
    pages = {
        "configuration.md": configuration_page(),
        "foreign_flags.md": foreign_flags_page(),
        "compatibility.md": compatibility_page(),
        "deepspeed_json.md": deepspeed_page(),
    }
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


def _field_row(spec: FieldSpec, meaning: str) -> tuple[str, ...]:
    spellings = [f"`{name}`" for name in (spec.flag, *spec.aliases)]
    spellings += [
        f"`{name}`" + ("" if spec.kind is Kind.BOOL else f" = {spoken(constant)}")
        for name, constant in spec.switches.items()
    ]
    unit = f" ({spec.unit})" if spec.unit else ""
    off = "; the flag sets the key to false" if spec.default is True else ""
    return (", ".join(spellings), f"`{spec.name}`", spec.type_name, _default(spec), meaning + unit + off)


def _default(spec: FieldSpec) -> str:
    if spec.required:
        return "required"
    if isinstance(spec.default, bool):
        return "on" if spec.default else "off"
    return "" if spec.default_text is None else f"`{spec.default_text}`"


def _rule_row(rule: Rule) -> tuple[str, ...]:
    return (f"`{rule.name}`", rule.message, ", ".join(f"`{path}`" for path in rule.fields), rule.remedy)


def _need_rows() -> Iterable[tuple[str, ...]]:
    """A row for each thing that settings of one section need."""
    takers: dict[tuple[str, Need], list[str]] = {}
    for spec in FIELDS:
        for need in spec.needs:
            of = f" = {', '.join(map(str, need.of))}" if need.of else ""
            takers.setdefault((spec.section, need), []).append(f"`{spec.path}`{of}")
    return ((", ".join(names), must(need), need.why) for (_, need), names in takers.items())


def _default_lines() -> list[str]:
    heads = ("Setting", "Here", "Megatron-LM", "Megatron-DeepSpeed", "Why")
    rows = (
        (f"`{row['setting']}`", row["here"], row["megatron_lm"], row["megatron_deepspeed"], row["why"])
        for row in tables.rows("defaults.csv")
    )
    return [
        "",
        "## Defaults decided here",
        "",
        "Where Megatron-LM and Megatron-DeepSpeed give a setting the same default, it is the default here.",
        "They differ in these settings, or neither's default would do:",
        "",
        *_table(heads, rows),
    ]


def _note_row(note: Note) -> tuple[str, ...]:
    return (", ".join(f"`{path}`" for path in note.fields), note.needs, note.effect)


def _plain_name(row: Foreign) -> str:
    return row.name.lstrip("-").lower()


def _foreign_row(row: Foreign) -> tuple[str, ...]:
    name, accepted, refused = f"`{row.name}`", row.accepted or "", row.refused or ""
    if not (accepted and refused):
        return (name, "no effect" if accepted else "refused", accepted or refused)
    if row.where:
        condition = f"where {' or '.join(map(_condition, row.where))}"
    else:
        condition = f"with {', '.join(f'`{value}`' for value in row.values)}"
    reason = refused if refused.startswith(accepted) else f"{accepted}; otherwise {refused}"
    return (name, f"no effect {condition}; refused otherwise", reason)


def _condition(condition: Condition) -> str:
    return f"`{condition.path}` is {' or '.join(map(str, condition.values)) or 'set'}"


if __name__ == "__main__":
    for path in write_pages(Path(sys.argv[1] if len(sys.argv) > 1 else "docs")):
        print(path)
