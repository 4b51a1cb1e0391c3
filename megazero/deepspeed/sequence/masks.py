"""Masks of a shared sequence: a model asks for that of its own piece, and gets that of the whole.

transformers' models describe a mask by functions of places, and their documents by positions that start anew.
Both are read here, and the mask of the whole sequence is made by transformers' own function, as on one rank.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from megazero.deepspeed.sequence.pieces import check_pieces
from megazero.errors import ConfigError
from megazero.layers.collectives import gather_rows
from megazero.mpu.group import Group

_RULES = "transformers.masking_utils"
_REMEDY = "take the model's mask away, or train it without sharing sequences"


@dataclass
class Whole:
    """Restrictions of a whole sequence.

    Attributes:
        positions: int [b, s].
        mask: as the attention of one rank takes it; None for causality alone.
    """

    positions: Tensor
    mask: Any


@dataclass(eq=False)
class PieceMask:
    """The mask that a model has asked for, in place of one.

    Attributes:
        make: transformers' function for the attention that is used.
        asked: its arguments, for this rank's piece.
    """

    make: Callable[..., Any]
    asked: dict[str, Any]
    _whole: Whole | None = field(default=None, repr=False)

    @cached_property
    def of_piece(self) -> Any:
        """The mask that the model would have got of transformers."""
        return self.make(**self.asked)

    def whole(self, positions: Tensor, group: Group) -> Whole:
        """The same for all layers of a pass: the first one gathers what the mask is made of.

        Args:
            positions: int [b, s/p] or [1, s/p].
            group: the ranks that share the sequence; each calls this.

        Raises:
            ConfigError: the mask is of a kind that cannot be made of pieces, or keys are kept in a cache; see
                `gather_positions`.
        """
        if self._whole is None:
            window = self._window()
            every = gather_positions(positions, self.asked["batch_size"], group)
            padding = self.asked.get("attention_mask")
            # Ranks agree on whether there is padding: a loader gives them pieces of the same tensors.
            padding = None if padding is None else gather_columns(padding, group)
            self._whole = Whole(every, self._make(every, padding, window))
        return self._whole

    def _window(self) -> int | None:
        queries, keys = self.asked["q_length"], self.asked["kv_length"]
        if queries != keys:
            raise ConfigError(
                f"`past_key_values` must be empty where ranks share a sequence, but there are {keys} keys "
                f"for {queries} queries; generate without sharing sequences"
            )
        if self.asked.get("use_vmap"):
            raise _unknown("or_mask_function or and_mask_function")
        return min(_windows(self.asked["mask_function"]), default=None)

    def _make(self, positions: Tensor, padding: Tensor | None, window: int | None) -> Any:
        length, documents = positions.shape[1], documents_of(positions)
        asked = {
            **self.asked,
            "q_length": length,
            "kv_length": length,
            "attention_mask": padding,
            "mask_function": rule(window, documents),
            "allow_is_causal_skip": documents is None,
        }
        return self.make(**asked)


def rule(window: int | None, documents: Tensor | None) -> Callable[..., Tensor]:
    """Whether a query may attend to a key, as transformers asks: by sample, head, query and key.

    Args:
        window: the most keys of a query, its own included.
        documents: int [b, s].
    """

    def allowed(sample: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        answer = key <= query
        if window is not None:
            answer = answer & (query - key < window)
        if documents is not None:
            answer = answer & (documents[sample, query] == documents[sample, key])
        return answer

    return allowed


def documents_of(positions: Tensor) -> Tensor | None:
    """[b, s], which document a position belongs to: one begins where they do not go on; None if all do."""
    breaks = torch.diff(positions, prepend=positions[:, :1] - 1) != 1
    return breaks.cumsum(-1) if bool(breaks.any()) else None


def gather_positions(positions: Tensor, batch: int, group: Group) -> Tensor:
    """The positions of whole sequences [b, s], from [b, s/p] or [1, s/p].

    Raises:
        ConfigError: pieces differ in length, positions are no matrix, or each piece counts from 0, which are
            a model's own positions, as it makes them if it is not given any.
    """
    if positions.dim() != 2:
        raise ConfigError(
            f"`position_ids` must be [b, s] where ranks share a sequence, but have {positions.dim()} dims; "
            "train the model without sharing sequences"
        )
    check_pieces(positions.t(), group)
    every = gather_columns(positions.expand(batch, -1), group)
    count = torch.arange(positions.shape[1], device=positions.device)
    pieces = every.unflatten(1, (group.size, -1))
    if group.size > 1 and bool((pieces == count).all()):
        raise ConfigError(
            f"`position_ids` must count through the whole sequence, but start at 0 in each of its "
            f"{group.size} pieces; pass the model this rank's piece of them, as `UlyssesSPDataLoaderAdapter` "
            "makes it"
        )
    return every


def gather_columns(x: Tensor, group: Group) -> Tensor:
    """[b, s/p] of each rank -> [b, s]."""
    return gather_rows(x.t(), group).t().contiguous()


def _windows(function: Callable[..., Any]) -> Iterator[int]:
    """The windows in a mask function of transformers that is causal, by document or not."""
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
