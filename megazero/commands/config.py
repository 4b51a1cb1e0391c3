"""The command `megazero config`: resolve a training's flags; print the tree, or every reason to refuse it.

With `--schema` it prints a JSON Schema of the YAML file instead, for editors.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from megazero.config.resolve import resolve_or_exit
from megazero.config.schema import schema
from megazero.errors import ConfigError
from megazero.train.folders import read_folder


def main(argv: Sequence[str]) -> int:
    """Run the command; without `--schema`, `resolve_or_exit` ends the process with the exit status."""
    if "--schema" in argv:
        if len(argv) > 1:
            others = " ".join(word for word in argv if word != "--schema")
            raise ConfigError([f"`--schema` must stand alone, but has {others} beside it; leave that out"])
        print(json.dumps(schema(), indent=1))
        return 0
    if {"-h", "--help"} & set(argv):
        print("megazero config --schema    print a JSON Schema of the YAML file, for editors\n")
    resolve_or_exit([*argv, "--check-config"], program="megazero config", reader=read_folder)
    return 0
