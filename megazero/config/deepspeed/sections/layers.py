"""`data_efficiency.data_routing` (random-LTD), `progressive_layer_drop` and `sparse_attention`."""

from __future__ import annotations

from typing import Annotated

from megazero.config.deepspeed.section import (
    COUNTS,
    INDICES,
    NOTHING,
    Bool,
    Count,
    Declared,
    JsonSection,
    Number,
    Size,
    Text,
    Values,
    does,
    ignored,
    only,
    refused,
    sets,
)

_ROUTING = "data_efficiency.data_routing"
_LTD = f"{_ROUTING}.random_ltd"
_SCHEDULE = f"{_LTD}.random_ltd_schedule"
_SWITCHES = ("data_efficiency.enabled", f"{_ROUTING}.enabled", f"{_LTD}.enabled")
_HEADING = "Token and layer dropping"


def _if_all_on(value: object, values: Values) -> object:
    """The value where all three sections around the settings are on."""
    return value if all(values.get(switch) is True for switch in _SWITCHES) else NOTHING


def _ltd(field: str) -> Declared:
    return sets(f"skipping.random_ltd_{field}", convert=_if_all_on)


class DataRouting(JsonSection):
    """`data_efficiency.data_routing`."""

    at, heading = _ROUTING, _HEADING

    # `random_ltd.enabled` sets the field where this switch and `data_efficiency.enabled` are on.
    enabled: Bool = does(fields=("skipping.random_ltd",))


class RandomLtd(JsonSection):
    """`data_efficiency.data_routing.random_ltd`."""

    at, heading = _LTD, _HEADING

    enabled: Bool = sets(
        "skipping.random_ltd",
        convert=lambda on, values: _if_all_on(True, values),
        default=False,
        getter="random_ltd_enabled",
    )
    total_layer_num: Count = _ltd("total_layer_num")
    random_ltd_layer_num: Count = _ltd("layer_num")
    random_ltd_layer_id: Annotated[Declared, INDICES] = _ltd("layer_id")
    model_mask_name: Text = ignored("masks follow the tokens that are kept, whatever they are called")
    model_type: Text = ignored("models know which kind they are")
    hidden_state_order: Text = ignored("hidden states have the sequence first")


class RandomLtdSchedule(JsonSection):
    """`random_ltd.random_ltd_schedule`."""

    at, heading = _SCHEDULE, _HEADING

    min_value: Count = _ltd("min_value")
    max_value: Count = _ltd("max_value")
    schedule_type: Text = refused(
        "the number of tokens grows along a straight line only", only("fixed_linear")
    )


class RandomLtdSteps(JsonSection):
    """`random_ltd.random_ltd_schedule.schedule_config`."""

    at, heading = f"{_SCHEDULE}.schedule_config", _HEADING

    require_steps: Count = _ltd("require_steps")
    seq_per_step: Count = _ltd("seq_per_step")


class LayerTokenSchedule(JsonSection):
    """`random_ltd.layer_token_lr_schedule`."""

    at, heading = f"{_LTD}.layer_token_lr_schedule", _HEADING

    enabled: Bool = refused(
        "DeepSpeed has no such schedule either; `train_tokens` and `lr_decay_tokens` count what layers see",
        only(False),
    )


class LayerDrop(JsonSection):
    """`progressive_layer_drop`."""

    at, heading, when = "progressive_layer_drop", _HEADING, "progressive_layer_drop.enabled"

    enabled: Bool = sets("skipping.progressive_layer_drop", default=False, getter="pld_enabled")
    theta: Number = sets("skipping.pld_theta", default=1.0, absent=1.0, getter="pld_theta")
    gamma: Number = sets("skipping.pld_gamma", default=0.001, absent=0.001, getter="pld_gamma")


_MODES = ("dense", "fixed", "variable", "bigbird", "bslongformer")
_DIRECTIONS = ("unidirectional", "bidirectional")


def _one_of(field: str, choices: tuple[str, ...]) -> Declared:
    listed = f"{', '.join(choices[:-1])} or {choices[-1]}"
    return sets(
        f"model.sparse_{field}",
        convert=lambda value, values: value.lower(),
        only=only(*choices),
        refused=f"choose {listed}",
    )


def _sparse(field: str) -> Declared:
    return sets(f"model.sparse_{field}")


class SparseAttention(JsonSection):
    """`sparse_attention`, which DeepSpeed has removed since."""

    at, heading, when = "sparse_attention", "Sparse attention", "sparse_attention.mode"

    mode: Text = _one_of("attention", _MODES)
    block: Count = _sparse("block")
    attention: Text = _one_of("direction", _DIRECTIONS)
    different_layout_per_head: Bool = _sparse("different_layout_per_head")
    num_local_blocks: Count = _sparse("num_local_blocks")
    num_global_blocks: Count = _sparse("num_global_blocks")
    num_different_global_patterns: Count = _sparse("num_different_global_patterns")
    horizontal_global_attention: Bool = _sparse("horizontal_global_attention")
    num_random_blocks: Size = _sparse("num_random_blocks")
    local_window_blocks: Annotated[Declared, COUNTS] = _sparse("local_window_blocks")
    global_block_indices: Annotated[Declared, INDICES] = _sparse("global_block_indices")
    global_block_end_indices: Annotated[Declared, COUNTS] = _sparse("global_block_end_indices")
    num_sliding_window_blocks: Count = _sparse("num_sliding_window_blocks")
