"""The section of the tree about how weights move: the optimizer and the schedules of its rate and decay."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from megazero.config.option import Probability, Section, option


class OptimizerConfig(Section):
    """Optimizer"""

    optimizer: Literal["adam", "sgd", "lamb", "onebit-adam", "zero-one-adam", "onebit-lamb"] = option(
        "adam",
        "adam is AdamW (decoupled weight decay); lamb is AdamW's update, made as long as a set fraction of "
        "each tensor's weights (You et al. 2020); onebit-adam (Tang et al. 2021), zero-one-adam (Lu et al. "
        "2022) and onebit-lamb (Li et al. 2021) come to send one bit per element between data-parallel ranks",
    )
    lr: PositiveFloat = option(..., "peak learning rate")
    min_lr: NonNegativeFloat = option(0.0, "floor of the learning rate")
    weight_decay: NonNegativeFloat = option(0.01, "weight decay of matrices and embeddings")
    adam_beta1: Probability = option(0.9, "Adam and LAMB of all kinds: decay of the first moment")
    adam_beta2: Probability = option(0.999, "Adam and LAMB of all kinds: decay of the second moment")
    adam_eps: PositiveFloat = option(
        1e-8, "Adam and LAMB of all kinds: added to the root of the second moment"
    )
    sgd_momentum: NonNegativeFloat = option(0.9, "momentum of SGD")
    lamb_max_coeff: PositiveFloat = option(
        10.0, "LAMB: largest trust ratio, norm of a tensor's weights over norm of its update"
    )
    lamb_min_coeff: NonNegativeFloat = option(0.01, "LAMB: smallest trust ratio")
    lamb_bias_correction: Literal["moments", "rate", "none"] = option(
        "moments",
        "LAMB: moments corrects them before the trust ratio is taken, as the paper and apex do; rate "
        "corrects the learning rate after it, as DeepSpeed does; none does neither",
    )
    lamb_adapt_all: bool = option(
        False,
        "LAMB: take the trust ratio of norms and biases too, as DeepSpeed does; otherwise it is 1 for what "
        "does not decay",
        aliases=("--use-nvlamb",),
    )
    onebit_freeze_step: PositiveInt = option(
        100_000,
        "1-bit Adam and LAMB: updates with exact sums, after which the second moment stays as it is; 15 to "
        "25 percent of a training",
    )
    onebit_lamb_coeff_beta: Probability = option(0.9, "1-bit LAMB: decay of the average of trust ratios")
    onebit_lamb_factor_max: PositiveFloat = option(
        4.0, "1-bit LAMB: largest factor by which the average trust ratio follows the second moment"
    )
    onebit_lamb_factor_min: PositiveFloat = option(0.5, "1-bit LAMB: smallest such factor")
    onebit_lamb_factor_threshold: PositiveFloat = option(
        0.1, "1-bit LAMB: largest change of that factor from one update to the next, as a share of it"
    )
    zero_one_var_freeze_step: PositiveInt = option(
        100_000, "0/1 Adam: updates after which the second moment stays as it is, and replicas go on alone"
    )
    zero_one_var_update_scaler: PositiveInt = option(
        16, "0/1 Adam: updates of the second moment, with exact sums, until their distance doubles"
    )
    zero_one_local_step_scaler: PositiveInt = option(
        32_678, "0/1 Adam: updates after the freeze until the distance of exchanges doubles"
    )
    zero_one_local_step_clipper: PositiveInt = option(
        16, "0/1 Adam: largest distance of exchanges; 1 exchanges in every update"
    )
    clip_grad: NonNegativeFloat = option(1.0, "largest global gradient norm; 0 turns clipping off")
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = option(
        "linear", "shape of the decay"
    )
    lr_decay_iters: PositiveInt | None = option(None, "length of the decay", unit="iterations")
    lr_decay_samples: PositiveInt | None = option(None, "length of the decay", unit="samples")
    lr_decay_tokens: PositiveInt | None = option(None, "length of the decay", unit="tokens")
    lr_warmup_iters: NonNegativeInt = option(0, "linear warmup", unit="iterations")
    lr_warmup_samples: NonNegativeInt = option(0, "linear warmup", unit="samples")
    lr_warmup_tokens: NonNegativeInt = option(0, "linear warmup", unit="tokens")
    lr_warmup_fraction: Probability | None = option(None, "linear warmup as a fraction of the decay length")
    lr_warmup_init: NonNegativeFloat = option(0.0, "learning rate at the start of the warmup")
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = option(
        "exponential", "shape of the final decay of WSD"
    )
    lr_wsd_decay_iters: PositiveInt | None = option(None, "length of WSD's final decay", unit="iterations")
    lr_wsd_decay_samples: PositiveInt | None = option(None, "length of WSD's final decay", unit="samples")
    lr_wsd_decay_tokens: PositiveInt | None = option(None, "length of WSD's final decay", unit="tokens")
    start_weight_decay: NonNegativeFloat | None = option(None, "weight decay at the start of its schedule")
    end_weight_decay: NonNegativeFloat | None = option(None, "weight decay at the end of its schedule")
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = option(
        "constant", "how weight decay moves from start to end"
    )
