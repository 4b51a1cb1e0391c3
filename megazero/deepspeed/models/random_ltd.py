"""Random layerwise token dropping around layers of any kind (Yao et al. 2022, as in DeepSpeed).

In training each converted layer computes with a random share of the tokens, in their order; the others pass
it by. The share grows along a straight line until it is everything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from megazero.deepspeed.config.shown import value_at
from megazero.errors import ConfigError

SECTION = "data_efficiency.data_routing.random_ltd"
_PROGRESS = ("consumed_layer_tokens", "current_steps", "current_value", "min_value", "max_value")
_SWITCHES = ("data_efficiency", "data_efficiency.data_routing", SECTION)


class RandomLTDScheduler:
    """How many tokens a converted layer keeps, by the optimizer steps so far.

    Attributes:
        state: the progress by DeepSpeed's names, and what the section says of the growth.

    Args:
        config: the section `random_ltd`, with `global_batch_size`.
    """

    state: dict[str, Any]

    def __init__(self, config: Mapping[str, Any]):
        self.model_layer_num = int(config["total_layer_num"])
        self.random_ltd_layer_num = int(config["random_ltd_layer_num"])
        self.config_schedule = config["random_ltd_schedule"]
        self.global_batch_size = int(config["global_batch_size"])
        steps = self.config_schedule["schedule_config"]
        self._steps, self._stride = int(steps["require_steps"]), int(steps["seq_per_step"])
        self.reset_to_init()

    def get_value(self, global_steps: int) -> int:
        """The tokens to keep after so many optimizer steps."""
        least, most = self.state["min_value"], self.state["max_value"]
        grown = int(global_steps / self._steps * (most - least) + least)
        value: int = min(grown - grown % self._stride, most)
        return value

    def get_current_seq(self) -> int:
        """The tokens to keep now."""
        kept: int = self.state["current_value"]
        return kept

    def set_current_seq(self, seq_length: int) -> None:
        """Keep so many tokens until the next `update_seq`."""
        self.state["current_value"] = seq_length

    def get_random_ltd_layer_num(self) -> int:
        """The number of converted layers."""
        return self.random_ltd_layer_num

    def get_state(self) -> dict[str, Any]:
        """`state`."""
        return self.state

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from another scheduler's `state`."""
        self.state = state

    def update_seq(self, global_steps: int) -> None:
        """Go to a step, and count the tokens that all layers see in it."""
        if self.state["current_value"] < self.state["max_value"]:
            self.state["current_value"] = self.get_value(global_steps)
        if global_steps != self.state["current_steps"]:
            whole = self.model_layer_num - self.random_ltd_layer_num
            seen = self.state["current_value"] * self.random_ltd_layer_num + self.state["max_value"] * whole
            self.state["consumed_layer_tokens"] += self.global_batch_size * seen
            self.state["current_steps"] = global_steps

    def get_total_layer_tokens(self, train_iters: int) -> int:
        """Go through so many steps; the tokens that all layers see in them."""
        for step in range(train_iters):
            self.update_seq(step)
        tokens: int = self.state["consumed_layer_tokens"]
        return tokens

    def reset_to_init(self) -> None:
        """Go back to before the first step."""
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
        """The progress."""
        return {name: self.state[name] for name in _PROGRESS}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Restore what `state_dict` returned."""
        self.state.update({name: state_dict[name] for name in _PROGRESS})


def scheduler_of(config: Mapping[str, Any], batch: int) -> RandomLTDScheduler | None:
    """The schedule of a JSON's content for so many samples in a batch; None if random-LTD is off.

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
        raise ConfigError(f"`{SECTION}` must have the key {missing}, but has not; add it") from None


@dataclass
class _Draw:
    """The tokens that all converted layers keep in one forward, drawn by the first of them.

    Attributes:
        kept: int64 [layers, batch, tokens], growing along the last axis.
        masks: the attention mask of each layer.
    """

    kept: Tensor = field(default_factory=lambda: torch.empty(0))
    masks: list[Tensor | None] = field(default_factory=list)


@dataclass(frozen=True)
class _Turn:
    """A converted layer's part: its number, the shared draw, and what the section says of its tensors."""

    number: int
    scheduler: RandomLTDScheduler
    draw: _Draw
    mask_name: str | None
    encoder: bool
    seq_dim: int

    def sample(self, tokens: Tensor, kept: int, mask: Tensor | None) -> None:
        """Draw for all layers at once: each subset of `kept` tokens is as probable as any other."""
        batch, seq = tokens.shape[1 - self.seq_dim], tokens.shape[self.seq_dim]
        layers = self.scheduler.random_ltd_layer_num
        drawn = torch.multinomial(torch.ones(layers * batch, seq, device=tokens.device), kept)
        self.draw.kept = drawn.sort(-1).values.view(layers, batch, kept)
        self.draw.masks = [self._part(mask, own) for own in self.draw.kept]

    def _part(self, mask: Tensor | None, kept: Tensor) -> Tensor | None:
        """An encoder's mask [b, 1, s or 1, s] at the kept tokens; a decoder's first rows and columns."""
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
    """The base of each converted layer: its forward sees the kept tokens, and the others pass it by."""

    random_ltd_turn: _Turn | None = None

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """As of the layer, whose first argument and first result are hidden states.

        Raises:
            ConfigError: the result is neither a tensor nor a tuple.
        """
        turn = self.random_ltd_turn
        if turn is None or not self.training:
            return super().forward(hidden_states, *args, **kwargs)
        kept = turn.scheduler.get_current_seq()
        if kept >= hidden_states.shape[turn.seq_dim]:
            return super().forward(hidden_states, *args, **kwargs)
        if turn.number == 0:
            turn.sample(hidden_states, kept, kwargs[turn.mask_name] if turn.mask_name else None)
        own = turn.draw.kept[turn.number]
        places = (own if turn.seq_dim == 1 else own.T)[..., None].expand(-1, -1, hidden_states.shape[-1])
        if turn.mask_name is not None:
            kwargs[turn.mask_name] = turn.draw.masks[turn.number]
        out = super().forward(hidden_states.gather(turn.seq_dim, places), *args, **kwargs)
        part = out[0] if isinstance(out, tuple) else out
        if not isinstance(part, Tensor):
            raise ConfigError(
                "the result of a layer with random-LTD must be a tensor or a tuple that begins with one, but "
                f"is a {type(out).__name__}; convert a layer within it"
            )
        whole = hidden_states.scatter(turn.seq_dim, places, part.to(hidden_states.dtype))
        return (whole, *out[1:]) if isinstance(out, tuple) else whole


def _converted(kind: type[nn.Module]) -> type[nn.Module]:
    """The class of converted layers of a kind."""
    return type(kind.__name__, (RandomLayerTokenDrop, kind), {"__module__": kind.__module__})


def initialize_layers(model: nn.Module, config: Mapping[str, Any], scheduler: RandomLTDScheduler) -> None:
    """Give the converted layers that the section lists their turns.

    As in DeepSpeed, a layer is the next listed one if its name contains that number.

    Raises:
        ConfigError: they are not `random_ltd_layer_num`, or a word of the section is not known.
    """
    section = value_at(config, SECTION)
    order, kind = section.get("hidden_state_order"), section.get("model_type")
    if order not in ("batch_seq_dim", "seq_batch_dim") or kind not in ("encoder", "decoder"):
        raise ConfigError(
            f"`{SECTION}` must say `hidden_state_order` batch_seq_dim or seq_batch_dim and `model_type` "
            f"encoder or decoder, but says {order} and {kind}"
        )
    mask_name = section.get("model_mask_name")
    if kind == "encoder" and mask_name is None:
        raise ConfigError(f"`{SECTION}.model_mask_name` must be given for an encoder, but is not")
    listed, draw, count = sorted(section["random_ltd_layer_id"]), _Draw(), 0
    for name, layer in model.named_modules():
        if isinstance(layer, RandomLayerTokenDrop) and listed and str(listed[0]) in name:
            seq_dim = int(order == "batch_seq_dim")
            layer.random_ltd_turn = _Turn(count, scheduler, draw, mask_name, kind == "encoder", seq_dim)
            listed, count = listed[1:], count + 1
    if count != scheduler.random_ltd_layer_num:
        raise ConfigError(
            f"`{SECTION}.random_ltd_layer_num` must be the number of layers in `random_ltd_layer_id`, but "
            f"is {scheduler.random_ltd_layer_num}, and {count} are listed and converted"
        )


def convert_to_random_ltd(model: Any, convert_type: type[nn.Module] | tuple[type[nn.Module], ...]) -> Any:
    """Convert the layers of a kind, in place; their parameters keep their names.

    Args:
        model: the engine.
        convert_type: the class of the layers, or several.

    Returns:
        The engine.

    Raises:
        ConfigError: the section is off, or does not fit the layers.
    """
    classes: dict[type[nn.Module], type[nn.Module]] = {}
    for layer in list(getattr(model, "module", model).modules()):
        if isinstance(layer, convert_type) and not isinstance(layer, RandomLayerTokenDrop):
            kind = type(layer)
            layer.__class__ = classes[kind] = classes.get(kind) or _converted(kind)
    model.random_ltd_initialize()
    return model


def save_without_random_ltd(model: Any) -> dict[str, Any]:
    """The weights of an engine's module under their own names."""
    return remove_random_ltd_state_dict(getattr(model, "module", model).state_dict())


def remove_random_ltd_state_dict(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict without the part of names that DeepSpeed puts there."""
    return {key.replace(".random_ltd_layer", ""): value for key, value in state_dict.items()}
