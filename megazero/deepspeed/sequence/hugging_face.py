"""Ulysses for models of transformers (ALST, arXiv:2506.13996), by replacing their attention function."""

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

# These describe a piece of the sequence or all heads; there is no conversion to the whole sequence.
_REFUSED = ("position_bias", "cu_seq_lens_q", "cu_seq_lens_k", "cache")
_Attention = Callable[..., tuple[Tensor, object]]


class UlyssesSPAttentionHF:
    """Wraps an attention function of transformers for ranks that hold a piece of each sequence.

    Attributes:
        attn: the attention function, which is called with the whole sequence and this rank's heads.
        group: the ranks that share a sequence.
        seq_length: the length of all sequences; None if it varies.
        disable_in_eval: whether modules in eval mode attend only within their piece.
    """

    def __init__(self, attn: _Attention, group: Group, seq_length: int | None, disable_in_eval: bool):
        self.attn, self.group = attn, group
        self.seq_length, self.disable_in_eval = seq_length, disable_in_eval

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: PieceMask | Tensor | None,
        *args: object,
        **kwargs: Any,
    ) -> tuple[Tensor, object]:
        """Return the context of this rank's piece, [b, s/p, n, d], and the attention's second result.

        Args:
            module: the layer; during the call, `num_key_value_groups` is that of this rank's heads.
            query: [b, n, s/p, d].
            key, value: [b, g, s/p, d].
            attention_mask: a `PieceMask`, or None from a model without a mask.
            args: passed to the attention.
            kwargs: passed to the attention, with the positions of the whole sequence.

        Raises:
            ConfigError: the mask or an argument describes only a piece, positions are missing or count from 0
                in each piece, or the sequence does not have `seq_length` tokens.
        """
        if self.disable_in_eval and not module.training:
            mask = attention_mask.of_piece if isinstance(attention_mask, PieceMask) else attention_mask
            return self.attn(module, query, key, value, mask, *args, **kwargs)
        kwargs["position_ids"], mask = self._whole(module, query, attention_mask, kwargs)
        plan = HeadPlan(query.shape[1], key.shape[1], self.group.size, self.group.rank)
        if kwargs.get("s_aux") is not None:  # an attention sink for each head
            heads = plan.queries[plan.rank]
            kwargs["s_aux"] = kwargs["s_aux"][heads.start : heads.stop]
        q, k, v = (x.permute(2, 0, 1, 3) for x in (query, key, value))
        q, k, v = (x.permute(1, 2, 0, 3) for x in exchange_heads(q, k, v, plan, self.group))
        groups = vars(module).get("num_key_value_groups")
        if groups is not None:
            module.num_key_value_groups = q.shape[1] // k.shape[1]  # type: ignore[assignment]  # a number
        try:
            context, weights = self.attn(module, q, k, v, mask, *args, **kwargs)
        finally:
            if groups is not None:
                module.num_key_value_groups = groups
        piece = return_heads(context.transpose(0, 1).flatten(2), plan, self.group)
        return piece.transpose(0, 1).unflatten(2, (query.shape[1], -1)), weights

    def _whole(
        self, module: nn.Module, query: Tensor, mask: PieceMask | Tensor | None, kwargs: dict[str, Any]
    ) -> tuple[Tensor, object]:
        """Return the positions and the mask of the whole sequence."""
        for name in _REFUSED:
            if kwargs.get(name) is not None:
                raise ConfigError(
                    f"`{name}` must be left out where ranks share a sequence, but {type(module).__name__} "
                    "gets it; mark documents by `position_ids` that restart"
                )
        if kwargs.get("position_ids") is None:
            raise ConfigError(
                f"`position_ids` must reach the attention where ranks share a sequence, but "
                f"{type(module).__name__} does not pass them on; use an attention under another name for it"
            )
        if isinstance(mask, PieceMask):
            whole = mask.whole(kwargs["position_ids"], self.group)
            positions, made = whole.positions, whole.mask
        elif mask is None:
            positions, made = gather_positions(kwargs["position_ids"], query.shape[0], self.group), None
            if documents_of(positions) is not None:
                raise ConfigError(
                    f"`position_ids` must increase by 1 where {type(module).__name__} asks for no mask, but "
                    "restart; train the model on one document per sample"
                )
        else:
            raise ConfigError(
                "`attention_mask` must be [b, s/p] or left out where ranks share a sequence, but has dims "
                f"{list(mask.shape)}; mark documents by `position_ids` that restart"
            )
        if self.seq_length not in (None, positions.shape[1]):
            raise ConfigError(
                f"`seq_length` must be that of all sequences, but is {self.seq_length} for one of "
                f"{positions.shape[1]}; leave `seq_length_is_variable` true"
            )
        return positions, made

    @classmethod
    def register_with_transformers(
        cls,
        model_name_or_path: object,
        core_attn_implementation: str,
        sequence_parallel_size: int,
        micro_batch_size: int,
        seq_length: int | None = None,
        seq_length_is_variable: bool = True,
        disable_in_eval: bool = False,
        max_length: int | None = None,
    ) -> SequenceMpu | None:
        """Share the sequences of transformers' models over ranks; each rank calls this before `initialize`.

        From then on, every model with this attention takes pieces of sequences. Documents begin where
        `position_ids` restart; sliding windows and padding work. Other masks are refused when a model asks
        for them.

        Args:
            model_name_or_path: the model, whose attention must be `core_attn_implementation`, or its path.
            core_attn_implementation: the attention: sdpa, flex_attention, or a flash attention.
            sequence_parallel_size: the number of adjacent ranks that share a sequence; 1 does nothing.
            micro_batch_size: has no effect.
            seq_length: the length of all sequences, if `seq_length_is_variable` is false.
            seq_length_is_variable: whether sequences differ in length.
            disable_in_eval: whether modules in eval mode attend only within their piece.
            max_length: another name for `seq_length`.

        Returns:
            `mpu` for `initialize`; None for one rank.

        Raises:
            ConfigError: the attention is unknown, eager, or not the model's; or the length is missing or does
                not divide by the ranks.
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
    """Replaces transformers' mask function, and returns its arguments as a `PieceMask`.

    Attributes:
        of_transformers: the replaced function.
    """

    def __init__(self, of_transformers: Callable[..., object]):
        self.of_transformers = of_transformers

    def __call__(self, **arguments: object) -> PieceMask:
        return PieceMask(self.of_transformers, arguments)


def _check_attention(model: object, name: str, known: list[str]) -> None:
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
