"""`LayerSpec`: a description of a layer, which only the stage that holds the layer builds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from megazero.errors import ConfigError, MegazeroError


class PipelineError(MegazeroError):
    """A use of a pipeline that only a whole model allows."""


class LayerSpec:
    """A module's class and its arguments.

    Args:
        typename: the class.
        *module_args: its arguments.
        **module_kwargs: its arguments by name.

    Raises:
        ConfigError: `typename` is no class of modules.
    """

    def __init__(self, typename: type[nn.Module], *module_args: object, **module_kwargs: object):
        if not (isinstance(typename, type) and issubclass(typename, nn.Module)):
            raise ConfigError(
                f"`typename` must be a class of torch.nn.Module, but is {typename!r}; pass the class and its "
                "arguments after it, or put a function into `layers` as it is"
            )
        self.typename = typename
        self.module_args, self.module_kwargs = module_args, module_kwargs

    def __repr__(self) -> str:
        return f"{self.typename.__name__}({self.module_args!r}, {self.module_kwargs!r})"

    def build(self, log: bool = False) -> nn.Module:
        """Build the module; `log` prints what is built."""
        if log:
            print(f"building {self!r}", flush=True)
        return self.typename(*self.module_args, **self.module_kwargs)


class TiedLayerSpec(LayerSpec):
    """A layer that shares its weights with every other layer of the same key.

    Each stage that uses it holds a copy; the copies are always equal.

    Args:
        key: the name of the weights, as in ``tied_modules.KEY``.
        typename: the class.
        *module_args: its arguments; the stage's first layer with this key determines them.
        **module_kwargs: its arguments by name.
        forward_fn: called with the module and the input, instead of the module's forward.
        tied_weight_attr: names of weights that `tied_comms` lists, such as ``weight`` or ``norm.weight``; all
            weights of the module are tied.
    """

    def __init__(
        self,
        key: str,
        typename: type[nn.Module],
        *module_args: object,
        forward_fn: Callable[[Any, Any], object] | None = None,
        tied_weight_attr: str | Sequence[str] = ("weight",),
        **module_kwargs: object,
    ):
        super().__init__(typename, *module_args, **module_kwargs)
        self.key = key
        self.forward_fn = forward_fn
        self.tied_weight_attr = (
            [tied_weight_attr] if isinstance(tied_weight_attr, str) else list(tied_weight_attr)
        )


Layer = LayerSpec | nn.Module | Callable[..., object]
"""A layer of a pipeline: a spec, a module, or a function."""


def name_of(layer: object) -> str | None:
    """The name of a layer's class, or of a function; None if it has none."""
    if isinstance(layer, LayerSpec):
        return layer.typename.__name__
    if isinstance(layer, nn.Module):
        return type(layer).__name__
    name: str | None = getattr(layer, "__name__", None)
    return name


def trained_parameters(layer: object) -> int:
    """The number of trained parameters of a layer; a spec is built to count them, as in DeepSpeed."""
    built = layer.build() if isinstance(layer, LayerSpec) else layer
    if not isinstance(built, nn.Module):
        return 0
    return sum(param.numel() for param in built.parameters() if param.requires_grad)
