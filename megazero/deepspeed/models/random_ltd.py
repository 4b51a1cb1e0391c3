"""Random layerwise token dropping (random-LTD) for layers of any kind (Yao et al. 2022, as in DeepSpeed).

In training, each converted layer sees a random subset of the tokens, in order; the other tokens bypass the
layer. The size of the subset grows linearly until it is the whole sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from megazero.deepspeed.config import Json
from megazero.deepspeed.config.shown import value_at
from megazero.errors import ConfigError

SECTION = "data_efficiency.data_routing.random_ltd"
_PROGRESS = ("consumed_layer_tokens", "current_steps", "current_value", "min_value", "max_value")
_SWITCHES = ("data_efficiency", "data_efficiency.data_routing", SECTION)
_T = TypeVar("_T")


class RandomLTDScheduler:
    """The number of tokens that converted layers keep, by the number of optimizer steps.

    Attributes:
        state: the progress and the settings of the growth, by DeepSpeed's names.

    Args:
        config: the section `random_ltd`, and `global_batch_size`.
    """

    state: dict[str, Any]

    def __init__(self, config: Json):
        self.model_layer_num = int(config["total_layer_num"])
        self.random_ltd_layer_num = int(config["random_ltd_layer_num"])
        self.config_schedule = config["random_ltd_schedule"]
        self.global_batch_size = int(config["global_batch_size"])
        steps = self.config_schedule["schedule_config"]
        self._steps, self._stride = int(steps["require_steps"]), int(steps["seq_per_step"])
        self.reset_to_init()

    def get_value(self, global_steps: int) -> int:
        """Return the number of tokens to keep after `global_steps` optimizer steps."""
        least, most = self.state["min_value"], self.state["max_value"]
        grown = int(global_steps / self._steps * (most - least) + least)
        value: int = min(grown - grown % self._stride, most)
        return value

    def get_current_seq(self) -> int:
        """Return the current number of tokens to keep."""
        kept: int = self.state["current_value"]
        return kept

    def set_current_seq(self, seq_length: int) -> None:
        """Keep `seq_length` tokens until the next `update_seq`."""
        self.state["current_value"] = seq_length

    def get_random_ltd_layer_num(self) -> int:
        """Return the number of converted layers."""
        return self.random_ltd_layer_num

    def get_state(self) -> dict[str, Any]:
        """Return `state`."""
        return self.state

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from the `state` of another scheduler."""
        self.state = state

    def update_seq(self, global_steps: int) -> None:
        """Advance to a step, and add the tokens that all layers see in this step."""
        if self.state["current_value"] < self.state["max_value"]:
            self.state["current_value"] = self.get_value(global_steps)
        if global_steps != self.state["current_steps"]:
            whole = self.model_layer_num - self.random_ltd_layer_num
            seen = self.state["current_value"] * self.random_ltd_layer_num + self.state["max_value"] * whole
            self.state["consumed_layer_tokens"] += self.global_batch_size * seen
            self.state["current_steps"] = global_steps

    def get_total_layer_tokens(self, train_iters: int) -> int:
        """Advance through `train_iters` steps; return the number of tokens that all layers see."""
        for step in range(train_iters):
            self.update_seq(step)
        tokens: int = self.state["consumed_layer_tokens"]
        return tokens

    def reset_to_init(self) -> None:
        """Reset to the state before the first step."""
        least, most = (int(self.config_schedule[name]) for name in ("min_value", "max_value"))
        self.state = {
            "consumed_layer_tokens": 0,
            "current_steps": -1,
            "current_value": least,
            "min_value": least,
            "max_value": most,
            "schedule_config": self.config_schedule["schedule_config"],
            "schedule_type": self.config_schedule.get("schedule_type"),
        }

    def state_dict(self) -> dict[str, int]:
        """Return the progress."""
        return {name: self.state[name] for name in _PROGRESS}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Restore what `state_dict` returned."""
        self.state.update({name: state_dict[name] for name in _PROGRESS})


def scheduler_of(config: Json, batch: int) -> RandomLTDScheduler | None:
    """Return the scheduler of a JSON for batches of `batch` samples; None if random-LTD is off.

    Raises:
        ConfigError: a key is missing.
    """
    if not all(value_at(config, f"{switch}.enabled", False) for switch in _SWITCHES):
        return None
    section = dict(value_at(config, SECTION))
    section["global_batch_size"] = batch
    try:
        return RandomLTDScheduler(section)
    except KeyError as missing:
        raise ConfigError(f"`{SECTION}` must have the key {missing}, but lacks it; add it") from None


@dataclass
class _Draw:
    """The tokens that all converted layers keep in one forward, drawn by the first layer.

    Attributes:
        kept: int64 [layers, batch, tokens], ascending along the last dim.
        masks: the attention mask of each layer.
    """

    kept: Tensor = field(default_factory=lambda: torch.empty(0))
    masks: list[Tensor | None] = field(default_factory=list)


@dataclass(frozen=True)
class _LayerPlan:
    """A converted layer's number, the draw that it shares, and the layout of its tensors."""

    number: int
    scheduler: RandomLTDScheduler
    draw: _Draw
    mask_name: str | None
    encoder: bool
    seq_dim: int

    def sample(self, tokens: Tensor, kept: int, mask: Tensor | None) -> None:
        """Draw the tokens of all layers at once; all subsets of `kept` tokens are equally probable."""
        batch, seq = tokens.shape[1 - self.seq_dim], tokens.shape[self.seq_dim]
        layers = self.scheduler.random_ltd_layer_num
        drawn = torch.multinomial(torch.ones(layers * batch, seq, device=tokens.device), kept)
        self.draw.kept = drawn.sort(-1).values.view(layers, batch, kept)
        self.draw.masks = [self._crop(mask, tokens) for tokens in self.draw.kept]

    def _crop(self, mask: Tensor | None, kept: Tensor) -> Tensor | None:
        """Select an encoder's mask [b, 1, s or 1, s] at the kept tokens; crop a decoder's causal mask."""
        if mask is None:
            return None
        count = kept.shape[1]
        if not self.encoder:
            return mask[:, :, :count, :count]
        columns = kept[:, None, None, :].expand(-1, mask.shape[1], mask.shape[2], -1)
        mask = mask.expand(len(kept), -1, -1, -1).gather(3, columns)
        if mask.shape[2] == 1:
            return mask
        return mask.gather(2, kept[:, None, :, None].expand(-1, mask.shape[1], -1, count))


class RandomLayerTokenDrop(nn.Module):
    """The base of converted layers: its forward applies the layer to the kept tokens alone."""

    random_ltd_plan: _LayerPlan | None = None

    def forward(self, hidden_states: Tensor, *args: object, **kwargs: Any) -> Any:
        """Call the layer, whose first argument and first result are hidden states.

        Raises:
            ConfigError: the result is neither a tensor nor a tuple that begins with one.
        """
        plan = self.random_ltd_plan
        if plan is None or not self.training:
            return super().forward(hidden_states, *args, **kwargs)
        kept = plan.scheduler.get_current_seq()
        if kept >= hidden_states.shape[plan.seq_dim]:
            return super().forward(hidden_states, *args, **kwargs)
        if plan.number == 0:
            plan.sample(hidden_states, kept, kwargs[plan.mask_name] if plan.mask_name else None)
        own = plan.draw.kept[plan.number]
        indices = (own if plan.seq_dim == 1 else own.T)[..., None].expand(-1, -1, hidden_states.shape[-1])
        if plan.mask_name is not None:
            kwargs[plan.mask_name] = plan.draw.masks[plan.number]
        out = super().forward(hidden_states.gather(plan.seq_dim, indices), *args, **kwargs)
        part = out[0] if isinstance(out, tuple) else out
        if not isinstance(part, Tensor):
            raise ConfigError(
                "the result of a layer with random-LTD must be a tensor or a tuple that begins with one, but "
                f"is a {type(out).__name__}; convert a layer within it"
            )
        whole = hidden_states.scatter(plan.seq_dim, indices, part.to(hidden_states.dtype))
        return (whole, *out[1:]) if isinstance(out, tuple) else whole


def initialize_layers(model: nn.Module, config: Json, scheduler: RandomLTDScheduler) -> None:
    """Set the plans of the converted layers that `random_ltd_layer_id` lists.

    As in DeepSpeed, a layer is the next listed one if its name contains that number.

    Raises:
        ConfigError: their number is not `random_ltd_layer_num`, or a value of the section is unknown.
    """
    section = value_at(config, SECTION)
    order, kind = section.get("hidden_state_order"), section.get("model_type")
    if order not in ("batch_seq_dim", "seq_batch_dim") or kind not in ("encoder", "decoder"):
        raise ConfigError(
            f"`{SECTION}` must have `hidden_state_order` batch_seq_dim or seq_batch_dim and `model_type` "
            f"encoder or decoder, but has {order} and {kind}"
        )
    mask_name = section.get("model_mask_name")
    if kind == "encoder" and mask_name is None:
        raise ConfigError(f"`{SECTION}.model_mask_name` must be given for an encoder, but is not")
    listed, draw, count = sorted(section["random_ltd_layer_id"]), _Draw(), 0
    for name, layer in model.named_modules():
        if isinstance(layer, RandomLayerTokenDrop) and listed and str(listed[0]) in name:
            seq_dim = int(order == "batch_seq_dim")
            layer.random_ltd_plan = _LayerPlan(count, scheduler, draw, mask_name, kind == "encoder", seq_dim)
            listed, count = listed[1:], count + 1
    if count != scheduler.random_ltd_layer_num:
        raise ConfigError(
            f"`{SECTION}.random_ltd_layer_num` must be the number of layers in `random_ltd_layer_id`, but "
            f"is {scheduler.random_ltd_layer_num}, and {count} are listed and converted"
        )


def convert_to_random_ltd(model: Any, convert_type: type[nn.Module] | tuple[type[nn.Module], ...]) -> Any:
    """Convert the layers of a class, in place; the names of parameters stay.

    Args:
        model: the engine.
        convert_type: the class of the layers, or several classes.

    Returns:
        The engine.

    Raises:
        ConfigError: the section is off, or contradicts the layers.
    """
    classes: dict[type[nn.Module], type[nn.Module]] = {}
    for layer in list(getattr(model, "module", model).modules()):
        if isinstance(layer, convert_type) and not isinstance(layer, RandomLayerTokenDrop):
            kind = type(layer)
            if kind not in classes:
                bases, names = (RandomLayerTokenDrop, kind), {"__module__": kind.__module__}
                classes[kind] = type(kind.__name__, bases, names)
            layer.__class__ = classes[kind]
    model.random_ltd_initialize()
    return model


def save_without_random_ltd(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict of an engine's module."""
    return remove_random_ltd_state_dict(getattr(model, "module", model).state_dict())


def remove_random_ltd_state_dict(state_dict: Mapping[str, _T]) -> dict[str, _T]:
    """Remove the part that DeepSpeed adds to the names in a state dict."""
    return {key.replace(".random_ltd_layer", ""): value for key, value in state_dict.items()}
