"""Layers and losses tile by tile (ALST, arXiv:2506.13996), with DeepSpeed's arguments.

Backward recomputes each tile with the random numbers and the autocast dtype of its forward. The parameters
that the tiles depend on are discovered in the autograd graph, and the gradients of all tiles are summed
before they reach a parameter, so that ZeRO reduces each gradient once. If weights are sharded, all ranks must
have equally many tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import Function, once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import get_device_states, set_device_states

from megazero.errors import ConfigError
from megazero.ops.autograd import Gradients, apply
from megazero.ops.chunks import compute_dtype

Reduction = Literal["mean", "sum"] | None

IGNORED = -100
"""The label that torch's cross-entropy ignores."""


@dataclass(frozen=True)
class _Tiling:
    """A function of tiles, and how tensors are split into tiles.

    Attributes:
        of_tile: the index of a tile and its pieces of the tensors -> the tile's result.
        tiles: the number of tiles.
        dim: the dim along which tensors are split.
    """

    of_tile: Callable[[int, list[Tensor]], Tensor]
    tiles: int
    dim: int

    def pieces(self, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
        """Return the pieces of all tensors for each tile."""
        split = [x.tensor_split(self.tiles, self.dim) for x in tensors]
        return [[parts[number] for parts in split] for number in range(self.tiles)]


class _InTiles(Function):
    """Returns the given results of all tiles; backward recomputes each tile.

    `restores` reset the random generators to their states before each tile. The first `count` of `tensors`
    are the ones that are split, and the rest are the leaves that the results depend on.
    """

    @staticmethod
    def forward(
        ctx: Any,
        tiling: _Tiling,
        results: Sequence[Tensor],
        restores: Sequence[Callable[[], None]],
        count: int,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*tensors[:count])
        ctx.tiling, ctx.restores, ctx.leaves = tiling, restores, tensors[count:]
        device = tensors[0].device.type
        ctx.autocast = torch.autocast(device, enabled=torch.is_autocast_enabled(device))
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Gradients:
        tensors, leaves, tiling = ctx.saved_tensors, ctx.leaves, ctx.tiling
        needed = ctx.needs_input_grad[4 : 4 + len(tensors)]
        whole = [torch.zeros_like(x) if needs else None for x, needs in zip(tensors, needed, strict=True)]
        targets = tiling.pieces([x for x in whole if x is not None])
        sums: list[Tensor | None] = [None] * len(leaves)
        device = tensors[0].device
        with torch.random.fork_rng([device] if device.type == "cuda" else []), ctx.autocast:
            for number, pieces in enumerate(tiling.pieces(tensors)):
                ctx.restores[number]()
                tile = [x.detach().requires_grad_(needs) for x, needs in zip(pieces, needed, strict=True)]
                with torch.enable_grad():
                    out = tiling.of_tile(number, tile)
                inputs = [*leaves, *(x for x in tile if x.requires_grad)]
                tile_grads = torch.autograd.grad(out, inputs, grads[number], allow_unused=True)
                for target, grad in zip(targets[number], tile_grads[len(leaves) :], strict=True):
                    if grad is not None:
                        target.copy_(grad)
                _add(sums, tile_grads[: len(leaves)])
                del out, tile_grads  # free the memory before the next tile
        totals = [None if x is None else x.to(leaf.dtype) for x, leaf in zip(sums, leaves, strict=True)]
        return None, None, None, None, *whole, *totals


def _add(sums: list[Tensor | None], more: Sequence[Tensor | None]) -> None:
    """Add gradients to sums in fp32 (or fp64).

    The first gradient is copied, because autograd may return one tensor for two leaves, or an expanded one.
    """
    for index, grad in enumerate(more):
        total = sums[index]
        if grad is not None and total is None:
            sums[index] = grad.to(compute_dtype(grad.dtype), copy=True)
        elif grad is not None and total is not None:
            total += grad


def _restore_later(x: Tensor) -> Callable[[], None]:
    """Return a function that restores the present random states of the CPU and of the device of x."""
    cpu, devices = torch.get_rng_state(), get_device_states(x)

    def restore() -> None:
        torch.set_rng_state(cpu)
        set_device_states(*devices)

    return restore


def _leaves(out: Tensor) -> dict[int, Tensor]:
    """Return id -> leaf for the leaves that need gradients and that a result depends on."""
    leaves: dict[int, Tensor] = {}
    stack, seen = [out.grad_fn], set()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves[id(node.variable)] = node.variable
        stack += [function for function, _ in node.next_functions]
    return leaves


def _in_tiles(tiling: _Tiling, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    if not torch.is_grad_enabled():
        return tuple(tiling.of_tile(number, tile) for number, tile in enumerate(tiling.pieces(tensors)))
    results, restores = [], []
    leaves: dict[int, Tensor] = {}
    for number, pieces in enumerate(tiling.pieces([x.detach() for x in tensors])):
        restores.append(_restore_later(pieces[0]))
        with saved_tensors_hooks(lambda _: None, _refuse_backward):  # the graph serves only to find leaves
            out = tiling.of_tile(number, pieces)
        leaves |= _leaves(out)
        results.append(out.detach())
    return apply(_InTiles, tiling, results, restores, len(tensors), *tensors, *leaves.values())


def _refuse_backward(_: object) -> Tensor:
    """Raise ConfigError: a tile's forward saves no tensors for a backward inside of it."""
    raise ConfigError("`fn` must compute no gradients in its forward, but does; compute them outside of it")


def _check_tiles(field: str, tiles: int, length: int) -> None:
    if not 1 <= tiles <= length:
        raise ConfigError(
            f"`{field}` must be from 1 to the length of the sequence ({length}), but is {tiles}; change it"
        )


def sequence_tiled_compute(
    fn: Callable[..., Tensor],
    seqlen: int,
    shards: int,
    kwargs_to_shard: Mapping[str, Tensor],
    kwargs_to_pass: Mapping[str, object],
    grad_requiring_tensor_key: str,
    compute_params: Sequence[Tensor] | None = None,
    output_unshard_dimension: int = 1,
    output_reduction: Reduction = "mean",
) -> Tensor:
    """Compute `fn(**kwargs_to_shard, **kwargs_to_pass)` for one tile of the sequence at a time.

    Args:
        fn: returns a tensor with a row for each row of its arguments, or a scalar.
        seqlen: the length of the sequence.
        shards: the number of tiles, which need not be equal.
        kwargs_to_shard: tensors [batch, seqlen, ...]; those that need a gradient get one.
        kwargs_to_pass: passed whole to every call.
        grad_requiring_tensor_key: the name of one of `kwargs_to_shard`.
        compute_params: has no effect, because parameters are discovered.
        output_unshard_dimension: the dim along which results are concatenated; scalars are stacked.
        output_reduction: "mean" or "sum" over all elements of the output; None for no reduction.

    Raises:
        ConfigError: `shards` exceeds the length, a tensor has another length, the key is unknown, or a tensor
            of `kwargs_to_pass` needs a gradient.
    """
    names = list(kwargs_to_shard)
    if grad_requiring_tensor_key not in names:
        raise ConfigError(
            f"`grad_requiring_tensor_key` must be one of {', '.join(names)}, but is "
            f"{grad_requiring_tensor_key}; name a tensor of `kwargs_to_shard`"
        )
    _check_tiles("shards", shards, seqlen)
    for name, x in kwargs_to_shard.items():
        if x.dim() < 2 or x.shape[1] != seqlen:
            raise ConfigError(
                f"`kwargs_to_shard` must hold tensors [batch, seqlen, ...] of seqlen {seqlen}, but `{name}` "
                f"has shape {list(x.shape)}; pass it in `kwargs_to_pass`"
            )
    for name, value in kwargs_to_pass.items():
        if isinstance(value, Tensor) and value.grad_fn is not None:
            raise ConfigError(
                f"`kwargs_to_pass` must hold no tensor that needs a gradient, but `{name}` does; shard or "
                "detach it"
            )

    def of_tile(number: int, pieces: list[Tensor]) -> Tensor:
        return fn(**dict(zip(names, pieces, strict=True)), **kwargs_to_pass)

    results = _in_tiles(_Tiling(of_tile, shards, 1), list(kwargs_to_shard.values()))
    scalars = results[0].dim() == 0
    out = torch.stack(results) if scalars else torch.cat(results, output_unshard_dimension)
    if output_reduction is None:
        return out
    return out.mean() if output_reduction == "mean" else out.sum()


class SequenceTiledCompute:
    """`sequence_tiled_compute` with the arguments of DeepSpeed's autograd function."""

    @staticmethod
    def apply(
        fn: Callable[..., Tensor],
        seqlen: int,
        shards: int,
        keys_to_shard: Sequence[str],
        keys_to_pass: Sequence[str],
        grad_requiring_tensor_key: str,
        compute_params: Sequence[Tensor] | None,
        output_unshard_dimension: int,
        output_reduction: Reduction,
        *args: Any,
    ) -> Tensor:
        """Call `sequence_tiled_compute`; `args` are the values of `keys_to_shard`, then of `keys_to_pass`."""
        sharded = dict(zip(keys_to_shard, args[: len(keys_to_shard)], strict=True))
        passed = dict(zip(keys_to_pass, args[len(keys_to_shard) :], strict=True))
        options = (grad_requiring_tensor_key, compute_params, output_unshard_dimension, output_reduction)
        return sequence_tiled_compute(fn, seqlen, shards, sharded, passed, *options)


class TiledMLP:
    """Computes an MLP tile by tile."""

    @staticmethod
    def apply(
        fn: Callable[[nn.Module, Tensor], Tensor],
        self: nn.Module,
        x: Tensor,
        shards: int,
        compute_params: Sequence[Tensor] | None = None,
    ) -> Tensor:
        """Compute `fn(self, x)` for one tile of s at a time.

        Args:
            fn: the forward of the MLP.
            self: the MLP.
            x: [..., s, h].
            shards: the number of tiles, which need not be equal.
            compute_params: has no effect, because parameters are discovered.

        Raises:
            ConfigError: `shards` exceeds the length.
        """
        _check_tiles("shards", shards, x.shape[-2])
        return torch.cat(_in_tiles(_Tiling(lambda _, pieces: fn(self, *pieces), shards, -2), [x]), -2)


class TiledFusedLogitsLoss:
    """Computes an output layer and its loss tile by tile, so that logits are never whole."""

    @staticmethod
    def apply(
        fn: Callable[..., Tensor],
        self: nn.Module,
        x: Tensor,
        y: Tensor,
        mask: Tensor | None,
        shards: int,
        compute_params: Sequence[Tensor] | None = None,
        output_reduction: Reduction = "mean",
    ) -> Tensor:
        """Compute the loss of x against y for one tile of s at a time.

        A token counts unless its label is -100 or the mask is 0. The mean is over all tokens that count,
        however they are spread over the tiles; it is 0 without any.

        Args:
            fn: `fn(self, x, y)`, or `fn(self, x, y, mask)` with a mask: returns the scalar loss of a tile, by
                `output_reduction` the mean or the sum over its tokens that count.
            self: passed to `fn`.
            x: hidden states [batch, s, ...].
            y: labels [batch, s].
            mask: [batch, s], nonzero for tokens that count; None for all.
            shards: the number of tiles, which need not be equal.
            compute_params: has no effect, because parameters are discovered.
            output_reduction: "mean" or "sum".

        Raises:
            ConfigError: `shards` exceeds the length, or the reduction is unknown.
        """
        _check_tiles("shards", shards, x.shape[1])
        if output_reduction not in ("mean", "sum"):
            raise ConfigError(
                f"`output_reduction` must be mean or sum, but is {output_reduction}; choose one of them"
            )
        counts = y != IGNORED if mask is None else (y != IGNORED) & mask.bool()
        counted = torch.stack([part.sum() for part in counts.tensor_split(shards, 1)])

        def of_tile(number: int, pieces: list[Tensor]) -> Tensor:
            rows, target, *masks = pieces
            # The mean over no token is NaN, and so are its gradients. All ranks must call `fn`, because they
            # gather weights together, so a tile without tokens that count gets one, whose loss has weight 0.
            dummy = torch.zeros(target.shape, dtype=torch.bool, device=target.device)
            dummy[:1, :1] = counted[number] == 0
            masks = [torch.where(dummy, 1, part) for part in masks]
            return fn(self, rows, target.masked_fill(dummy, 0), *masks)

        tensors = [x, y] if mask is None else [x, y, mask]
        losses = torch.stack(_in_tiles(_Tiling(of_tile, shards, 1), tensors))
        weights = counted if output_reduction == "mean" else counted > 0
        total = counted.sum().clamp(min=1) if output_reduction == "mean" else 1
        return (losses * weights.to(losses.dtype)).sum() / total
