"""The part of the optimizer's section about the rate and the decay, and the schedules of both."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from megazero.config.condition import here, when
from megazero.config.tree.option import Probability, Section, option
from megazero.config.tree.roles import Role

DecayStyle = Literal["constant", "linear", "cosine", "cosine-restarts", "inverse-square-root", "WSD"]
FinalDecayStyle = Literal["exponential", "linear", "cosine", "minus_sqrt"]
WeightDecayStyle = Literal["constant", "linear", "cosine"]

_NO_SCALAR = here.muon_scalar_lr.is_none.because("it is the peak of all that is no matrix")
_MOVES = here.weight_decay_incr_style.among("linear", "cosine")
_OF_WSD = (here.lr_decay_style == "WSD").because("the rate has no final decay of its own")
_RESTARTS = here.lr_decay_style == "cosine-restarts"


class ScheduleConfig(Section):
    """Rate, weight decay, and how they change: what `--use-checkpoint-opt_param-scheduler` takes over"""

    roles = Role.SCHEDULE

    lr: PositiveFloat = option(..., "peak learning rate")
    min_lr: NonNegativeFloat = option(0.0, "floor of the learning rate")
    decoupled_lr: PositiveFloat | None = option(
        None,
        "peak learning rate of the word embedding and the output head; default: that of the rest",
        needs=_NO_SCALAR,
    )
    decoupled_min_lr: NonNegativeFloat | None = option(
        None, "floor of their learning rate; default: that of the rest", needs=_NO_SCALAR
    )
    muon_scalar_lr: PositiveFloat | None = option(
        None,
        "Muon: peak learning rate of what is no matrix, which moves as `--lr` does; none for the same",
        needs=here.optimizer == "muon",
    )
    weight_decay: NonNegativeFloat = option(0.01, "weight decay of matrices and embeddings")
    lr_decay_style: DecayStyle = option(
        "linear",
        "shape of the decay; cosine-restarts falls along a cosine and starts again from the peak after each "
        "cycle (SGDR, Loshchilov & Hutter 2017)",
        needs=(
            when("WSD", here.lr_wsd_decay_iters | here.lr_wsd_decay_samples | here.lr_wsd_decay_tokens),
            when("cosine-restarts", here.lr_cycle_iters | here.lr_cycle_samples | here.lr_cycle_tokens),
        ),
    )
    lr_decay_iters: PositiveInt | None = option(None, "length of the decay", Role.LENGTH, unit="iterations")
    lr_decay_samples: PositiveInt | None = option(None, "length of the decay", Role.LENGTH, unit="samples")
    lr_decay_tokens: PositiveInt | None = option(None, "length of the decay", Role.LENGTH, unit="tokens")
    lr_warmup_iters: NonNegativeInt = option(0, "linear warmup", Role.LENGTH, unit="iterations")
    lr_warmup_samples: NonNegativeInt = option(0, "linear warmup", Role.LENGTH, unit="samples")
    lr_warmup_tokens: NonNegativeInt = option(0, "linear warmup", Role.LENGTH, unit="tokens")
    lr_warmup_fraction: Probability | None = option(
        None,
        "linear warmup as a fraction of the decay length",
        needs=(here.lr_warmup_iters == 0, here.lr_warmup_samples == 0, here.lr_warmup_tokens == 0),
    )
    lr_warmup_init: NonNegativeFloat = option(0.0, "learning rate at the start of the warmup")
    lr_wsd_decay_style: FinalDecayStyle = option("exponential", "shape of the final decay of WSD")
    lr_wsd_decay_iters: PositiveInt | None = option(
        None, "length of WSD's final decay", Role.LENGTH, unit="iterations", idle_without=_OF_WSD
    )
    lr_wsd_decay_samples: PositiveInt | None = option(
        None, "length of WSD's final decay", Role.LENGTH, unit="samples", idle_without=_OF_WSD
    )
    lr_wsd_decay_tokens: PositiveInt | None = option(
        None, "length of WSD's final decay", Role.LENGTH, unit="tokens", idle_without=_OF_WSD
    )
    lr_cycle_iters: PositiveInt | None = option(
        None, "length of the first cycle of cosine-restarts", Role.LENGTH, unit="iterations", needs=_RESTARTS
    )
    lr_cycle_samples: PositiveInt | None = option(
        None, "length of the first cycle of cosine-restarts", Role.LENGTH, unit="samples", needs=_RESTARTS
    )
    lr_cycle_tokens: PositiveInt | None = option(
        None, "length of the first cycle of cosine-restarts", Role.LENGTH, unit="tokens", needs=_RESTARTS
    )
    lr_cycle_mult: Annotated[float, Field(ge=1, le=1000)] = option(
        1.0, "factor by which each cycle of cosine-restarts is longer than the one before", needs=_RESTARTS
    )
    start_weight_decay: NonNegativeFloat | None = option(
        None, "weight decay at the start of its schedule", needs=(here.end_weight_decay, _MOVES)
    )
    end_weight_decay: NonNegativeFloat | None = option(
        None, "weight decay at the end of its schedule", needs=(here.start_weight_decay, _MOVES)
    )
    weight_decay_incr_style: WeightDecayStyle = option(
        "constant",
        "how weight decay moves from start to end",
        needs=here.start_weight_decay | here.end_weight_decay,
    )
