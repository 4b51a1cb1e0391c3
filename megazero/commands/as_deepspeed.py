"""The commands `deepspeed` and `ds_report`, for job scripts that call them by name.

``pip install ./scripts/deepspeed_commands`` installs them. megazero's own package does not, so that it can be
installed beside DeepSpeed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from megazero.commands import env, launch
from megazero.errors import MegazeroError
from megazero.launch.flags import parse

_SHORTER = ("--hide_operator_status", "--hide_errors_and_warnings")


def deepspeed(argv: Sequence[str] | None = None) -> int:
    """Launch a script as `megazero launch` does; in a Python script, `import deepspeed` means megazero."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        plain = {"-h", "--help"} & {*words} or parse(words).no_python
    except MegazeroError:
        plain = True  # `launch.main` reports the error
    return launch.main([*(() if plain else ("--import-deepspeed", "megazero")), *words])


def ds_report(argv: Sequence[str] | None = None) -> int:
    """Print the report of `megazero env`; flags that shorten DeepSpeed's report have no effect on it."""
    words = sys.argv[1:] if argv is None else argv
    return env.main([word for word in words if word not in _SHORTER])
