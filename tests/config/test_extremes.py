"""Numbers beyond what anything can count: a sentence each, from flags, YAML and JSON alike; never a "
"traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megazero.config.deepspeed.read import read_deepspeed
from megazero.config.deepspeed.section import KeyRow
from megazero.config.deepspeed.table import ROWS
from megazero.config.document import read_text
from megazero.config.fields import FIELDS, FieldSpec, Kind
from megazero.config.flags import scan
from megazero.config.resolve import parse_config
from megazero.config.shown import shown_config
from megazero.errors import ConfigError
from tests.config.samples import BASE_FLAGS
from tests.tables import over_table

ROOT = Path(__file__).parents[2]
INTEGERS = [spec for spec in FIELDS if spec.kind in (Kind.INT, Kind.INTS)]
BOUNDED = [spec for spec in INTEGERS if not spec.is_endless]
ENDLESS = [spec for spec in INTEGERS if spec.is_endless]
NUMBERS = [spec for spec in FIELDS if spec.kind in (Kind.FLOAT, Kind.FLOATS)]
BITS = "must be an integer of at most 64 bits, no larger than 9223372036854775807"


def violations(argv: list[str]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse_config(argv, world_size=1)
    return caught.value.violations


@over_table("spec", BOUNDED, ids=lambda spec: spec.path)
@over_table("written", ["1e23", "9223372036854775808", "-9223372036854775808", "1.0e+19"])
def test_integers_beyond_64_bits(spec: FieldSpec, written: str) -> None:
    values = [written] * (spec.length or 1)
    (problem,) = scan([spec.flag, *values]).problems
    assert problem == f"`{spec.flag}` {BITS}, but is `{' '.join(values)}`."
    listed = f"[{', '.join(values)}]" if spec.length else written
    (problem,) = read_text(f"{spec.section}:\n  {spec.name}: {listed}").problems
    assert problem.startswith(f"<text>:2: `{spec.path}` {BITS}, but is ")


@over_table("spec", ENDLESS, ids=lambda spec: spec.path)
@over_table("written", ["1e23", "9223372036854775808", "1.0e+19", "1e99"])
def test_lengths_and_intervals_beyond_64_bits_are_never_reached(spec: FieldSpec, written: str) -> None:
    (setting,) = scan([spec.flag, written]).settings
    (same,) = read_text(f"{spec.section}:\n  {spec.name}: {written}").settings
    assert setting.value == same.value == 2**63 - 1
    (problem,) = scan([spec.flag, "-1e23"]).problems
    assert problem == f"`{spec.flag}` {BITS}, but is `-1e23`."


def test_the_settings_without_a_largest_value() -> None:
    names = {spec.name for spec in ENDLESS}
    assert names >= {"train_iters", "train_samples", "train_tokens", "lr_decay_iters", "lr_warmup_samples"}
    assert names >= {"loss_scale_window", "eval_interval", "exit_interval", "save_interval", "log_interval"}
    assert not names & {"seq_length", "fp8_amax_history_len", "spike_window", "log_stability"}


@over_table("spec", INTEGERS, ids=lambda spec: spec.path)
def test_the_largest_integer_is_accepted_or_refused_by_a_rule(spec: FieldSpec) -> None:
    argv = [*BASE_FLAGS, spec.flag, *(["9223372036854775807"] * (spec.length or 1))]
    refused = []
    try:
        text = shown_config(parse_config(argv, world_size=1).config, 1)
    except ConfigError as error:
        refused = error.violations
    assert all(line.endswith(("].", "`.")) for line in refused)
    assert refused or "9223372036854775807" in text


@over_table("spec", NUMBERS, ids=lambda spec: spec.path)
def test_numbers_beyond_a_float(spec: FieldSpec) -> None:
    assert any(
        line.startswith(f"`{spec.flag}` must be ") and line.endswith("but is `inf`.")
        for line in violations([*BASE_FLAGS, spec.flag, "1e400"])
    )
    (problem,) = read_text(f"{spec.section}:\n  {spec.name}: 1{'0' * 400}").problems
    assert problem.startswith(f"<text>:2: `{spec.path}` must be a number that a float can hold, but is `1000")
    assert len(problem) < 200


@over_table(
    "text",
    [
        "model: {num_layers: 0x" + "f" * 5000 + "}",
        "model: {num_layers: " + "9" * 5000 + "}",
        "optimizer: {lr: " + "9" * 5000 + "}",
        "optimizer: {lr: 0x" + "f" * 5000 + "}",
        "data: {data_path: [&a [x, x, x, x], &b [*a, *a, *a, *a], &c [*b, *b, *b, *b], [*c, *c]]}",
        "data: {split: " + "[" * 900 + "]" * 900 + "}",
        "model: {num_layers: !!int ''}",
        "optimizer: {lr: !!float ''}",
        "optimizer: {lr: !!timestamp x}",
        "optimizer: {lr: 1:99999999999999999999999999999999999999999999999.5}",
    ],
)
def test_documents_that_are_too_much(text: str) -> None:
    problems = read_text(text).problems
    assert len(problems) == 1
    assert " must " in problems[0]
    assert len(problems[0]) < 250


@over_table("row", ROWS.values(), ids=lambda row: row.key)
def test_each_key_of_a_json_takes_any_number_or_says_why_not(row: KeyRow) -> None:
    for value in (10**400, -(10**400), float("inf"), 10**5000):
        document: Any = value
        for name in reversed(row.key.split(".")):
            document = {name: document}
        problems = read_deepspeed(document, data_parallel=1).problems
        assert all(" must " in line or " is not accepted" in line for line in problems)
        assert all(len(line) < 400 for line in problems)


@over_table(
    ("flags", "says"),
    [
        (["--num-layers", "1e23"], f"`--num-layers` {BITS}, but is `1e23`."),
        (["--config", "run.yaml"], f"run.yaml:1: `model.num_layers` {BITS}, but is `{10**23}`."),
        (
            ["--deepspeed", "--deepspeed_config", "ds.json"],
            "ds.json: the file must not be nested this deeply.",
        ),
    ],
)
def test_a_process_ends_with_a_sentence(flags: list[str], says: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(f"model: {{num_layers: {10**23}}}")
    (tmp_path / "ds.json").write_text('{"compression_training": ' + '{"a":' * 900 + "1" + "}" * 901)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    code = "import sys; from megazero.config import resolve_or_exit; resolve_or_exit(sys.argv[1:])"
    base = [flag for flag in BASE_FLAGS if flag not in ("--num-layers", "4")]
    done = subprocess.run(
        [sys.executable, "-c", code, *base, *flags],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert says in done.stderr


def test_a_ramp_of_endless_increments_is_refused_at_once() -> None:
    argv = [*BASE_FLAGS, "--rampup-batch-size", "2", "2", "1000000", "--global-batch-size", "2000000000000"]
    assert any("[rule ramp_increments]" in line for line in violations(argv))


def test_thousands_of_unknown_names_are_counted(tmp_path: Path) -> None:
    """They were once a line each, and each was compared with every known name: minutes."""
    names = [f"strange_{number}" for number in range(2_000)]
    (tmp_path / "run.yaml").write_text("".join(f"{name}: 1\n" for name in names))
    (tmp_path / "ds.json").write_text("{" + ", ".join(f'"{name}": 1' for name in names) + "}")
    flags = ["stray"] * 2_000 + [f"--{name}" for name in names]
    files = ["--config", str(tmp_path / "run.yaml")]
    document = ["--deepspeed", "--deepspeed_config", str(tmp_path / "ds.json")]
    lines = violations([*BASE_FLAGS, *files, *document, *flags])
    assert len([line for line in lines if "unknown" in line or "stray" in line]) <= 4 * 21
    assert f"{tmp_path}/run.yaml: there are 1,980 more unknown keys." in lines
    assert f"{tmp_path}/ds.json: there are 1,980 more unknown keys." in lines
    assert "there are 1,980 more unknown flags." in lines
    assert "there are 1,980 more unexpected arguments." in lines
    assert f"{tmp_path}/run.yaml:20: unknown key `strange_19`; docs/configuration.md lists the keys." in lines
    assert len(lines) < 100
