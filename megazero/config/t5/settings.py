"""Settings of an encoder and a decoder (T5) in the section `model`."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveInt, model_validator

from megazero.config.condition import here
from megazero.config.tree.attention import AttentionConfig
from megazero.config.tree.option import of_model, of_training


class T5Config(AttentionConfig):
    """T5's two stacks"""

    needs = here.family == "t5"

    t5_encoder_layers: PositiveInt | None = of_model(
        None, flag="--encoder-num-layers", instead_of=("num_layers",)
    )
    """T5: layers of the encoder; default: --num-layers, which then counts those of one stack alone"""
    t5_decoder_layers: PositiveInt | None = of_model(None, flag="--decoder-num-layers")
    """T5: layers of the decoder; default: as many as the encoder's"""
    t5_decoder_seq_length: PositiveInt | None = of_training(None, flag="--decoder-seq-length", unit="tokens")
    """T5: most tokens that the decoder is given; default: as many as the encoder"""
    t5_relative_buckets: PositiveInt = of_model(
        32, flag="--relative-attention-num-buckets", needs=here.position_embedding_type == "relative"
    )
    """T5: kinds of distance between two tokens, each with a bias of its own for every head"""
    t5_relative_distance: PositiveInt = of_model(
        128,
        flag="--relative-attention-max-distance",
        unit="tokens",
        needs=here.position_embedding_type == "relative",
    )
    """T5: the distance from which on all tokens are of the same kind"""
    t5_style: Literal["megatron", "google"] = of_model("megatron")
    """T5: megatron divides scores by the root of the head's width and gives a tied head a bias; google does
    neither, and divides what a tied head is given by the root of the hidden size (Raffel et al. 2020, and
    transformers)"""

    @model_validator(mode="before")
    @classmethod
    def _layers_of_both(cls, data: object) -> object:
        """Count the layers of both stacks in `num_layers`, which in Megatron-LM's flags are one stack's."""
        if not isinstance(data, dict) or data.get("family") != "t5":
            return data
        said, encoder = data.get("num_layers"), data.get("t5_encoder_layers")
        encoder, decoder = encoder or said, data.get("t5_decoder_layers") or encoder or said
        if not isinstance(encoder, int) or not isinstance(decoder, int):
            return data
        both = {"t5_encoder_layers": encoder, "t5_decoder_layers": decoder}
        own = said if data.get("t5_encoder_layers") and said else encoder + decoder
        return {**data, **both, "num_layers": own}

    @property
    def encoder_layers(self) -> int:
        """Layers of the encoder, which come first; all in a model of one stack."""
        return self.t5_encoder_layers or self.num_layers

    @property
    def tells_distances(self) -> bool:
        """Whether there are buckets for keys on both sides, and for distances beyond the single ones."""
        return self.t5_relative_buckets >= 4 and self.t5_relative_distance > self.t5_relative_buckets // 2

    @property
    def decoder_length(self) -> int:
        """Most tokens that the decoder is given."""
        return self.t5_decoder_seq_length or self.seq_length
