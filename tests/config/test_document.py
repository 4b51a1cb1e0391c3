"""YAML: what is read, what is refused and on which line, and the round trip as a law."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from megazero.config.document import read_file, read_text, to_yaml
from megazero.config.fields import FIELD_BY_PATH, FIELDS, SECTIONS, FieldSpec, Kind
from megazero.config.tree.config import Config
from tests.config.samples import make_config
from tests.tables import over_table


def test_values_by_section() -> None:
    text = """
model:
  num_layers: 2
  normalization: rmsnorm   # any case
data:
  data_path: [0.3, a, 0.7, b]
  split: 969,30,1
optimizer: {lr: 1e-4, weight_decay: 0}
training: {train_tokens: 3e11}
checkpoint:
  save: null
logging:
"""
    document = read_text(text)
    assert document.problems == []
    assert {s.spec.path: s.value for s in document.settings} == {
        "model.num_layers": 2,
        "model.normalization": "RMSNorm",
        "data.data_path": ("0.3", "a", "0.7", "b"),
        "data.split": "969,30,1",
        "optimizer.lr": 1e-4,
        "optimizer.weight_decay": 0.0,
        "training.train_tokens": 300_000_000_000,
        "checkpoint.save": None,
    }
    assert document.settings[0].source == "<text>:3"


@over_table(
    ("text", "problem"),
    [
        (
            "model:\n  num_layer: 2",
            "f.yaml:2: unknown key `model.num_layer`; did you mean `model.num_layers`?",
        ),
        ("modle:\n  num_layers: 2", "f.yaml:1: unknown key `modle`; did you mean `model`?"),
        ("model:\n  lr: 2", "f.yaml:2: unknown key `model.lr`; it belongs in section `optimizer`."),
        ("num_layers: 2", "f.yaml:1: unknown key `num_layers`; it belongs in section `model`."),
        ("model:\n  xyzzy: 2", "f.yaml:2: unknown key `model.xyzzy`; docs/configuration.md lists the keys."),
        (
            "model:\n  num_layers: 2\n  num_layers: 3",
            "f.yaml:3: `num_layers` must be given once, but is given on line 2 too.",
        ),
        ("model: {}\nmodel: {}", "f.yaml:2: `model` must be given once, but is given on line 1 too."),
        ("model: 3", "f.yaml:1: `model` must be a mapping of names to values."),
        ("- a\n- b", "f.yaml:1: the document must be a mapping of names to values."),
        (
            "model:\n  num_layers: two",
            "f.yaml:2: `model.num_layers` must be an integer, but is `two`.",
        ),
        (
            "model:\n  num_layers: yes",
            "f.yaml:2: `model.num_layers` must be an integer, but is `yes`.",
        ),
        (
            "model: {a: [}",
            "f.yaml:1:13: the document must be valid YAML, but is not: "
            "expected the node content, but found '}'.",
        ),
        (
            "checkpoint:\n  save: 2026-99-99",
            "f.yaml:2: `checkpoint.save` must be a valid text, but is `2026-99-99`.",
        ),
        (f"model:\n  num_layers: {'9' * 5000}", None),
        ("model:\n  num_layers: !!python/name:os.system 1", None),
        ("model: !!python/object:os.system {}", None),
        ("a: 1\n---\nb: 2", None),
        ("model: &a\n  num_layers: *a", None),
        ("[" * 5000, None),
        ("\x00", None),
    ],
)
def test_problems_name_the_line(text: str, problem: str | None) -> None:
    problems = read_text(text, "f.yaml").problems
    assert len(problems) == 1
    assert problem is None or problems == [problem]
    assert problems[0].startswith("f.yaml")


def test_a_list_of_aliases_is_not_written_out() -> None:
    """Each line names the line before eight times: in full, the last would take hours to write."""
    lines = [
        "&a [x, x]",
        *(f"&{b} [{', '.join([f'*{a}'] * 8)}]" for a, b in zip("abcdefghij", "bcdefghijk", strict=True)),
    ]
    problems = read_text(f"data:\n  data_path: [{', '.join(lines)}]\n", "f.yaml").problems
    assert problems == [
        "f.yaml: the document must have at most 1048576 characters where its aliases are written out."
    ]


def test_every_problem_of_a_file_is_reported() -> None:
    text = "model:\n  num_layer: 2\n  hidden_size: wide\noptimiser: {}\n"
    assert len(read_text(text).problems) == 3


def test_an_empty_document_sets_nothing() -> None:
    for text in ("", "# nothing\n", "---\n", "null"):
        document = read_text(text)
        assert (document.settings, document.problems) == ([], [])


def test_unreadable_files(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes(b"model: \xff\xfe")
    for name, reason in (("missing.yaml", "No such file"), (".", "Is a directory"), ("latin.yaml", "UTF-8")):
        problems = read_file(str(tmp_path / name)).problems
        assert len(problems) == 1
        assert reason in problems[0]


_WORDS = (
    "",
    " ",
    "plain",
    "yes",
    "null",
    "~",
    "1e-4",
    "0x1F",
    "2026-01-02",
    "a: b",
    "- a",
    "#",
    "'",
    '"',
    "é漢😀",
)
_CHARACTERS = "ab:#-'\"\\{}[]&*!|>%@`, \n\t\r\0\x1f\x7f\x85\u2028\ufeffé漢😀"
_FLOATS = (0.0, 1e-300, 1e-8, 5e-5, 0.1, 1 / 3, 0.95, 1.0, 2.0**32, 1e16, 1e22, 1e300)


def _text(rng: random.Random) -> str:
    return rng.choice([*_WORDS, "".join(rng.choices(_CHARACTERS, k=rng.randrange(1, 9)))])


def _value(spec: FieldSpec, rng: random.Random) -> Any:
    if spec.optional and rng.random() < 0.3:
        return None
    if spec.name == "split":
        return rng.choice(["969,30,1", "1/1/1", "0, 0, 2.5"])
    return {
        Kind.INT: lambda: rng.randrange(1, 10 ** rng.randrange(1, 14)),
        Kind.FLOAT: lambda: rng.choice([*_FLOATS, rng.random(), 10 ** rng.uniform(-20, 20)]),
        Kind.TEXT: lambda: _text(rng),
        Kind.CHOICE: lambda: rng.choice(spec.choices),
        Kind.BOOL: lambda: rng.random() < 0.5,
        Kind.INTS: lambda: tuple(rng.randrange(1, 10**9) for _ in range(spec.length or rng.randrange(1, 4))),
        Kind.FLOATS: lambda: tuple(rng.choice(_FLOATS) for _ in range(rng.randrange(1, 4))),
        Kind.CHOICES: lambda: tuple(rng.choices(spec.choices, k=rng.randrange(1, 4))),
        Kind.TEXTS: lambda: tuple(_text(rng) for _ in range(rng.randrange(4))),
        Kind.METRICS: lambda: tuple(
            _metric(name, rng) for name in rng.choices([(), ("a",), ("b", "c.d")])[0]
        ),
    }[spec.kind]()


def _metric(name: str, rng: random.Random) -> dict[str, Any]:
    settings = {
        "index_to_sample_path": _text(rng),
        "difficulty_type": rng.choice(["value", "percentile"]),
        "clustering_type": rng.choice(["schedule_based", "single_cluster"]),
        "min_difficulty": rng.randrange(-9, 9),
        "total_curriculum_step": rng.randrange(1, 10**9),
        "difficulty_step": rng.randrange(1, 9),
        "root_degree": rng.choice([0.5, 2.0, 1 / 3]),
        "difficulty": (-3, 8),
        "max_step": (10**6,),
    }
    kept = {key: value for key, value in settings.items() if rng.random() < 0.7}
    return {"name": name, "schedule_type": rng.choice(["fixed_linear", "fixed_discrete"]), **kept}


def _random_config(seed: int) -> Config:
    """Any value of every field's type; those out of the field's range are drawn again."""
    rng = random.Random(seed)
    tree = {name: {s.name: _value(s, rng) for s in FIELDS if s.section == name} for name in SECTIONS}
    while True:
        try:
            return Config.model_validate(tree)
        except ValidationError as error:
            for detail in error.errors():
                section, name = str(detail["loc"][0]), str(detail["loc"][1])
                tree[section][name] = _value(FIELD_BY_PATH[f"{section}.{name}"], rng)


@over_table("seed", range(20))
def test_what_is_written_reads_back_equal(seed: int) -> None:
    config = _random_config(seed)
    document = read_text(to_yaml(config))
    assert document.problems == []
    read: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
    for setting in document.settings:
        read[setting.spec.section][setting.spec.name] = setting.value
    assert Config.model_validate(read) == config


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=60))
def test_no_text_raises(text: str) -> None:
    document = read_text(text)
    assert document.settings == [] or ":" in text


def test_the_whole_tree_is_written() -> None:
    text = to_yaml(make_config())
    for spec in FIELDS:
        assert f"\n  {spec.name}:" in text


def written(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")


def test_a_document_is_built_on_its_base(tmp_path: Path) -> None:
    """The base is looked for beside the file that names it; what stands in both is the upper one's."""
    files = {
        "common/root.yaml": "model: {num_layers: 2, hidden_size: 8}\noptimizer: {lr: 1}\n",
        "base.yaml": "base: common/root.yaml\nmodel:\n  num_layers: 3\n  seq_length: 4\n",
        "member.yaml": "model:\n  seq_length: 5\nbase: base.yaml\n",
    }
    written(tmp_path, files)
    document = read_file(str(tmp_path / "member.yaml"))
    assert document.problems == []
    assert {s.spec.path: (s.value, Path(s.source).name) for s in document.settings} == {
        "model.hidden_size": (8, "root.yaml:1"),
        "optimizer.lr": (1.0, "root.yaml:2"),
        "model.num_layers": (3, "base.yaml:3"),
        "model.seq_length": (5, "member.yaml:2"),
    }
    assert len(document.settings) == 4


def test_a_value_of_the_base_that_cannot_be_read_may_be_overridden_but_is_reported(tmp_path: Path) -> None:
    files = {
        "base.yaml": "model: {num_layers: two, hidden_size: two}\n",
        "a.yaml": "base: base.yaml\nmodel: {num_layers: 2}",
    }
    written(tmp_path, files)
    document = read_file(str(tmp_path / "a.yaml"))
    assert len(document.problems) == 2
    assert document.broken == {"model.hidden_size"}


@over_table(
    ("files", "problem"),
    [
        (
            {"a.yaml": "base: b.yaml"},
            "a.yaml:1: `base` must name a readable file, but {}/b.yaml: No such file or directory.",
        ),
        ({"a.yaml": "\nbase: [b]"}, "a.yaml:2: `base` must be the name of a file, but is a sequence."),
        ({"a.yaml": "base:"}, "a.yaml:1: `base` must be the name of a file, but is ``."),
        ({"a.yaml": "basse: b.yaml"}, "a.yaml:1: unknown key `basse`; did you mean `base`?"),
        (
            {"a.yaml": "base: b.yaml", "b.yaml": "base: a.yaml"},
            "b.yaml:1: `base` must not lead back to a file built on it, but is {}/a.yaml.",
        ),
        (
            {"a.yaml": "base: b.yaml", "b.yaml": "model: {num_layer: 2}"},
            "b.yaml:1: unknown key `model.num_layer`; did you mean `model.num_layers`?",
        ),
    ],
)
def test_problems_of_a_base(tmp_path: Path, files: dict[str, str], problem: str) -> None:
    written(tmp_path, files)
    assert read_file(str(tmp_path / "a.yaml")).problems == [f"{tmp_path}/{problem.format(tmp_path)}"]
