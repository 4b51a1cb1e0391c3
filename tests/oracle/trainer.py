"""The oracle: a GPT trained the plain way, in one process, with ordinary PyTorch and no code of the package.

It reads the flags of a run as a dictionary (``{"num-layers": 2, ...}``) and takes three things as data: the
documents, the initial weights, and which elements dropout keeps. All else is written out here, in `model.py`
and in `order.py` from what the flags mean: models, schedules, decay groups, clipping and loss scales as
Megatron has them. It computes in float64, and a global batch is one forward pass; in half precision, where a
micro-batch is what overflows, it computes as the flags say, micro-batch by micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tests.oracle.model import Flags, Kept, Model, Text, Weights, text_of
from tests.oracle.order import Documents, training_samples

DTYPES = {"fp32": torch.float64, "fp16": torch.float16, "bf16": torch.bfloat16}
UNITS = ("iters", "samples", "tokens")


@dataclass
class Training:
    """What a training did, step by step, and what it left.

    `steps` holds, for each step: loss, gradient norm, learning rate, loss scale, whether it was skipped, and
    the samples consumed after it. `state` holds each weight's optimizer state by name, such as exp_avg.
    """

    steps: list[dict[str, float]] = field(default_factory=list)
    weights: Weights = field(default_factory=dict)
    state: dict[str, Weights] = field(default_factory=dict)


def batch_size(flags: Flags, consumed: int) -> int:
    """Samples in the step after `consumed`: equal increments, each held for an equal share of the ramp."""
    if "step-batch-size-schedule" in flags:
        pairs = [stair.split(":") for stair in flags["step-batch-size-schedule"]]
        return [int(size) for tokens, size in pairs if consumed >= int(tokens) // flags["seq-length"]][-1]
    if "rampup-batch-size" not in flags:
        return flags["global-batch-size"]
    start, increment, ramp = flags["rampup-batch-size"]
    count = (flags["global-batch-size"] - start) // increment
    return min(flags["global-batch-size"], start + increment * (consumed * count // ramp))


def learning_rate(flags: Flags, done: tuple[int, int], total: tuple[int, int]) -> float:
    """The rate of the step that follows the (iterations, samples) `done`, of a training of `total`."""
    unit = length_unit(flags)
    count, decay = (
        {"iters": each[0], "samples": each[1], "tokens": each[1] * flags["seq-length"]}[unit]
        for each in (done, total)
    )
    decay, peak, floor = flags.get(f"lr-decay-{unit}", decay), flags["lr"], flags["min-lr"]
    # A fraction is one of the decay; beside a decay in tokens, Megatron-DeepSpeed takes it of the training,
    # which it counts in iterations or samples.
    of_training = unit == "tokens" and "train-tokens" not in flags
    whole = total[1] * flags["seq-length"] if of_training else decay
    warmup = flags.get(f"lr-warmup-{unit}", flags.get("lr-warmup-fraction", 0) * whole)
    if of_training and "train-iters" in flags and "lr-warmup-fraction" in flags:
        # It warms up over iterations, and decays over tokens from those that are consumed by then.
        steps = flags["lr-warmup-fraction"] * total[0]
        if done[0] <= steps:
            return flags["lr-warmup-init"] + (peak - flags["lr-warmup-init"]) * done[0] / steps
        before, after = (total_samples(flags, each) for each in (int(steps), int(steps) + 1))
        warmup = (before + (steps - int(steps)) * (after - before)) * flags["seq-length"]
    if warmup > 0 and count <= warmup:
        return flags["lr-warmup-init"] + (peak - flags["lr-warmup-init"]) * count / warmup
    style = flags["lr-decay-style"]
    if style == "constant":
        return peak
    if count > decay or (style == "cosine-restarts" and count == decay):  # no restart where it ends
        return floor
    if style == "inverse-square-root":
        if unit == "iters":  # Megatron counts an iteration as a global batch of samples
            count, warmup = count * flags["global-batch-size"], warmup * flags["global-batch-size"]
        return max(floor, peak * math.sqrt(max(warmup, 1) / max(count, 1)))
    share, last = (count - warmup) / (decay - warmup), style
    if style == "WSD":
        final, last = flags[f"lr-wsd-decay-{unit}"], flags["lr-wsd-decay-style"]
        share = max(0.0, count - (decay - final)) / final
    if style == "cosine-restarts":
        last, left, cycle = "cosine", count - warmup, flags[f"lr-cycle-{unit}"]
        while left >= cycle:
            left, cycle = left - cycle, cycle * flags.get("lr-cycle-mult", 1.0)
        share = left / cycle
    heights = {
        "linear": 1 - share,
        "cosine": (1 + math.cos(math.pi * share)) / 2,
        "exponential": 2 * 0.5**share - 1,
        "minus_sqrt": 1 - math.sqrt(share),
    }
    return floor + (peak - floor) * heights[last]


def decoupled_rates(flags: Flags, done: tuple[int, int], total: tuple[int, int]) -> dict[str, float]:
    """The rates of parameters that have their own."""
    own = {name: flags[f"decoupled-{name}"] for name in ("lr", "min-lr") if f"decoupled-{name}" in flags}
    if not own:
        return {}
    return dict.fromkeys(
        ("embedding.word.weight", "head.weight"), learning_rate({**flags, **own}, done, total)
    )


def length_unit(flags: Flags) -> str:
    """What the learning rate's lengths are counted in: as given, or as the training's own."""
    for stem in ("lr-decay", "lr-wsd-decay", "lr-cycle", "lr-warmup", "train"):
        for unit in UNITS:
            if f"{stem}-{unit}" in flags:
                return unit
    raise KeyError("train-iters")


def weight_decay(flags: Flags, share: float) -> float:
    """The weight decay of the step that follows this share of all samples."""
    style = flags["weight-decay-incr-style"]
    if style == "constant":
        return flags["weight-decay"]
    height = share if style == "linear" else (1 - math.cos(math.pi * share)) / 2
    return flags["start-weight-decay"] + height * (flags["end-weight-decay"] - flags["start-weight-decay"])


class Scale:
    """Megatron's loss scale: a window of good steps doubles it; overflows beyond the tolerance halve it."""

    def __init__(self, flags: Flags):
        self.flags = flags
        self.dynamic = flags["params-dtype"] == "fp16" and "loss-scale" not in flags
        self.value = flags["initial-loss-scale"] if self.dynamic else flags.get("loss-scale", 1.0)
        self.good, self.tolerated = 0, flags["hysteresis"]

    def after(self, overflow: bool) -> None:
        """Take note of a step."""
        if not self.dynamic:
            return
        if overflow:
            self.good, self.tolerated = 0, self.tolerated - 1
            if self.tolerated <= 0:
                self.value = max(self.value / 2, self.flags["min-loss-scale"])
            return
        self.good += 1
        if self.good == self.flags["loss-scale-window"]:
            self.good, self.tolerated, self.value = 0, self.flags["hysteresis"], self.value * 2


def update(
    flags: Flags, w: Tensor, grad: Tensor, state: Weights, step: int, lr: float, decay: float, exempt: bool
) -> None:
    """Adam or AdEMAMix with decoupled weight decay, LAMB, or SGD as torch and Megatron have it; in place."""
    if flags["optimizer"] == "sgd":
        grad = grad + decay * w
        if flags["sgd-momentum"]:
            state["momentum"] = grad = flags["sgd-momentum"] * state.get("momentum", 0) + grad
        w.sub_(lr * grad)
        return
    beta1, beta2 = flags["adam-beta1"], flags["adam-beta2"]
    state["exp_avg"] = beta1 * state.get("exp_avg", 0) + (1 - beta1) * grad
    state["exp_avg_sq"] = beta2 * state.get("exp_avg_sq", 0) + (1 - beta2) * grad**2
    if flags["optimizer"] == "lamb":
        w.sub_(lamb_change(flags, w, state, step, lr, decay, exempt))
        return
    mean, square = state["exp_avg"] / (1 - beta1**step), state["exp_avg_sq"] / (1 - beta2**step)
    if flags["optimizer"] == "ademamix":
        mean = mean + slow_mean(flags, state, grad, step)
    w.mul_(1 - lr * decay).sub_(lr * mean / (square.sqrt() + flags["adam-eps"]))


def slow_mean(flags: Flags, state: Weights, grad: Tensor, step: int) -> Tensor:
    """What AdEMAMix adds to the mean of gradients; both of its schedules as its paper writes them."""
    alpha = min(step * flags["ademamix-alpha"] / flags["ademamix-alpha-warmup"], flags["ademamix-alpha"])
    start, beta3, share = flags["adam-beta1"], flags["ademamix-beta3"], step / flags["ademamix-beta3-warmup"]
    ends = math.log(start), math.log(beta3)
    beta3 = min(math.exp(ends[0] * ends[1] / ((1 - share) * ends[1] + share * ends[0])), beta3)
    state["exp_avg_slow"] = beta3 * state.get("exp_avg_slow", 0) + (1 - beta3) * grad
    return alpha * state["exp_avg_slow"]


def lamb_change(
    flags: Flags, w: Tensor, state: Weights, step: int, lr: float, decay: float, exempt: bool
) -> Tensor:
    """What LAMB takes off a whole weight whose moments are up to date."""
    mean, square = state["exp_avg"], state["exp_avg_sq"]
    bias1, bias2 = 1 - flags["adam-beta1"] ** step, 1 - flags["adam-beta2"] ** step
    if flags["lamb-bias-correction"] == "moments":
        mean, square = mean / bias1, square / bias2
    elif flags["lamb-bias-correction"] == "rate":
        lr = lr * math.sqrt(bias2) / bias1
    change = mean / (square.sqrt() + flags["adam-eps"]) + decay * w
    length, reach = float(w.double().norm()), float(change.double().norm())
    if length == 0 or reach == 0 or (exempt and not flags["lamb-adapt-all"]):
        return lr * change
    return lr * min(max(length / reach, flags["lamb-min-coeff"]), flags["lamb-max-coeff"]) * change


def train(
    flags: Flags,
    datasets: Sequence[Documents],
    initial: Weights,
    kept: Kept,
    steps: int,
    kind: type[Model] = Model,
) -> Training:
    """Train as the flags say on `datasets` (documents of tokens), from the `initial` weights."""
    model, exact = kind(flags, kept), flags["params-dtype"] == "fp32"
    rows = training_samples(flags, datasets, total_samples(flags, steps))

    def of_step(master: Weights, done: int, size: int, scale: float) -> tuple[float, Weights]:
        piece = size if exact else flags["micro-batch-size"]
        texts = [
            text_of(flags, range(first, first + piece), rows[first : first + piece])
            for first in range(done, done + size, piece)
        ]
        return gradients(model, master, texts, scale)

    return follow(flags, initial, steps, of_step)


def total_samples(flags: Flags, steps: int) -> int:
    """Samples of all steps together."""
    total = 0
    for _ in range(steps):
        total += batch_size(flags, total)
    return total


def follow(flags: Flags, initial: Weights, steps: int, of_step: Callable) -> Training:
    """Train by the (loss, gradients) of ``of_step(weights, first sample, samples, loss scale)``."""
    wide = torch.float64 if flags["params-dtype"] == "fp32" else torch.float32
    master = {name: each.to(wide, copy=True) for name, each in initial.items()}
    scale, run, total = Scale(flags), Training(), total_samples(flags, steps)
    done, updates, learned = 0, 0, 0  # samples, updates, and the samples of these
    for _ in range(steps):
        size = batch_size(flags, done)
        loss, grads = of_step(master, done, size, scale.value)
        norm = math.sqrt(sum(float(grad.double().square().sum()) for grad in grads.values()))
        skipped = loss is None or not math.isfinite(norm)  # without a loss there is nothing to learn from
        # A step without an update moves no schedule.
        lr = learning_rate(flags, (updates, learned), (steps, total))
        rates = decoupled_rates(flags, (updates, learned), (steps, total))
        decay = weight_decay(flags, learned / total)
        done += size
        facts = {"lm_loss": loss, "grad_norm": norm, "learning_rate": lr, "loss_scale": scale.value}
        run.steps.append({**facts, "skipped": skipped, "consumed_samples": done})
        scale.after(skipped)
        if skipped:
            continue
        updates, learned = updates + 1, learned + size
        clip = min(1.0, flags["clip-grad"] / (norm + 1e-6)) if flags["clip-grad"] else 1.0
        for name, each in master.items():
            # As in GPT-2: neither norms nor biases; nor the numbers of a state-space layer's heads.
            vectors = ("bias", "mamba.a_log", "mamba.skip", "mamba.norm.weight")
            decays = each.dim() > 1 and not name.endswith(vectors)
            if flags.get("apply-wd-to-qk-layernorm"):
                decays |= "q_norm." in name or "k_norm." in name
            state = run.state.setdefault(name, {})
            facts = {"lr": rates.get(name, lr), "decay": decay if decays else 0.0, "exempt": not decays}
            update(flags, each, grads[name] * clip, state, updates, **facts)
    run.weights = master
    return run


def gradients(model: Model, master: Weights, texts: Sequence[Text], scale: float) -> tuple[float, Weights]:
    """The mean loss over all tokens that count, and its gradients, by way of the scaled loss."""
    counted = sum(float(text.counts.sum()) for text in texts)
    grads, loss = {name: torch.zeros_like(each) for name, each in master.items()}, 0.0
    for text in texts:
        dtype = DTYPES[model.flags["params-dtype"]]
        leaves = {name: each.detach().to(dtype).requires_grad_() for name, each in master.items()}
        tied = {"head.weight": leaves["embedding.word.weight"]}
        summed = (model.losses({**tied, **leaves}, text) * text.counts).sum()
        (summed * (scale / counted)).backward()
        loss += summed.item() / counted
        for name, leaf in leaves.items():
            grads[name] += leaf.grad.to(grads[name].dtype) / scale
    return loss, grads
