"""The generated pages and the command line's help are as committed.

After an intended change run `MEGAZERO_UPDATE_SNAPSHOTS=1 python -m pytest tests/config/test_reference.py`,
then read the difference that git shows: it is what users will notice.
"""

from __future__ import annotations

import os
from pathlib import Path

from megazero.config.compat.foreign import FOREIGN_FLAGS
from megazero.config.deepspeed.table import ROWS as DEEPSPEED_ROWS
from megazero.config.fields import FIELDS, SECTIONS
from megazero.config.flags import FLAGS
from megazero.config.help import format_help, meanings
from megazero.config.rules.table import RULES
from scripts.reference_pages import (
    compatibility_page,
    configuration_page,
    deepspeed_page,
    foreign_flags_page,
    write_pages,
)
from tests.tables import over_table

ROOT = Path(__file__).parents[2]
SNAPSHOTS = {
    ROOT / "docs" / "configuration.md": configuration_page,
    ROOT / "docs" / "foreign_flags.md": foreign_flags_page,
    ROOT / "docs" / "compatibility.md": compatibility_page,
    ROOT / "docs" / "deepspeed_json.md": deepspeed_page,
    Path(__file__).with_name("cli_snapshot.txt"): format_help,
}


@over_table("path", SNAPSHOTS, ids=lambda path: path.name)
def test_snapshot_is_current(path: Path) -> None:
    text = SNAPSHOTS[path]()
    if os.environ.get("MEGAZERO_UPDATE_SNAPSHOTS"):
        path.write_text(text, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == text


def test_the_pages_name_everything(tmp_path: Path) -> None:
    configuration, foreign, compatibility, deepspeed = (
        path.read_text(encoding="utf-8") for path in write_pages(tmp_path)
    )
    for name in FLAGS:
        assert f"`{name}`" in configuration
    for name in FOREIGN_FLAGS:
        assert foreign.count(f"| `{name}` |") == 1
    for rule in RULES:
        assert f"`{rule.name}`" in compatibility
    for key in DEEPSPEED_ROWS:
        assert f"| `{key}` |" in deepspeed


def test_help_fits_its_width_and_names_every_flag() -> None:
    for width in (80, 100):
        lines = format_help(width=width).splitlines()
        too_long = [line for line in lines if len(line) > width and not line.startswith("  --")]
        assert too_long == []
    whole = format_help()
    assert all(name in whole for name in FLAGS)


@over_table("section", SECTIONS)
def test_every_field_is_documented(section) -> None:
    for name, meaning in meanings(section).items():
        assert meaning, f"{section}.{name} has no text below its declaration"
        assert not meaning.endswith("."), f"{section}.{name}"


def test_every_flag_has_dashes() -> None:
    assert all(spec.flag.startswith("--") for spec in FIELDS)
