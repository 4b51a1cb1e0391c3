"""The shapes of layers with sizes of their own, as a JSON text gives them.

Names and defaults are Megatron-LM's, which reads the `block_configs` of Hugging Face's Nemotron models (made
by Puzzle, Bercovich et al. 2024).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NoReturn

_MULTIPLE = 256  # of an inner width that `ffn_mult` gives
_HALVES = MappingProxyType(
    {
        "attention": ("num_query_groups", "num_key_value_heads", "n_heads_in_group"),
        "ffn": ("ffn_hidden_size", "intermediate_size", "ffn_mult"),
    }
)
"""The halves of a layer, and the names of their sizes."""

_FACTS = (
    *("num_hidden_layers", "hidden_size", "num_attention_heads", "head_dim", "tie_word_embeddings"),
    *("rope_theta", "rope_scaling", "hidden_act", "rms_norm_eps", "attention_bias", "mlp_bias"),
)
"""Settings of a whole model that a file may name beside its layers."""

_SWITCHES = ("no_op", "replace_with_linear", "sparsify")


@dataclass(frozen=True)
class LayerShape:
    """The sizes of one layer.

    Attributes:
        groups: key/value heads; 0 for a layer without attention.
        width: inner width of the MLP; 0 for a layer without one.
    """

    groups: int
    width: int


def read_text(path: str) -> str:
    """Read a file, and normalize its text by `read_layers`. ValueError says what is wrong with it."""
    try:
        with open(path, encoding="utf-8") as file:
            return read_layers(file.read())
    except (OSError, UnicodeDecodeError) as error:
        reason = error.reason if isinstance(error, UnicodeDecodeError) else error.strerror or error
        raise ValueError(f"must be a JSON file that can be read ({reason})") from error


def read_layers(text: str) -> str:
    """Normalize a text: keep what it says of sizes, in one notation. ValueError says what is wrong."""
    try:
        given = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"must be a JSON object with `block_configs` ({error})") from error
    layers = given.get("block_configs") if isinstance(given, dict) else None
    if not isinstance(layers, list) or not layers:
        raise ValueError("must be a JSON object with `block_configs`, a list with an object for each layer")
    if given.get("sliding_window"):
        raise ValueError("must have no `sliding_window`: windows are given by `--window-size`")
    if isinstance(scaling := given.get("rope_scaling"), dict):
        given["rope_scaling"] = scaling.get("factor", 1.0)
    kept = {name: given[name] for name in _FACTS if isinstance(given.get(name), int | float | str)}
    halves = [{name: _half(layer, name, n) for name in _HALVES} for n, layer in enumerate(layers)]
    return json.dumps({"block_configs": halves, **kept}, separators=(",", ":"))


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def _half(layer: object, name: str, number: int) -> dict[str, object]:
    """Return the size of one half of a layer, or `no_op`; empty where the half has the model's size."""
    where = f"`block_configs` [{number}]"
    spellings = ("ffn", "mlp") if name == "ffn" else (name,)
    halves = [layer[word] for word in spellings if word in layer] if isinstance(layer, dict) else []
    if not isinstance(layer, dict) or len(halves) != 1 or not isinstance(half := halves[0], dict):
        how = "both" if len(halves) > 1 else f"no `{name}`"
        raise ValueError(f"must give each layer `attention` and `ffn` as objects ({where} has {how})")
    if more := [key for key in layer.keys() - {"attention", "ffn", "mlp"} if layer[key] is not None]:
        raise ValueError(f"must give each layer `attention` and `ffn` alone ({where} has `{min(more)}`)")
    given = {
        key: value
        for key, value in half.items()
        if value is not None and not (value is False and key in _SWITCHES)
    }
    if "replace_with_linear" in given:
        raise ValueError(f"must have no `replace_with_linear`, which is not built here ({where}, `{name}`)")
    known = {"no_op", *_HALVES[name]}
    if others := sorted(given.keys() - known):
        raise ValueError(f"must give sizes and `no_op` alone ({where}, `{name}` has `{others[0]}`)")
    if len(given) > 1:
        raise ValueError(
            f"must give one size or `no_op` ({where}, `{name}` has {' and '.join(sorted(given))})"
        )
    for key, value in given.items():
        if not _sound(key, value):
            raise ValueError(f"must have sizes above 0 ({where}, `{name}`: `{key}` is {json.dumps(value)})")
    return given


def _sound(key: str, value: Any) -> bool:
    if key == "no_op":
        return value is True
    kinds = int | float if key == "ffn_mult" else int
    return isinstance(value, kinds) and not isinstance(value, bool) and 0 < value < 2**31


def shapes_of(text: str, heads: int, hidden: int, size: LayerShape) -> tuple[LayerShape, ...]:
    """Return the shapes of the layers of a text that `read_layers` made.

    `ffn_mult` counts two of the three matrices of a gated MLP, and the width is rounded up to a multiple of
    256. Groups that do not divide the heads evenly become more groups than heads, which a rule refuses.

    Args:
        text: the layers.
        heads, hidden: query heads, and the width of the model.
        size: the shape of a layer that gives no sizes.
    """
    layers = json.loads(text)["block_configs"]
    return tuple(
        LayerShape(_groups(layer["attention"], heads, size.groups), _width(layer["ffn"], hidden, size.width))
        for layer in layers
    )


def facts_of(text: str) -> Mapping[str, float | str]:
    """The settings of the whole model that a text gives."""
    given = json.loads(text)
    return {name: value for name, value in given.items() if name in _FACTS}


def _groups(half: Mapping[str, int], heads: int, groups: int) -> int:
    if "no_op" in half:
        return 0
    if "n_heads_in_group" in half:
        together = half["n_heads_in_group"]
        return heads // together if heads % together == 0 else heads + 1
    return next(iter(half.values()), groups)


def _width(half: Mapping[str, Any], hidden: int, width: int) -> int:
    if "no_op" in half:
        return 0
    if "ffn_mult" in half:
        return max(1, math.ceil(int(2 * half["ffn_mult"] * hidden / 3) / _MULTIPLE)) * _MULTIPLE
    return next(iter(half.values()), width)


def text_of(shapes: tuple[LayerShape, ...]) -> str:
    """Write layers of these shapes as a text."""
    halves = [
        {
            "attention": {"num_query_groups": shape.groups} if shape.groups else {"no_op": True},
            "ffn": {"ffn_hidden_size": shape.width} if shape.width else {"no_op": True},
        }
        for shape in shapes
    ]
    return json.dumps({"block_configs": halves}, separators=(",", ":"))
