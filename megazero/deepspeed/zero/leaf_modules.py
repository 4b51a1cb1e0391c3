"""Leaf modules: those whose parameters ZeRO stage 3 gathers together, whatever they run inside.

A module that chooses which of its parts to run, such as a mixture of experts, must be one where ranks may
choose differently: every rank then gathers all parts when the module begins. The names are DeepSpeed's.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from megazero.deepspeed.asserted import asserts
from megazero.errors import ConfigError

DEFAULT_CLASSES = (
    "transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
    "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
    "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
)
"""Classes of transformers that are leaves unless the JSON says otherwise."""


def z3_leaf_module(model: nn.Module) -> bool:
    """Whether the module is a leaf."""
    return bool(model.__dict__.get("_z3_leaf", False))


def z3_leaf_parameter(model: nn.Parameter) -> bool:
    """Whether an engine gathers the parameter with a leaf."""
    return "ds_z3_leaf_module" in model.__dict__


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """The leaves among a model and the modules in it."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Make this very module a leaf, or an ordinary module again."""
    model.__dict__["_z3_leaf"] = flag


@asserts
def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Make leaves of all modules of these classes; call it before `initialize`.

    Args:
        model: the model.
        leaf_module_classes: classes, their names, or their names with their modules.
        raise_if_not_found: refuse classes of which there is no module.

    Returns:
        The modules, in the order of `Module.apply`.

    Raises:
        ConfigError: there is none, or something else than classes and names is given.
    """
    return _flag_classes(model, leaf_module_classes, True, raise_if_not_found)


@asserts
def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Take back `set_z3_leaf_modules`, whose arguments this has."""
    return _flag_classes(model, leaf_module_classes, False, raise_if_not_found)


@asserts
def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Make leaves, or ordinary modules again, of the modules with these names in `named_modules`.

    Returns:
        The modules, and the names that are not there.

    Raises:
        ConfigError: a name is not there.
    """
    modules = dict(model.named_modules())
    return _flag_named(
        model, module_names, lambda name: [modules[name]] if name in modules else [], flag, raise_if_not_found
    )


@asserts
def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """As `set_z3_leaf_modules_by_name`, for all modules whose names end with one of these."""
    modules = dict(model.named_modules())

    def ending(suffix: str) -> list[nn.Module]:
        return [module for name, module in modules.items() if name.endswith(suffix)]

    return _flag_named(model, module_name_suffixes, ending, flag, raise_if_not_found)


def apply_leaf_settings(model: nn.Module, section: Mapping[str, Any] | None = None) -> list[nn.Module]:
    """Make the leaves that the JSON's `zero_optimization.leaf_module` names.

    One file may serve several models, so names that match nothing are a warning and not an error.

    Args:
        model: the model.
        section: `classes`, `names` and `name_suffixes`, each a list or one text; without `classes` those of
            `DEFAULT_CLASSES` are taken.

    Returns:
        The modules, each once.

    Raises:
        ConfigError: the section has another key.
    """
    given = {
        key: [value] if isinstance(value, str) else list(value) for key, value in (section or {}).items()
    }
    unknown = given.keys() - {"classes", "names", "name_suffixes"}
    if unknown:
        raise ConfigError(
            "`leaf_module` must have `classes`, `names` or `name_suffixes`, but has "
            f"{', '.join(sorted(unknown))}"
        )
    leaves = _flag_classes(model, given.get("classes", DEFAULT_CLASSES), True, False)
    missing = [] if leaves else list(given.get("classes", ()))
    for flag_named, key in (
        (set_z3_leaf_modules_by_name, "names"),
        (set_z3_leaf_modules_by_suffix, "name_suffixes"),
    ):
        modules, unmatched = flag_named(model, given.get(key, ()), raise_if_not_found=False)
        leaves += modules
        missing += unmatched
    if missing:
        warnings.warn(
            f"`leaf_module` does nothing for {', '.join(missing)}, which {type(model).__name__} lacks",
            stacklevel=2,
        )
    return list({id(module): module for module in leaves}.values())


def chooses(leaf: nn.Module) -> bool:
    """Whether a leaf has parts to choose among: several modules in a list or a dict."""
    lists = [part for part in leaf.modules() if isinstance(part, (nn.ModuleList, nn.ModuleDict))]
    return any(len(part) > 1 for part in lists)


def _flag_classes(
    model: nn.Module, classes: Sequence[type | str], flag: bool, raises: bool
) -> list[nn.Module]:
    if isinstance(classes, str) or not all(isinstance(kind, (type, str)) for kind in classes):
        raise ConfigError(
            f"`leaf_module_classes` must be a list of classes or of their names, but is {classes!r}"
        )
    kinds = tuple(kind for kind in classes if isinstance(kind, type))
    leaves = []
    for module in _in_order_of_apply(model):
        kind = type(module)
        named = kind.__name__ in classes or f"{kind.__module__}.{kind.__qualname__}" in classes
        if isinstance(module, kinds) or named:
            set_z3_leaf_module(module, flag)
            leaves.append(module)
    if raises and not leaves:
        wanted = ", ".join(kind if isinstance(kind, str) else kind.__name__ for kind in classes)
        raise ConfigError(
            f"`leaf_module_classes` must be classes of modules in {type(model).__name__}, but none of "
            f"{wanted} is; take a class from `type(module)`"
        )
    return leaves


def _flag_named(
    model: nn.Module,
    names: Sequence[str],
    matching: Callable[[str], list[nn.Module]],
    flag: bool,
    raises: bool,
) -> tuple[list[nn.Module], list[str]]:
    matches = {name: matching(name) for name in names}
    missing = [name for name, modules in matches.items() if not modules]
    leaves = list({id(module): module for modules in matches.values() for module in modules}.values())
    for module in leaves:
        set_z3_leaf_module(module, flag)
    if missing and raises:
        raise ConfigError(
            f"leaf modules must be named as in `named_modules` of {type(model).__name__}, but there is no "
            f"{', '.join(missing)}"
        )
    return leaves, missing


def _in_order_of_apply(module: nn.Module) -> list[nn.Module]:
    """A module's parts before the module, each as often as it occurs."""
    return [part for child in module.children() for part in _in_order_of_apply(child)] + [module]
