"""Every setting that needs others is refused without them, by one rule, in a sentence that names them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import pytest
from pydantic import ValidationError

from megazero.config.condition import Condition, Need, config, here, when
from megazero.config.derive import EXPERT_FIELDS
from megazero.config.fields import FIELD_BY_PATH, FIELDS, SECTIONS, Kind, check_needs, paths, section_fields
from megazero.config.rules.needs import unmet_needs
from megazero.config.rules.rule import Rule, display_name
from megazero.config.rules.sound import Unsound, sound_part
from megazero.config.rules.table import RULES, broken_rules, check
from megazero.config.tree.option import Section, option
from tests.config.rules.examples import EXAMPLES, EXPERTS, WORLD
from tests.config.samples import make_config
from tests.tables import over_table

pytestmark = pytest.mark.fast

_VALUES: Mapping[Kind, tuple[Any, ...]] = MappingProxyType(
    {
        Kind.BOOL: (True, False),
        Kind.INT: (2, 1, 0, None),
        Kind.FLOAT: (0.25, 2.0, 1.0, None),
        Kind.FLOATS: ((1.0,), ()),
        Kind.TEXT: ("a", "M", None),
        Kind.TEXTS: (("a",), (), ("a", "b"), None, ("0:8",)),
        Kind.INTS: ((8,), (8, 8, 100), (), None, (8, 0)),
        Kind.METRICS: (({"name": "rarity", "schedule_type": "fixed_discrete"},),),
    }
)

_ROWS = [(spec.path, need) for spec in FIELDS for need in spec.needs]


def _candidates(path: str) -> Iterator[Any]:
    """The values of a field that a test may take, as the tree holds them."""
    spec = FIELD_BY_PATH[path]
    choices = {
        Kind.CHOICE: (*spec.choices, None),
        Kind.CHOICES: (*((choice,) for choice in spec.choices), ()),
    }
    for value in choices[spec.kind] if spec.kind in choices else _VALUES[spec.kind]:
        try:
            section = getattr(make_config({path: value}), spec.section)
        except ValidationError:
            continue
        yield getattr(section, spec.name)


def _value(condition: Condition, holds: bool) -> Any:
    return next(value for value in _candidates(condition.path) if condition.holds(value) is holds)


def _given(path: str, of: tuple[Any, ...]) -> dict[str, Any]:
    """The setting, with a value that has the need, where it counts."""
    spec = FIELD_BY_PATH[path]
    idle = spec.section == "model" and spec.name in EXPERT_FIELDS
    value = next(value for value in _candidates(path) if (value in of if of else value != spec.default))
    return {**(EXPERTS if idle else {}), path: value}


@over_table(("path", "need"), _ROWS, ids=lambda part: part if isinstance(part, str) else "")
def test_a_setting_is_refused_without_what_it_needs(path: str, need: Need) -> None:
    without = {
        **_given(path, need.of),
        **{condition.path: _value(condition, False) for condition in need.conditions},
    }
    head, name = f"`{display_name(need.conditions[0].path)}` must be ", f" with `{display_name(path)}`"
    sentence = next(
        line for _, line in unmet_needs(make_config(without)) if line.startswith(head) and name in line
    )
    assert all(f"`{display_name(condition.path)}` is " in sentence for condition in need.conditions)
    assert f"`{FIELD_BY_PATH[path].flag}` out" in sentence
    assert sentence.endswith(f"[rule needs_of_{FIELD_BY_PATH[path].name}].")
    for met in need.conditions:
        assert sentence not in check(make_config({**without, met.path: _value(met, True)}), None)
    assert sentence not in check(make_config({**without, path: FIELD_BY_PATH[path].default}), None)


def test_the_sentences() -> None:
    changes = {"optimizer.lamb_max_coeff": 0.3, "zero.stage": 3, "acceleration.cuda_graph": True}
    assert check(make_config(changes), WORLD) == [
        "`optimizer.optimizer` must be lamb or onebit-lamb with `lamb_max_coeff` 0.3, but "
        "`optimizer.optimizer` is adam; add `--optimizer lamb` or `--optimizer onebit-lamb`, or leave "
        "`--lamb-max-coeff` out [rule needs_of_lamb_max_coeff].",
        "`stage` must be 0, 1 or 2 with `cuda_graph`, but `stage` is 3; leave `--zero-stage` or "
        "`--cuda-graph` out: a graph reads weights where they were, and stage 3 gathers and frees them "
        "[rule needs_of_cuda_graph].",
    ]


@over_table(
    ("setting", "value", "remedy"),
    [
        ("recompute.offload", True, "`--recompute-granularity full`"),
        ("zero.hpz_partition_size", 2, "`--zero-stage 3`"),
        ("offload.delayed_param_update", True, "`--offload-optimizer cpu`"),
        ("precision.loss_scale", 1024.0, "`--fp16` or `--bf16`"),
    ],
)
def test_the_remedy_is_the_field_s_own_flag_or_the_value_s(setting: str, value: Any, remedy: str) -> None:
    """And not another trainer's switch for it, such as `--use-torch-fsdp2` for stage 3."""
    sentences = check(make_config({setting: value}), None)
    assert any(f"add {remedy}" in sentence for sentence in sentences), sentences


def test_settings_of_experts_need_nothing_where_there_are_none() -> None:
    changes = {"model.moe_pad_expert_input_to_capacity": True}
    assert list(unmet_needs(make_config(changes))) == []
    assert len(list(unmet_needs(make_config({**changes, **EXPERTS})))) == 1


def test_a_field_that_is_broken_is_not_read() -> None:
    """Neither by itself nor through what follows from it; what is left is judged."""
    config = make_config()
    part = sound_part({name: getattr(config, name) for name in SECTIONS}, {"model.hidden_size"})
    assert part.model.num_layers == config.model.num_layers
    assert part.model.positions == config.model.positions
    assert part.skipping.dropping_layers(4) == config.skipping.dropping_layers(4)
    for read in (lambda: part.model.hidden_size, lambda: part.model.head_dim, lambda: part.model.ffn_size):
        with pytest.raises(Unsound):
            read()
    with pytest.raises(Unsound):
        _ = sound_part({"model": config.model}).zero


@over_table("rule", RULES, ids=lambda rule: rule.name)
def test_no_rule_shows_a_field_that_is_broken(rule: Rule) -> None:
    config = make_config(EXAMPLES[rule.name])
    for path in () if rule.facts is not None else rule.fields:
        assert rule.name not in broken_rules(config, WORLD, {path})


_IMPOSSIBLE = {
    "`model.num_experts` can have, but are 'none'": config.model.num_experts == "none",
    "must be about a field of the tree, but name `model.num_expert`": config.model.num_expert,
    "`zero.stage` can have, but are 4": config.zero.stage.among(1, 4),
    "`checkpoint.finetune` can have, but are 1": config.checkpoint.finetune == 1,
    "`optimizer.lr` can have, but are 1": config.optimizer.lr == 1,
    "`batch.micro_batch_size` can have, but are None": config.batch.micro_batch_size.is_none,
    "`training.train_iters` can have, but are 'y'": when("y", config.model.num_experts),
    "must be about a field of the tree, but name `training.seeds`": here.seeds.is_off,
}


def test_a_condition_that_no_run_can_meet_is_refused_where_it_is_declared() -> None:
    """`model.num_experts=none` was once taken, and refused every run that gave the option."""
    for message, need in _IMPOSSIBLE.items():

        class Planted(Section):
            train_iters: int | None = option(None, "planted", needs=need)

        (spec,) = section_fields("training", Planted)
        with pytest.raises(ValueError, match=message):
            check_needs(spec.path, spec.needs)


def test_conditions_are_joined_by_a_bar_alone() -> None:
    need = (here.save | (here.load_hf == "a")).because("the reason").within("checkpoint")
    assert need == Need((Condition("checkpoint.save"), Condition("checkpoint.load_hf", ("a",))), "the reason")
    for misuse in (lambda: here.save or here.load, lambda: here.save != "a", lambda: not here.save):
        with pytest.raises(TypeError, match="joined by `|`"):
            misuse()


def test_a_path_that_is_misspelled_is_no_attribute() -> None:
    assert paths.model.num_layers == "model.num_layers"
    for misspelled in (lambda: paths.model.num_layer, lambda: paths.models):
        with pytest.raises(AttributeError):
            misspelled()
