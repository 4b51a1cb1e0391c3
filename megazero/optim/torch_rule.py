"""A torch optimizer class as an update rule: it runs itself on flat pieces of the fp32 master weights.

Whole tensors would give the same result if each element's update depends on that element alone, which
`on_pieces` tests beforehand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from megazero.errors import ConfigError
from megazero.optim.rule import Needs, Pieces, UpdateRule

_TRIAL_STEPS = 3


@dataclass(frozen=True)
class TorchRule(UpdateRule):
    """A torch optimizer class as an update rule (see `UpdateRule`).

    Attributes:
        kind: the class.
        options: its arguments except learning rate and weight decay.
        takes: which of these two it takes.
        state_names: its state tensors with the parameter's shape.
        counter: how it counts its updates: the entry `step` as a tensor, as a number, or not at all.
    """

    needs: ClassVar[Needs] = Needs()

    kind: type[torch.optim.Optimizer]
    options: Mapping[str, Any] = field(hash=False)
    takes: tuple[str, ...] = ("lr", "weight_decay")
    state_names: tuple[str, ...] = ()
    counter: type | None = None

    def step(self, pieces: Pieces, lr: float) -> None:
        """Update parameters and states in place, as the class does; the first update replaces the states."""
        pieces.check(self.state_names)
        for decay, chosen in pieces.by_decay():
            leaves = [nn.Parameter(pieces.params[i]) for i in chosen]
            optimizer = self.make(leaves, lr, decay)
            for leaf, i in zip(leaves, chosen, strict=True):
                leaf.grad = pieces.grads[i]
                if pieces.step > 1:
                    optimizer.state[leaf] = {**pieces.states[i], **self._count(pieces.step - 1)}
            optimizer.step()
            for leaf, i in zip(leaves, chosen, strict=True):
                for name, mine in pieces.states[i].items():
                    if optimizer.state[leaf][name] is not mine:
                        mine.copy_(optimizer.state[leaf][name])

    def make(self, leaves: Sequence[nn.Parameter], lr: float, weight_decay: float) -> torch.optim.Optimizer:
        """An optimizer for these parameters, without state."""
        rates = {"lr": lr, "weight_decay": weight_decay}
        options = {**self.options, **{name: rates[name] for name in self.takes}}
        return self.kind(leaves, **options)

    def _count(self, done: int) -> dict[str, object]:
        """The entries of the state that follow from the number of updates."""
        if self.counter is None:
            return {}
        known = {name: torch.tensor(of(self.options, done)) for name, of in _counted(self.kind).items()}
        return {"step": torch.tensor(float(done)) if self.counter is Tensor else done, **known}


def on_pieces(rule: TorchRule) -> TorchRule:
    """The rule with its state described, after trial updates of a small tensor in one piece and in two.

    Args:
        rule: its class and options.

    Raises:
        ConfigError: the two disagree, or the optimizer fails.
    """
    name = rule.kind.__name__
    generator = torch.Generator().manual_seed(0)
    start, *grads = torch.randn(1 + _TRIAL_STEPS, 4, 6, generator=generator).unbind()
    whole = nn.Parameter(start.clone())
    optimizer = rule.make([whole], 0.1, 0.01)
    try:
        for grad in grads:
            whole.grad = grad.clone()
            optimizer.step()
        rule = _described(rule, optimizer.state[whole], whole)
        pieces = [piece.clone() for piece in start.view(-1).split([9, 15])]
        states = [rule.init_state(piece) for piece in pieces]
        for number, grad in enumerate(grads, start=1):
            parts = [part.clone() for part in grad.reshape(-1).split([9, 15])]
            rule.step(Pieces(pieces, parts, states, [0.01, 0.01], number), 0.1)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"`optimizer` must be one that can update flat pieces of tensors, but {name} fails there "
            f"({type(error).__name__}: {error}); choose another, such as torch.optim.AdamW"
        ) from error
    if not torch.allclose(torch.cat(pieces), whole.detach().view(-1)):
        raise ConfigError(
            f"`optimizer` must update each element by itself to run on shards, but {name} gives other values "
            "for a tensor in pieces; choose another"
        )
    return rule


def _described(rule: TorchRule, state: Mapping[str, object], param: Tensor) -> TorchRule:
    """The rule with the names of the state that a parameter has after an update."""
    counter = state.get("step")
    shaped = {
        name for name, value in state.items() if isinstance(value, Tensor) and value.shape == param.shape
    }
    known = shaped | {"step"} | _counted(rule.kind).keys()
    others = [name for name, value in state.items() if name not in known and value is not None]
    if others or (counter is not None and not isinstance(counter, (Tensor, int, float))):
        raise ConfigError(
            f"`optimizer` must only keep tensors of the parameter's shape and a count of its steps, but "
            f"{rule.kind.__name__} keeps {', '.join(others) or 'another count'}; choose another"
        )
    kind = None if counter is None else Tensor if isinstance(counter, Tensor) else int
    return replace(rule, state_names=tuple(name for name in state if name in shaped), counter=kind)


def _counted(kind: type) -> Mapping[str, Callable[[Mapping[str, object], int], float]]:
    """The scalars in a class's state that follow from its options and the number of updates."""
    return {"mu_product": _nadam_product} if kind is torch.optim.NAdam else MappingProxyType({})


def _nadam_product(options: Mapping[str, Any], done: int) -> float:
    """The product of NAdam's momenta ``b1 (1 - 0.96^(t psi) / 2)`` so far (Dozat 2016)."""
    beta1, psi = options.get("betas", (0.9, 0.999))[0], options.get("momentum_decay", 4e-3)
    if beta1 <= 0 or done * math.log(beta1) < math.log(torch.finfo(torch.float32).tiny):
        return 0.0  # no term is above b1, so that fp32 has nothing left of it
    steps = torch.arange(1, done + 1, dtype=torch.float64)
    return float((beta1 * (1.0 - 0.5 * 0.96 ** (steps * psi))).prod())
