"""Sliding windows in ``config.json``: one width and, in some architectures, the layers that have it.

transformers' width counts all tokens that a token sees, itself included; megazero's, as Megatron-LM's, counts
the tokens before it.
"""

from __future__ import annotations

from megazero.config.tree.model import ModelConfig
from megazero.config.tree.option import is_interval
from megazero.formats.hf.architecture import (
    PLAIN_HEADS,
    UNGROUPED,
    FieldPair,
    Json,
    JsonObject,
    Limit,
    Rewrite,
    layers_of,
)

WIDTH, KINDS, USED, FIRST = "sliding_window", "layer_types", "use_sliding_window", "max_window_layers"
PATTERN = "sliding_window_pattern"
_SLIDING, _FULL = "sliding_attention", "full_attention"

NO_WINDOWS = Limit(lambda m: not m.has_windows, "all tokens must see all earlier ones, without `window_size`")
PLAIN_ATTENTION = (NO_WINDOWS, UNGROUPED, PLAIN_HEADS)


def _alike(model: ModelConfig) -> bool:
    pattern = model.window_attn_skip_freq or (1,)
    every = pattern[0] > model.num_layers if is_interval(pattern) else 0 not in pattern
    return every or not model.has_windows


ALIKE = Limit(_alike, "all layers must have the same window, or none")


def _tokens_seen(model: ModelConfig) -> int | None:
    return model.window[0] + 1 if model.window is not None and model.has_windows else None


def _our_window(seen: int) -> tuple[int, int]:
    if seen < 1:
        raise ValueError(f"`{WIDTH}` must be at least 1, a token that sees itself, but is {seen}")
    return seen - 1, 0


def _windowed(model: ModelConfig) -> tuple[int, ...] | None:
    return tuple(int(window is not None) for window in model.windows) or None


WINDOW = FieldPair(WIDTH, "window_size", None, int, resolved=_tokens_seen, taken=_our_window)
"""The width of all windows."""

WINDOWED_LAYERS = FieldPair(KINDS, "window_attn_skip_freq", None, tuple, resolved=_windowed)
"""A 1 for each layer with a window and a 0 for others, as `plain_layers` writes it."""


def without_idle_windows(model: ModelConfig) -> ModelConfig:
    """The model without its window if that is as wide as the longest sequence, and so hides nothing."""
    hides = model.window is not None and model.window[0] < model.positions - 1
    if model.window is None or hides or model.window_rotary_base is not None:
        return model
    return model.model_copy(update={"window_size": None, "window_attn_skip_freq": None})


def plain_layers(config: Json, layers: int, first: int | None) -> JsonObject:
    """Flatten the fields of windows that are used: leave the width, and a 1 or 0 for each layer.

    Args:
        config: the fields of a ``config.json`` like Qwen2's.
        layers: the number of layers that transformers assumes.
        first: the first layer with a window that transformers assumes; None if its versions disagree about
            ``max_window_layers``, so that ``layer_types`` must list the layers.

    Raises:
        ValueError: the list of layers is ill-formed or missing, or has windows while none are used.
    """
    out = dict(config)
    used, width, kinds = out.pop(USED, False), out.pop(WIDTH, 4096), out.pop(KINDS, None)
    given = out.pop(FIRST, first)
    if not used or width is None:
        if kinds is not None and (not isinstance(kinds, list) or any(kind != _FULL for kind in kinds)):
            raise ValueError(
                f"`{KINDS}` must be {_FULL} for all layers where `{USED}` is not true, but is {kinds!r:.200}"
            )
        return out
    if kinds is None and first is None:
        raise ValueError(f"`{KINDS}` must say which layers have the `{WIDTH}`, but is missing; list them")
    layers = layers_of(out, layers)
    if kinds is None:
        if type(given) is not int:
            raise ValueError(f"`{FIRST}` must be a number, but is {given!r:.40}")
        kinds = [_SLIDING if number >= given else _FULL for number in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers or not {*map(str, kinds)} <= {_SLIDING, _FULL}:
        raise ValueError(
            f"`{KINDS}` must be {_SLIDING} or {_FULL} for each of {layers} layers, but is {kinds!r:.200}"
        )
    windowed = tuple(int(kind == _SLIDING) for kind in kinds)
    return {**out, WIDTH: width, KINDS: windowed} if any(windowed) else out


def with_layers(complete: Rewrite) -> Rewrite:
    """A rewrite that calls `complete` and then inverts `plain_layers`."""

    def completed(config: Json) -> JsonObject:
        out = complete(config)
        width, windowed = out.pop(WIDTH), out.pop(KINDS)
        if width is None:
            return out
        kinds = [_SLIDING if flag else _FULL for flag in windowed]
        # Versions that do not read `layer_types` give a window to all layers from this one on.
        return {**out, USED: True, WIDTH: width, KINDS: kinds, FIRST: kinds.index(_SLIDING)}

    return completed


def plain_listed(config: Json, layers: int, width: int, interval: object) -> JsonObject:
    """Call `plain_layers`; without ``layer_types``, every `interval`-th layer has full attention.

    Args:
        config: the fields of ``config.json``.
        layers, width: the number of layers and the width of windows that transformers assumes.
        interval: the interval, which may come from ``config.json`` unchecked.

    Raises:
        ValueError: see `plain_layers`; or `interval` is not a positive number.
    """
    given = {WIDTH: width, **config, USED: True}
    if given.get(KINDS) is None:
        if type(interval) is not int or interval < 1:
            raise ValueError(f"`{PATTERN}` must be a positive number, but is {interval!r:.40}")
        numbers = range(1, layers_of(given, layers) + 1)
        given[KINDS] = [_SLIDING if number % interval else _FULL for number in numbers]
    return plain_layers(given, layers, None)


def with_listed(complete: Rewrite) -> Rewrite:
    """A rewrite that calls `complete` and then inverts `plain_listed`."""

    def completed(config: Json) -> JsonObject:
        out = complete(config)
        windowed = out[KINDS] or (0,) * out["num_hidden_layers"]
        return {**out, KINDS: [_SLIDING if flag else _FULL for flag in windowed]}

    return completed
