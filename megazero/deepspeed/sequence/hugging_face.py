"""Ulysses for models of transformers (ALST, arXiv:2506.13996): their attention is exchanged in its table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from megazero.deepspeed.comm.groups import logged_group
from megazero.deepspeed.sequence.masks import PieceMask, documents_of, gather_positions
from megazero.deepspeed.sequence.state import SequenceMpu, initialize_sequence_parallel
from megazero.errors import ConfigError
from megazero.layers.context.heads import HeadPlan, exchange_heads, return_heads
from megazero.mpu.group import Group

# What these say is about a piece, or about all heads, and nothing here makes it of the whole.
_REFUSED = ("position_bias", "cu_seq_lens_q", "cu_seq_lens_k", "cache")


class UlyssesSPAttentionHF:
    """An attention of transformers, for whole sequences, on ranks that hold a piece of each.

    Attributes:
        attn: the attention of transformers, called with all rows of this rank's heads.
        group: the ranks that share a sequence.
        seq_length: the length of all sequences; None if it varies.
        disable_in_eval: whether modules that are not in training attend to their piece alone.
    """

    def __init__(self, attn: Callable[..., Any], group: Group, seq_length: int | None, disable_in_eval: bool):
        self.attn, self.group = attn, group
        self.seq_length, self.disable_in_eval = seq_length, disable_in_eval

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Any]:
        """The attention of this rank's piece, [b, s/p, n, d], and what else the attention returns.

        Args:
            module: the layer; for the call, it has as many query heads to a key's head as it is given.
            query: [b, n, s/p, d].
            key, value: [b, g, s/p, d].
            attention_mask: a `PieceMask`, or None from a model that asks for no mask.
            args: go to the attention.
            kwargs: go to it, with the positions of the whole sequence in place of the piece's.

        Raises:
            ConfigError: the mask or an argument is of a piece alone, positions are missing or those of a
                piece, or the sequence has another length than was promised.
        """
        if self.disable_in_eval and not module.training:
            mask = attention_mask.of_piece if isinstance(attention_mask, PieceMask) else attention_mask
            result: tuple[Tensor, Any] = self.attn(module, query, key, value, mask, *args, **kwargs)
            return result
        kwargs["position_ids"], mask = self._whole(module, query, attention_mask, kwargs)
        plan = HeadPlan(query.shape[1], key.shape[1], self.group.size, self.group.rank)
        if kwargs.get("s_aux") is not None:  # a score of its own for each head
            own = plan.queries[plan.rank]
            kwargs["s_aux"] = kwargs["s_aux"][own.start : own.stop]
        q, k, v = (x.permute(2, 0, 1, 3) for x in (query, key, value))
        q, k, v = (x.permute(1, 2, 0, 3) for x in exchange_heads(q, k, v, plan, self.group))
        together = vars(module).get("num_key_value_groups")
        if together is not None:
            module.num_key_value_groups = q.shape[1] // k.shape[1]  # type: ignore[assignment]  # a number
        try:
            context, weights = self.attn(module, q, k, v, mask, *args, **kwargs)
        finally:
            if together is not None:
                module.num_key_value_groups = together
        piece = return_heads(context.transpose(0, 1).flatten(2), plan, self.group)
        return piece.transpose(0, 1).unflatten(2, (query.shape[1], -1)), weights

    def _whole(
        self, module: nn.Module, query: Tensor, mask: Any, kwargs: dict[str, Any]
    ) -> tuple[Tensor, Any]:
        """The positions and the mask of the whole sequence."""
        for name in _REFUSED:
            if kwargs.get(name) is not None:
                raise ConfigError(
                    f"`{name}` must be left out where ranks share a sequence, but {type(module).__name__} "
                    "gets it; documents begin where `position_ids` start anew"
                )
        if kwargs.get("position_ids") is None:
            raise ConfigError(
                f"`position_ids` must reach the attention where ranks share a sequence, but "
                f"{type(module).__name__} does not pass them on; use an attention under another name for it"
            )
        if isinstance(mask, PieceMask):
            whole = mask.whole(kwargs["position_ids"], self.group)
            positions, mask = whole.positions, whole.mask
        elif mask is None:
            positions = gather_positions(kwargs["position_ids"], query.shape[0], self.group)
            if documents_of(positions) is not None:
                raise ConfigError(
                    f"`position_ids` must count on where {type(module).__name__} asks for no mask, but start "
                    "anew; train it on one document a sample"
                )
        else:
            raise ConfigError(
                "`attention_mask` must be [b, s/p] or left out where ranks share a sequence, but has dims "
                f"{list(mask.shape)}; documents begin where `position_ids` start anew"
            )
        if self.seq_length not in (None, positions.shape[1]):
            raise ConfigError(
                f"`seq_length` must be that of all sequences, but is {self.seq_length} for one of "
                f"{positions.shape[1]}; leave `seq_length_is_variable` true"
            )
        return positions, mask

    @classmethod
    def register_with_transformers(
        cls,
        model_name_or_path: Any,
        core_attn_implementation: str,
        sequence_parallel_size: int,
        micro_batch_size: int,
        seq_length: int | None = None,
        seq_length_is_variable: bool = True,
        disable_in_eval: bool = False,
        max_length: int | None = None,
    ) -> SequenceMpu | None:
        """Share the sequences of transformers' models over ranks; each rank calls this before `initialize`.

        Every model that uses this attention is from now on given pieces of sequences. Its documents begin
        where `position_ids` start anew, with every kind of attention; windows of causal masks and padding are
        honoured. Masks of other kinds are refused when a model asks for them.

        Args:
            model_name_or_path: the model or what to load it from; a model's own attention must be the one
                that is given.
            core_attn_implementation: the attention: sdpa, flex_attention, or one of flash attention.
            sequence_parallel_size: the ranks that share a sequence, neighbours; with 1 nothing is done.
            micro_batch_size: not needed; any number of sequences may be given.
            seq_length: the length of all sequences, if `seq_length_is_variable` is false.
            seq_length_is_variable: whether sequences differ in length.
            disable_in_eval: whether modules that are not in training attend to what they are given alone.
            max_length: another name for `seq_length`.

        Returns:
            `mpu` for `initialize`; None for one rank.

        Raises:
            ConfigError: the attention is unknown, eager, or not the model's; or the length is missing, or
                ranks do not divide it.
        """
        if sequence_parallel_size == 1:
            return None
        seq_length = max_length if seq_length is None else seq_length
        if not seq_length_is_variable and (seq_length is None or seq_length % sequence_parallel_size):
            raise ConfigError(
                f"`seq_length` must be a multiple of `sequence_parallel_size` ({sequence_parallel_size}) if "
                f"`seq_length_is_variable` is false, but is {seq_length}; pad sequences to it"
            )
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as masks
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as attentions

        _check_attention(
            model_name_or_path, core_attn_implementation, sorted(attentions.keys() & masks.keys())
        )
        mpu = initialize_sequence_parallel(sequence_parallel_size)
        attn, make = attentions[core_attn_implementation], masks[core_attn_implementation]
        if isinstance(attn, cls):  # registered before
            attn = attn.attn
        make = getattr(make, "of_transformers", make)
        length = None if seq_length_is_variable else seq_length
        attentions[core_attn_implementation] = cls(
            attn, logged_group(mpu.context.groups["cp"]), length, disable_in_eval
        )
        masks[core_attn_implementation] = _MaskMaker(make)
        return mpu


class _MaskMaker:
    """Takes the place of transformers' function for masks, and keeps what it is asked for.

    Attributes:
        of_transformers: that function.
    """

    def __init__(self, of_transformers: Callable[..., Any]):
        self.of_transformers = of_transformers

    def __call__(self, **asked: Any) -> PieceMask:
        return PieceMask(self.of_transformers, asked)


def _check_attention(model: Any, name: str, known: list[str]) -> None:
    if name not in known or name == "eager":
        names = ", ".join(sorted(set(known) - {"eager"}))
        raise ConfigError(
            f"`core_attn_implementation` must be one of {names}, but is {name}; load the model with one"
        )
    own = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if own not in (None, name):
        raise ConfigError(
            f"`core_attn_implementation` must be the attention that the model uses ({own}), but is {name}; "
            "load the model with that `attn_implementation`"
        )
