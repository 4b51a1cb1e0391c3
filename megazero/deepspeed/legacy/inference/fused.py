"""`replace_with_kernel_inject`: megazero's operators for the norms and activations of a user's model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from megazero.ops.bias_gelu import bias_gelu
from megazero.ops.layer_norm import layer_norm
from megazero.ops.rms_norm import rms_norm

_WIDTH = 8  # of the random input on which activations are compared


class FusedRmsNorm(nn.Module):
    """RMSNorm by `rms_norm`, with the weight of the module that it replaces."""

    def __init__(self, weight: nn.Parameter, eps: float):
        super().__init__()
        self.weight, self.eps = weight, eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., h] -> [..., h]."""
        return rms_norm(x, self.weight, self.eps)


class FusedLayerNorm(nn.Module):
    """LayerNorm by `layer_norm`, with the parameters of the module that it replaces."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter, eps: float):
        super().__init__()
        self.weight, self.bias, self.eps = weight, bias, eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., h] -> [..., h]."""
        return layer_norm(x, self.weight, self.bias, self.eps)


class FusedGelu(nn.Module):
    """GELU by `bias_gelu`; the tanh approximation unless `exact`."""

    def __init__(self, exact: bool):
        super().__init__()
        self.exact = exact

    def forward(self, x: Tensor) -> Tensor:
        """Apply GELU elementwise."""
        return bias_gelu(x, None, self.exact)


@torch.no_grad()
def inject(model: nn.Module) -> Counter[str]:
    """Replace norms and activations by operators; return the number of replaced modules by class name.

    A module is replaced only if it agrees with the operator on a random input, because a class may be called
    RMSNorm and compute something else.
    """
    replaced: Counter[str] = Counter()
    for parent in list(model.modules()):
        for name, module in list(parent.named_children()):
            for candidate in _candidates(module):
                weight = next(candidate.parameters(), None)
                width = _WIDTH if weight is None else weight.shape[-1]
                if _same(module, candidate, width, next(model.parameters())):
                    parent._modules[name] = candidate.train(module.training)
                    replaced[type(candidate).__name__] += 1
                    break
    return replaced


def _candidates(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the operators that may compute the same as a module."""
    kind = type(module).__name__
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if isinstance(module, nn.LayerNorm) and module.bias is not None and len(module.normalized_shape) == 1:
        yield FusedLayerNorm(module.weight, module.bias, module.eps)
    elif kind.endswith("RMSNorm") and isinstance(weight, nn.Parameter) and isinstance(eps, float):
        yield FusedRmsNorm(weight, eps)
    elif "gelu" in kind.lower() and next(module.parameters(), None) is None:
        yield FusedGelu(False)
        yield FusedGelu(True)


def _same(one: nn.Module, other: nn.Module, width: int, like: Tensor) -> bool:
    """Whether two modules agree on a random input [3, width]; activations are compared in fp32."""
    generator = torch.Generator().manual_seed(0)
    # In half precision, exact and approximate GELU would agree.
    dtype = torch.float32 if next(one.parameters(), None) is None else like.dtype
    x = torch.randn(3, width, generator=generator).to(like.device, dtype)
    tolerance = 8 * torch.finfo(dtype).eps
    return torch.allclose(one(x), other(x), rtol=tolerance, atol=tolerance)
