"""How weights move: update rules, schedules, loss scales and the gradient norm.

Everything here is a pure function or a frozen value and starts no communication; `train` and `zero` put the
pieces together. `schedule.py`: learning rate and weight decay over the course of training. `rule.py`: what an
update rule is given and may ask for. `elementwise.py`: the rules that move each element by itself, and their
table. `torch_rule.py`: any other class of torch.optim that does so.
`lamb.py`: LAMB, which asks for norms of whole parameters. `muon.py`: Muon, which asks for whole matrices.
`compressed/`: rules that sum over the replicas themselves, a bit per element. `build.py`: the rule that a
configuration names. `loss_scaler.py`: the loss scale of fp16 training. `grad_norm.py`: clipping.
"""

from megazero.optim.lamb import Lamb
from megazero.optim.torch_rule import TorchRule

__all__ = ["Lamb", "TorchRule"]
