"""Metrics as mappings, JSON and files: what is read, and that every fault is named at once."""

from __future__ import annotations

import json

import pytest
import yaml

from megazero.config.document import read_text
from megazero.config.flags import scan
from megazero.config.metric_text import as_mapping, read_metrics
from megazero.config.numbers import Unreadable
from tests.config.deepspeed.data_efficiency_keys import BY_RARITY, RARITY
from tests.tables import over_table

READ = BY_RARITY[0].model_copy(update={"name": "rarity"})
LEVELS = {
    "schedule_type": "fixed_discrete",
    "schedule_config": {"difficulty": ["1e1", 20], "max_step": [5]},
}


def test_a_mapping_by_name():
    rarity, levels = read_metrics({"rarity": RARITY, "levels": LEVELS, "none": None})
    assert rarity == READ
    assert (levels.name, levels.difficulty, levels.max_step) == ("levels", (10, 20), (5,))
    assert read_metrics(as_mapping((rarity, levels))) == (rarity, levels)


def test_json_and_files(tmp_path):
    given = {"rarity": RARITY}
    (tmp_path / "m.json").write_text(json.dumps(given))
    (tmp_path / "m.yaml").write_text(yaml.dump(given))
    for text in (json.dumps(given), str(tmp_path / "m.json"), str(tmp_path / "m.yaml")):
        assert read_metrics(text) == (READ,)
        (setting,) = scan(["--curriculum-metrics", text]).settings
        assert setting.value == (READ,)
        assert read_text(f"data_sampling:\n  curriculum_metrics: {json.dumps(text)}").settings[0].value == (
            READ,
        )


@over_table(
    ("given", "says"),
    [
        ([RARITY], "must be a mapping of metrics' names to their settings, JSON, or a file that has it"),
        ("nowhere.json", "a file that can be read (No such file or directory)"),
        ("\0", "must be JSON or the name of a file that can be read"),
        ("{", "must be valid JSON (Expecting property name"),
        ('{"a": {}, "a": {}}', "must have each key once (`a` is given again)"),
        ("{" * 100_000, "must be valid JSON"),
        ({"a": 3}, "`a` must be a mapping of names to values, but is 3"),
        ({"a": {}}, "`a.schedule_type` must be given, but is missing"),
        ({"a/b": LEVELS}, "`a/b` must be named with letters, digits, `_`, `.` and `-` alone"),
        ({"a": {**LEVELS, "schedule_typ": 1}}, "unknown key `a.schedule_typ`; did you mean `schedule_type`?"),
        ({"a": {**LEVELS, "max_step": [1]}}, "unknown key `a.max_step`, which belongs in `schedule_config`"),
        (
            {"a": {**LEVELS, "schedule_config": {"min_difficulty": 1}}},
            "unknown key `a.schedule_config.min_difficulty`, which belongs beside `schedule_config`",
        ),
        ({"a": {**LEVELS, "min_difficulty": 1.5}}, "`a.min_difficulty` must be an integer, but is 1.5"),
        ({"a": {**LEVELS, "max_difficulty": 10**400}}, "must be an integer of at most 64 bits"),
        ({"a": {**LEVELS, "index_to_sample_path": 3}}, "`a.index_to_sample_path` must be text, but is 3"),
        (
            {"a": {"schedule_type": "custom"}},
            "must be one of fixed_linear, fixed_root, fixed_discrete (custom is a schedule of one's own, "
            'which is not offered: give its values to fixed_discrete), but is "custom"',
        ),
        (
            {"a": {**LEVELS, "schedule_config": {"total_curriculum_step": 0}}},
            "`a.schedule_config.total_curriculum_step` must be a positive integer, but is 0",
        ),
        ({"a": {**LEVELS, "schedule_config": {"root_degree": float("inf")}}}, "must be a positive number"),
        ({"a": {**LEVELS, "schedule_config": {"difficulty": 3}}}, "must be a list of integers, but is 3"),
        ({"a": {**LEVELS, "schedule_config": 3}}, "`a.schedule_config` must be a mapping"),
    ],
)
def test_what_is_wrong_is_said(given, says):
    with pytest.raises(Unreadable) as caught:
        read_metrics(given)
    assert says in str(caught.value)


def test_all_faults_are_named_at_once():
    given = {"a": {"schedule_type": "linear", "min": 1}, "b": {**LEVELS, "max_difficulty": "many"}}
    with pytest.raises(Unreadable) as caught:
        read_metrics(given)
    for part in ("`a.schedule_type`", "`a.min`", "`b.max_difficulty`"):
        assert part in str(caught.value)


def test_a_key_twice_in_a_document_is_a_problem(tmp_path):
    """PyYAML keeps the last one."""
    text = (
        "data_sampling:\n  curriculum_metrics: {a: {schedule_type: fixed_linear, schedule_type: fixed_root}}"
    )
    (problem,) = read_text(text).problems
    assert "must have each key once (`schedule_type` is given again)" in problem
    (tmp_path / "m.yaml").write_text("a: {}\na: {}")
    with pytest.raises(Unreadable, match="each key once"):
        read_metrics(str(tmp_path / "m.yaml"))


@over_table("content", [b"\xff\xfe", b"a: [", b"a: !!int ''", b"2026-99-99", b""])
def test_files_that_are_no_metrics(tmp_path, content):
    path = tmp_path / "m.yaml"
    path.write_bytes(content)
    with pytest.raises(Unreadable, match="must be"):
        read_metrics(str(path))
