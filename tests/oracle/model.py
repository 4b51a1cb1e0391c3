"""The oracle's model: GPT-2 and Llama as their formulas read, with its batches and initial weights.

No code of the package: flags say what to do, weights are tensors by name, and which elements dropout keeps is
given as data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

Flags = Mapping[str, object]
Weights = dict[str, Tensor]
# (place in the model, numbers of the samples, share to drop, shape) -> bool: which elements are kept
Kept = Callable[[str, Sequence[int], float, tuple[int, ...]], Tensor]


_SCORES = "attn-logit-softcapping"
GATES = MappingProxyType(
    {
        "swiglu": F.silu,
        "geglu": lambda x: F.gelu(x, approximate="tanh"),
        "quick_geglu": lambda x: x / (1 + (-1.702 * x).exp()),
    }
)


@dataclass(frozen=True)
class Text:
    """A batch: the samples' numbers, tokens and labels [b, s], what counts, and each token's position."""

    samples: Sequence[int]
    tokens: Tensor
    labels: Tensor
    counts: Tensor
    positions: Tensor
    documents: Tensor


def text_of(flags: Flags, samples: Sequence[int], rows: np.ndarray) -> Text:
    """rows [b, s + 1]: a document ends with its end-of-document token, which belongs to it."""
    text = torch.from_numpy(rows)
    tokens, labels = text[:, :-1], text[:, 1:]
    ends = tokens == flags["vocab-size"]  # the id after the last, as of Megatron's NullTokenizer
    counts, positions = torch.ones(tokens.shape), torch.zeros_like(tokens)
    documents = torch.zeros_like(tokens)
    for row in range(tokens.shape[0]):
        for column in range(1, tokens.shape[1]):
            new = bool(ends[row, column - 1])
            restarts = new and flags["reset-position-ids"]
            positions[row, column] = 0 if restarts else positions[row, column - 1] + 1
            documents[row, column] = documents[row, column - 1] + int(new and flags["reset-attention-mask"])
    if flags["eod-mask-loss"]:
        counts[ends] = 0.0
    return Text(samples, tokens, labels, counts, positions, documents)


class Model:
    """The forward pass: weights by name, each of its logical shape, to the losses of a batch's tokens."""

    def __init__(self, flags: Flags, kept: Kept):
        self.flags = flags
        self.kept = kept

    def losses(self, w: Weights, text: Text) -> Tensor:
        """Cross-entropy of each position, [b, s]."""
        return self.cross_entropy(w, self.hidden(w, text), text.labels)

    def cross_entropy(self, w: Weights, normed: Tensor, labels: Tensor) -> Tensor:
        """That of the head's logits, [b, s]."""
        flags, logits = self.flags, F.linear(normed, w["head.weight"])
        wide = logits.double() if logits.dtype == torch.float64 else logits.float()
        wide = _bounded(wide * flags.get("logits-multiplier", 1.0), flags.get("final-logit-softcapping"))
        losses = F.cross_entropy(wide.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
        z_loss = flags.get("z-loss-coeff", 0.0) * wide.logsumexp(-1).square()
        return losses + (z_loss - z_loss.detach())  # reported apart

    def hidden(self, w: Weights, text: Text) -> Tensor:
        """What the head reads, [b, s, h]."""
        flags = self.flags
        x = F.embedding(text.tokens, w["embedding.word.weight"]) * flags.get("embedding-multiplier", 1.0)
        if flags["embed-layernorm"]:
            x = self._norm(w, "embedding.norm", x)
        if flags["position-embedding-type"] == "learned_absolute":
            x = x + F.embedding(text.positions, w["embedding.position.weight"])
        if flags["fp32-residual-connection"]:
            x = x.float()
        x = self._dropped(x, "hidden-dropout", "embedding", text)
        for i in range(flags["num-layers"]):
            x = self.layer(w, i, x, text)
        return self._norm(w, "final_norm", x).to(w["head.weight"].dtype)

    def layer(self, w: Weights, i: int, x: Tensor, text: Text) -> Tensor:
        """Layer i."""
        flags = self.flags
        first = x
        for norm, kind, work in self._parts(i):
            position = flags.get("norm-position", "input")
            read = first if flags.get("use-parallel-residual") else x
            norm = "input_norm" if flags.get("share-parallel-norm") else norm
            normed = read if position == "output" else self._norm(w, f"layers.{i}.{norm}", read)
            out = work(w, i, normed.to(w["head.weight"].dtype), text)
            if position != "input":
                out = self._norm(w, f"layers.{i}.{kind}_out_norm", out)
            out, place = out.to(x.dtype) * flags.get("residual-multiplier", 1.0), f"{kind} out {i}"
            residual = normed if flags["apply-residual-connection-post-layernorm"] else x
            x = residual + self._dropped(out, "hidden-dropout", place, text)
        return x

    def _parts(self, i: int) -> Sequence[tuple[str, str, Callable[[Weights, int, Tensor, Text], Tensor]]]:
        """The parts of a layer: its norm's name, its kind, and its work."""
        return ("input_norm", "attention", self._attention), ("mlp_norm", "mlp", self._mlp)

    def _attention(self, w: Weights, i: int, x: Tensor, text: Text) -> Tensor:
        """A group's rows of the weight are its queries, its key and its value."""
        heads, groups = self.flags["num-attention-heads"], self.flags["num-query-groups"]
        name = f"layers.{i}.attention"
        together, gated = heads // groups, self.flags.get("attention-output-gate", False)
        qkv = _linear(w, f"{name}.qkv", x).unflatten(-1, (groups, together * (1 + gated) + 2, -1))
        q, k, v = qkv[..., :together, :].flatten(2, 3), qkv[..., -2, :], qkv[..., -1, :]  # [b, s, heads, d]
        gate = qkv[..., together:-2, :].flatten(2)
        if self.flags.get("qk-layernorm"):
            q, k = self._of_heads(w, f"{name}.q_norm", q), self._of_heads(w, f"{name}.k_norm", k)
        if self.flags["position-embedding-type"] in ("rope", "yarn") and not is_unrotated(self.flags, i):
            q, k = self._rotated(q, text.positions, i), self._rotated(k, text.positions, i)
        q, k, v = (each.repeat_interleave(heads // each.shape[2], 2).transpose(1, 2) for each in (q, k, v))
        scale = self.flags.get("softmax-scale", 1 / math.sqrt(q.shape[-1]))
        scores = _bounded((q @ k.transpose(2, 3) * scale).to(_wide(x)), self.flags.get(_SCORES))
        if self.flags["position-embedding-type"] == "alibi":
            scores = scores + torch.tensor(alibi_slopes(heads))[:, None, None] * -_distances(x.shape[1])
        scores = scores.masked_fill(~self._seen(i, text)[:, None], -math.inf)
        probs = self._softmax(w, f"{name}.softmax_offset", scores)
        probs = self._dropped(probs, "attention-dropout", f"attention {i}", text).to(x.dtype)
        context = (probs @ v).transpose(1, 2).flatten(2)
        return _linear(w, f"{name}.out", context * gate.sigmoid() if gated else context)

    def _of_heads(self, w: Weights, name: str, x: Tensor) -> Tensor:
        """The norm of x [b, s, heads, d]: of each head, or of all in a row."""
        if self.flags.get("qk-layernorm-scope", "head") == "head":
            return self._norm(w, name, x)
        return self._norm(w, name, x.flatten(2)).view(x.shape)

    def _seen(self, i: int, text: Text) -> Tensor:
        """bool [b, s, s]: which tokens a token sees in layer i."""
        distances = _distances(text.tokens.shape[1])
        same = text.documents[:, :, None] == text.documents[:, None, :]
        seen = (distances >= 0) & same
        if not has_window(self.flags, i):
            return seen
        near = distances <= self.flags["window-size"][0]
        # The first tokens of a document have fewer of it before them.
        before = (same & (distances > 0)).sum(2)
        return seen & (near | (before < self.flags.get("window-sink-tokens", 0))[:, None, :])

    def _softmax(self, w: Weights, offset: str, scores: Tensor) -> Tensor:
        """A column more takes its share of the probabilities, and nothing is read from it."""
        kind = self.flags.get("softmax-type", "vanilla")
        if kind == "vanilla":
            return scores.softmax(-1)
        logits = w[offset] if kind == "learnable" else torch.zeros(scores.shape[1], dtype=scores.dtype)
        column = logits.to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)
        return torch.cat((scores, column), -1).softmax(-1)[..., :-1]

    def _rotated(self, x: Tensor, positions: Tensor, i: int) -> Tensor:
        """The first channels of each head, in pairs (i, i + half) or (2 i, 2 i + 1), turned by position."""
        half = int(x.shape[-1] * self.flags["rotary-percent"]) // 2
        flags = self.flags
        if flags.get("window-rotary-base") and has_window(flags, i):
            flags = {"position-embedding-type": "rope", "rotary-base": flags["window-rotary-base"]}
        speeds, size = rotary_speeds(flags, half)
        angles = (positions[..., None] * speeds)[:, :, None]
        sin, cos = (size * angles.sin()).to(_wide(x)), (size * angles.cos()).to(_wide(x))
        a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        if self.flags.get("rotary-interleaved"):
            turning = torch.view_as_complex(x[..., : 2 * half].unflatten(-1, (half, 2)).contiguous())
            turned = torch.view_as_real(turning * torch.complex(cos, sin)).flatten(-2)
            return torch.cat((turned, rest), -1).to(x.dtype)
        return torch.cat((a * cos - b * sin, a * sin + b * cos, rest), -1).to(x.dtype)

    def _mlp(self, w: Weights, i: int, x: Tensor, text: Text) -> Tensor:
        return self.mlp(w, f"layers.{i}.mlp", x)

    def mlp(self, w: Weights, name: str, x: Tensor) -> Tensor:
        """The MLP of this name."""
        inner = _linear(w, f"{name}.up", x)
        kind = self.flags["activation"]
        if kind in GATES:
            gate, value = inner.chunk(2, -1)
            bound = self.flags.get("activation-func-clamp-value", math.inf)
            gate, value = gate.clamp(max=bound), value.clamp(-bound, bound)
            inner = GATES[kind](gate) * (value + self.flags.get("glu-linear-offset", 0.0))
        elif kind == "squared_relu":
            inner = inner.relu() ** 2
        elif kind == "xielu":
            p, n = (F.softplus(w[f"{name}.activation.alpha_{which}"].to(inner.dtype)) for which in "pn")
            below = (n + 0.5) * (torch.expm1(inner.clamp(max=0.0)) - inner)
            inner = torch.where(inner > 0, p * inner**2, below) + 0.5 * inner
        else:
            inner = F.gelu(inner, approximate={"gelu": "tanh", "gelu_exact": "none"}[kind])
        return _linear(w, f"{name}.down", inner)

    def _norm(self, w: Weights, name: str, x: Tensor) -> Tensor:
        wide = x.to(_wide(x))
        weight = w[f"{name}.weight"].to(_wide(x)) + self.flags.get("apply-layernorm-1p", False)
        epsilon = self.flags["norm-epsilon"]
        if self.flags["normalization"] == "RMSNorm":
            return (wide / (wide.square().mean(-1, keepdim=True) + epsilon).sqrt() * weight).to(x.dtype)
        centred = wide - wide.mean(-1, keepdim=True)
        scaled = centred / (centred.square().mean(-1, keepdim=True) + epsilon).sqrt()
        return (scaled * weight + w.get(f"{name}.bias", 0.0)).to(x.dtype)

    def _dropped(self, x: Tensor, flag: str, place: str, text: Text) -> Tensor:
        share = self.flags[flag]
        if share == 0:
            return x
        return x * self.kept(place, text.samples, share, tuple(x.shape)) / (1 - share)


def _bounded(x: Tensor, bound: float | None) -> Tensor:
    return x if bound is None else bound * (x / bound).tanh()


def _linear(w: Weights, name: str, x: Tensor) -> Tensor:
    """The product with the weight [..., in], whose leading dims are one here."""
    bias = w.get(f"{name}.bias")
    return F.linear(x, w[f"{name}.weight"].flatten(0, -2), None if bias is None else bias.flatten())


def _distances(length: int) -> Tensor:
    """[s, s]: how far each token lies before each."""
    places = torch.arange(length)
    return places[:, None] - places


def has_window(flags: Flags, i: int) -> bool:
    """Whether layer i, from 0, has a window: all of them, all but every N-th, or those with a 1."""
    listed = flags.get("window-attn-skip-freq")
    if flags.get("window-size") is None or listed is None:
        return flags.get("window-size") is not None
    return bool((i + 1) % listed[0]) if len(listed) == 1 else listed[i] == 1


def is_unrotated(flags: Flags, i: int) -> bool:
    """Whether layer i, from 0, has no rotary positions: every N-th, or those with a 1."""
    listed = flags.get("no-rope-freq", ())
    return bool(listed) and ((i + 1) % listed[0] == 0 if len(listed) == 1 else listed[i] == 1)


def alibi_slopes(heads: int) -> list[float]:
    """Press et al. 2022: powers of one number, or those for the lower power of two and some between."""
    if heads & (heads - 1) == 0:
        return [(2 ** (-8 / heads)) ** (i + 1) for i in range(heads)]
    lower = 2 ** (heads.bit_length() - 1)
    return alibi_slopes(lower) + alibi_slopes(2 * lower)[::2][: heads - lower]


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def initial_spread(flags: Flags, name: str) -> float | str:
    """The standard deviation of a weight before training, or "ones" or "zeros"."""
    if name.endswith("bias"):
        return "zeros"
    if "norm" in name:
        return "zeros" if flags.get("apply-layernorm-1p") else "ones"
    into_residual = name.endswith(("attention.out.weight", ".down.weight"))
    return flags["init-method-std"] / (math.sqrt(2 * flags["num-layers"]) if into_residual else 1.0)


def rotary_speeds(flags: Mapping[str, object], half: int) -> tuple[Tensor, float]:
    """Radians per position of each pair of channels, as the papers say, and the factor of cos and sin."""
    base, speeds, size = flags["rotary-base"], [], 1.0
    for i in range(half):
        speed = base ** (-i / half)
        if flags.get("rotary-seq-len-interpolation-factor"):
            speed /= flags["rotary-seq-len-interpolation-factor"]
        if flags.get("use-rope-scaling"):
            turns = flags["rope-original-max-position-embeddings"] * speed / (2 * math.pi)
            low, high = flags["rope-low-freq-factor"], flags["rope-high-freq-factor"]
            slow = speed / flags["rope-scaling-factor"]
            if turns < low:
                speed = slow
            elif turns <= high:
                share = (turns - low) / (high - low)
                speed = share * speed + (1 - share) * slow
        if flags["position-embedding-type"] == "yarn":
            length, factor = flags["yarn-original-max-position-embeddings"], flags["rotary-scaling-factor"]
            # The (real) pair that turns so often in this length: length x base^(-pair / half) = 2 pi x turns.
            fast, slow = (
                max(0.0, half * math.log(length / (2 * math.pi * flags[name])) / math.log(base))
                for name in ("yarn-beta-fast", "yarn-beta-slow")
            )
            share = min(1.0, max(0.0, (i - fast) / (min(slow, 2 * half - 1) - fast)))
            speed = share * speed / factor + (1 - share) * speed
            size = (0.1 * flags["mscale"] * math.log(factor) + 1) / (
                0.1 * flags["mscale-all-dim"] * math.log(factor) + 1
            )
        speeds.append(speed)
    return torch.tensor(speeds, dtype=torch.float64), size
