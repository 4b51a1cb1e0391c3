"""The section `compression_training` of a DeepSpeed JSON, checked and complete."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any

from megazero.config.deepspeed.load import load_ds_config
from megazero.errors import ConfigError

SECTION = "compression_training"
_NEEDED = object()
_PRUNING: Mapping[str, Any] = MappingProxyType({"enabled": False, "method": "l1", "schedule_offset": 1000})
_QUANTIZING: Mapping[str, Any] = MappingProxyType({"enabled": False, "quantization_type": "symmetric"})
_MIXED: Mapping[str, Any] = MappingProxyType({"enabled": False, "quantize_change_ratio": 0.001})

# Technique -> the keys of `shared_parameters` and of a group's `params`, with their defaults.
_TECHNIQUES: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = MappingProxyType(
    {
        "weight_quantization": (
            {
                **_QUANTIZING,
                "schedule_offset": 0,
                "quantize_groups": 1,
                "rounding": "nearest",
                "fp16_mixed_quantize": _MIXED,
                "quantize_weight_in_forward": False,
                "quantizer_kernel": False,
                "quantize_verbose": False,
            },
            {"start_bits": _NEEDED, "target_bits": _NEEDED, "quantization_period": 1},
        ),
        "activation_quantization": (
            {**_QUANTIZING, "range_calibration": "dynamic", "schedule_offset": 1000},
            {"bits": _NEEDED},
        ),
        "sparse_pruning": (_PRUNING, {"dense_ratio": _NEEDED}),
        "row_pruning": (_PRUNING, {"dense_ratio": _NEEDED}),
        "head_pruning": ({**_PRUNING, "method": "topk", "num_heads": _NEEDED}, {"dense_ratio": _NEEDED}),
        "channel_pruning": (_PRUNING, {"dense_ratio": _NEEDED}),
    }
)
_REDUCTION: Mapping[str, Any] = MappingProxyType(
    {
        "enabled": False,
        "keep_number_layer": None,
        "module_name_prefix": "",
        "teacher_layer": (),
        "other_module_name": (),
    }
)
_CHOICES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "quantization_type": ("symmetric", "asymmetric"),
        "rounding": ("nearest", "stochastic"),
        "range_calibration": ("dynamic", "static"),
        "method": ("l1", "topk"),
    }
)


@dataclass(frozen=True)
class LayerGroup:
    """Layers that a technique treats alike.

    Attributes:
        name: its key in the JSON.
        params: the technique's numbers for them.
        modules: parts of the layers' names, as regular expressions; ``*`` is every layer.
        related: for each of `modules`, the layers whose other side loses what is pruned; empty for none.
    """

    name: str
    params: Mapping[str, Any]
    modules: tuple[str, ...]
    related: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Technique:
    """One way to compress; it begins after `offset` optimizer steps."""

    name: str
    shared: Mapping[str, Any]
    groups: tuple[LayerGroup, ...]

    @property
    def offset(self) -> int:
        """The optimizer steps before it begins."""
        return int(self.shared["schedule_offset"])


@dataclass(frozen=True)
class Reduction:
    """Which of a teacher's layers a student begins with.

    Attributes:
        prefix: the name of the list of layers, such as ``bert.encoder.layer``.
        layers: the teacher's layer for each layer of the student.
        others: names of modules that are copied whole.
    """

    prefix: str
    layers: tuple[int, ...]
    others: tuple[str, ...]


@dataclass(frozen=True)
class CompressionSettings:
    """All that is enabled, in the order in which it is made permanent."""

    techniques: tuple[Technique, ...]
    reduction: Reduction | None


def read_compression(config: Any) -> CompressionSettings:
    """The settings of compression in a DeepSpeed JSON.

    Args:
        config: its path, its content, or an object that has the content as `_param_dict`.

    Raises:
        ConfigError: names everything that is wrong with the section, or that there is none.
    """
    content = load_ds_config(config)
    if not isinstance(content.get(SECTION), Mapping):
        raise ConfigError(f"`{SECTION}` must be a section of the configuration, but is not there; add it")
    section: Mapping[str, Any] = content[SECTION]
    problems: list[str] = []
    _known(section, [*_TECHNIQUES, "layer_reduction"], SECTION, problems)
    techniques = [
        _technique(name, section[name], problems)
        for name in _TECHNIQUES
        if isinstance(section.get(name), Mapping)
        and section[name].get("shared_parameters", {}).get("enabled") is True
    ]
    reduction = _reduction(section.get("layer_reduction") or {}, problems)
    if problems:
        raise ConfigError(problems)
    return CompressionSettings(tuple(techniques), reduction)


def _technique(name: str, given: Mapping[str, Any], problems: list[str]) -> Technique:
    shared_keys, params_keys = _TECHNIQUES[name]
    place = f"{SECTION}.{name}"
    _known(given, ["shared_parameters", "different_groups"], place, problems)
    shared = _filled(given["shared_parameters"], shared_keys, f"{place}.shared_parameters", problems)
    if name == "head_pruning" and shared["method"] != "topk":
        problems.append(f"`{place}.shared_parameters.method` must be topk, but is {shared['method']}")
    groups = []
    for label, group in given.get("different_groups", {}).items():
        where = f"{place}.different_groups.{label}"
        _known(group, ["params", "modules", "related_modules"], where, problems)
        params = _filled(group.get("params", {}), params_keys, f"{where}.params", problems)
        modules = tuple(group.get("modules", ("*",)))
        related = tuple(map(tuple, group.get("related_modules") or ()))
        if related and len(related) != len(modules):
            problems.append(
                f"`{where}.related_modules` must have a list for each of the {len(modules)} `modules`, but "
                f"has {len(related)}"
            )
        groups.append(LayerGroup(label, params, modules, related))
    if not groups:
        problems.append(f"`{place}.different_groups` must name a group of layers, but is empty")
    return Technique(name, shared, tuple(groups))


def _reduction(given: Mapping[str, Any], problems: list[str]) -> Reduction | None:
    place = f"{SECTION}.layer_reduction"
    keys = _filled(given, _REDUCTION, place, problems)
    if keys["enabled"] is not True:
        return None
    layers = tuple(keys["teacher_layer"])
    if keys["keep_number_layer"] not in (None, len(layers)):
        problems.append(
            f"`{place}.keep_number_layer` must be the length of `teacher_layer` ({len(layers)}), but is "
            f"{keys['keep_number_layer']}"
        )
    return Reduction(keys["module_name_prefix"], layers, tuple(keys["other_module_name"]))


def _filled(
    given: Mapping[str, Any], keys: Mapping[str, Any], place: str, problems: list[str]
) -> Mapping[str, Any]:
    """The values of all keys; what is wrong with the given ones is added to `problems`."""
    _known(given, list(keys), place, problems)
    values = {**{key: None if value is _NEEDED else value for key, value in keys.items()}, **given}
    for key, default in keys.items():
        if default is _NEEDED and values[key] is None:
            problems.append(f"`{place}.{key}` must be given, but is not")
        if key in _CHOICES and values[key] not in _CHOICES[key]:
            problems.append(f"`{place}.{key}` must be {' or '.join(_CHOICES[key])}, but is {values[key]}")
    ratio = values.get("dense_ratio")
    if ratio is not None and not 0 < ratio <= 1:
        problems.append(f"`{place}.dense_ratio` must be above 0 and at most 1, but is {ratio}")
    for key in ("start_bits", "target_bits", "bits"):
        if values.get(key) is not None and not 1 <= values[key] <= 16:
            problems.append(f"`{place}.{key}` must be from 1 to 16, but is {values[key]}")
    return values


def _known(given: Mapping[str, Any], keys: list[str], place: str, problems: list[str]) -> None:
    for key in given:
        if key not in keys:
            near = get_close_matches(key, keys, 1)
            hint = f"; did you mean `{near[0]}`?" if near else ""
            problems.append(f"`{place}.{key}` must be a key of it ({', '.join(keys)}), but is not{hint}")
