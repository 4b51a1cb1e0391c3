"""The section `skipping`: tokens and whole layers that a step leaves out."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from megazero.config.condition import config, here
from megazero.config.pacing import MOST_CHANGES, FromZero, Pacing, root_of
from megazero.config.tree.option import Section, option
from megazero.config.tree.roles import Role

PositiveFraction = Annotated[float, Field(gt=0, le=1)]
"""A fraction above 0, up to 1."""


class RandomLtdConfig(Section):
    """Random layer-wise token dropping"""

    roles = Role.SCHEDULE
    needs = here.random_ltd

    random_ltd: bool = option(
        False,
        needs=(
            here.random_ltd_min_value.because("layers begin with so many tokens"),
            here.random_ltd_require_steps.because("layers see all tokens after so many steps"),
            config.finetune.task.is_none,
            config.data.bert_pack.is_off.because(
                "what is kept of a sample would depend on which others share its row"
            ),
        ),
    )
    """random layer-wise token dropping: layers see some tokens of each sequence, others bypass them;
    evaluations and generation see all"""
    random_ltd_layer_id: tuple[NonNegativeInt, ...] = option((), roles=Role.TOLD)
    """layers that drop tokens, counted from 0; default: all but the first and the last"""
    random_ltd_min_value: PositiveInt | None = option(None, unit="tokens")
    """tokens that these layers see at the beginning"""
    random_ltd_max_value: PositiveInt | None = option(None, unit="tokens")
    """tokens that they see at the end; default: the sequence length, which drops none"""
    random_ltd_require_steps: PositiveInt | None = option(None, roles=Role.LENGTH, unit="iterations")
    """steps from the one to the other, along a straight line"""
    random_ltd_seq_per_step: PositiveInt = option(16, unit="tokens")
    """numbers in between are rounded down to multiples of this"""
    random_ltd_layer_num: PositiveInt | None = option(None, roles=Role.TOLD)
    """refuse another number of layers that drop tokens; default: take any"""
    random_ltd_total_layer_num: PositiveInt | None = option(None, roles=Role.TOLD)
    """refuse a model with another number of layers; default: take any"""

    def dropping_layers(self, layers: int) -> tuple[int, ...] | range:
        """The layers that drop tokens, in a model of `layers` layers."""
        return self.random_ltd_layer_id or range(1, layers - 1)

    def kept_tokens(self, sequence_length: int) -> Pacing | None:
        """The number of tokens that these layers see, as a function of steps.

        None if they see all, or if the settings contradict each other, which rules refuse.
        """
        first, total = self.random_ltd_min_value, self.random_ltd_require_steps
        last = self.random_ltd_max_value or sequence_length
        ramp = root_of(first, last, total, self.random_ltd_seq_per_step, 1.0)
        if not self.random_ltd or ramp is None or self.too_many_changes(sequence_length):
            return None
        return FromZero(ramp)

    def too_many_changes(self, sequence_length: int) -> bool:
        """Whether the number of tokens changes more often than `MOST_CHANGES`."""
        grown = (self.random_ltd_max_value or sequence_length) - (self.random_ltd_min_value or 1)
        return self.random_ltd and grown // self.random_ltd_seq_per_step > MOST_CHANGES


class LayerDropConfig(Section):
    """Progressive layer dropping"""

    roles = Role.SCHEDULE
    needs = here.progressive_layer_drop

    progressive_layer_drop: bool = option(False, needs=config.finetune.task.is_none)
    """leave out whole layers, more of them the longer training lasts and the deeper they are; evaluations and
    generation run all"""
    pld_theta: PositiveFraction = option(0.5)
    """in the end, layer l of L, from 0, runs in 1 - l / L x (1 - theta) of the steps"""
    pld_gamma: PositiveFloat = option(0.001, roles=Role.RATE)
    """how fast theta is reached: after t steps it is theta + (1 - theta) x exp(-gamma x t)"""


class SkippingConfig(LayerDropConfig, RandomLtdConfig):
    """Token and layer dropping"""
