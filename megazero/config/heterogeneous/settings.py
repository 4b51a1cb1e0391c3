"""Layers with sizes of their own, in the section `model`.

The names are Megatron-LM's; such models are made by Puzzle (Bercovich et al. 2024), as Nemotron's are.
"""

from __future__ import annotations

import json
from typing import Annotated

from pydantic import AfterValidator

from megazero.config.heterogeneous.shapes import LayerShape, read_layers, read_text, shapes_of, text_of
from megazero.config.tree.option import of_model
from megazero.config.tree.roles import Role
from megazero.config.tree.transformer import TransformerConfig

_PATH, _TEXT = "heterogeneous_layers_config_path", "heterogeneous_layers_config_encoded_json"


def _file(path: str) -> str:
    read_text(path)
    return path


class HeterogeneousConfig(TransformerConfig):
    """Layers with their own numbers of key/value heads and widths, some without attention or MLP"""

    heterogeneous_layers_config_path: Annotated[str, AfterValidator(_file)] | None = of_model(None)
    """a JSON file whose `block_configs` give each layer key/value heads and an inner width, or leave its
    attention or MLP out (Nemotron); it is read once, and checkpoints have its text"""
    heterogeneous_layers_config_encoded_json: Annotated[str, AfterValidator(read_layers)] | None = of_model(
        None, roles=Role.VARIANT, instead_of=("heterogeneous_layers_config_path",), resolved="layers_said"
    )
    """the text of such a file, in place of one"""

    @classmethod
    def implied(cls, values: dict[str, object]) -> dict[str, object]:
        """Replace the file by its text, and take the model's depth from it.

        A file that cannot be read stays, and its field's own check refuses it.
        """
        values = dict(super().implied(values))
        if values.get(_TEXT) is None and isinstance(path := values.get(_PATH), str):
            try:
                values[_TEXT] = read_text(path)
            except ValueError:
                return values
            del values[_PATH]
        try:
            layers = json.loads(read_layers(str(values[_TEXT])))["block_configs"]
        except (KeyError, ValueError):
            return values
        return {"num_layers": len(layers), **values}

    @property
    def layer_shapes(self) -> tuple[LayerShape, ...] | None:
        """The sizes of each layer; None where all are alike."""
        text = self.heterogeneous_layers_config_encoded_json
        if text is None:
            return None
        return shapes_of(text, self.num_attention_heads, self.hidden_size, self.layer_size)

    @property
    def layer_size(self) -> LayerShape:
        """The sizes of a layer that has none of its own."""
        return LayerShape(self.kv_heads, self.ffn_size)

    @property
    def layers_said(self) -> str | None:
        """The sizes of all layers as a text, by which two models are compared."""
        shapes = self.layer_shapes
        return None if shapes is None else text_of(shapes)
