"""RoPE in ``config.json``: its base, and its scaling to longer sequences, in several spellings.

Up to version 4 transformers writes ``rope_theta`` and ``rope_scaling``, from version 5 on
``rope_parameters``, which holds both. Both versions must be able to read what is written here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

from megazero.formats.hf.architecture import FieldPair, Json, JsonObject
from megazero.ops.rotary_frequencies import yarn_magnitude

_FIELDS = ("rope_scaling", "rope_parameters")
_LENGTH = "original_max_position_embeddings"

ROPE_SETTINGS = (
    FieldPair("rope_theta", "rotary_base", 10000.0),
    FieldPair(
        "rope_scaling.rope_type",
        "position_embedding_type",
        "rope",
        words=(("rope", "rope"), ("yarn", "yarn")),
    ),
    FieldPair("linear rope_scaling.factor", "rotary_seq_len_interpolation_factor", None, float),
    FieldPair("llama3 rope_scaling", "use_rope_scaling", False),
    FieldPair("llama3 rope_scaling.factor", "rope_scaling_factor", 8.0),
    FieldPair("llama3 rope_scaling.low_freq_factor", "rope_low_freq_factor", 1.0),
    FieldPair("llama3 rope_scaling.high_freq_factor", "rope_high_freq_factor", 4.0),
    FieldPair(f"llama3 rope_scaling.{_LENGTH}", "rope_original_max_position_embeddings", 8192),
    FieldPair("yarn rope_scaling.factor", "rotary_scaling_factor", 1.0),
    FieldPair(f"yarn rope_scaling.{_LENGTH}", "yarn_original_max_position_embeddings", 4096),
    FieldPair("yarn rope_scaling.beta_fast", "yarn_beta_fast", 32.0),
    FieldPair("yarn rope_scaling.beta_slow", "yarn_beta_slow", 1.0),
    FieldPair("yarn rope_scaling.truncate", "yarn_correction_range_round_to_int", True),
    FieldPair("yarn rope_scaling.mscale", "mscale", 1.0),
    FieldPair("yarn rope_scaling.mscale_all_dim", "mscale_all_dim", 0.0),
)
"""The settings of RoPE, under the flat names that `plain_rope` gives them."""

_REQUIRED = frozenset({"factor", "low_freq_factor", "high_freq_factor", _LENGTH})
_OF_YARN = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")
_KEYS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "default": frozenset(),
        "linear": frozenset({"factor"}),
        "llama3": _REQUIRED,
        "yarn": frozenset({"factor", _LENGTH, *_OF_YARN}),
    }
)
"""Kind of scaling -> the keys that it may have; those in `_REQUIRED` it must have."""


def plain_rope(config: Json) -> JsonObject:
    """Flatten the rope fields: replace them by the names of `ROPE_SETTINGS`.

    Raises:
        ValueError: a part of the channels is rotated, the kind is unknown, or two fields disagree.
    """
    out = dict(config)
    thetas = {} if config.get("rope_theta") is None else {"rope_theta": config["rope_theta"]}
    scalings: dict[str, Json] = {}
    for field in _FIELDS:
        nested = out.pop(field, None)
        if nested is None:
            continue
        if not isinstance(nested, dict):
            raise ValueError(f"`{field}` must be an object, but is {nested!r:.80}")
        scalings[field] = _scaling(field, nested, config)
        if nested.get("rope_theta") is not None:
            thetas[field] = nested["rope_theta"]
    if any(theta != next(iter(thetas.values())) for theta in thetas.values()):
        raise ValueError(f"`rope_theta` must be given once, but is given as {thetas}; keep the right one")
    if config.get("partial_rotary_factor") not in (None, 1.0):
        raise ValueError(
            f"`partial_rotary_factor` must be 1, but is {config['partial_rotary_factor']!r:.40}; Llama "
            f"rotates whole heads"
        )
    if len(scalings) == 2 and scalings[_FIELDS[0]] != scalings[_FIELDS[1]]:
        raise ValueError(
            "`rope_scaling` and `rope_parameters` must describe one rotation, but describe two; keep the "
            "right one"
        )
    out.pop("rope_theta", None)
    theta = {"rope_theta": next(iter(thetas.values()))} if thetas else {}
    return {**out, **theta, **next(iter(scalings.values()), {})}


def _scaling(field: str, nested: Json, config: Json) -> Json:
    """The flat fields of one scaling; `field` is the name of `nested` in `config`."""
    kind = nested.get("rope_type", nested.get("type", "default"))
    keys = _KEYS.get(kind) if isinstance(kind, str) else None
    if kind == "dynamic":
        raise ValueError(
            f"`{field}` must be a rotation of the kinds {', '.join(_KEYS)}, but is dynamic, whose base "
            "depends on the length of each sequence; take it out for sequences up to "
            "`max_position_embeddings`, which it leaves alone, or give a larger `rope_theta` for longer ones"
        )
    if keys is None:
        raise ValueError(
            f"`{field}` must be a rotation of the kinds {', '.join(_KEYS)}, but is {nested!r:.200}; no "
            "other is supported"
        )
    if nested.get("partial_rotary_factor") not in (None, 1.0):
        raise ValueError(f"`{field}` must rotate whole heads, but is {nested!r:.200}")
    extra = sorted(nested.keys() - keys - {"rope_type", "type", "rope_theta", "partial_rotary_factor"})
    if extra:
        raise ValueError(f"`{field}` of the kind {kind} must not have `{extra[0]}`, but is {nested!r:.200}")
    if kind == "default":
        return {}
    given = {key: nested[key] for key in keys if nested.get(key) is not None}
    positions = config.get("max_position_embeddings")
    if kind != "linear":  # a missing length of the original training means the model's own length
        given[_LENGTH] = config.get(_LENGTH) or given.get(_LENGTH) or positions
    if kind == "yarn" and "factor" not in given and given[_LENGTH] and positions:
        given["factor"] = positions / given[_LENGTH]
    missing = sorted(keys & _REQUIRED - {key for key, value in given.items() if value})
    if missing:
        raise ValueError(f"`{field}` of the kind {kind} must have `{missing[0]}`, but is {nested!r:.200}")
    given = {key: float(v) if type(v) is int and key != _LENGTH else v for key, v in given.items()}
    if kind == "linear":
        return {"linear rope_scaling.factor": given["factor"]}
    if kind == "llama3":
        return {
            "llama3 rope_scaling": True,
            **{f"llama3 rope_scaling.{key}": value for key, value in given.items()},
        }
    return {
        "rope_scaling.rope_type": "yarn",
        **{f"yarn rope_scaling.{key}": value for key, value in _sharpened(given).items()},
    }


def _sharpened(given: JsonObject) -> JsonObject:
    """YaRN's settings, with the factor of attention's logits expressed by `mscale`.

    transformers multiplies cos and sin by ``attention_factor``; by default that is 0.1 mscale log(factor) +
    1.
    """
    sharpening = given.pop("attention_factor", None)
    if sharpening is None:
        if not (given.get("mscale") and given.get("mscale_all_dim")):  # transformers reads both or neither
            given.pop("mscale", None)
            given.pop("mscale_all_dim", None)
        return given
    growth = 0.1 * math.log(given["factor"])
    if growth == 0.0 and sharpening != 1.0:
        raise ValueError(f"`attention_factor` must be 1 where `factor` is 1, but is {sharpening!r:.40}")
    return {**given, "mscale": (sharpening - 1) / growth if growth else 1.0, "mscale_all_dim": 0.0}


def with_rope_parameters(config: Json) -> JsonObject:
    """Invert `plain_rope`: write the fields that versions 4 and 5 of transformers read."""
    flat = {key: value for key, value in config.items() if "rope_scaling" in key}
    out = {key: value for key, value in config.items() if key not in flat}

    def of(kind: str) -> JsonObject:
        head = f"{kind} rope_scaling."
        return {key.removeprefix(head): value for key, value in flat.items() if key.startswith(head)}

    scaling: JsonObject = {}
    if flat["rope_scaling.rope_type"] == "yarn":
        scaling = {"rope_type": "yarn", **of("yarn")}
        own, all_dim = scaling["mscale"], scaling["mscale_all_dim"]
        if not (own and all_dim):  # transformers reads both or neither
            del scaling["mscale"], scaling["mscale_all_dim"]
            if (own, all_dim) != (1.0, 0.0):
                scaling["attention_factor"] = yarn_magnitude(scaling["factor"], own, all_dim)
    elif flat["llama3 rope_scaling"]:
        scaling = {"rope_type": "llama3", **of("llama3")}
    elif flat["linear rope_scaling.factor"] is not None:
        scaling = {"rope_type": "linear", "factor": flat["linear rope_scaling.factor"]}
    if scaling:
        out["rope_scaling"] = scaling
    base = {"rope_theta": config["rope_theta"]}
    return {**out, "rope_parameters": {**(scaling or {"rope_type": "default"}), **base}}
