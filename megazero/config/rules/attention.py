"""Rules about the keys that attention sees."""

from __future__ import annotations

from megazero.config.fields import paths
from megazero.config.rules.rule import Rule
from megazero.config.tree.model import ModelConfig
from megazero.config.tree.option import is_interval

_MODEL = paths.model

_WINDOW, _SKIPPED, _DEPTH = _MODEL.window_size, _MODEL.window_attn_skip_freq, _MODEL.num_layers
_POSITIONS, _LENGTH = _MODEL.max_position_embeddings, _MODEL.seq_length


def _is_whole(model: ModelConfig, field: str = "window_attn_skip_freq") -> bool:
    pattern = getattr(model, field)
    if pattern is None or is_interval(pattern):
        return True
    return len(pattern) == model.num_layers and set(pattern) <= {0, 1}


def _whole_pattern(name: str, field: str, remedy: str) -> Rule:
    return Rule(
        name,
        (f"model.{field}", _DEPTH),
        f"`{field}` must be one number above 1, or a 0 or 1 for each layer",
        f"correct it; an interval of 1 leaves no layer {remedy}",
        lambda c: _is_whole(c.config.model, field),
        lambda c: f"it has {len(getattr(c.config.model, field) or ())} items",
    )


def _within_positions(model: ModelConfig) -> bool:
    return max(model.window_size or (-1,)) < model.positions


def _only_past(model: ModelConfig) -> bool:
    return model.family != "gpt" or model.window_size is None or model.window_size[1] in (-1, 0)


ATTENTION_RULES: tuple[Rule, ...] = (
    Rule(
        "latent_heads_have_own_keys",
        (_MODEL.num_query_groups, _MODEL.multi_latent_attention),
        "`num_query_groups` must be left out with `multi_latent_attention`, where each head has its own keys",
        "leave one of the two out",
        lambda c: (
            not c.config.model.multi_latent_attention
            or c.config.model.kv_heads == c.config.model.num_attention_heads
        ),
    ),
    _whole_pattern("window_pattern_is_whole", "window_attn_skip_freq", "a window: leave `--window-size` out"),
    _whole_pattern("rotation_pattern_is_whole", "no_rope_freq", "rotary positions: leave the rotation out"),
    Rule(
        "window_of_the_past",
        (_WINDOW, _MODEL.family),
        "the second number of `window_size` must be 0 or -1 for a gpt, whose tokens see no later ones",
        "give `--window-size L,0`",
        lambda c: _only_past(c.config.model),
    ),
    Rule(
        "window_within_positions",
        (_WINDOW, _POSITIONS, _LENGTH),
        "each side of `window_size` must be below `max_position_embeddings`, or `seq_length` if that is not "
        "given, as no token is farther from another",
        "make the window smaller, or raise `--max-position-embeddings`",
        lambda c: _within_positions(c.config.model),
        lambda c: f"there are {c.config.model.positions:,} positions",
    ),
    Rule(
        "some_layer_has_a_window",
        (_WINDOW, _SKIPPED, _DEPTH),
        "`window_size` must limit a side, in at least one layer",
        "give a number other than -1, or leave `--window-size` out",
        lambda c: (
            c.config.model.window_size is None
            or not _is_whole(c.config.model)
            or not _only_past(c.config.model)
            or c.config.model.has_windows
        ),
    ),
)
