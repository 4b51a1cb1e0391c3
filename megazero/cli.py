"""`megazero VERB`: run a verb's module, imported only then, because torch takes seconds to import."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Sequence

from megazero.commands import VERBS
from megazero.errors import MegazeroError


def usage() -> str:
    """The text of `megazero --help`."""
    width = max(len(verb.name) for verb in VERBS)
    lines = [f"  {verb.name:<{width}}  {verb.help}" for verb in VERBS]
    return "\n".join(
        ["usage: megazero VERB [flags]", "", *lines, "", "`megazero VERB --help` lists a verb's flags."]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb. Status: the verb's own; 2 for no verb or an unknown one; an error's `exit_code`."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments:
        print(usage(), file=sys.stderr)
        return 2
    name, *rest = arguments
    if name in ("-h", "--help", "help"):
        print(usage())
        return 0
    name = "version" if name == "--version" else name
    verb = next((verb for verb in VERBS if verb.name == name), None)
    if verb is None:
        print(f"error: {_unknown(name)}", file=sys.stderr)
        return 2
    try:
        return verb.run(rest)
    except MegazeroError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def _unknown(name: str) -> str:
    names = [verb.name for verb in VERBS]
    near = difflib.get_close_matches(name, names, n=1)
    remedy = f"did you mean `{near[0]}`?" if near else "see `megazero --help`."
    return f"the verb must be one of {', '.join(names)}, but is `{name}`; {remedy}"


if __name__ == "__main__":
    sys.exit(main())
