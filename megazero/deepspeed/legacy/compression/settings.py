"""The section `compression_training` of a DeepSpeed JSON: checked, and completed by defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from megazero.config.deepspeed.load import load_ds_config
from megazero.config.words import nearest
from megazero.errors import ConfigError

SECTION = "compression_training"
_REQUIRED = object()
_Values = Mapping[str, Any]
_PRUNING: _Values = MappingProxyType({"enabled": False, "method": "l1", "schedule_offset": 1000})
_QUANTIZING: _Values = MappingProxyType({"enabled": False, "quantization_type": "symmetric"})
_MIXED: _Values = MappingProxyType({"enabled": False, "quantize_change_ratio": 0.001})

# Technique -> the keys of `shared_parameters` and of a group's `params`, with their defaults.
_TECHNIQUES: Mapping[str, tuple[_Values, _Values]] = MappingProxyType(
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
            {"start_bits": _REQUIRED, "target_bits": _REQUIRED, "quantization_period": 1},
        ),
        "activation_quantization": (
            {**_QUANTIZING, "range_calibration": "dynamic", "schedule_offset": 1000},
            {"bits": _REQUIRED},
        ),
        "sparse_pruning": (_PRUNING, {"dense_ratio": _REQUIRED}),
        "row_pruning": (_PRUNING, {"dense_ratio": _REQUIRED}),
        "head_pruning": ({**_PRUNING, "method": "topk", "num_heads": _REQUIRED}, {"dense_ratio": _REQUIRED}),
        "channel_pruning": (_PRUNING, {"dense_ratio": _REQUIRED}),
    }
)
_REDUCTION: _Values = MappingProxyType(
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
    """Layers to which a technique applies with the same parameters.

    Attributes:
        name: the group's key in the JSON.
        params: the parameters.
        modules: patterns, each searched for in the layers' names; ``*`` matches every layer.
        related: for each of `modules`, the patterns of the layers that are connected to the pruned ones;
            empty for none.
    """

    name: str
    params: _Values
    modules: tuple[str, ...]
    related: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Technique:
    """A compression technique, the parameters that its groups share, and the groups."""

    name: str
    shared: _Values
    groups: tuple[LayerGroup, ...]

    @property
    def offset(self) -> int:
        """The number of optimizer steps before the technique starts."""
        return int(self.shared["schedule_offset"])


@dataclass(frozen=True)
class LayerReduction:
    """The layers of a teacher that initialize a student.

    Attributes:
        prefix: the path of the list of layers, such as ``bert.encoder.layer``.
        layers: the index of the teacher's layer for each layer of the student.
        others: the paths of further modules to copy.
    """

    prefix: str
    layers: tuple[int, ...]
    others: tuple[str, ...]


@dataclass(frozen=True)
class CompressionSettings:
    """The enabled techniques, in the order in which they are made permanent, and the layer reduction."""

    techniques: tuple[Technique, ...]
    reduction: LayerReduction | None


def read_compression(config: object) -> CompressionSettings:
    """Read the section `compression_training` of a DeepSpeed JSON.

    Args:
        config: the path of the JSON, its content, or a `DeepSpeedConfig`.

    Raises:
        ConfigError: the section is missing, or has faults, which are all listed.
    """
    content = load_ds_config(config)
    if not isinstance(content.get(SECTION), Mapping):
        raise ConfigError(f"`{SECTION}` must be a section of the configuration, but is missing; add it")
    section: _Values = content[SECTION]
    problems: list[str] = []
    _check_keys(section, [*_TECHNIQUES, "layer_reduction"], SECTION, problems)
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


def _technique(name: str, section: _Values, problems: list[str]) -> Technique:
    shared_keys, params_keys = _TECHNIQUES[name]
    place = f"{SECTION}.{name}"
    _check_keys(section, ["shared_parameters", "different_groups"], place, problems)
    shared = _with_defaults(section["shared_parameters"], shared_keys, f"{place}.shared_parameters", problems)
    if name == "head_pruning" and shared["method"] != "topk":
        problems.append(f"`{place}.shared_parameters.method` must be topk, but is {shared['method']}")
    groups = []
    for label, group in section.get("different_groups", {}).items():
        where = f"{place}.different_groups.{label}"
        _check_keys(group, ["params", "modules", "related_modules"], where, problems)
        params = _with_defaults(group.get("params", {}), params_keys, f"{where}.params", problems)
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


def _reduction(section: _Values, problems: list[str]) -> LayerReduction | None:
    place = f"{SECTION}.layer_reduction"
    keys = _with_defaults(section, _REDUCTION, place, problems)
    if keys["enabled"] is not True:
        return None
    layers = tuple(keys["teacher_layer"])
    if keys["keep_number_layer"] not in (None, len(layers)):
        problems.append(
            f"`{place}.keep_number_layer` must be the length of `teacher_layer` ({len(layers)}), but is "
            f"{keys['keep_number_layer']}"
        )
    return LayerReduction(keys["module_name_prefix"], layers, tuple(keys["other_module_name"]))


def _with_defaults(section: _Values, keys: _Values, place: str, problems: list[str]) -> _Values:
    """Complete a section by the defaults of its `keys`; append its faults to `problems`."""
    _check_keys(section, list(keys), place, problems)
    values = {**{key: None if value is _REQUIRED else value for key, value in keys.items()}, **section}
    for key, default in keys.items():
        if default is _REQUIRED and values[key] is None:
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


def _check_keys(section: _Values, keys: list[str], place: str, problems: list[str]) -> None:
    for key in section:
        if key not in keys:
            near = nearest(key, keys)
            hint = f"; did you mean `{near}`?" if near else ""
            problems.append(f"`{place}.{key}` must be a key of it ({', '.join(keys)}), but is not{hint}")
