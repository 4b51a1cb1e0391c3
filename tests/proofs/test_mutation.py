"""The mutation check itself: what its rules make of a text, what it draws, and what it finds."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections import Counter

import pytest

from proofs.mutation.faults import Fault, Key, all_faults, read_equivalents, sample, stale
from proofs.mutation.hits import instrument
from proofs.mutation.nearest import MeasuredTests, Nearest
from proofs.mutation.rules import Edit, compiles, edits_of, setting_defaults
from proofs.mutation.runner import Workplace
from tests.source_tree import ROOT
from tests.tables import over_table

SETTINGS = {"clip_grad": "1.0", "eod_mask_loss": "False"}


def changed(source: str) -> set[tuple[str, str]]:
    """Rule and changed line of every edit of a function's body, given on one line."""
    text = f"def f(a, b, eps=1e-5):\n    {source}\n"
    edits = edits_of(text, SETTINGS)
    assert {edit.function for edit in edits} <= {"f"}
    return {(edit.rule, edit.apply(text).splitlines()[1].strip()) for edit in edits if edit.line == 2}


@over_table(
    ("source", "expected"),
    [
        ("return a / b", {("drop-factor", "return a"), ("swap-operands", "return (b / a)")}),
        ("return a * b", {("drop-factor", "return a"), ("drop-factor", "return b")}),
        (
            "return a - b",
            {
                ("flip-sign", "return (a + b)"),
                ("drop-term", "return a"),
                ("swap-operands", "return (b - a)"),
            },
        ),
        ("return a < b", {("boundary", "return (a <= b)"), ("flip-comparison", "return (a >= b)")}),
        ("return a is None", {("flip-comparison", "return (a is not None)")}),
        ("return not a", {("drop-not", "return a")}),
        (
            "return a and b",
            {("and-or", "return (a or b)"), ("drop-clause", "return (b)"), ("drop-clause", "return (a)")},
        ),
        ("return -a", {("drop-minus", "return a")}),
        ("return a[1]", {("off-by-one", "return a[2]"), ("off-by-one", "return a[0]")}),
        ("return a[:b]", {("off-by-one", "return a[:b + 1]")}),
        ("a += b", {("flip-sign", "a -= b"), ("drop-call", "pass")}),
        ("a.zero_()", {("drop-call", "pass")}),
        ("return a.g(b, a)", {("swap-arguments", "return a.g(a, b)")}),
        ("return min(a.x)", {("min-max", "return max(a.x)")}),
        ("return sorted(a)", {("drop-wrapper", "return list(a)")}),
        ("return a.clip_grad", {("ignore-setting", "return 1.0")}),
        ("return eps", {("ignore-parameter", "return 1e-05")}),
        ("return eps.hex()", set()),
        ("return True", {("flip-flag", "return False")}),
        ("return 0.5", {("other-constant", "return 1.0")}),
        ("return [x for x in a if x]", {("drop-filter", "return [x for x in a if True]")}),
        ("return a if b else eps.x", {("negate-condition", "return a if not b else eps.x")}),
        ("return 'ü', a / b", {("drop-factor", "return 'ü', a"), ("swap-operands", "return 'ü', (b / a)")}),
    ],
)
def test_each_rule_on_its_smallest_example(source, expected):
    assert changed(source) == expected


def test_a_check_is_skipped_and_its_message_left_alone():
    text = "def f(a):\n    if a:\n        raise ValueError(f'{a + 1} is 2')\n    return g(a)\n"
    assert {(edit.rule, edit.line, edit.text) for edit in edits_of(text, {})} == {("skip-check", 2, "False")}


def test_what_is_no_behaviour_is_left_alone():
    text = (
        '"""Text: 1 + 1."""\nfrom __future__ import annotations\n__all__ = ["a"[0]]\n'
        "@given(1)\ndef f(a: tuple[1]) -> Literal[2]:\n    '''3 - 1'''\n    assert a > 3\n"
        "    return f'{a - 1}'\n"
    )
    assert edits_of(text, {}) == []


def test_defaults_of_settings_are_those_of_the_tree():
    names = ("rotary.py", "transformer.py")
    defaults = setting_defaults({name: (ROOT / "megazero/config/tree" / name).read_text() for name in names})
    assert (defaults["rotary_base"], defaults["norm_epsilon"], defaults["hidden_dropout"]) == (
        "10000.0",
        "1e-05",
        "0.1",
    )
    assert "hidden_size" not in defaults  # it has none


def test_what_does_not_compile_or_warns_is_known():
    assert compiles("a = 1\n")
    assert not compiles("return 1\n")
    assert not compiles("a = None(1)\n")


def fault(package: str, file: str, rule: str, line: int) -> Fault:
    source = "".join(f"{name} = 1\n" for name in "abcdefghij")
    start = 6 * (line - 1) + 4
    return Fault(f"megazero/{package}/{file}", source, Edit(rule, "<module>", line, start, start + 1, "2"))


def test_a_sample_is_spread_over_packages_then_rules_then_files_and_takes_no_line_twice():
    faults = [fault("mpu", "a.py", rule, line) for rule in ("x", "y") for line in (1, 2, 3)]
    faults += [fault("zero", "b.py", "x", line) for line in range(1, 10)]
    faults += [fault("zero", "c.py", "x", line) for line in (1, 2)] + [fault("zero", "b.py", "y", 10)]
    drawn = sample(faults, 6, seed=3)
    assert Counter(each.package for each in drawn) == {"mpu": 3, "zero": 3}
    of_zero = [each for each in drawn if each.package == "zero"]
    assert Counter(each.edit.rule for each in of_zero) == {"x": 2, "y": 1}
    assert {each.path for each in of_zero if each.edit.rule == "x"} >= {"megazero/zero/c.py"}
    assert len({(each.path, each.edit.line) for each in sample(faults, 99, seed=3)}) == 3 + 12
    assert sample(list(reversed(faults)), 6, seed=3) == drawn
    assert sample(faults, 6, seed=4) != drawn


def test_equivalents_are_found_by_what_they_say_not_by_their_line(tmp_path):
    path = tmp_path / "list.txt"
    path.write_text(
        "# a comment\n\nmegazero/mpu/a.py <module> x\n- a = 1\n+ a = 2\n  Nobody\n  reads it.\n\n\n"
        "megazero/mpu/gone.py f x\n- a < 1\n+ a <= 1\n  The same.\n"
    )
    rows = read_equivalents(path)
    gone = Key("megazero/mpu/gone.py", "f", "x", "a < 1", "a <= 1")
    here = fault("mpu", "a.py", "x", 1)
    assert rows == {here.key: "Nobody reads it.", gone: "The same."}
    assert stale(rows, [here]) == [gone]
    path.write_text("megazero/mpu/a.py <module> x\n- a = 1\n+ a = 2\n")
    with pytest.raises(ValueError, match="not of the form"):
        read_equivalents(path)


def test_equal_faults_of_a_function_have_names_of_their_own(tmp_path):
    path = tmp_path / "megazero/optim/a.py"
    path.parent.mkdir(parents=True)
    path.write_text(
        "def f(a):\n    while True:\n        if a:\n            break\n        g()\n        break\n"
    )
    keys = [fault.key for fault in all_faults(tmp_path, ["optim"]) if fault.edit.rule == "drop-jump"]
    assert [(key.before, key.after) for key in keys] == [("break", "pass"), ("break [2]", "pass")]


SUM = """\
def total(values):
    \"\"\"Their sum.\"\"\"
    start = 0
    for value in values:
        start += value
    return start


def unused(a): return a + 1
"""
TESTS = """\
import time
from megazero.optim.total import total

def test_sum():
    assert total([2, 3]) == 5

def test_other():
    assert True

def test_hang():
    time.sleep(60)
"""


@pytest.fixture
def project(tmp_path):
    """A small project with the tool in it."""
    root = tmp_path / "project"
    shutil.copytree(ROOT / "proofs/mutation", root / "proofs/mutation")
    texts = {"megazero/optim/total.py": SUM, "tests/optim/test_total.py": TESTS, "tests/test_loss.py": ""}
    texts |= dict.fromkeys(
        (
            "benchmarks/__init__.py",
            "megazero/__init__.py",
            "megazero/optim/__init__.py",
            "pytest.ini",
            "tests/test_end_to_end.py",
        ),
        "",
    )
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    return root


@pytest.mark.slow
def test_a_fault_is_found_by_a_test_that_runs_it_and_the_checkout_stays_as_it_was(project, tmp_path):
    name, tests = "megazero/optim/total.py", "tests/optim/test_total.py"
    place = Workplace(project, tmp_path / "measure", ())
    instrument(place.copy, ["megazero/optim"])
    functions = json.loads((place.copy / "functions.json").read_text())
    wanted = [f"{tests}::test_sum", f"{tests}::test_other"]
    measured = place.run([tests], wanted, 60.0, stop=False, hits=True)
    assert measured["code"] == 0
    known = MeasuredTests(tmp_path / "map")
    assert known.missing(project, ["optim"]) == [tests]
    assert known.missing(project, ["zero"]) == []
    known.add(tests, "digest", measured["tests"], functions)
    assert {test.name: sorted(test.functions) for test in known.tests} == {
        wanted[0]: [(name, "total")],
        wanted[1]: [],
    }

    def outcome(before: str, after: str, function: str) -> tuple[bool, str | None, int]:
        start = SUM.index(before)
        edit = Edit("rule", function, 1, start, start + len(before), after)
        result = place.try_fault(Fault(name, SUM, edit), Nearest(project, known.tests, 10.0))
        return result["found"], result.get("by"), result["tests"]

    place.close()
    place = Workplace(project, tmp_path / "plant", ())
    assert outcome("+=", "-=", "total") == (True, wanted[0], 1)
    assert outcome("start = 0", "start = 0.0", "total") == (False, None, 2)
    hung = place.run([tests], [f"{tests}::test_hang"], 2.0, stop=True, hits=False)
    assert (hung["timed_out"], hung["code"]) == (True, None)
    place.close()
    assert (project / name).read_text() == SUM == (place.copy / name).read_text()
