"""The part of the optimizer's section about clipping, and the schedules of the rate and the decay."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt

from megazero.config.tree.option import Probability, Section, option


class ScheduleConfig(Section):
    """Clipping and schedules"""

    clip_grad: NonNegativeFloat = option(1.0, "largest global gradient norm; 0 turns clipping off")
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = option(
        "linear",
        "shape of the decay",
        needs="WSD => lr_wsd_decay_iters or lr_wsd_decay_samples or lr_wsd_decay_tokens",
    )
    lr_decay_iters: PositiveInt | None = option(None, "length of the decay", unit="iterations")
    lr_decay_samples: PositiveInt | None = option(None, "length of the decay", unit="samples")
    lr_decay_tokens: PositiveInt | None = option(None, "length of the decay", unit="tokens")
    lr_warmup_iters: NonNegativeInt = option(0, "linear warmup", unit="iterations")
    lr_warmup_samples: NonNegativeInt = option(0, "linear warmup", unit="samples")
    lr_warmup_tokens: NonNegativeInt = option(0, "linear warmup", unit="tokens")
    lr_warmup_fraction: Probability | None = option(
        None,
        "linear warmup as a fraction of the decay length",
        needs=("lr_warmup_iters=0", "lr_warmup_samples=0", "lr_warmup_tokens=0"),
    )
    lr_warmup_init: NonNegativeFloat = option(0.0, "learning rate at the start of the warmup")
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = option(
        "exponential", "shape of the final decay of WSD"
    )
    lr_wsd_decay_iters: PositiveInt | None = option(None, "length of WSD's final decay", unit="iterations")
    lr_wsd_decay_samples: PositiveInt | None = option(None, "length of WSD's final decay", unit="samples")
    lr_wsd_decay_tokens: PositiveInt | None = option(None, "length of WSD's final decay", unit="tokens")
    start_weight_decay: NonNegativeFloat | None = option(
        None,
        "weight decay at the start of its schedule",
        needs=("end_weight_decay", "weight_decay_incr_style=linear,cosine"),
    )
    end_weight_decay: NonNegativeFloat | None = option(
        None,
        "weight decay at the end of its schedule",
        needs=("start_weight_decay", "weight_decay_incr_style=linear,cosine"),
    )
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = option(
        "constant", "how weight decay moves from start to end", needs="start_weight_decay or end_weight_decay"
    )
