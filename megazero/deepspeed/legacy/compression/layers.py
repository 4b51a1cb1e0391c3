"""Linear layers, convolutions and embeddings that compute with compressed weights."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megazero.deepspeed.legacy.compression.prune import Pruning
from megazero.deepspeed.legacy.compression.quantize import ActivationQuantizer, WeightQuantizer


class Treatment(nn.Module):
    """The compression techniques of one layer; keys of checkpoints contain its name, `treatment`.

    Attributes:
        step: the number of optimizer steps so far.
        offsets: technique -> the step at which it starts.
        weights: quantizes the weight; None for no quantization.
        inputs: quantizes the inputs; None for no quantization.
        prunings: technique -> its `Pruning`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.step = 0
        self.offsets: dict[str, int] = {}
        self.weights: WeightQuantizer | None = None
        self.inputs: ActivationQuantizer | None = None
        self.prunings = nn.ModuleDict()

    def weight(self, weight: Tensor) -> Tensor:
        """Return the quantized and masked weight."""
        steps = self.step - self.offsets.get("weight_quantization", 0)
        if self.weights is not None and steps >= 0:
            weight = self.weights(weight, steps)
        for pruning in self.active():
            weight = weight * pruning.mask_for(weight)
        return weight

    def bias(self, bias: Tensor | None) -> Tensor | None:
        """Return the masked bias."""
        for pruning in self.active():
            if bias is not None and pruning.drops_outputs:
                bias = bias * pruning.kept()
        return bias

    def input(self, x: Tensor, first_dim: int = -1) -> Tensor:
        """Return the quantized input; see `ActivationQuantizer`."""
        if self.inputs is None or self.step < self.offsets["activation_quantization"]:
            return x
        result: Tensor = self.inputs(x, first_dim)
        return result

    def active(self) -> Iterator[Pruning]:
        """Yield the prunings that have started."""
        for name, pruning in self.prunings.items():
            if self.step >= self.offsets[name]:
                assert isinstance(pruning, Pruning)
                yield pruning

    @property
    def is_empty(self) -> bool:
        """Whether the layer has no techniques."""
        return self.weights is None and self.inputs is None and not self.prunings


class CompressedLinear(nn.Linear):
    """A linear layer with compressed weights."""

    treatment: Treatment

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., in] to [..., out]."""
        treatment = self.treatment
        weight, bias = treatment.weight(self.weight), treatment.bias(self.bias)
        return F.linear(treatment.input(x), weight, bias)


class CompressedConv2d(nn.Conv2d):
    """A convolution with compressed weights."""

    treatment: Treatment

    def forward(self, x: Tensor) -> Tensor:
        """Map [b, in, height, width] to [b, out, ...]."""
        treatment = self.treatment
        weight, bias = treatment.weight(self.weight), treatment.bias(self.bias)
        result: Tensor = self._conv_forward(treatment.input(x, 1), weight, bias)
        return result


class CompressedEmbedding(nn.Embedding):
    """An embedding with compressed weights; each row is quantized by itself."""

    treatment: Treatment

    def forward(self, ids: Tensor) -> Tensor:
        """Map ids [...] to [..., h]."""
        weight = self.treatment.weight(self.weight)
        return F.embedding(ids, weight, self.padding_idx, self.max_norm, self.norm_type)


class _MaskedNorm:
    """A batch norm that zeroes the channels that are pruned in the layer before it.

    Its shift would turn pruned channels into constants, which a cleaned model lacks.
    """

    treatment: Treatment

    def forward(self, x: Tensor) -> Tensor:
        """Map [b, channels, ...] to the same shape."""
        out: Tensor = super().forward(x)  # type: ignore[misc]
        for pruning in self.treatment.active():
            out = out * pruning.kept().view(-1, *[1] * (x.dim() - 2))
        return out


class MaskedBatchNorm1d(_MaskedNorm, nn.BatchNorm1d):
    """A batch norm after a linear layer whose outputs are pruned."""


class MaskedBatchNorm2d(_MaskedNorm, nn.BatchNorm2d):
    """A batch norm after a convolution whose channels are pruned."""


CompressedLayer = (
    CompressedLinear | CompressedConv2d | CompressedEmbedding | MaskedBatchNorm1d | MaskedBatchNorm2d
)
_NORMS: tuple[type[nn.Module], ...] = (nn.BatchNorm1d, nn.BatchNorm2d)
_PLAIN: tuple[type[nn.Module], ...] = (nn.Linear, nn.Conv2d, nn.Embedding, *_NORMS)
_COMPRESSED: tuple[type[CompressedLayer], ...] = (
    CompressedLinear,
    CompressedConv2d,
    CompressedEmbedding,
    MaskedBatchNorm1d,
    MaskedBatchNorm2d,
)


def can_compress(module: nn.Module) -> bool:
    """Whether the module is a linear layer, a convolution or an embedding, compressed or torch's own."""
    return type(module) in (*_PLAIN[:3], *_COMPRESSED[:3])


def can_shrink(module: nn.Module) -> bool:
    """Whether the module can lose inputs: one that can be compressed, or a batch norm."""
    return type(module) in (*_PLAIN, *_COMPRESSED)


def is_norm(module: nn.Module) -> bool:
    """Whether the module is a batch norm."""
    return isinstance(module, _NORMS)


def compress_layer(module: nn.Module) -> CompressedLayer:
    """Turn one of torch's layers into a compressed layer, in place, unless it already is one."""
    if type(module) in _PLAIN:
        module.__class__ = _COMPRESSED[_PLAIN.index(type(module))]
        module.add_module("treatment", Treatment().train(module.training))
    assert isinstance(module, _COMPRESSED)
    return module


def release_layer(module: nn.Module) -> None:
    """Turn a compressed layer without techniques into one of torch's again, in place."""
    assert isinstance(module, _COMPRESSED)
    if module.treatment.is_empty:
        del module.treatment
        layer: nn.Module = module
        layer.__class__ = _PLAIN[_COMPRESSED.index(type(module))]


@torch.no_grad()
def shrink(module: nn.Module, dim: int, kept: Tensor) -> None:
    """Remove outputs or inputs of a linear layer or convolution, or channels of a batch norm.

    Args:
        module: the layer.
        dim: 0 for outputs, 1 for inputs.
        kept: bool, True for each feature that stays.
    """
    numbers = kept.nonzero().squeeze(1)
    if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d)):
        for name, param in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(param[numbers.to(param.device)], param.requires_grad))
        for name in ("running_mean", "running_var"):
            if (statistic := getattr(module, name)) is not None:
                setattr(module, name, statistic[numbers.to(statistic.device)])
        module.num_features = len(numbers)
        return
    assert isinstance(module, (nn.Linear, nn.Conv2d))
    numbers = numbers.to(module.weight.device)
    module.weight = nn.Parameter(module.weight.index_select(dim, numbers), module.weight.requires_grad)
    if dim == 0 and module.bias is not None:
        module.bias = nn.Parameter(module.bias[numbers], module.bias.requires_grad)
    kind = "features" if isinstance(module, nn.Linear) else "channels"
    setattr(module, f"{('out', 'in')[dim]}_{kind}", len(numbers))
