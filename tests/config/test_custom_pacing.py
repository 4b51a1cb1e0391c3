"""A user's own function as a schedule: what it says is what happens, and what is no schedule is refused."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import pytest

from megazero.config.custom_pacing import Custom, custom_pacing
from megazero.config.pacing import pieces
from megazero.config.resolve import parse_config
from megazero.config.steps import BEGINNING
from megazero.config.training_plan import training_plan_of
from megazero.errors import ConfigError
from tests.tables import over_table

SMALL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 64 --vocab-size 64 --mock-data "
    "--micro-batch-size 2 --global-batch-size 4 --lr 1e-2 --train-iters 200"
)
LOGARITHMIC = "import math\n\ndef grow(count):\n    return 8 * (1 + int(math.log2(count)))\n"


def write(folder: Path, text: str) -> str:
    path = folder / "mine.py"
    path.write_text(text)
    return f"{path}:grow"


def flags(name: str, *more: str) -> list[str]:
    return [*SMALL.split(), "--seqlen-schedule", "custom", "--seqlen-custom-schedule", name, *more]


def test_lengths_are_those_of_the_function(tmp_path):
    config = parse_config(flags(write(tmp_path, LOGARITHMIC)), world_size=1).config
    steps = training_plan_of(config, 1).steps
    lengths = [steps.at(steps.before(done)).sequence_length for done in range(40)]
    assert lengths == [8 * (1 + int(math.log2(count))) for count in range(1, 41)]
    assert (lengths[0], lengths[30], lengths[31]) == (8, 40, 48)


def test_what_only_looks_runs_no_function_that_a_file_names(tmp_path):
    """`megazero config --config FILE` ran whatever FILE named; what the command line names is the user's."""
    name = write(tmp_path, LOGARITHMIC + f"open({str(tmp_path / 'ran')!r}, 'a').close()\n")
    file = tmp_path / "c.yaml"
    file.write_text(f"curriculum:\n  seqlen_schedule: custom\n  seqlen_custom_schedule: {name}\n")
    words = [*SMALL.split(), "--config", str(file)]
    looked = [
        parse_config([*words, "--check-config"], world_size=1),
        parse_config(words, world_size=1, only_look=True),
    ]
    for resolved in looked:
        assert training_plan_of(resolved.config, 1).steps.at(BEGINNING).sequence_length == 64
        assert resolved.config.curriculum.seqlen_custom_schedule == name
        assert any(f"{file}:3" in warning and "not run" in warning for warning in resolved.warnings)
    assert not (tmp_path / "ran").exists()
    parse_config(flags(name, "--check-config"), world_size=1)
    assert (tmp_path / "ran").exists()
    assert parse_config(words, world_size=1).config.curriculum.seqlen(64).at(1) == 8


def test_it_stays_at_the_end(tmp_path):
    name = write(tmp_path, LOGARITHMIC)
    config = parse_config(flags(name, "--seqlen-max-difficulty", "20"), world_size=1).config
    assert config.curriculum.seqlen(64).hardest == 20
    assert pieces(config.curriculum.seqlen(64)) == ((0, 8), (1, 16), (3, 20))


@over_table(
    "function",
    [
        lambda count: 8 + count // 7,
        lambda count: (4, 9, 30)[min(count // 100, 2)],
        lambda count: max(1, int(math.sqrt(count))),
        lambda count: 12,
        lambda count: int(30 / (1 + math.exp(-min(count, 10**4) / 50))),
    ],
)
def test_pieces_are_those_of_a_walk(function):
    pacing = Custom("f", function, 30)
    walked = [(0, min(function(1), 30))]
    for done in range(1, 3000):
        if min(function(done + 1), 30) != walked[-1][1]:
            walked.append((done, min(function(done + 1), 30)))
    assert pieces(pacing) == tuple(walked)


@over_table(
    ("text", "said"),
    [
        ("def grow(count):\n    return max(8, 40 - count)\n", "must never fall, but"),
        (
            "def grow(count):\n    return 64 if count > 30 else 8 if count == 13 else 16\n",
            "16 at 12 and 8 at 13",
        ),
        ("def grow(count):\n    return 8.5\n", "positive whole numbers, but .* gives 8.5 at 1"),
        ("def grow(count):\n    return count - 1\n", "positive whole numbers, but .* gives 0 at 1"),
        ("def grow(count):\n    return True\n", "positive whole numbers, but .* gives True at 1"),
        ("def grow(count):\n    return [8, 32][count - 1]\n", "fails at 3 with IndexError"),
        ("def other(count):\n    return 8\n", "has no function grow"),
        ("def grow(count)\n", "cannot: SyntaxError"),
        (
            "seen = []\n\ndef grow(count):\n    seen.append(count)\n    return 8 + 8 * (len(seen) % 3)\n",
            "must always give the same|must never fall",
        ),
    ],
)
def test_what_is_no_schedule_is_refused_by_a_rule(tmp_path, text, said):
    name = write(tmp_path, text)
    with pytest.raises(ConfigError, match=said):
        custom_pacing(name, 64)
    with pytest.raises(ConfigError, match=f"(?s)({said}).*rule seqlen_custom_is_a_pacing"):
        parse_config(flags(name), world_size=1)


@over_table(
    ("name", "said"),
    [
        ("no_colon", "must be module:function or path.py:function, but is 'no_colon'"),
        (":grow", "must be module:function"),
        ("no_such_module_here:grow", "cannot: ModuleNotFoundError"),
        ("/no/such/file.py:grow", "cannot: FileNotFoundError"),
    ],
)
def test_what_cannot_be_found_is_named(name, said):
    with pytest.raises(ConfigError, match=said):
        custom_pacing(name, 64)


def test_a_module_s_function_is_taken_and_a_changed_file_is_read_again(tmp_path, monkeypatch):
    (tmp_path / "pacing_of_mine.py").write_text("def grow(count):\n    return min(4 * count, 16)\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert [custom_pacing("pacing_of_mine:grow", 64).at(n) for n in (1, 2, 9)] == [4, 8, 16]
    for length in (8, 16):
        name = write(tmp_path, f"def grow(count):\n    return {length}\n")
        assert custom_pacing(name, 64).at(5) == length


def test_values_grow_whatever_is_asked_in_which_order():
    pacing = Custom("f", lambda count: min(count, 50), 50)
    asked = [9, 1, 70, 30, 31, 9, 2]
    found = sorted((count, pacing.at(count)) for count in asked)
    assert all(a[1] <= b[1] for a, b in pairwise(found))
    falls = Custom("f", lambda count: 100 - count, 200)
    assert falls.at(10) == 90
    with pytest.raises(ConfigError, match="gives 95 at 5 and 90 at 10"):
        falls.at(5)
