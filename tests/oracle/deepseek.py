"""The oracle's DeepSeek: latent attention, and the prediction of further tokens, as the papers have them.

Arrays of further tokens are made position by position; heads are made one by one.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tests.oracle.experts import ExpertModel, RouterState
from tests.oracle.model import Flags, Kept, Text, Weights, rotary_speeds


class DeepseekModel(ExpertModel):
    """A GPT with latent attention if the flags say so, and as many further tokens as they say."""

    def __init__(self, flags: Flags, kept: Kept):
        super().__init__(flags, kept)
        layers, depths = flags["num-layers"], flags.get("mtp-num-layers", 0)
        self.depths = range(1, depths + 1)
        self.further = {f"mtp_{d}": flags.get("mtp-loss-scaling-factor", 0.1) / depths for d in self.depths}
        for number in range(layers, layers + depths):
            if layers - 1 in self.states:
                e = len(self.states[layers - 1].load)
                self.states[number] = RouterState(torch.full((e,), 1 / e), torch.zeros(e), torch.zeros(e))

    def losses(self, w: Weights, text: Text) -> Tensor:
        """Those of the next token; the means of further ones become terms."""
        hidden = self.hidden(w, text)
        losses = self.cross_entropy(w, hidden, text.labels)
        for depth in self.depths:
            words, labels, counts = further(text, depth)
            number = self.flags["num-layers"] + depth - 1
            hidden = self._deeper(w, number, depth, hidden, words, text)
            own = self.cross_entropy(w, hidden, labels)
            self.terms.add(f"mtp_{depth}", (own * counts).sum() / counts.sum())
        return losses

    def _deeper(self, w: Weights, i: int, depth: int, hidden: Tensor, words: Tensor, text: Text) -> Tensor:
        embedded = w["embedding.word.weight"][words]
        embedded = self._dropped(embedded, "hidden-dropout", f"embedding {depth}", text)
        left = self._norm(w, f"layers.{i}.word_norm", embedded)
        right = self._norm(w, f"layers.{i}.hidden_norm", hidden)
        h = left.shape[-1]
        join = w[f"layers.{i}.join.weight"]
        x = left @ join[:, :h].t() + right @ join[:, h:].t()
        return self._norm(w, f"layers.{i}.final_norm", self.layer(w, i, x, text))

    def _attention(self, w: Weights, i: int, x: Tensor, text: Text) -> Tensor:
        flags, name = self.flags, f"layers.{i}.attention"
        if not flags.get("multi-latent-attention"):
            return super()._attention(w, i, x, text)
        own, turned, rank = (flags[key] for key in ("qk-head-dim", "qk-pos-emb-head-dim", "kv-lora-rank"))
        small = x
        if "q-lora-rank" in flags:
            small = self._small(w, f"{name}.query_norm", x @ w[f"{name}.query_down.weight"].t())
        down = x @ w[f"{name}.latent_down.weight"].t()
        latent = self._small(w, f"{name}.latent_norm", down[..., :rank])
        key = self._turned(down[..., rank:], text.positions)
        sharper = 1.0
        if flags.get("rope-type") != "rope":
            sharper = 0.1 * flags.get("mscale-all-dim", 0.0) * math.log(flags["rotary-scaling-factor"]) + 1
        seen, contexts = self._seen(i, text), []
        for head in range(flags["num-attention-heads"]):
            q = small @ w[f"{name}.query.weight"][head].t()
            up = latent @ w[f"{name}.latent_up.weight"][head].t()
            k, v = up[..., :own], up[..., own:]
            scores = q[..., :own] @ k.transpose(1, 2)
            scores = scores + self._turned(q[..., own:], text.positions) @ key.transpose(1, 2)
            scores = scores * sharper**2 / math.sqrt(own + turned)
            contexts.append((scores.masked_fill(~seen, -math.inf), v))
        probs = torch.stack([scores for scores, _ in contexts], 1).softmax(-1)
        probs = self._dropped(probs, "attention-dropout", f"attention {i}", text)
        made = [probs[:, head] @ v for head, (_, v) in enumerate(contexts)]
        out = torch.cat(made, -1) @ w[f"{name}.out.weight"].t()
        return out + w[f"{name}.out.bias"] if f"{name}.out.bias" in w else out

    def _small(self, w: Weights, norm: str, x: Tensor) -> Tensor:
        return self._norm(w, norm, x) if self.flags.get("qk-layernorm") else x

    def _turned(self, x: Tensor, positions: Tensor) -> Tensor:
        """Neighbouring channels, turned together as one complex number."""
        kind = "rope" if self.flags.get("rope-type") == "rope" else "yarn"
        flags = {"mscale": 1.0, "mscale-all-dim": 0.0, **self.flags, "position-embedding-type": kind}
        speeds, size = rotary_speeds(flags, x.shape[-1] // 2)
        angles = positions[..., None] * speeds
        turns = torch.polar(torch.full_like(angles, size), angles)
        return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * turns).flatten(-2)


def further(text: Text, depth: int) -> tuple[Tensor, Tensor, Tensor]:
    """The words, labels and counts [b, s] that a depth reads, within sequences and their documents."""
    words, labels = torch.zeros_like(text.tokens), torch.zeros_like(text.labels)
    counts = torch.zeros_like(text.counts)
    for row, column in torch.cartesian_prod(*map(torch.arange, text.tokens.shape)).tolist():
        there = column + depth
        if there < text.tokens.shape[1] and text.documents[row, there] == text.documents[row, column]:
            words[row, column] = text.tokens[row, there]
            labels[row, column] = text.labels[row, there]
            counts[row, column] = text.counts[row, there]
    return words, labels, counts
