"""Layers and losses tile by tile (ALST, arXiv:2506.13996), with DeepSpeed's arguments.

Backward computes each tile again, with the random numbers and the types that forward had for it. Parameters
need not be named: those that the tiles' results depend on are looked for in their graphs. Each gets the sum
of its tiles' gradients at once, so that ZeRO reduces it once. Where weights are sharded, all ranks must have
as many tiles.
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
"""The label that torch's cross-entropy leaves out."""


@dataclass(frozen=True)
class _Tiling:
    """How tensors are cut, and what is computed of a tile.

    Attributes:
        of_tile: the number of a tile and its pieces of the tensors -> its result.
        tiles: the number of tiles.
        dim: the dim of the tensors that is cut.
    """

    of_tile: Callable[[int, list[Tensor]], Tensor]
    tiles: int
    dim: int

    def pieces(self, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
        """The pieces of all tensors, tile after tile."""
        cut = [x.tensor_split(self.tiles, self.dim) for x in tensors]
        return [[parts[number] for parts in cut] for number in range(self.tiles)]


class _InTiles(Function):
    """The results of all tiles, which are given; backward computes each again.

    `restores` let the generators draw what they drew for a tile. `tensors` are so many that are `cut`, which
    it saves, then the leaves that results depend on.
    """

    @staticmethod
    def forward(
        ctx: Any,
        tiling: _Tiling,
        results: Sequence[Tensor],
        restores: Sequence[Callable[[], None]],
        cut: int,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*tensors[:cut])
        ctx.tiling, ctx.restores, ctx.leaves = tiling, restores, tensors[cut:]
        kind = tensors[0].device.type
        ctx.autocast = torch.autocast(kind, enabled=torch.is_autocast_enabled(kind))
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Gradients:
        tensors, leaves, tiling = ctx.saved_tensors, ctx.leaves, ctx.tiling
        learns = ctx.needs_input_grad[4 : 4 + len(tensors)]
        whole = [torch.zeros_like(x) if wanted else None for x, wanted in zip(tensors, learns, strict=True)]
        into = tiling.pieces([x for x in whole if x is not None])
        sums: list[Tensor | None] = [None] * len(leaves)
        device = tensors[0].device
        with torch.random.fork_rng([device] if device.type == "cuda" else []), ctx.autocast:
            for number, pieces in enumerate(tiling.pieces(tensors)):
                ctx.restores[number]()
                own = [x.detach().requires_grad_(w) for x, w in zip(pieces, learns, strict=True)]
                with torch.enable_grad():
                    out = tiling.of_tile(number, own)
                inputs = [*leaves, *(x for x in own if x.requires_grad)]
                made = torch.autograd.grad(out, inputs, grads[number], allow_unused=True)
                for place, grad in zip(into[number], made[len(leaves) :], strict=True):
                    if grad is not None:
                        place.copy_(grad)
                _add(sums, made[: len(leaves)])
                del out, made  # before the next tile has its own
        totals = [None if x is None else x.to(leaf.dtype) for x, leaf in zip(sums, leaves, strict=True)]
        return None, None, None, None, *whole, *totals


def _add(sums: list[Tensor | None], more: Sequence[Tensor | None]) -> None:
    """Add up gradients of tiles in fp32 (or fp64), in memory of their own.

    Autograd may hand out one tensor as the gradient of two leaves, or an expanded one.
    """
    for place, grad in enumerate(more):
        total = sums[place]
        if grad is not None and total is None:
            sums[place] = grad.to(compute_dtype(grad.dtype), copy=True)
        elif grad is not None and total is not None:
            total += grad


def _noted(x: Tensor) -> Callable[[], None]:
    """Note the states of torch's generators, on the CPU and on the device of x; the result restores them."""
    cpu, devices = torch.get_rng_state(), get_device_states(x)

    def restore() -> None:
        torch.set_rng_state(cpu)
        set_device_states(*devices)

    return restore


def _leaves(out: Tensor) -> dict[int, Tensor]:
    """The leaves that need a gradient and that a result depends on, by their ids."""
    leaves: dict[int, Tensor] = {}
    stack, seen = [out.grad_fn], set()
    while stack:
        node: Any = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves[id(node.variable)] = node.variable
        stack += [following for following, _ in node.next_functions]
    return leaves


def _in_tiles(tiling: _Tiling, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    if not torch.is_grad_enabled():
        return tuple(tiling.of_tile(number, tile) for number, tile in enumerate(tiling.pieces(tensors)))
    results, restores = [], []
    leaves: dict[int, Tensor] = {}
    for number, pieces in enumerate(tiling.pieces([x.detach() for x in tensors])):
        restores.append(_noted(pieces[0]))
        with saved_tensors_hooks(lambda _: None, _not_kept):  # only the leaves of the graph are of use
            out = tiling.of_tile(number, pieces)
        leaves |= _leaves(out)
        results.append(out.detach())
    return apply(_InTiles, tiling, results, restores, len(tensors), *tensors, *leaves.values())


def _not_kept(_: Any) -> Tensor:
    """Refuse a backward within a tile's forward, which keeps nothing for one."""
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
    kwargs_to_pass: Mapping[str, Any],
    grad_requiring_tensor_key: str,
    compute_params: Sequence[Tensor] | None = None,
    output_unshard_dimension: int = 1,
    output_reduction: Reduction = "mean",
) -> Tensor:
    """`fn(**kwargs_to_shard, **kwargs_to_pass)`, computed for a part of the sequence at a time.

    Args:
        fn: computes a tensor, whose rows follow those of its arguments; or a scalar.
        seqlen: the length of the sequence.
        shards: the number of parts; they need not be equal.
        kwargs_to_shard: tensors [batch, seqlen, ...], each of which gets its gradient if it needs one.
        kwargs_to_pass: what every call gets as it is.
        grad_requiring_tensor_key: the name of one of `kwargs_to_shard`.
        compute_params: not needed; parameters are found.
        output_unshard_dimension: the dim along which results are put together; scalars are stacked.
        output_reduction: "mean" or "sum" over all elements of that; None for it as it is.

    Raises:
        ConfigError: `shards` does not suit the length, a tensor has another length, the key is unknown, or a
            tensor that is not sharded needs a gradient.
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
    """`sequence_tiled_compute` with its tensors one by one, as DeepSpeed's Function takes them."""

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
        """The same; `args` are the values of `keys_to_shard`, then those of `keys_to_pass`."""
        cut = dict(zip(keys_to_shard, args[: len(keys_to_shard)], strict=True))
        passed = dict(zip(keys_to_pass, args[len(keys_to_shard) :], strict=True))
        how = (grad_requiring_tensor_key, compute_params, output_unshard_dimension, output_reduction)
        return sequence_tiled_compute(fn, seqlen, shards, cut, passed, *how)


class TiledMLP:
    """An MLP, tile by tile."""

    @staticmethod
    def apply(
        fn: Callable[[nn.Module, Tensor], Tensor],
        self: nn.Module,
        x: Tensor,
        shards: int,
        compute_params: Sequence[Tensor] | None = None,
    ) -> Tensor:
        """`fn(self, x)` for x [..., s, h], computed for a part of s at a time.

        Args:
            fn: the forward of the MLP.
            self: the MLP.
            x: its input.
            shards: the number of parts; they need not be equal.
            compute_params: not needed; parameters are found.

        Raises:
            ConfigError: `shards` does not suit the length.
        """
        _check_tiles("shards", shards, x.shape[-2])
        return torch.cat(_in_tiles(_Tiling(lambda _, pieces: fn(self, *pieces), shards, -2), [x]), -2)


class TiledFusedLogitsLoss:
    """A head and its loss, tile by tile: the logits are never whole."""

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
        """The loss of x [batch, s, ...] against y [batch, s], computed for a part of s at a time.

        Its gradient is that of the loss for the head and for x alike, whatever the loss is multiplied by. The
        mean is that over all tokens that count, however they lie in the parts; 0 if none does. A token counts
        unless its label is -100 or the mask leaves it out.

        Args:
            fn: `fn(self, x, y)`, or `fn(self, x, y, mask)` with a mask, of a part -> its loss, a scalar: by
                `output_reduction` the mean over its tokens that count, or their sum.
            self: handed to `fn`.
            x: hidden states.
            y: labels.
            mask: [batch, s], not 0 for the tokens that `fn` counts; None for all.
            shards: the number of parts; they need not be equal.
            compute_params: not needed; parameters are found.
            output_reduction: "mean" or "sum".

        Raises:
            ConfigError: `shards` does not suit the length, or the reduction is another one.
        """
        _check_tiles("shards", shards, x.shape[1])
        if output_reduction not in ("mean", "sum"):
            raise ConfigError(
                f"`output_reduction` must be mean or sum, but is {output_reduction}; choose one of them"
            )
        counts = y != IGNORED if mask is None else (y != IGNORED) & mask.bool()
        counted = torch.stack([part.sum() for part in counts.tensor_split(shards, 1)])

        def of_tile(number: int, pieces: list[Tensor]) -> Tensor:
            rows, target, *chosen = pieces
            # Of no token a mean is NaN, and so are gradients. Ranks that gather weights must all call `fn`,
            # so one token counts, and then weighs nothing.
            made_up = torch.zeros(target.shape, dtype=torch.bool, device=target.device)
            made_up[:1, :1] = counted[number] == 0
            chosen = [torch.where(made_up, 1, part) for part in chosen]
            return fn(self, rows, target.masked_fill(made_up, 0), *chosen)

        tensors = [x, y] if mask is None else [x, y, mask]
        losses = torch.stack(_in_tiles(_Tiling(of_tile, shards, 1), tensors))
        weights = counted if output_reduction == "mean" else counted > 0
        total = counted.sum().clamp(min=1) if output_reduction == "mean" else 1
        return (losses * weights.to(losses.dtype)).sum() / total
