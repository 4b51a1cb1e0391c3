"""Leaf modules: modules whose parameters, submodules included, ZeRO stage 3 gathers together.

A module that chooses which submodules to run, such as a mixture of experts, must be a leaf if ranks may
choose differently. Every rank then gathers all of its parameters when it begins. The names are DeepSpeed's.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence

from torch import nn

from megazero.deepspeed.asserted import asserts
from megazero.errors import ConfigError

DEFAULT_CLASSES = (
    "transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
    "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
    "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
)
"""Classes of transformers that are leaves by default."""


def z3_leaf_module(model: nn.Module) -> bool:
    """Whether the module is a leaf."""
    return bool(model.__dict__.get("_z3_leaf", False))


def z3_leaf_parameter(model: nn.Parameter) -> bool:
    """Whether an engine gathers the parameter with a leaf."""
    return "ds_z3_leaf_module" in model.__dict__


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """The leaves among all modules of a model, itself included."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Make this module a leaf, or no leaf any more; its submodules do not change."""
    model.__dict__["_z3_leaf"] = flag


@asserts
def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Make all modules of these classes leaves; call it before `initialize`.

    Args:
        model: the model.
        leaf_module_classes: classes, their names, or their qualified names.
        raise_if_not_found: raise if the model has no such module.

    Returns:
        The modules, in the order of `Module.apply`.

    Raises:
        ConfigError: no module matches, or the classes are neither classes nor names.
    """
    return _flag_classes(model, leaf_module_classes, True, raise_if_not_found)


@asserts
def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Undo `set_z3_leaf_modules`; the arguments are the same."""
    return _flag_classes(model, leaf_module_classes, False, raise_if_not_found)


@asserts
def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Make the modules with these names in `named_modules` leaves; with `flag` False, no leaves any more.

    Returns:
        The modules, and the names that match none.

    Raises:
        ConfigError: a name matches no module.
    """
    modules = dict(model.named_modules())
    return _flag_named(
        model, module_names, lambda name: [modules[name]] if name in modules else [], flag, raise_if_not_found
    )


@asserts
def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Like `set_z3_leaf_modules_by_name`, for all modules whose names end with one of the suffixes."""
    modules = dict(model.named_modules())

    def ending(suffix: str) -> list[nn.Module]:
        return [module for name, module in modules.items() if name.endswith(suffix)]

    return _flag_named(model, module_name_suffixes, ending, flag, raise_if_not_found)


def apply_leaf_settings(
    model: nn.Module, section: Mapping[str, str | Sequence[str]] | None = None
) -> list[nn.Module]:
    """Make the modules in the JSON's `zero_optimization.leaf_module` leaves.

    Names that match nothing are a warning and no error, as a JSON may serve several models.

    Args:
        model: the model.
        section: `classes` (by default `DEFAULT_CLASSES`), `names` and `name_suffixes`, each a list or a
            string.

    Returns:
        The modules, each once.

    Raises:
        ConfigError: the section has another key.
    """
    lists = {
        key: [value] if isinstance(value, str) else list(value) for key, value in (section or {}).items()
    }
    unknown = lists.keys() - {"classes", "names", "name_suffixes"}
    if unknown:
        raise ConfigError(
            "`leaf_module` must have `classes`, `names` or `name_suffixes`, but has "
            f"{', '.join(sorted(unknown))}"
        )
    leaves = _flag_classes(model, lists.get("classes", DEFAULT_CLASSES), True, False)
    missing = [] if leaves else list(lists.get("classes", ()))
    for flag_named, key in (
        (set_z3_leaf_modules_by_name, "names"),
        (set_z3_leaf_modules_by_suffix, "name_suffixes"),
    ):
        modules, unmatched = flag_named(model, lists.get(key, ()), raise_if_not_found=False)
        leaves += modules
        missing += unmatched
    if missing:
        warnings.warn(
            f"`leaf_module` does nothing for {', '.join(missing)}, which {type(model).__name__} lacks",
            stacklevel=2,
        )
    return list({id(module): module for module in leaves}.values())


def chooses(leaf: nn.Module) -> bool:
    """Whether a leaf may choose among submodules: it has several in a `ModuleList` or `ModuleDict`."""
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
    """All submodules, each before its parent, and as often as it occurs."""
    return [part for child in module.children() for part in _in_order_of_apply(child)] + [module]
