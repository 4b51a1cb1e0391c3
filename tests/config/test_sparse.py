"""Settings of sparse attention: DeepSpeed's section, what each mode refuses, all faults at once."""

from __future__ import annotations

import json
from typing import Any

import pytest

from megazero.config.fields import FIELDS
from megazero.config.resolve import parse_config
from megazero.config.rules.table import broken_rules, check
from megazero.config.tree.model import ModelConfig
from megazero.config.tree.sparse import SPARSE_FIELDS
from megazero.errors import ConfigError
from tests.config.samples import BASE_FLAGS, make_config
from tests.tables import over_table

MODES = ("fixed", "variable", "bigbird", "bslongformer", "local_sliding_window")
# key -> a value, and the modes in which it acts (tests/layers/test_patterns.py); it is refused in all others
TAKEN: dict[str, tuple[Any, set[str]]] = {
    "sparse_block": (8, {*MODES}),
    "sparse_direction": ("bidirectional", {*MODES}),
    "sparse_num_local_blocks": (2, {"fixed"}),
    "sparse_num_global_blocks": (2, {"fixed", "bigbird"}),
    "sparse_num_different_global_patterns": (2, {"fixed"}),
    "sparse_horizontal_global_attention": (True, {"fixed", "variable"}),
    "sparse_num_random_blocks": (1, {"variable", "bigbird"}),
    "sparse_seed": (5, {"variable", "bigbird"}),
    "sparse_different_layout_per_head": (True, {"fixed", "variable", "bigbird"}),
    "sparse_local_window_blocks": ((2,), {"variable"}),
    "sparse_global_block_indices": ((1,), {"variable", "bslongformer"}),
    "sparse_global_block_end_indices": ((2,), {"variable", "bslongformer"}),
    "sparse_num_sliding_window_blocks": (1, {"bigbird", "bslongformer", "local_sliding_window"}),
}
BESIDE: dict[str, dict[str, Any]] = {
    "sparse_num_different_global_patterns": {"sparse_different_layout_per_head": True},
    "sparse_seed": {"sparse_num_random_blocks": 1},
}


def beside(key: str, mode: str) -> dict[str, Any]:
    if key == "sparse_different_layout_per_head":
        fixed = mode == "fixed"
        return {"sparse_num_different_global_patterns" if fixed else "sparse_num_random_blocks": 2}
    return BESIDE.get(key, {})


@over_table("mode", ["dense", *MODES])
@over_table("key", TAKEN)
def test_a_key_is_taken_where_it_acts_and_refused_elsewhere(key: str, mode: str) -> None:
    value, modes = TAKEN[key]
    family = {"model.family": "bert", "tokenizer.tokenizer_type": "BertWordPieceLowerCase"}
    settings = {"sparse_block": 4, "sparse_attention": mode, **beside(key, mode), key: value}
    if mode == "dense":
        settings = {"sparse_attention": mode, key: value}
    broken = broken_rules(make_config({**family, **{f"model.{k}": v for k, v in settings.items()}}), 1)
    broken = [name for name in broken if "sparse" in name]
    assert (broken == []) == (mode in modes), broken


def test_every_key_is_among_them() -> None:
    assert TAKEN.keys() | {"sparse_attention"} == SPARSE_FIELDS
    assert {spec.name for spec in FIELDS if spec.name.startswith("sparse_")} == SPARSE_FIELDS


def resolve(tmp_path, section: Any, *flags: str) -> ModelConfig:
    """The model of the base flags, further ones, and a JSON with the section."""
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"train_batch_size": 2, "sparse_attention": section}))
    words = [*BASE_FLAGS, "--deepspeed", "--deepspeed_config", str(path), *flags]
    return parse_config(words, world_size=1).config.model


def test_a_json_of_deepspeeds_tutorial(tmp_path) -> None:
    """It names the keys of other modes too, as DeepSpeed has them by default."""
    section = {
        "mode": "fixed",
        "block": 4,
        "different_layout_per_head": True,
        "num_local_blocks": 4,
        "num_global_blocks": 1,
        "attention": "unidirectional",
        "horizontal_global_attention": False,
        "num_different_global_patterns": 4,
        "num_random_blocks": 0,
        "local_window_blocks": [4],
        "global_block_indices": [0],
        "global_block_end_indices": None,
        "num_sliding_window_blocks": 3,
    }
    model = resolve(tmp_path, section)
    assert (model.sparse_attention, model.sparse_block, model.sparse_blocks) == ("fixed", 4, 8)
    assert model.sparse_num_different_global_patterns == 4
    assert model.sparse_global_block_end_indices == ()


def test_a_section_without_a_mode_is_fixed(tmp_path) -> None:
    assert resolve(tmp_path, {}).sparse_attention == "fixed"
    assert resolve(tmp_path, None).sparse_attention == "dense"


@over_table(
    ("section", "says"),
    [
        ({"attention": "bidirectional"}, "`sparse_direction` must be unidirectional for GPT"),
        ({"mode": "bigbird", "attention": "bidirectional"}, "`sparse_direction` must be unidirectional"),
        ({"mode": "bigbird", "num_local_blocks": 8}, "`sparse_attention` must be fixed with"),
        ({"mode": "strided"}, "choose dense, fixed, variable, bigbird or bslongformer"),
        ({"block": 5}, "`sparse_block` must divide `seq_length`"),
        ({"blocks": 16}, "did you mean `sparse_attention.block`?"),
        ({"horizontal_global_attention": True}, "`family` must be bert"),
        (["fixed"], "`sparse_attention` must be an object"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, section: Any, says: str) -> None:
    with pytest.raises(ConfigError) as error:
        resolve(tmp_path, section)
    assert says in str(error.value)


def test_all_faults_are_named_at_once(tmp_path) -> None:
    section = {"block": 5, "num_local_blocks": 4, "num_global_blocks": 3, "num_sliding_window_blocks": 5}
    with pytest.raises(ConfigError) as error:
        resolve(tmp_path, section, "--random-ltd")
    rules = ("sparse_blocks_divide_sequence", "sparse_global_blocks_fit", "needs_of_sparse_attention")
    for rule in (*rules, "needs_of_sparse_num_sliding_window_blocks"):
        assert f"[rule {rule}]" in str(error.value)


@over_table(
    ("flags", "block", "allowed"),
    [((32, 48), 16, True), ((32, 40), 16, False), ((40, 48), 16, False), ((32, None), 32, True)],
)
def test_blocks_divide_the_sequence_and_the_longest_one(flags, block, allowed) -> None:
    length, longest = flags
    config = make_config(
        {
            "model.seq_length": length,
            "model.max_position_embeddings": longest,
            "model.sparse_attention": "fixed",
            "model.sparse_block": block,
        }
    )
    assert (broken_rules(config, 1) == []) == allowed


def test_packed_rows_of_bert_are_refused() -> None:
    changes = {"model.sparse_attention": "fixed", "data.bert_pack": True, "model.family": "bert"}
    sentence = next(line for line in check(make_config(changes), 1) if "sparse_attention" in line)
    assert "would depend on where in its row it lies" in sentence
