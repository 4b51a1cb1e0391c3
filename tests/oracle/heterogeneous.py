"""The oracle's model of layers of their own sizes, which reads Puzzle's `block_configs` itself."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from math import ceil

from torch import Tensor

from tests.oracle.model import Model, Text, Weights

_Part = tuple[str, str, Callable[[Weights, int, Tensor, Text], Tensor]]


class HeterogeneousModel(Model):
    """A GPT whose layers have the key/value heads and the inner widths that a text gives them."""

    def _layer(self, i: int) -> dict[str, dict[str, object]]:
        text = self.flags["heterogeneous-layers-config-encoded-json"]
        return json.loads(str(text))["block_configs"][i]

    def _parts(self, i: int) -> Sequence[_Part]:
        layer = self._layer(i)
        mlp = layer["ffn"] if "ffn" in layer else layer["mlp"]
        attention: list[_Part] = [("input_norm", "attention", self._shared)]
        if layer["attention"].get("no_op"):
            return [] if mlp.get("no_op") else [("input_norm", "mlp", self._wide)]
        return attention if mlp.get("no_op") else [*attention, ("mlp_norm", "mlp", self._wide)]

    def _shared(self, w: Weights, i: int, x: Tensor, text: Text) -> Tensor:
        said, heads = self._layer(i)["attention"], self.flags["num-attention-heads"]
        together = said.get("n_heads_in_group")
        groups = said.get("num_query_groups") or said.get("num_key_value_heads")
        groups = groups or (together and heads // together) or self.flags["num-query-groups"]
        assert w[f"layers.{i}.attention.qkv.weight"].shape[0] == groups
        return Model({**self.flags, "num-query-groups": groups}, self.kept)._attention(w, i, x, text)

    def _wide(self, w: Weights, i: int, x: Tensor, text: Text) -> Tensor:
        layer = self._layer(i)
        said = layer["ffn"] if "ffn" in layer else layer["mlp"]
        width = said.get("ffn_hidden_size") or said.get("intermediate_size")
        if said.get("ffn_mult"):
            width = 256 * ceil(int(said["ffn_mult"] * 2 / 3 * self.flags["hidden-size"]) / 256)
        assert w[f"layers.{i}.mlp.down.weight"].shape[-1] == (width or self.flags["ffn-hidden-size"])
        return self._mlp(w, i, x, text)
