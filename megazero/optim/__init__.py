"""How weights move: update rules, schedules, loss scales and the gradient norm.

Everything here is a pure function or a frozen value and starts no communication; `train` and `zero` put the
pieces together. `schedule.py`: learning rate and weight decay over the course of training. `rule.py`: what an
update rule is given and may ask for. `elementwise.py`: the rules that move each element by itself, and their
table. `torch_rule.py`: any other class of torch.optim that does so.
`lamb.py`: LAMB, which asks for norms of whole parameters. `muon.py`: Muon, which asks for whole matrices.
`compressed/`: rules that sum over the replicas themselves, a bit per element. `build.py`: the rule that a
configuration names. `loss_scaler.py`: the loss scale of fp16 training. `grad_norm.py`: clipping.
"""

from megazero.optim.build import build_update_rule, takes_signs
from megazero.optim.compressed import OnebitAdam, OnebitLamb, ZeroOneAdam
from megazero.optim.elementwise import ELEMENTWISE, Adam, Elementwise, Sgd
from megazero.optim.grad_norm import clip_coefficient, local_square_sum
from megazero.optim.lamb import Lamb
from megazero.optim.loss_scaler import (
    DynamicLossScaler,
    LossScaler,
    NoScaler,
    ScalerState,
    StaticLossScaler,
    build_loss_scaler,
)
from megazero.optim.muon import Muon
from megazero.optim.rule import (
    SERVER_ERROR,
    WORKER_ERROR,
    LocalRule,
    MatrixRule,
    Needs,
    NormRule,
    PassEnds,
    Pieces,
    ReducingRule,
    Replicas,
    UpdateRule,
)
from megazero.optim.schedule import (
    Decay,
    LearningRate,
    Warmup,
    WeightDecay,
    build_learning_rate,
    build_weight_decay,
)
from megazero.optim.torch_rule import TorchRule, on_pieces

__all__ = [
    "ELEMENTWISE",
    "SERVER_ERROR",
    "WORKER_ERROR",
    "Adam",
    "Decay",
    "DynamicLossScaler",
    "Elementwise",
    "Lamb",
    "LearningRate",
    "LocalRule",
    "LossScaler",
    "MatrixRule",
    "Muon",
    "Needs",
    "NoScaler",
    "NormRule",
    "OnebitAdam",
    "OnebitLamb",
    "PassEnds",
    "Pieces",
    "ReducingRule",
    "Replicas",
    "ScalerState",
    "Sgd",
    "StaticLossScaler",
    "TorchRule",
    "UpdateRule",
    "Warmup",
    "WeightDecay",
    "ZeroOneAdam",
    "build_learning_rate",
    "build_loss_scaler",
    "build_update_rule",
    "build_weight_decay",
    "clip_coefficient",
    "local_square_sum",
    "on_pieces",
    "takes_signs",
]
