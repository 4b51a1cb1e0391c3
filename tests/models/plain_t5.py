"""T5 as Raffel et al. 2020 describe it, pair by pair: no padding, no masks, no code of the package.

Weights are by megazero's names, of their logical shapes. In Megatron-LM's form scores are scaled, and a
tied head has a bias; norms, linear layers and positions may be a GPT's in either.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tests.models.plain_bert import gelu, surprise

Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class PlainT5:
    """What the shape of a T5 leaves open."""

    layers: tuple[int, int]
    heads: int
    positions: str = "relative"
    buckets: tuple[int, int] = (32, 128)
    google: bool = True
    activation: str = "geglu"
    rms: bool = True
    tied: bool = True
    epsilon: float = 1e-6

    def losses(self, w: Weights, arrays: Mapping[str, np.ndarray]) -> Tensor:
        """The sum over these pairs of the cross-entropies, in nats."""
        total = torch.zeros((), dtype=torch.float64)
        for row, (s, t) in enumerate(zip(arrays["lengths"], arrays["decoder_lengths"], strict=True)):
            source, given, labels = (
                torch.from_numpy(arrays[name][row, :length])
                for name, length in (("tokens", s), ("decoder_tokens", t), ("labels", t))
            )
            words = self.logits(w, source, given)
            for place in np.flatnonzero(arrays["loss_mask"][row]).tolist():
                total = total + surprise(words[place], int(labels[place]))
        return total

    def logits(self, w: Weights, source: Tensor, given: Tensor) -> Tensor:
        """[t, v], of the token that follows each of those given."""
        x = self.embedded(w, source)
        for i in range(self.layers[0]):
            x = x + self.within(w, i, x, later=True)
            x = x + self.mlp(w, i, self.norm(w, f"layers.{i}.mlp_norm", x))
        encoded = self.norm(w, "encoder_norm", x)
        y = self.embedded(w, given)
        for i in range(self.layers[0], sum(self.layers)):
            y = y + self.within(w, i, y, later=False)
            y = y + self.across(w, i, self.norm(w, f"layers.{i}.cross_norm", y), encoded)
            y = y + self.mlp(w, i, self.norm(w, f"layers.{i}.mlp_norm", y))
        y = self.norm(w, "final_norm", y)
        if self.google and self.tied:
            y = y / math.sqrt(y.shape[1])
        words = y @ w["embedding.word.weight" if self.tied else "head.weight"].T
        return words + w["head.bias"] if self.tied and not self.google else words

    def embedded(self, w: Weights, tokens: Tensor) -> Tensor:
        x = w["embedding.word.weight"][tokens]
        return x + w["embedding.position.weight"][: len(tokens)] if self.positions == "learned" else x

    def within(self, w: Weights, i: int, x: Tensor, *, later: bool) -> Tensor:
        """Attention of a stack to itself; each head's rows are its query, its key and its value."""
        x, name, found = self.norm(w, f"layers.{i}.input_norm", x), f"layers.{i}.attention", []
        places = range(len(x))
        kinds = torch.tensor([[self.kind(key - query, later) for key in places] for query in places])
        for head in range(self.heads):
            q, k, v = (self.part(w, f"{name}.qkv", (head, part), x) for part in range(3))
            scores = q @ k.T * self.scale(q)
            if self.positions == "relative":
                table = w[f"{'encoder' if later else 'decoder'}.relative_bias.weight"][:, head]
                scores = scores + table[kinds]
            if not later:
                scores = scores + torch.full_like(scores, -math.inf).triu(1)
            found.append(scores.softmax(1) @ v)
        return self.out(w, f"{name}.out", torch.cat(found, 1))

    def across(self, w: Weights, i: int, y: Tensor, encoded: Tensor) -> Tensor:
        """Attention of the decoder to the encoder."""
        name, found = f"layers.{i}.cross", []
        for head in range(self.heads):
            q = self.part(w, f"{name}.query", (head,), y)
            k, v = (self.part(w, f"{name}.key_value", (head, part), encoded) for part in range(2))
            found.append((q @ k.T * self.scale(q)).softmax(1) @ v)
        return self.out(w, f"{name}.out", torch.cat(found, 1))

    def scale(self, q: Tensor) -> float:
        return 1.0 if self.google else 1 / math.sqrt(q.shape[1])

    def kind(self, distance: int, later: bool) -> int:
        """The row of a distance in the table: half of them are of later keys, where there are any."""
        buckets, furthest = self.buckets
        first = 0
        if later:
            buckets //= 2
            first = buckets if distance > 0 else 0
            distance = abs(distance)
        else:
            distance = max(0, -distance)
        if distance < buckets // 2:
            return first + distance
        share = math.log(distance / (buckets // 2)) / math.log(furthest / (buckets // 2))
        return first + min(buckets - 1, buckets // 2 + int(share * (buckets - buckets // 2) + 1e-6))

    def part(self, w: Weights, name: str, rows: tuple[int, ...], x: Tensor) -> Tensor:
        out = x @ w[f"{name}.weight"][rows].T
        return out + w[f"{name}.bias"][rows] if f"{name}.bias" in w else out

    def out(self, w: Weights, name: str, x: Tensor) -> Tensor:
        out = x @ w[f"{name}.weight"].T
        return out + w[f"{name}.bias"] if f"{name}.bias" in w else out

    def mlp(self, w: Weights, i: int, x: Tensor) -> Tensor:
        name = f"layers.{i}.mlp"
        if self.activation == "geglu":
            gate, value = (self.part(w, f"{name}.up", (half,), x) for half in range(2))
            inner = gelu(gate, erf=False) * value
        else:
            inner = self.out(w, f"{name}.up", x)
            inner = inner.clamp(min=0) if self.activation == "relu" else gelu(inner, erf=False)
        return self.out(w, f"{name}.down", inner)

    def norm(self, w: Weights, name: str, x: Tensor) -> Tensor:
        if self.rms:
            return x / torch.sqrt((x**2).mean(-1, keepdim=True) + self.epsilon) * w[f"{name}.weight"]
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred / torch.sqrt((centred**2).mean(-1, keepdim=True) + self.epsilon)
        return scaled * w[f"{name}.weight"] + w[f"{name}.bias"]
