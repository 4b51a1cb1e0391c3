"""A rule about paths: what may be at a URL, and what must be local."""

from __future__ import annotations

from megazero.config.fields import fields_with
from megazero.config.rules.rule import Case, display_name, rule, value_at
from megazero.config.tree.roles import Role
from megazero.storage.urls import is_url

_LOCAL = tuple(spec.path for spec in fields_with(Role.OUTPUT))


def _urls(case: Case) -> str:
    wrong = [path for path in _LOCAL if is_url(value_at(case.config, path))]
    return " and ".join(f"`{display_name(path)}` is {value_at(case.config, path)}" for path in wrong)


@rule(_LOCAL, "name a local path; what is in the folder of `--save` is put to its URL", facts=_urls)
def written_to_local_paths(case: Case) -> bool:
    """what is written outside the folder of `--save` must be local"""
    return not _urls(case)
