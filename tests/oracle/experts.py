"""The oracle's mixture of experts: routing, balance, capacity and mixtures as their formulas read.

Tokens are gone through sequence by sequence; nothing is sorted, and no code of the package is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from types import MappingProxyType

import torch
from torch import Tensor

from tests.oracle.model import Flags, Kept, Model, Text, Weights, text_of
from tests.oracle.order import Documents, training_samples
from tests.oracle.trainer import Training, follow, total_samples

BALANCES = {
    "aux_loss": "load_balancing",
    "seq_aux_loss": "seq_load_balancing",
    "global_aux_loss": "global_load_balancing",
}


@dataclass
class RouterState:
    """What a router remembers: each expert's share of the last step's choices, and its bias."""

    load: Tensor
    bias: Tensor
    counts: Tensor


@dataclass
class Terms:
    """What the routers of all layers add to one step: means by name, and the closest decision of them."""

    means: dict[str, Tensor] = field(default_factory=dict)
    margin: float = math.inf

    def add(self, name: str, value: Tensor) -> None:
        self.means[name] = self.means.get(name, 0) + value


def has_experts(flags: Flags, layer: int) -> bool:
    """Whether a layer, from 0, has experts: one in so many, the first or the last of them, or as listed."""
    if isinstance(flags.get("moe-layer-freq"), tuple):
        return flags["moe-layer-freq"][layer] == 1
    if "expert-interval" in flags:
        return (layer + 1) % flags["expert-interval"] == 0
    return layer % flags.get("moe-layer-freq", 1) == 0


def expert_layers(flags: Flags) -> dict[int, int]:
    """Layer -> its number of experts."""
    given = flags.get("num-experts")
    if given is None:
        return {}
    layers = [layer for layer in range(flags["num-layers"]) if has_experts(flags, layer)]
    return dict(zip(layers, given * len(layers) if len(given) == 1 else given, strict=True))


def assigned(logits: Tensor) -> Tensor:
    """Megatron-LM's sinkhorn of logits [n, E]: rows and columns are scaled in turn, for even shares."""
    cost = logits.exp()
    n, e = cost.shape
    columns, error = torch.ones(e, dtype=cost.dtype), math.inf
    while error > 1e-4:
        rows = [1 / n / (sum(columns[j] * row[j] for j in range(e)) + 1e-8) for row in cost]
        old = columns
        columns = torch.stack(
            [1 / e / (sum(rows[i] * cost[i, j] for i in range(n)) + 1e-8) for j in range(e)]
        )
        error = sum(abs(a - b) for a, b in zip(old, columns, strict=True)) / e
    return torch.stack([cost[i] * columns * rows[i] for i in range(n)])


class ExpertModel(Model):
    """A GPT whose layers may have experts; `tables` name those of each id [ids, k] in the first layers."""

    def __init__(self, flags: Flags, kept: Kept, tables: Mapping[int, Tensor] = MappingProxyType({})):
        super().__init__(flags, kept)
        self.tables = tables
        self.states = {
            layer: RouterState(torch.full((e,), 1 / e), torch.zeros(e), torch.zeros(e))
            for layer, e in expert_layers(flags).items()
        }
        self.terms = Terms()
        self.further: dict[str, float] = {}  # the coefficients of more terms, by name

    def _mlp(self, w: Weights, i: int, x: Tensor, text: Text) -> Tensor:
        """x [b, s, h]."""
        name, flags = f"layers.{i}.mlp", self.flags
        if i not in self.states:
            return super()._mlp(w, i, x, text)
        logits = x @ w[f"{name}.router.weight"].t() + w.get(f"{name}.router.logit_bias", 0)
        named = self.tables[i][text.tokens] if i in self.tables else None
        chosen, weights, probabilities = self._choose(logits, self.states[i].bias, named)
        self._balance(i, logits, chosen, probabilities)
        kept = self._kept(chosen, weights, logits.shape[-1])
        out = torch.zeros_like(x)
        for e in range(logits.shape[-1]):
            own = {f"e.{k}": w[f"{name}.experts.{k}"][e] for k in _parts(w, f"{name}.experts")}
            taken = ((chosen == e) & kept).any(-1)  # an expert is chosen once by a token
            weight = (weights * ((chosen == e) & kept)).sum(-1)
            scattered = torch.zeros_like(x)
            scattered[taken] = self.mlp(own, "e", x[taken]) * weight[taken].unsqueeze(-1)
            out = out + scattered
        if "moe-shared-expert-intermediate-size" in flags:
            every = self.mlp(w, f"{name}.shared", x)
            if flags.get("moe-shared-expert-gate"):
                every = every * torch.sigmoid(x @ w[f"{name}.shared_gate.weight"].t())
            out = out + every
        if flags.get("mlp-type") == "residual":
            mix = (x @ w[f"{name}.coefficient.weight"].t() + w[f"{name}.coefficient.bias"]).softmax(-1)
            out = mix[..., :1] * out + mix[..., 1:] * self.mlp(w, f"{name}.dense", x)
        return out

    def _choose(self, logits: Tensor, bias: Tensor, named: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """The chosen experts [b, s, k], which a table may name, their weights, and all probabilities."""
        flags = self.flags
        sigmoid = flags.get("moe-router-score-function") == "sigmoid"
        scores = 1 / (1 + (-logits).exp()) if sigmoid else logits.softmax(-1)
        ranking = (scores if sigmoid else logits).detach() + bias
        if "moe-router-num-groups" in flags:
            ranking = self._within_groups(ranking)
        assigns = flags.get("moe-router-load-balancing-type") == ("sinkhorn",)
        if assigns:
            sigmoid = flags["moe-router-topk"] == 1
            scores = 1 / (1 + (-logits).exp()) if sigmoid else logits.softmax(-1)
            parts = logits.detach().split(flags["micro-batch-size"])
            size = parts[0].shape[:2].numel()  # the shares of a row are parts of 1/size
            ranking = torch.cat([size * assigned(part.flatten(0, 1)).view_as(part) for part in parts])
        chosen = self._best(ranking, flags["moe-router-topk"]) if named is None else named
        taken = scores.gather(-1, chosen)
        if assigns:
            return chosen, taken, scores / scores.sum(-1, keepdim=True)
        if sigmoid:
            weights = taken / taken.sum(-1, keepdim=True) if chosen.shape[-1] > 1 else taken
            probabilities = scores / scores.sum(-1, keepdim=True)
        else:
            before = flags.get("moe-router-pre-softmax", False)
            weights = taken if before else taken / taken.sum(-1, keepdim=True)
            probabilities = scores
        return chosen, weights * flags.get("moe-router-topk-scaling-factor", 1.0), probabilities

    def _best(self, ranking: Tensor, count: int) -> Tensor:
        """The numbers of the highest, one after the other; notes how close the last one was to the next."""
        left, found, last = ranking.clone(), [], None
        for _ in range(count + (count < ranking.shape[-1])):
            high, where = left.max(-1)
            if last is not None:
                gaps = (last - high)[(last - high).isfinite()]
                self.terms.margin = min([self.terms.margin, *gaps.tolist()])
            last = high
            found.append(where)
            left = left.scatter(-1, where.unsqueeze(-1), -math.inf)
        return torch.stack(found[:count], -1)

    def _within_groups(self, ranking: Tensor) -> Tensor:
        groups, kept = self.flags["moe-router-num-groups"], self.flags["moe-router-group-topk"]
        parts = ranking.unflatten(-1, (groups, -1))
        each = self.flags["moe-router-topk"] // kept
        value = parts.topk(each, -1).values.sum(-1)
        best = self._best(value, kept)
        inside = torch.zeros_like(value).scatter(-1, best, 1.0) > 0
        return torch.where(inside.unsqueeze(-1), parts, -math.inf).flatten(-2)

    def _balance(self, i: int, logits: Tensor, chosen: Tensor, probabilities: Tensor) -> None:
        flags, e, k = self.flags, logits.shape[-1], chosen.shape[-1]
        counts = torch.stack([(chosen == number).double().sum((1, 2)) for number in range(e)], -1)  # [b, E]
        s = chosen.shape[1]
        self.states[i].counts += counts.sum(0)
        size = flags["micro-batch-size"]
        for kind in flags["moe-router-load-balancing-type"]:
            if kind in ("none", "sinkhorn") or i in self.tables:  # a table is as even as it is
                continue
            if kind == "seq_aux_loss":
                value = (e * counts / (s * k) * probabilities.mean(1)).sum(-1).mean()
            elif kind == "aux_loss":
                shares = counts.unflatten(0, (-1, size)).sum(1) / (size * s * k)
                mean = probabilities.unflatten(0, (-1, size)).mean((1, 2))
                value = (e * shares * mean).sum(-1).mean()
            else:
                value = (e * self.states[i].load * probabilities.mean((0, 1))).sum()
            self.terms.add(BALANCES[kind], value)
        if flags.get("moe-z-loss-coeff"):
            self.terms.add("z", logits.exp().sum(-1).log().square().mean())
        entropy = -(probabilities * probabilities.log()).sum(-1).mean().detach()
        self.terms.add("router_entropy", entropy / len(self.states))

    def _kept(self, chosen: Tensor, weights: Tensor, experts: int) -> Tensor:
        """bool [b, s, k]: the choices that have room."""
        flags, kept = self.flags, torch.ones_like(chosen, dtype=torch.bool)
        if "moe-expert-capacity-factor" not in flags:
            return kept
        b, s, k = chosen.shape
        size = flags["micro-batch-size"] if flags.get("moe-capacity-scope") == "micro_batch" else 1
        factor = Fraction(str(flags["moe-expert-capacity-factor"]))
        room = max(math.ceil(factor * size * s * k / experts), flags.get("moe-min-capacity", 0))
        choices, score = chosen.tolist(), weights.tolist()
        for first in range(0, b, size):
            for e in range(experts):
                # Choice by choice, then column by column.
                wanting = [
                    (row, column, j)
                    for j in range(k)
                    for column in range(s)
                    for row in range(first, first + size)
                    if choices[row][column][j] == e
                ]
                if flags["moe-token-drop-policy"] == "probs":
                    wanting.sort(key=lambda at: -score[at[0]][at[1]][at[2]])
                    if 0 < room < len(wanting):
                        edge = [score[r][c][j] for r, c, j in wanting[room - 1 : room + 1]]
                        self.terms.margin = min(self.terms.margin, edge[0] - edge[1])
                for at in wanting[room:]:
                    kept[at] = False
        dropped = (~kept).sum() / chosen.numel()
        self.terms.add("dropped_tokens", dropped.double() / len(self.states))
        return kept

    def after_step(self) -> None:
        """Remember the step's loads, and move the biases towards equal ones."""
        for layer, state in self.states.items():
            counts, state.counts = state.counts, torch.zeros_like(state.counts)
            state.load = counts / counts.sum()
            if self.flags.get("moe-router-enable-expert-bias") and layer not in self.tables:
                state.bias += self.flags["moe-router-bias-update-rate"] * (counts.mean() - counts).sign()


def _parts(w: Weights, name: str) -> list[str]:
    return [full.removeprefix(f"{name}.") for full in w if full.startswith(f"{name}.")]


def train_experts(
    flags: Flags,
    datasets: Sequence[Documents],
    initial: Weights,
    kept: Kept,
    steps: int,
    kind: Callable[[Flags, Kept], ExpertModel] = ExpertModel,
) -> tuple[Training, list[dict[str, float]], ExpertModel, float]:
    """Train in float64 as the flags say.

    Returns:
        The training, each step's further terms, the model with what its routers remember, and the closest
        decision of any router: what a routing in fp32 may get wrong by.
    """
    model, told, margins = kind(flags, kept), [], []
    rows = training_samples(flags, datasets, total_samples(flags, steps))
    coefficients = dict(
        zip(flags.get("moe-router-load-balancing-type", ()), flags.get("moe-aux-loss-coeff", ()), strict=True)
    )
    trained = {BALANCES[kind]: value for kind, value in coefficients.items() if kind in BALANCES}
    trained |= {"z": flags["moe-z-loss-coeff"]} if flags.get("moe-z-loss-coeff") else {}
    trained |= model.further

    def of_step(master: Weights, done: int, size: int, scale: float) -> tuple[float, Weights]:
        text = text_of(flags, range(done, done + size), rows[done : done + size])
        leaves = {name: each.detach().requires_grad_() for name, each in master.items()}
        tied = {"head.weight": leaves["embedding.word.weight"]}
        model.terms = Terms()
        lm = (model.losses({**tied, **leaves}, text) * text.counts).sum() / text.counts.sum()
        means = model.terms.means
        (lm + sum(means[name] * value for name, value in trained.items())).backward()
        told.append({name: mean.item() for name, mean in means.items()})
        margins.append(model.terms.margin)
        model.after_step()
        zeros = {name: torch.zeros_like(each) for name, each in leaves.items()}
        return lm.item(), {n: zeros[n] if each.grad is None else each.grad for n, each in leaves.items()}

    return follow(flags, initial, steps, of_step), told, model, min(margins)
