"""Each setting says what it is for, and no list elsewhere says it a second time."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from pydantic import ValidationError

from megazero.config.fields import FIELDS, SECTIONS, FieldSpec, Kind, fields_with, names_with, section_fields
from megazero.config.training_plan import training_plan_of
from megazero.config.tree.model import ModelConfig
from megazero.config.tree.optimizer import OptimizerConfig
from megazero.config.tree.option import of_model, option
from megazero.config.tree.roles import RESUME, Role
from megazero.errors import ConfigError
from megazero.mpu.grid import AXES
from megazero.optim.schedule import UpdateSchedule
from tests.config.samples import make_config
from tests.source_tree import Source, sources

pytestmark = pytest.mark.fast

FEW = 3
TREE = "megazero.config.tree."
# Tables whose rows pair a name of others with one of ours.
PAIRING = (
    *("megazero.formats.hf.", "megazero.config.compat.", "megazero.config.deepspeed.sections."),
    "megazero.deepspeed.engine.getters",  # with DeepSpeed's names, some of which are ours, too
)
NO_PAIRS = ("megazero.formats.hf.architecture", "megazero.formats.hf.config_json")


NAMES = {name for spec in FIELDS for name in (spec.name, spec.path)}


def lists_of_settings(source: Source) -> Iterator[str]:
    """Values of a module, and lists within its functions, that hold more than a few names of settings."""
    if source.module.startswith((TREE, *PAIRING)) and source.module not in NO_PAIRS:
        return
    if len(NAMES.intersection(re.findall(r"[\"']([a-z0-9_.]+)[\"']", source.text))) <= FEW:
        return  # which is sooner seen than parsed
    for node in source.tree.body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            held = {part.value for part in ast.walk(node) if isinstance(part, ast.Constant)}
        else:
            held = max((set(_items(part)) & NAMES for part in ast.walk(node)), key=len)
        if len(held & NAMES) > FEW:
            yield f"{source.module}:{node.lineno} lists settings: give them a role (config/tree/roles.py)"


def _items(node: ast.AST) -> Iterator[Any]:
    """The constants of a list, a tuple or a set, and of those that are spread in it."""
    for item in node.elts if isinstance(node, (ast.List, ast.Tuple, ast.Set)) else ():
        if isinstance(item, ast.Constant):
            yield item.value
        elif isinstance(item, ast.Starred):
            yield from _items(item.value)


def test_settings_are_listed_in_the_tree_alone() -> None:
    names = '{"lr", *("seed", "hidden_size"), "model.num_layers"}'
    for text in (
        f"SAME: set = {names}",
        f"class A:\n    same = {names}",
        f"def f(x):\n    return x in {names}",
    ):
        assert len([*lists_of_settings(Source("megazero.train.x", text))]) == 1, text
        assert len([*lists_of_settings(Source("megazero.deepspeed.x", text))]) == 1, text
        assert [*lists_of_settings(Source("megazero.config.tree.x", text))] == []
    assert [line for source in sources("megazero") for line in lists_of_settings(source)] == []


def test_each_role_is_asked_for() -> None:
    """But those of a resume that refuses, or that goes on and says so, which is what it does unasked."""
    homes = {home.__module__ for section in SECTIONS.values() for home in section.__mro__}
    asked = {
        name
        for source in sources("megazero")
        if source.module not in homes and not source.module.startswith(TREE)
        for name in re.findall(r"\bRole\.([A-Z_]+)", source.text)
    }
    assert {role.name for role in Role} - asked == {"MODEL", "TOLD"}


def without_a_resume_role(specs: Iterable[FieldSpec]) -> Iterator[str]:
    """Settings that do not say, once, what a resume makes of another value."""
    for spec in specs:
        said, of_model = spec.roles & RESUME, spec.section == "model"
        if said not in ((Role.MODEL, Role.FREE) if of_model else (Role.SCHEDULE, Role.TOLD, Role.QUIET)):
            word = "`of_model` or `of_training`" if of_model else "Role.SCHEDULE, Role.TOLD or Role.QUIET"
            yield f"{spec.path} must be declared with one of {word}, but says {said}"


def test_each_setting_says_what_a_resume_makes_of_another_value() -> None:
    assert [*without_a_resume_role(FIELDS)] == []


def test_a_new_setting_that_says_nothing_of_a_resume_fails_by_name() -> None:
    class Model(ModelConfig):
        sparkle: bool = option(False, "planted")
        colour: bool = of_model(False, "planted", Role.SCHEDULE)

    class Optimizer(OptimizerConfig):
        sparkle: bool = option(False, "planted")

    assert [line.partition(" must")[0] for line in without_a_resume_role(section_fields("model", Model))] == [
        "model.sparkle",
        "model.colour",
    ]
    planted = [*without_a_resume_role(section_fields("optimizer", Optimizer))]
    assert planted == [
        "optimizer.sparkle must be declared with one of Role.SCHEDULE, Role.TOLD or Role.QUIET, "
        "but says Role.NONE"
    ]


_SCHEDULES: tuple[dict[str, Any], ...] = (
    {"lr_decay_style": "linear", "lr_warmup_iters": 10, "lr_decay_iters": 80, "min_lr": 1e-5},
    {"lr_decay_style": "cosine", "lr_decay_samples": 80, "decoupled_lr": 1e-2},
    {"lr_decay_style": "linear", "lr_warmup_tokens": 10, "lr_decay_tokens": 80},
    *(
        {"lr_decay_style": "WSD", f"lr_decay_{unit}": 80, f"lr_wsd_decay_{unit}": 20}
        for unit in ("iters", "samples", "tokens")
    ),
    *(
        {
            "lr_decay_style": "cosine-restarts",
            f"lr_decay_{unit}": 80,
            f"lr_cycle_{unit}": 20,
            "lr_cycle_mult": 2,
        }
        for unit in ("iters", "samples", "tokens")
    ),
    {"weight_decay_incr_style": "linear", "start_weight_decay": 0.1, "end_weight_decay": 0.2},
    {"lr_decay_style": "linear", "lr_warmup_fraction": 0.1, "lr_decay_iters": 80},
)
"""Trainings that have a use for each setting of a schedule."""


def _values(settings: dict[str, Any]) -> dict[str, object] | None:
    changes = {"optimizer.lr": 1e-3, **{f"optimizer.{name}": value for name, value in settings.items()}}
    lengths = {f"training.train_{unit}": None for unit in ("iters", "samples", "tokens")}
    unit = next((u for u in ("samples", "tokens") if settings.get(f"lr_decay_{u}")), "iters")
    try:
        config = make_config({**lengths, f"training.train_{unit}": 100, **changes})
        return UpdateSchedule.of(config.optimizer, training_plan_of(config, 1)).values()
    except (ConfigError, ValidationError):
        return None


def _others(spec: FieldSpec, now: Any) -> Iterator[Any]:
    """Values of a setting of a schedule, near the one that it has."""
    if spec.kind is Kind.CHOICE:
        yield from spec.choices
    elif spec.kind is Kind.INT:
        yield from ((now or 10) + 1, (now or 10) // 2)
    else:
        yield from ((now or spec.default or 1e-4) * 1.5, (now or spec.default or 1e-4) * 0.5)


def _is_compared(spec: FieldSpec) -> bool:
    for settings in _SCHEDULES:
        given = {"lr": 1e-3, **settings}
        for value in _others(spec, given.get(spec.name)):
            changed = _values({**given, spec.name: value})
            if changed is not None and changed != _values(given):
                return True
    return False


def test_what_a_schedule_is_made_of_is_compared_at_a_resume() -> None:
    """Another value of each makes another schedule, by which `train/resume/scheduled.py` judges."""
    specs = [spec for spec in fields_with(Role.SCHEDULE) if spec.section == "optimizer"]
    assert [spec.path for spec in specs if not _is_compared(spec)] == []


def test_facets_name_what_there_is() -> None:
    model = ModelConfig(num_layers=2, hidden_size=8, num_attention_heads=2, seq_length=4)
    assert all(hasattr(model, spec.resolved) for spec in FIELDS if spec.resolved)
    assert {spec.axis for spec in FIELDS if spec.axis} == {
        n for n, a in AXES.items() if a.setting is not None
    }


def test_queries_have_the_tree_s_order() -> None:
    assert names_with(Role.LATENT) == (
        *("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),
    )
    assert set(names_with(Role.EXPERTS | Role.FREE)) == {*names_with(Role.EXPERTS)} & {*names_with(Role.FREE)}
    assert names_with(Role.FILE, "tokenizer") == ("vocab_file", "merge_file", "tokenizer_model")
