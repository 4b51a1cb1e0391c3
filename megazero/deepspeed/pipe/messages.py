"""Messages between stages: pack tuples of tensors into the one tensor that our executor sends.

A single floating-point tensor is sent as it is. All else is packed into a carrier: a flat fp32 tensor that
holds the bytes of all tensors, one after another. No arithmetic is done on a carrier, so its bits do not
change. The gradient of a carrier holds the tensors' gradients in the same way.
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

_SPEC_TAG = 1 << 20  # the tag of specs, above the tags of all messages of a step
_ALIGNED = 16  # bytes: tensors of any dtype may begin there
_DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
)


@dataclass(frozen=True)
class TensorSpec:
    """The spec of one tensor of a message.

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
        """The strides of a contiguous tensor."""
        return tuple(math.prod(self.shape[dim + 1 :]) for dim in range(len(self.shape)))

    @property
    def nbytes(self) -> int:
        """Its bytes in a carrier, padded."""
        size = math.prod(self.shape) * self.dtype.itemsize
        return -(-size // _ALIGNED) * _ALIGNED


@dataclass(frozen=True)
class MessageSpec:
    """The spec of a message: the output of one stage, and the input of the next.

    Attributes:
        items: its tensors.
        single: whether the output is a tensor, and not a tuple.
    """

    items: tuple[TensorSpec, ...]
    single: bool

    @classmethod
    def of(cls, value: object, layer: str) -> MessageSpec:
        """The spec of a stage's output.

        Args:
            value: the output.
            layer: the name of the stage's last layer, for messages.

        Raises:
            PipelineError: the output is neither a tensor nor a tuple of tensors.
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
            tuple(TensorSpec(tuple(t.shape), t.dtype, t.requires_grad) for t in tensors),
            isinstance(value, Tensor),
        )

    @property
    def plain(self) -> bool:
        """Whether the tensor is sent as it is, without a carrier."""
        return self.single and self.items[0].dtype.is_floating_point

    @property
    def boundary(self) -> Boundary:
        """The shape and dtype of the tensor that is sent."""
        if self.plain:
            return Boundary(self.items[0].shape, self.items[0].dtype)
        return Boundary((sum(item.nbytes for item in self.items) // 4,), torch.float32)

    def views(self, carrier: Tensor) -> Iterator[Tensor]:
        """The tensors in a carrier, over its memory; autograd does not treat them as views."""
        offset = carrier.storage_offset() * carrier.element_size()
        for item in self.items:
            piece = torch.empty(0, dtype=item.dtype, device=carrier.device)
            yield piece.set_(
                carrier.untyped_storage(), offset // item.dtype.itemsize, item.shape, item.strides
            )
            offset += item.nbytes

    def encode(self) -> list[int]:
        """Encode the spec as integers."""
        numbers = [int(self.single)]
        for item in self.items:
            numbers += [_DTYPES.index(item.dtype), int(item.differentiable), len(item.shape), *item.shape]
        return numbers

    @classmethod
    def decode(cls, numbers: Sequence[int]) -> MessageSpec:
        """Decode the integers of `encode`."""
        items, start = [], 1
        while start < len(numbers):
            dtype, differentiable, dims = numbers[start : start + 3]
            shape = tuple(numbers[start + 3 : start + 3 + dims])
            items.append(TensorSpec(shape, _DTYPES[dtype], bool(differentiable)))
            start += 3 + dims
        return cls(tuple(items), bool(numbers[0]))


class Unpack(torch.autograd.Function):
    """Unpack a received tensor: carrier -> (token, *tensors).

    The token is a scalar 0. `Pack` takes it as an input, so that backward always comes through here, even if
    no layer uses the tensors.
    """

    @staticmethod
    def forward(ctx: Any, carrier: Tensor, spec: MessageSpec) -> tuple[Tensor, ...]:
        ctx.spec, ctx.carrier = spec, (carrier.shape, carrier.dtype, carrier.device)
        ctx.set_materialize_grads(False)
        # `data`, because layers may change their input in place, which autograd forbids for views of a leaf.
        tensors = [carrier.data] if spec.plain else list(spec.views(carrier))
        constants = [t for t, item in zip(tensors, spec.items, strict=True) if not item.differentiable]
        ctx.mark_non_differentiable(*constants)
        return carrier.new_zeros(()), *tensors

    @staticmethod
    def backward(ctx: Any, token: Tensor | None, *grads: Tensor | None) -> tuple[Tensor, None]:
        spec: MessageSpec = ctx.spec
        shape, dtype, device = ctx.carrier
        if spec.plain and grads[0] is not None:
            return grads[0], None
        carrier = torch.zeros(shape, dtype=dtype, device=device)
        for view, grad in zip(spec.views(carrier), grads, strict=True):
            if grad is not None:
                view.copy_(grad)
        return carrier, None


class Pack(torch.autograd.Function):
    """Pack a stage's output for sending: (token, *tensors) -> carrier."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, spec: MessageSpec, *tensors: Tensor) -> Tensor:
        ctx.spec, ctx.token = spec, (token.dtype, token.device)
        if spec.plain:
            return tensors[0].contiguous().data
        shape, dtype = spec.boundary
        carrier = torch.zeros(shape, dtype=dtype, device=token.device)
        for view, tensor in zip(spec.views(carrier), tensors, strict=True):
            view.copy_(tensor)
        return carrier

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        spec: MessageSpec = ctx.spec
        dtype, device = ctx.token
        grads = [grad] if spec.plain else list(spec.views(grad))
        wanted = [g if item.differentiable else None for g, item in zip(grads, spec.items, strict=True)]
        return torch.zeros((), dtype=dtype, device=device), None, *wanted


@dataclass
class MessageSpecs:
    """The specs of a batch's messages to and from a stage, by number of micro-batch.

    Attributes:
        incoming: the messages from the previous stage.
        outgoing: the messages to the next stage.
    """

    incoming: dict[int, MessageSpec] = field(default_factory=dict)
    outgoing: dict[int, MessageSpec] = field(default_factory=dict)


class DescribingGroup(WrappingGroup):
    """The group of a pipeline's stages, which sends the spec of a message before the message.

    The receiver waits for the spec, so less communication overlaps with computation. Specs that are known
    from an earlier batch are not sent.

    Args:
        inner: the group of stages.
        device: the device of messages.
    """

    def __init__(self, inner: Group, device: torch.device):
        super().__init__(inner)
        self._device = device
        self._specs: Mapping[int, MessageSpec] = {}
        self._first_tag = 0
        self._sent: list[tuple[Work, Tensor]] = []

    def send_specs(self, specs: Mapping[int, MessageSpec], micro_batches: int) -> None:
        """From now on, send the spec of each micro-batch before its message.

        Args:
            specs: the specs by micro-batch; each must be set when its message is sent.
            micro_batches: the number of micro-batches, which determines the tags of messages.
        """
        self._specs, self._first_tag = specs, self.rank * micro_batches

    def stop_specs(self) -> None:
        """From now on, send no specs."""
        for work, _ in self._sent:
            work.wait()
        self._specs, self._sent = {}, []

    def exchange(self, transfers: Sequence[Transfer]) -> list[Work]:
        """See `Group`."""
        for transfer in transfers:
            spec = self._specs.get(transfer.tag - self._first_tag) if transfer.kind == "send" else None
            if spec is not None:
                numbers = spec.encode()
                self._send([len(numbers)], transfer.peer)
                self._send(numbers, transfer.peer)
        return self.inner.exchange(transfers)

    def receive_spec(self) -> MessageSpec:
        """Wait for the spec of the next message from the previous stage."""
        (length,) = self._receive(1)
        return MessageSpec.decode(self._receive(length))

    def _send(self, numbers: list[int], peer: int) -> None:
        tensor = torch.tensor(numbers, dtype=torch.int64, device=self._device)
        (work,) = self.inner.exchange([Transfer("send", tensor, peer, _SPEC_TAG)])
        self._sent.append((work, tensor))

    def _receive(self, length: int) -> list[int]:
        tensor = torch.empty(length, dtype=torch.int64, device=self._device)
        (work,) = self.inner.exchange([Transfer("recv", tensor, self.rank - 1, _SPEC_TAG)])
        work.wait()
        numbers: list[int] = tensor.tolist()
        return numbers
