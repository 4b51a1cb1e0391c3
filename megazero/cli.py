"""`megazero VERB`: run a verb's module, imported only then, because torch takes seconds to import."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module

from megazero.errors import MegazeroError


@dataclass(frozen=True)
class Verb:
    """A word after `megazero` and its line of help; `main` of its module in `megazero.commands` runs it."""

    name: str
    help: str

    def run(self, arguments: list[str]) -> int:
        """Run the verb; returns the exit status."""
        module = import_module(f"megazero.commands.{self.name.replace('-', '_')}")
        status: int = module.main(arguments)
        return status


VERBS = (
    Verb("ablate", "train a folder of configurations and compare what they learned"),
    Verb("analyze-loss", "order training samples by their loss under a checkpoint"),
    Verb("checkpoint", "inspect, verify, compare, convert and prune checkpoints"),
    Verb("completion", "print a script by which bash, zsh or fish completes verbs, flags and files"),
    Verb("config", "resolve a training's flags, and print the tree or why not; or a schema for editors"),
    Verb("data", "preprocess, train-tokenizer, inspect, merge, analyze: texts made into datasets"),
    Verb("env", "report on this machine, and on what is in the way of training on it"),
    Verb("fill-mask", "show what a model expects at the masked places of a text"),
    Verb("finetune", "fine-tune on labelled texts, as finetune.py does; under torchrun on several ranks"),
    Verb("generate", "generate text from a checkpoint"),
    Verb("incidents", "list what a run's guards found, and draw it over time"),
    Verb("kernels", "build the CUDA kernels, and show what they do and need"),
    Verb("launch", "start a script's ranks on one or many hosts, over ssh, pdsh, srun, mpirun or torchrun"),
    Verb("memory-report", "show what each rank's memory holds, measured or planned"),
    Verb("merge-traces", "merge the traces of a run's ranks into one, with their clocks aligned"),
    Verb("moe-report", "show how evenly a mixture of experts uses its experts"),
    Verb("plan", "show what a launch would do: `megazero plan schedule` draws a pipeline schedule"),
    Verb("pretrain", "train, as pretrain_gpt.py does; `torchrun -m megazero.cli pretrain` starts ranks"),
    Verb("profile", "measure this machine, and write it as a device that plans can use"),
    Verb("report", "write one page that shows runs, or watch them while they go on"),
    Verb("run", "run a script that imports `deepspeed`, with megazero in its place"),
    Verb("tune", "look for the layout in which a training is quickest, on paper"),
    Verb("verify", "check that a configuration's layout trains like one process"),
    Verb("version", "print the version"),
)


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
