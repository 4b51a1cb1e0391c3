"""Masks of a shared sequence: a model asks for the mask of its piece, and attention needs the whole one.

Models of transformers describe a mask by functions of positions, and documents by positions that restart.
From both, transformers' own function makes the mask of the whole sequence, as on one rank.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from megazero.deepspeed.sequence.layer import check_pieces
from megazero.errors import ConfigError
from megazero.layers.collectives import gather_rows
from megazero.mpu.group import Group

_RULES = "transformers.masking_utils"
_REMEDY = "take the model's mask away, or train it without sharing sequences"


@dataclass
class WholeMask:
    """The positions and the mask of a whole sequence.

    Attributes:
        positions: int [b, s].
        mask: the mask for the attention function; None for causal attention.
    """

    positions: Tensor
    mask: object


@dataclass(eq=False)
class PieceMask:
    """A mask that a model has asked for, not yet made.

    Attributes:
        make: transformers' mask function of the attention.
        arguments: the function's arguments for this rank's piece.
    """

    make: Callable[..., object]
    arguments: dict[str, Any]
    _whole: WholeMask | None = field(default=None, repr=False)

    @cached_property
    def of_piece(self) -> object:
        """The mask of this rank's piece."""
        return self.make(**self.arguments)

    def whole(self, positions: Tensor, group: Group) -> WholeMask:
        """Gather the mask of the whole sequence; all layers of a forward share the result.

        Args:
            positions: int [b, s/p] or [1, s/p].
            group: the ranks that share the sequence, all of which call this.

        Raises:
            ConfigError: the mask is of another kind than causal, or there is a cache; or see
                `gather_positions`.
        """
        if self._whole is None:
            window = self._window()
            gathered = gather_positions(positions, self.arguments["batch_size"], group)
            padding = self.arguments.get("attention_mask")
            # Ranks agree on whether there is padding: a loader gives them pieces of the same tensors.
            padding = None if padding is None else gather_columns(padding, group)
            self._whole = WholeMask(gathered, self._make(gathered, padding, window))
        return self._whole

    def _window(self) -> int | None:
        """Return the sliding window of the mask; None without one."""
        queries, keys = self.arguments["q_length"], self.arguments["kv_length"]
        if queries != keys:
            raise ConfigError(
                f"`past_key_values` must be empty where ranks share a sequence, but there are {keys} keys "
                f"for {queries} queries; generate without sharing sequences"
            )
        if self.arguments.get("use_vmap"):
            raise _unknown("or_mask_function or and_mask_function")
        return min(_windows(self.arguments["mask_function"]), default=None)

    def _make(self, positions: Tensor, padding: Tensor | None, window: int | None) -> object:
        length, documents = positions.shape[1], documents_of(positions)
        arguments = {
            **self.arguments,
            "q_length": length,
            "kv_length": length,
            "attention_mask": padding,
            "mask_function": rule(window, documents),
            "allow_is_causal_skip": documents is None,
        }
        return self.make(**arguments)


def rule(window: int | None, documents: Tensor | None) -> Callable[..., Tensor]:
    """Return a mask function of transformers: (sample, head, query, key) -> whether the key is visible.

    Args:
        window: the size of the sliding window; None for no window.
        documents: int [b, s], the document of each position; None for one document.
    """

    def allowed(sample: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        visible = key <= query
        if window is not None:
            visible = visible & (query - key < window)
        if documents is not None:
            visible = visible & (documents[sample, query] == documents[sample, key])
        return visible

    return allowed


def documents_of(positions: Tensor) -> Tensor | None:
    """Return the document of each position, int [b, s]: one starts wherever positions do not increase by 1.

    Return None if every sequence is one document.
    """
    breaks = torch.diff(positions, prepend=positions[:, :1] - 1) != 1
    return breaks.cumsum(-1) if bool(breaks.any()) else None


def gather_positions(positions: Tensor, batch: int, group: Group) -> Tensor:
    """Gather the positions of whole sequences [b, s] from [b, s/p] or [1, s/p].

    Raises:
        ConfigError: pieces differ in length, positions have another shape, or count from 0 in each piece, as
            a model's default positions do.
    """
    if positions.dim() != 2:
        raise ConfigError(
            f"`position_ids` must be [b, s] where ranks share a sequence, but have {positions.dim()} dims; "
            "train the model without sharing sequences"
        )
    check_pieces(positions.t(), group)
    gathered = gather_columns(positions.expand(batch, -1), group)
    count = torch.arange(positions.shape[1], device=positions.device)
    pieces = gathered.unflatten(1, (group.size, -1))
    if group.size > 1 and bool((pieces == count).all()):
        raise ConfigError(
            f"`position_ids` must count through the whole sequence, but start at 0 in each of its "
            f"{group.size} pieces; pass the model this rank's piece of them, as `UlyssesSPDataLoaderAdapter` "
            "makes it"
        )
    return gathered


def gather_columns(x: Tensor, group: Group) -> Tensor:
    """Gather [b, s/p] of each rank to [b, s]."""
    return gather_rows(x.t(), group).t().contiguous()


def _windows(function: Callable[..., object]) -> Iterator[int]:
    """Yield the sliding windows in a mask function of transformers.

    Raises:
        ConfigError: the function is not made of causal masks, windows and documents.
    """
    if not inspect.isfunction(function):
        raise _unknown(type(function).__name__)
    name = f"{function.__module__}.{function.__qualname__}"
    inside = inspect.getclosurevars(function).nonlocals
    if name == f"{_RULES}.and_masks.<locals>.and_mask":
        for part in inside["mask_functions"]:
            yield from _windows(part)
    elif name == f"{_RULES}.remap_positions_for_packed_sequence.<locals>.inner_mask":
        yield from _windows(inside["mask_function"])
    elif name == f"{_RULES}.sliding_window_overlay.<locals>.inner_mask":
        yield inside["sliding_window"]
    elif name not in (
        f"{_RULES}.causal_mask_function",
        f"{_RULES}.packed_sequence_mask_function.<locals>.inner_mask",
    ):
        raise _unknown(name.removeprefix(f"{_RULES}.").partition(".")[0])


def _unknown(name: str) -> ConfigError:
    return ConfigError(
        f"`attention_mask` must be causal, with a window or documents, where ranks share a sequence, but the "
        f"model asks for {name}; {_REMEDY}"
    )
