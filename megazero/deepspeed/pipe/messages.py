"""The messages between stages: tensors and tuples of tensors, as the one tensor that our executor moves.

A single floating-point tensor is sent as it is. Anything else travels in a carrier: a flat fp32 tensor whose
bytes are those of all tensors, one after another. Nothing ever computes with a carrier, so its bits arrive as
they were, and its gradient carries the gradients in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megazero.deepspeed.pipe.specs import PipelineError
from megazero.mpu.group import Group, Transfer, Work
from megazero.mpu.wrapping_group import WrappingGroup
from megazero.pipeline.chunk import Boundary

_FORM = 1 << 20  # the tag of forms, above those of all messages of a step
_ALIGNED = 16  # bytes: tensors of any dtype may begin there
_DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
)


@dataclass(frozen=True)
class Item:
    """One tensor between two stages.

    Attributes:
        shape: its shape.
        dtype: its dtype.
        differentiable: whether its gradient is sent back.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool

    @property
    def strides(self) -> tuple[int, ...]:
        """The strides of the contiguous tensor."""
        return tuple(math.prod(self.shape[dim + 1 :]) for dim in range(len(self.shape)))

    @property
    def nbytes(self) -> int:
        """Its size in a carrier."""
        size = math.prod(self.shape) * self.dtype.itemsize
        return -(-size // _ALIGNED) * _ALIGNED


@dataclass(frozen=True)
class Form:
    """The form of what one stage gives to the next.

    Attributes:
        items: its tensors.
        single: whether it is one tensor, and not a tuple.
    """

    items: tuple[Item, ...]
    single: bool

    @classmethod
    def of(cls, value: Any, layer: str) -> Form:
        """The form of a value.

        Args:
            value: what a stage computed.
            layer: the name of its last layer, for errors.

        Raises:
            PipelineError: it is neither a tensor nor a tuple of tensors.
        """
        tensors = (value,) if isinstance(value, Tensor) else value
        if not isinstance(tensors, (tuple, list)) or not all(isinstance(t, Tensor) for t in tensors):
            shown = type(value).__name__
            if isinstance(tensors, (tuple, list)):
                shown += f" of {', '.join(type(t).__name__ for t in tensors)}"
            raise PipelineError(
                f"`{layer}` must give a tensor or a tuple of tensors, as the next layer is on another stage, "
                f"but gives a {shown}; make tensors of it"
            )
        return cls(
            tuple(Item(tuple(t.shape), t.dtype, t.requires_grad) for t in tensors), isinstance(value, Tensor)
        )

    @property
    def plain(self) -> bool:
        """Whether the tensor itself is sent."""
        return self.single and self.items[0].dtype.is_floating_point

    @property
    def boundary(self) -> Boundary:
        """The tensor that is sent."""
        if self.plain:
            return Boundary(self.items[0].shape, self.items[0].dtype)
        return Boundary((sum(item.nbytes for item in self.items) // 4,), torch.float32)

    def views(self, carrier: Tensor) -> Iterator[Tensor]:
        """The tensors in a carrier: they share its memory, but for autograd they are no views of it."""
        at = carrier.storage_offset() * carrier.element_size()
        for item in self.items:
            piece = torch.empty(0, dtype=item.dtype, device=carrier.device)
            yield piece.set_(carrier.untyped_storage(), at // item.dtype.itemsize, item.shape, item.strides)
            at += item.nbytes

    def encode(self) -> list[int]:
        """The form as numbers, which `decode` reads."""
        numbers = [int(self.single)]
        for item in self.items:
            numbers += [_DTYPES.index(item.dtype), int(item.differentiable), len(item.shape), *item.shape]
        return numbers

    @classmethod
    def decode(cls, numbers: Sequence[int]) -> Form:
        """The form that was encoded."""
        items, at = [], 1
        while at < len(numbers):
            dtype, differentiable, dims = numbers[at : at + 3]
            shape = tuple(numbers[at + 3 : at + 3 + dims])
            items.append(Item(shape, _DTYPES[dtype], bool(differentiable)))
            at += 3 + dims
        return cls(tuple(items), bool(numbers[0]))


class Unpack(torch.autograd.Function):
    """From the tensor that was received to a token, and what the stage before gave.

    The token is 0. What a stage computes must depend on it, so that each backward comes here, even if no
    layer used the tensors.
    """

    @staticmethod
    def forward(ctx: Any, carrier: Tensor, form: Form) -> tuple[Tensor, ...]:
        ctx.form, ctx.carrier = form, (carrier.shape, carrier.dtype, carrier.device)
        ctx.set_materialize_grads(False)
        # `data`: layers may change their input in place, which is forbidden for views of a leaf.
        tensors = [carrier.data] if form.plain else list(form.views(carrier))
        fixed = [t for t, item in zip(tensors, form.items, strict=True) if not item.differentiable]
        ctx.mark_non_differentiable(*fixed)
        return carrier.new_zeros(()), *tensors

    @staticmethod
    def backward(ctx: Any, token: Tensor | None, *grads: Tensor | None) -> tuple[Tensor, None]:
        form: Form = ctx.form
        shape, dtype, device = ctx.carrier
        if form.plain and grads[0] is not None:
            return grads[0], None
        carrier = torch.zeros(shape, dtype=dtype, device=device)
        for view, grad in zip(form.views(carrier), grads, strict=True):
            if grad is not None:
                view.copy_(grad)
        return carrier, None


class Pack(torch.autograd.Function):
    """From the token and what a stage gives to the tensor that is sent."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, form: Form, *tensors: Tensor) -> Tensor:
        ctx.form, ctx.token = form, (token.dtype, token.device)
        if form.plain:
            return tensors[0].contiguous().data
        shape, dtype = form.boundary
        carrier = torch.zeros(shape, dtype=dtype, device=token.device)
        for view, tensor in zip(form.views(carrier), tensors, strict=True):
            view.copy_(tensor)
        return carrier

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        form: Form = ctx.form
        dtype, device = ctx.token
        grads = [grad] if form.plain else list(form.views(grad))
        own = [g if item.differentiable else None for g, item in zip(grads, form.items, strict=True)]
        return torch.zeros((), dtype=dtype, device=device), None, *own


@dataclass
class Forms:
    """The forms of one batch's micro-batches at both ends of a stage, by number; filled as they become known.

    Attributes:
        incoming: what the stage before gives.
        outgoing: what this stage gives.
    """

    incoming: dict[int, Form] = field(default_factory=dict)
    outgoing: dict[int, Form] = field(default_factory=dict)


class DescribingGroup(WrappingGroup):
    """The stages of a pipeline; where a receiver cannot know the form of a message, it is sent ahead of it.

    A receiver waits for the form before it receives, which hides less of the transfers behind its work.

    Args:
        inner: the stages.
        device: the device that messages are on.
    """

    def __init__(self, inner: Group, device: torch.device):
        super().__init__(inner)
        self._device = device
        self._ahead: Mapping[int, Form] = {}
        self._first_tag = 0
        self._sent: list[tuple[Work, Tensor]] = []

    def describe(self, forms: Mapping[int, Form], micro_batches: int) -> None:
        """From now on, send the form of a micro-batch ahead of it.

        Args:
            forms: by micro-batch; each is there when its micro-batch is sent.
            micro_batches: their number, which gives their tags.
        """
        self._ahead, self._first_tag = forms, self.rank * micro_batches

    def be_silent(self) -> None:
        """From now on, send no forms."""
        for work, _ in self._sent:
            work.wait()
        self._ahead, self._sent = {}, []

    def exchange(self, transfers: Sequence[Transfer]) -> list[Work]:
        """See `Group`."""
        for transfer in transfers:
            form = self._ahead.get(transfer.tag - self._first_tag) if transfer.kind == "send" else None
            if form is not None:
                numbers = form.encode()
                self._send([len(numbers)], transfer.peer)
                self._send(numbers, transfer.peer)
        return self.inner.exchange(transfers)

    def receive_form(self) -> Form:
        """Wait for the form of the next micro-batch from the stage before."""
        (length,) = self._receive(1)
        return Form.decode(self._receive(length))

    def _send(self, numbers: list[int], peer: int) -> None:
        tensor = torch.tensor(numbers, dtype=torch.int64, device=self._device)
        (work,) = self.inner.exchange([Transfer("send", tensor, peer, _FORM)])
        self._sent.append((work, tensor))

    def _receive(self, length: int) -> list[int]:
        tensor = torch.empty(length, dtype=torch.int64, device=self._device)
        (work,) = self.inner.exchange([Transfer("recv", tensor, self.rank - 1, _FORM)])
        work.wait()
        numbers: list[int] = tensor.tolist()
        return numbers
