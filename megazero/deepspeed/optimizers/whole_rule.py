"""`WholeRule`: run a torch optimizer that must see whole parameters, such as Adafactor or Shampoo.

The state of such an optimizer has other shapes than the parameter. Its numbers are packed, one tensor after
another, into flat tensors of the parameter's size, which are sharded, offloaded and saved like moments.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from megazero.deepspeed.optimizers.grouped_rule import GroupedRule, GroupRate
from megazero.errors import ConfigError
from megazero.mpu.context import ParallelContext
from megazero.optim.rule import Pieces
from megazero.optim.torch_rule import TorchRule
from megazero.zero.bucket import whole_state
from megazero.zero.store.store import GRADIENT, WEIGHT, LoadedBucket
from megazero.zero.update import BucketRule, UpdateFacts, of_group

_EXACT = (torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int8, torch.int16, torch.bool)
_TRIAL_STEPS, _TRIAL_SIZE = 3, 5
_LARGE = 256  # a size that classes which treat large tensors differently take for large

Shape = tuple[int, ...]
Value = Tensor | int | float | None
"""An entry of a torch optimizer's state."""


@dataclass(frozen=True)
class _StateEntry:
    """An entry of a parameter's state; `like` is its value after an update, which has its type and shape."""

    name: str
    like: Value

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.like.numel() if isinstance(self.like, Tensor) else int(self.like is not None)

    def flat(self, value: Value, out: Tensor) -> None:
        """Write the elements of a value to a flat tensor."""
        if self.like is not None:
            out.copy_(value.detach().reshape(-1) if isinstance(value, Tensor) else torch.tensor([value]))

    def value(self, flat: Tensor) -> Value:
        """The value with the elements of a flat tensor."""
        if isinstance(self.like, Tensor):
            device = "cpu" if self.like.dim() == 0 and self.name == "step" else flat.device
            return flat.view(self.like.shape).to(device, self.like.dtype, copy=True)
        return None if self.like is None else type(self.like)(flat.item())


@dataclass(frozen=True)
class WholeRule(GroupedRule, BucketRule):
    """The rule of a torch optimizer class that updates whole parameters one by one.

    Attributes:
        rules: the class with the options of each group.
        names: the names of the flat tensors of packed state.
        forms: cache of `form`, by group and shape.
    """

    rules: tuple[TorchRule, ...]
    names: tuple[str, ...] = ()
    forms: dict[tuple[int, Shape], tuple[_StateEntry, ...]] = field(default_factory=dict, compare=False)

    @property
    def state_names(self) -> tuple[str, ...]:
        return self.names

    def move_bucket(self, loaded: LoadedBucket, facts: UpdateFacts, context: ParallelContext) -> None:
        """Update the parameters that this rank has slices of; each such rank computes the whole update."""
        layout, frozen = loaded.bucket.layout, loaded.bucket.frozen()
        kinds = (GRADIENT, WEIGHT, *self.names)
        views = [layout.views(whole_state(loaded.bucket, loaded.flats[kind])) for kind in kinds]
        for number, segment in enumerate(layout.member_segments):
            where, spec = layout.overlap(segment.start, segment.stop), layout.specs[number]
            if where.start == where.stop or number in frozen:
                continue
            parts = (spec.unshard(view[number], context.groups).contiguous() for view in views)
            grad, *changed = parts
            decay = of_group(facts.weight_decay, segment.group) if segment.weight_decay else 0.0
            state = dict(zip(self.names, changed[1:], strict=True))
            pieces = Pieces(changed[:1], [grad], [state], [decay], facts.number)
            self.step(pieces, of_group(facts.lr, segment.group))
            first = max(0, layout.state_range.start - segment.start)
            for kind, whole in zip(kinds[1:], changed, strict=True):
                mine = spec.shard(whole, context.place).reshape(-1)
                loaded.flats[kind][where].copy_(mine[first : first + where.stop - where.start])

    def step(self, pieces: Pieces, lr: float) -> None:
        """Update whole parameters of one group and their packed state in place.

        Raises:
            ConfigError: the state of a parameter has other entries than after the first update.
        """
        assert isinstance(lr, GroupRate), "`rates` makes the learning rates"
        pieces.check(self.names)
        rule = self.rules[lr.group]
        lists = (pieces.params, pieces.grads, pieces.states, pieces.weight_decays)
        for param, grad, state, decay in zip(*lists, strict=True):
            leaf, form = nn.Parameter(param), self.form(lr.group, tuple(param.shape))
            leaf.grad = grad
            optimizer = rule.make([leaf], float(lr), decay)
            packed = torch.stack([state[name] for name in self.names]).view(-1)
            parts = packed.split([*(entry.size for entry in form), packed.numel() - _size(form)])
            if packed.any():  # all zeros before the first update
                named = zip(form, parts[:-1], strict=True)
                optimizer.state[leaf] = {entry.name: entry.value(part) for entry, part in named}
            optimizer.step()
            _check_form(rule.kind, form, optimizer.state[leaf])
            for entry, part in zip(form, parts[:-1], strict=True):
                entry.flat(optimizer.state[leaf][entry.name], part)
            for name, part in zip(self.names, packed.split(param.numel()), strict=True):
                state[name].copy_(part.view(param.shape))

    def form(self, group: int, shape: Shape) -> tuple[_StateEntry, ...]:
        """The entries of the state of a parameter of this shape.

        Raises:
            ConfigError: an entry is neither a number nor a tensor whose values fp32 holds exactly.
        """
        if (group, shape) not in self.forms:
            self.forms[group, shape] = _form(self.rules[group], shape)
        return self.forms[group, shape]

    def kinds(self, shapes: Iterable[Shape]) -> tuple[str, ...]:
        """The names of as many flat tensors as the state of parameters of these shapes needs."""
        sizes = [
            (_size(self.form(group, shape)), math.prod(shape))
            for group in range(len(self.rules))
            for shape in shapes
        ]
        count = max((-(-size // numel) for size, numel in sizes if numel), default=1)
        return tuple(f"state_{number}" for number in range(max(count, 1)))


def _form(rule: TorchRule, shape: Shape) -> tuple[_StateEntry, ...]:
    """Run one update of a parameter of ones, and return the entries of its state."""
    try:
        state = _state(rule, shape, "meta")
    except Exception:  # the class reads values, which the meta device has none of
        state = _state(rule, shape, "cpu")
    for name, like in state.items():
        exact = not isinstance(like, Tensor) or like.dim() == 0 or like.dtype in _EXACT
        if not exact or not isinstance(like, Tensor | int | float | None):
            shown = like.dtype if isinstance(like, Tensor) else f"a {type(like).__name__}"
            raise ConfigError(
                "`optimizer` must keep numbers and tensors of at most 32 bits, but "
                f"{rule.kind.__name__} keeps {shown} as {name}; choose another"
            )
    return tuple(_StateEntry(name, like) for name, like in state.items())


def _state(rule: TorchRule, shape: Shape, device: str) -> Mapping[str, Value]:
    leaf = nn.Parameter(torch.ones(shape, device=device))
    leaf.grad = torch.ones_like(leaf)
    optimizer = rule.make([leaf], 0.1, 0.0)
    optimizer.step()
    state: Mapping[str, Value] = optimizer.state[leaf]
    return state


def keeps_shape(rule: TorchRule, shapes: Iterable[Shape]) -> bool:
    """Whether all state tensors have the shape of their parameter or are scalars; tried on capped shapes."""
    capped = {tuple(min(size, _LARGE) for size in shape) for shape in shapes}
    tensors = [(s, e.like) for s in capped for e in _form(rule, s) if isinstance(e.like, Tensor)]
    return all(like.dim() == 0 or tuple(like.shape) == shape for shape, like in tensors)


def on_whole(rules: Sequence[TorchRule], shapes: Iterable[Shape]) -> WholeRule:
    """Build the rule of an optimizer for whole parameters, and try it on small tensors.

    Args:
        rules: the class with the options of each group.
        shapes: the shapes of all parameters.

    Raises:
        ConfigError: the class fails, mixes parameters in an update, or keeps state that cannot be packed.
    """
    kind, shapes = rules[0].kind, sorted(set(shapes))
    whole = WholeRule(tuple(rules))
    try:
        whole = replace(whole, names=whole.kinds(shapes))
        small = sorted({tuple(min(size, _TRIAL_SIZE) for size in shape) for shape in shapes})
        alone = all(_alone(whole, group, small) for group in range(len(rules)))
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            "`optimizer` must be one that can update tensors from their gradients alone, but "
            f"{kind.__name__} fails there ({type(error).__name__}: {error}); choose another, such as AdamW"
        ) from error
    if not alone:
        raise ConfigError(
            f"`optimizer` must update each parameter by itself, but {kind.__name__} gives other values for "
            "parameters together, or keeps state in its groups; choose another, such as torch.optim.AdamW"
        )
    return whole


def _size(form: Iterable[_StateEntry]) -> int:
    return sum(entry.size for entry in form)


def _check_form(kind: type, form: Sequence[_StateEntry], state: Mapping[str, Value]) -> None:
    """Refuse a state with other entries than after the first update."""
    expected = [(entry.name, getattr(entry.like, "shape", None)) for entry in form]
    if [(name, getattr(value, "shape", None)) for name, value in state.items()] != expected:
        raise ConfigError(
            "`optimizer` must keep the same kinds of state from its first update on, but "
            f"{kind.__name__} keeps {', '.join(entry.name for entry in form)} at first and "
            f"{', '.join(state)} later; choose another"
        )


def _alone(rule: WholeRule, group: int, shapes: Sequence[Shape]) -> bool:
    """Whether the rule, one parameter at a time, gives the values of one optimizer over all parameters."""
    generator = torch.Generator().manual_seed(0)
    together = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    alone = [param.detach().clone() for param in together]
    rule = replace(rule, names=rule.kinds(shapes))
    states = [{name: torch.zeros_like(param) for name in rule.names} for param in alone]
    optimizer = rule.rules[group].make(together, 0.1, 0.01)
    for number in range(1, _TRIAL_STEPS + 1):
        grads = [torch.randn(shape, generator=generator) for shape in shapes]
        for param, grad in zip(together, grads, strict=True):
            param.grad = grad.clone()
        optimizer.step()
        rule.step(Pieces(alone, grads, states, [0.01] * len(alone), number), GroupRate(0.1, group))
    return all(torch.allclose(one, other) for one, other in zip(alone, together, strict=True))
