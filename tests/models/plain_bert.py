"""BERT as Devlin et al. 2019 wrote it down, sample by sample: no padding, no masks, no code of the package.

Weights are by megazero's names, of their logical shapes. In the original each norm follows a residual sum:
`input_norm` of layer 0 is that of the embedding, and `input_norm` of layer i + 1 or `final_norm` ends
layer i.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class PlainBert:
    """What the shape of a BERT leaves open."""

    layers: int
    heads: int
    post_norm: bool = False
    erf: bool = False
    head_erf: bool = True
    binary: bool = True
    epsilon: float = 1e-5
    window: tuple[int, int] = (-1, -1)
    softmax: str = "vanilla"

    def hidden(self, w: Weights, tokens: Tensor, types: Tensor) -> Tensor:
        """Hidden states [s, h] of one sample, after the last norm."""
        x = w["embedding.word.weight"][tokens] + w["embedding.position.weight"][: len(tokens)]
        if self.binary:
            x = x + w["embedding.token_type.weight"][types]
        if self.post_norm:
            x = self.norm(w, "layers.0.input_norm", x)
            for i in range(self.layers):
                after = "final_norm" if i + 1 == self.layers else f"layers.{i + 1}.input_norm"
                x = self.norm(w, f"layers.{i}.mlp_norm", x + self.attention(w, i, x))
                x = self.norm(w, after, x + self.mlp(w, i, x))
            return x
        for i in range(self.layers):
            x = x + self.attention(w, i, self.norm(w, f"layers.{i}.input_norm", x))
            x = x + self.mlp(w, i, self.norm(w, f"layers.{i}.mlp_norm", x))
        return self.norm(w, "final_norm", x)

    def logits(self, w: Weights, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """Of the tokens at every position, [s, v], and of the order of the segments, [2]."""
        x = self.norm(w, "head.norm", gelu(product(w, "head.dense", hidden), self.head_erf))
        words = w.get("head.weight", w["embedding.word.weight"]) @ x.T
        if not self.binary:
            return words.T + w["head.bias"], None
        pooled = torch.tanh(product(w, "pooler", hidden[0]))
        return words.T + w["head.bias"], product(w, "binary_head", pooled)

    def losses(self, w: Weights, arrays: Mapping[str, np.ndarray]) -> tuple[Tensor, Tensor]:
        """The sums over these samples of both cross-entropies, in nats."""
        lm = sop = torch.zeros((), dtype=torch.float64)
        for row, length in enumerate(arrays["lengths"].tolist()):
            tokens, types, labels = (
                torch.from_numpy(arrays[name][row, :length]) for name in ("tokens", "token_types", "labels")
            )
            words, order = self.logits(w, self.hidden(w, tokens, types))
            for place in np.flatnonzero(arrays["loss_mask"][row]).tolist():
                lm = lm + surprise(words[place], int(labels[place]))
            if order is not None:
                sop = sop + surprise(order, int(arrays["is_random"][row]))
        return lm, sop

    def attention(self, w: Weights, i: int, x: Tensor) -> Tensor:
        """Each head's rows of the weight are its query, its key and its value: [heads, 3, d, h]."""
        name = f"layers.{i}.attention"
        weight, bias = w[f"{name}.qkv.weight"], w[f"{name}.qkv.bias"]
        found = []
        for head in range(self.heads):
            q, k, v = (x @ weight[head, part].T + bias[head, part] for part in range(3))
            scores = (q @ k.T / math.sqrt(q.shape[1])).masked_fill(self.hidden_from(len(x)), -math.inf)
            if self.softmax != "vanilla":  # a column more takes its share, and nothing is read from it
                learned = self.softmax == "learnable"
                logit = w[f"{name}.softmax_offset"][head] if learned else torch.zeros((), dtype=x.dtype)
                scores = torch.cat((scores, logit.expand(len(x), 1)), 1)
            found.append(scores.softmax(1)[:, : len(x)] @ v)
        return torch.cat(found, 1) @ w[f"{name}.out.weight"].T + w[f"{name}.out.bias"]

    def hidden_from(self, length: int) -> Tensor:
        """bool [s, s]: which tokens lie too far before or after a token to be seen."""
        after = torch.arange(length) - torch.arange(length)[:, None]
        left, right = self.window
        return ((left >= 0) & (-after > left)) | ((right >= 0) & (after > right))

    def mlp(self, w: Weights, i: int, x: Tensor) -> Tensor:
        inner = gelu(product(w, f"layers.{i}.mlp.up", x), self.erf)
        return product(w, f"layers.{i}.mlp.down", inner)

    def norm(self, w: Weights, name: str, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred / torch.sqrt((centred**2).mean(-1, keepdim=True) + self.epsilon)
        return scaled * w[f"{name}.weight"] + w[f"{name}.bias"]


def product(w: Weights, name: str, x: Tensor) -> Tensor:
    """A linear layer; dims of the weight [..., in] that say what its rows are, are one here."""
    weight = w[f"{name}.weight"]
    return x @ weight.flatten(0, -2).T + w[f"{name}.bias"].flatten()


def gelu(x: Tensor, erf: bool) -> Tensor:
    """Hendrycks & Gimpel 2016, exactly or by their tanh."""
    if erf:
        return x * (1 + torch.erf(x / math.sqrt(2))) / 2
    return x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2


def surprise(logits: Tensor, label: int) -> Tensor:
    """Cross-entropy in nats."""
    return torch.logsumexp(logits, 0) - logits[label]
