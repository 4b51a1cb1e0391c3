"""The schedule of random-LTD as Megatron-DeepSpeed's scripts ask it."""

from __future__ import annotations

from megazero.deepspeed.models.random_ltd import RandomLTDScheduler

SECTION = {
    "total_layer_num": 4,
    "random_ltd_layer_num": 2,
    "global_batch_size": 3,
    "random_ltd_schedule": {
        "min_value": 8,
        "max_value": 16,
        "schedule_type": "fixed_linear",
        "schedule_config": {"require_steps": 4, "seq_per_step": 4},
    },
}


def test_a_scheduler_tells_its_layers_and_its_state():
    scheduler = RandomLTDScheduler(SECTION)
    assert scheduler.get_random_ltd_layer_num() == 2
    assert scheduler.get_total_layer_tokens(3) == 3 * (2 * (8 + 8 + 12) + 2 * 3 * 16)
    progress = {"consumed_layer_tokens": 456, "current_steps": 2, "current_value": 12}
    assert scheduler.state_dict() == {**progress, "min_value": 8, "max_value": 16}
    assert scheduler.get_state().items() >= {**progress, "schedule_type": "fixed_linear"}.items()
    other = RandomLTDScheduler(SECTION)
    other.set_state(scheduler.get_state())
    other.update_seq(4)
    assert other.get_current_seq() == 16
    other.reset_to_init()
    assert (other.get_current_seq(), other.state_dict()["current_steps"]) == (8, -1)
