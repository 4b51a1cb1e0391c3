"""Sliding windows in ``config.json``: one width, and in some architectures which layers have it.

Theirs counts the tokens that a token sees, itself among them; ours counts those before it, as Megatron-LM
does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megazero.config.tree.model import ModelConfig
from megazero.config.tree.option import is_interval
from megazero.formats.hf.architecture import PLAIN_HEADS, UNGROUPED, FieldPair, Json, Limit, layers_of

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
"""Which layers have one, as `plain_layers` gives it."""


def without_idle_windows(model: ModelConfig) -> ModelConfig:
    """The model without a window as long as its longest sequence, which hides nothing there."""
    hides = model.window is not None and model.window[0] < model.positions - 1
    if model.window is None or hides or model.window_rotary_base is not None:
        return model
    return model.model_copy(update={"window_size": None, "window_attn_skip_freq": None})


def plain_layers(config: Json, layers: int, first: int | None) -> dict[str, Any]:
    """`config` with the width, and a 1 or 0 for each layer, of windows that are used.

    Args:
        config: one of Qwen2's kind.
        layers: the number of layers that transformers assumes if ``config.json`` says none.
        first: the first layer with a window that it assumes; None if versions of it differ in what
            ``max_window_layers`` means, so that the layers must be listed.

    Raises:
        ValueError: the layers are not listed in a way that can be told, or have windows that are not used.
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


def with_layers(complete: Callable[[Json], dict[str, Any]]) -> Callable[[Json], dict[str, Any]]:
    """The opposite of `plain_layers`, after what else is to complete ``config.json``."""

    def completed(config: Json) -> dict[str, Any]:
        out = complete(config)
        width, windowed = out.pop(WIDTH), out.pop(KINDS)
        if width is None:
            return out
        kinds = [_SLIDING if flag else _FULL for flag in windowed]
        # Versions that read no kinds give a window to all layers from this one on.
        return {**out, USED: True, WIDTH: width, KINDS: kinds, FIRST: kinds.index(_SLIDING)}

    return completed


def plain_listed(config: Json, layers: int, width: int, interval: Any) -> dict[str, Any]:
    """`plain_layers` of an architecture whose layers all have a window but for every `interval`-th.

    Args:
        config: it may list the layers otherwise.
        layers, width: the number of layers and the width of windows that transformers assumes.
        interval: see above.

    Raises:
        ValueError: see `plain_layers`; or `interval`, which ``config.json`` may give, is none.
    """
    given = {WIDTH: width, **config, USED: True}
    if given.get(KINDS) is None:
        if type(interval) is not int or interval < 1:
            raise ValueError(f"`{PATTERN}` must be a positive number, but is {interval!r:.40}")
        numbers = range(1, layers_of(given, layers) + 1)
        given[KINDS] = [_SLIDING if number % interval else _FULL for number in numbers]
    return plain_layers(given, layers, None)


def with_listed(complete: Callable[[Json], dict[str, Any]]) -> Callable[[Json], dict[str, Any]]:
    """The opposite of `plain_listed`, after what else is to complete ``config.json``."""

    def completed(config: Json) -> dict[str, Any]:
        out = complete(config)
        windowed = out[KINDS] or (0,) * out["num_hidden_layers"]
        return {**out, KINDS: [_SLIDING if flag else _FULL for flag in windowed]}

    return completed
