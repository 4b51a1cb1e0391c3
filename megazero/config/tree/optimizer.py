"""The section of the tree about how weights move: the optimizer and the schedules of its rate and decay."""

from __future__ import annotations

from typing import Literal, get_args

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from megazero.config.condition import config, here, when
from megazero.config.tree.option import Probability, Section, option
from megazero.config.tree.roles import Role
from megazero.config.tree.schedule import ScheduleConfig

OptimizerName = Literal[
    "adam",
    "ademamix",
    "sgd",
    "lamb",
    "lion",
    "adagrad",
    "adadelta",
    "adamax",
    "nadam",
    "radam",
    "rmsprop",
    "muon",
    "onebit-adam",
    "zero-one-adam",
    "onebit-lamb",
]
_ONE_BIT = ("onebit-adam", "zero-one-adam", "onebit-lamb")
# These send messages between ranks during an update; all others move each element by itself.
_SENDING = ("lamb", "muon", *_ONE_BIT)
_FED_BACK = "what rounding to a bit leaves out is fed back"
ELEMENTWISE_NAMES = tuple(name for name in get_args(OptimizerName) if name not in _SENDING)


class BaseOptimizerConfig(Section):
    """Optimizer and clipping"""

    optimizer: OptimizerName = option(
        "adam",
        "adam is AdamW (decoupled weight decay); ademamix is AdamW with a second, slower mean of gradients "
        "(Pagliardini et al. 2024); lamb is AdamW's update, made as long as a set fraction of "
        "each tensor's weights (You et al. 2020); lion moves each weight by the learning rate (Chen et al. "
        "2023, decoupled weight decay); adagrad, adadelta, adamax, nadam, radam and rmsprop are "
        "torch.optim's, whose weight decay is a part of the gradient; muon makes the updates of matrices "
        "between hidden vectors orthogonal (Jordan et al. 2024, decoupled weight decay) and leaves the rest "
        "to `--muon-scalar-optimizer`; onebit-adam (Tang et al. 2021), zero-one-adam (Lu et al. 2022) and "
        "onebit-lamb (Li et al. 2021) end up sending one bit per element between data-parallel ranks",
        Role.TOLD,
        refused={
            "adafactor": "keeps the rows and columns of whole matrices, which pieces of them have not",
            "asgd": "trains as SGD does, and averages weights that no checkpoint would take",
            "rprop": "reads the learning rate only once and decays no weights; their schedules would be idle",
            "soap": "is not offered; choose muon, which also preconditions whole matrices",
            "adaptive_muon": "is not offered; choose muon",
            "dist_muon": "is muon with `--use-distributed-optimizer`; give these two",
        },
        needs=(
            when(_ONE_BIT, config.zero.stage == 0).because(
                "each replica needs whole moments to say what its bits leave out of the sum, and a sharded "
                "one could not use the sum"
            ),
            when(_ONE_BIT, config.zero.main_params_dtype == "fp32").because(_FED_BACK),
            when(_ONE_BIT, config.zero.grad_accumulation_dtype == "fp32").because(_FED_BACK),
            when(_ONE_BIT, config.offload.optimizer == "none").because(
                "messages are made of moments and leave from the device"
            ),
        ),
    )
    clip_grad: NonNegativeFloat = option(1.0, "largest global gradient norm; 0 turns clipping off", Role.TOLD)


class AdamConfig(Section):
    """Adam"""

    roles = Role.TOLD

    adam_beta1: Probability = option(
        0.9, "Adam and LAMB of all kinds, ademamix, adamax, nadam and radam: decay of the first moment"
    )
    adam_beta2: Probability = option(
        0.999,
        "Adam and LAMB of all kinds, ademamix, adamax, nadam and radam: decay of the second moment, or of "
        "adamax's norm",
    )
    adam_eps: PositiveFloat = option(
        1e-8,
        "Adam and LAMB of all kinds, ademamix, adamax, nadam, radam and rmsprop: added to the root of the "
        "second moment",
    )


class AdemamixConfig(Section):
    """AdEMAMix"""

    roles = Role.TOLD
    needs = here.optimizer == "ademamix"

    ademamix_beta3: Probability = option(0.9999, "AdEMAMix: decay of the slow first moment")
    ademamix_alpha: NonNegativeFloat = option(
        5.0, "AdEMAMix: weight of the slow first moment in the update, beside the fast one's 1"
    )
    ademamix_beta3_warmup: NonNegativeInt = option(
        0,
        "AdEMAMix: updates in which the half-life of the slow moment grows from the fast one's; 0 for none. "
        "The paper's are as many as the training has",
        Role.LENGTH,
        unit="iterations",
    )
    ademamix_alpha_warmup: NonNegativeInt = option(
        0,
        "AdEMAMix: updates in which its weight grows from 0; 0 for none. The paper's are as many as the "
        "training has",
        Role.LENGTH,
        unit="iterations",
    )


class SgdConfig(Section):
    """SGD"""

    roles = Role.TOLD

    sgd_momentum: NonNegativeFloat = option(0.9, "momentum of SGD")


class LambConfig(Section):
    """LAMB"""

    roles = Role.TOLD
    needs = here.optimizer.among("lamb", "onebit-lamb")

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


class OneBitConfig(Section):
    """1-bit Adam and LAMB"""

    roles = Role.TOLD
    needs = here.optimizer.among("onebit-adam", "onebit-lamb")

    onebit_freeze_step: PositiveInt = option(
        100_000,
        "1-bit Adam and LAMB: updates with exact sums, after which the second moment stays as it is; 15 to "
        "25 percent of a training",
    )


class OneBitAdamConfig(Section):
    """1-bit and 0/1 Adam"""

    roles = Role.TOLD
    needs = here.optimizer.among("onebit-adam", "zero-one-adam")

    onebit_precondition: bool = option(
        True,
        "1-bit and 0/1 Adam: let a bit stand for the same amount of the first moment in all of a "
        "parameter, as in the papers; it then moves an element by the more the smaller its second moment is, "
        "which blows up elements whose gradient is rounding alone. By default a bit stands for the same "
        "share of the update",
        flag="--no-onebit-precondition",
        switches={"--onebit-precondition": True, "--onebit-adam-precondition": True},
    )


class OneBitLambConfig(Section):
    """1-bit LAMB"""

    roles = Role.TOLD
    needs = here.optimizer == "onebit-lamb"

    onebit_lamb_coeff_beta: Probability = option(0.9, "1-bit LAMB: decay of the average of trust ratios")
    onebit_lamb_factor_max: PositiveFloat = option(
        4.0, "1-bit LAMB: largest factor by which the average trust ratio follows the second moment"
    )
    onebit_lamb_factor_min: PositiveFloat = option(0.5, "1-bit LAMB: smallest such factor")
    onebit_lamb_factor_threshold: PositiveFloat = option(
        0.1, "1-bit LAMB: largest change of that factor from one update to the next, as a share of it"
    )


class ZeroOneConfig(Section):
    """0/1 Adam"""

    roles = Role.TOLD
    needs = here.optimizer == "zero-one-adam"

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


class LionConfig(Section):
    """Lion"""

    roles = Role.TOLD
    needs = (here.optimizer == "lion") | (here.muon_scalar_optimizer == "lion")

    lion_beta1: Probability = option(0.95, "Lion: share of the momentum in the sum whose sign is taken")
    lion_beta2: Probability = option(0.98, "Lion: decay of the momentum")


class AdagradConfig(Section):
    """Adagrad"""

    roles = Role.TOLD
    needs = here.optimizer == "adagrad"

    adagrad_eps: PositiveFloat = option(1e-10, "Adagrad: added to the root of the sum of squared gradients")


class AdadeltaConfig(Section):
    """Adadelta"""

    roles = Role.TOLD
    needs = here.optimizer == "adadelta"

    adadelta_rho: Probability = option(0.9, "Adadelta: decay of the means of squared gradients and updates")
    adadelta_eps: PositiveFloat = option(1e-6, "Adadelta: added to both means before their roots are taken")


class RmspropConfig(Section):
    """RMSprop"""

    roles = Role.TOLD
    needs = here.optimizer == "rmsprop"

    rmsprop_alpha: Probability = option(0.99, "RMSprop: decay of the mean of squared gradients")


class MuonConfig(Section):
    """Muon"""

    roles = Role.TOLD
    needs = here.optimizer == "muon"

    muon_momentum: Probability = option(0.9, "Muon: decay of the momentum")
    muon_nesterov: bool = option(False, "Muon: Nesterov's momentum, in which the gradient counts once more")
    muon_coefficient_type: Literal["quintic", "simple"] = option(
        "quintic",
        "Muon: coefficients of the Newton-Schulz steps; quintic are tuned for five steps one by one, simple "
        "are Jordan et al.'s, the same in each step",
        refused={
            **dict.fromkeys(("polar_express", "cans", "aol"), "is not offered; choose quintic"),
            "custom": "takes numbers that no command line gives; choose quintic or simple",
        },
    )
    muon_num_ns_steps: PositiveInt = option(5, "Muon: number of Newton-Schulz steps")
    muon_ns_dtype: Literal["fp32", "bf16"] = option(
        "fp32", "Muon: dtype of the products in Newton-Schulz steps"
    )
    muon_scale_mode: Literal["spectral", "unit_rms_norm", "shape_scaling"] = option(
        "spectral",
        "Muon: factor of an update by its matrix's shape: spectral is sqrt(max(rows, columns)), "
        "unit_rms_norm sqrt(rows / columns), shape_scaling sqrt(max(1, rows / columns)), as Jordan et al. "
        "have it",
    )
    muon_extra_scale_factor: PositiveFloat = option(
        1.0, "Muon: a further factor of updates; 0.2 with spectral makes them the size of AdamW's"
    )
    muon_split_qkv: bool = option(
        True, "Muon: queries, keys and values are one matrix", flag="--muon-no-split-qkv"
    )
    muon_scalar_optimizer: Literal["adam", "lion"] = option(
        "adam", "Muon: optimizer of embeddings, heads, norms, biases and routers"
    )


class OptimizerConfig(
    ScheduleConfig,
    MuonConfig,
    RmspropConfig,
    AdadeltaConfig,
    AdagradConfig,
    LionConfig,
    ZeroOneConfig,
    OneBitLambConfig,
    OneBitAdamConfig,
    OneBitConfig,
    LambConfig,
    SgdConfig,
    AdemamixConfig,
    AdamConfig,
    BaseOptimizerConfig,
):
    """Optimizer"""

    roles = Role.NONE  # each field, or its class, says whether a schedule is made of it
