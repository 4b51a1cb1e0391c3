"""`megazero <verb>`: the command for all but training. Only the verbs that need torch import it."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megazero.errors import MegazeroError
from megazero.version import VERSION


@dataclass(frozen=True)
class Verb:
    """A word after `megazero`: its line of help, and the function that runs it (arguments -> exit status)."""

    name: str
    help: str
    run: Callable[[list[str]], int]


def _ablate(arguments: list[str]) -> int:
    from megazero.ablate.command import main as ablate

    return ablate(arguments)


def _analyze_loss(arguments: list[str]) -> int:
    from megazero.inference.loss_command import main as analyze_loss

    return analyze_loss(arguments)


def _checkpoint(arguments: list[str]) -> int:
    from megazero.checkpoint.command import main as checkpoint

    return checkpoint(arguments)


def _config(arguments: list[str]) -> int:
    from megazero.config import resolve_or_exit

    resolve_or_exit([*arguments, "--check-config"], program="megazero config")
    return 0


def _env(arguments: list[str]) -> int:
    from megazero.env.command import main as env

    return env(arguments)


def _fill_mask(arguments: list[str]) -> int:
    from megazero.inference.fill_command import main as fill_mask

    return fill_mask(arguments)


def _generate(arguments: list[str]) -> int:
    from megazero.inference.command import main as generate

    return generate(arguments)


def _incidents(arguments: list[str]) -> int:
    from megazero.report.incidents import main as incidents

    return incidents(arguments)


def _kernels(arguments: list[str]) -> int:
    from megazero.report.kernels.command import main as kernels

    return kernels(arguments)


def _memory_report(arguments: list[str]) -> int:
    from megazero.report.memory.command import main as memory_report

    return memory_report(arguments)


def _moe_report(arguments: list[str]) -> int:
    from megazero.report.command import main as moe_report

    return moe_report(arguments)


def _plan(arguments: list[str]) -> int:
    from megazero.plan.command import main as plan

    return plan(arguments)


def _pretrain(arguments: list[str]) -> int:
    from megazero.config import resolve_or_exit
    from megazero.errors import exit_status

    config = resolve_or_exit(arguments, "megazero pretrain")
    from megazero.train.pretraining import pretrain

    return exit_status(lambda: pretrain(config))


def _verify(arguments: list[str]) -> int:
    from megazero.verify.command import main as verify

    return verify(arguments)


def _version(arguments: list[str]) -> int:
    print(f"megazero {VERSION}")
    return 0


VERBS = (
    Verb("ablate", "train a folder of configurations and compare what they learned", _ablate),
    Verb("analyze-loss", "order training samples by their loss under a checkpoint", _analyze_loss),
    Verb("checkpoint", "inspect, verify, compare, convert and prune checkpoints", _checkpoint),
    Verb("config", "resolve pretrain_gpt.py's flags; print the tree, or every reason to refuse it", _config),
    Verb("env", "report on this machine, and on what is in the way of training on it", _env),
    Verb("fill-mask", "show what a model expects at the masked places of a text", _fill_mask),
    Verb("generate", "generate text from a checkpoint", _generate),
    Verb("incidents", "list what a run's guards found, and draw it over time", _incidents),
    Verb("kernels", "build the CUDA kernels, and show what they do and need", _kernels),
    Verb("memory-report", "show what each rank's memory holds, measured or planned", _memory_report),
    Verb("moe-report", "show how evenly a mixture of experts uses its experts", _moe_report),
    Verb("plan", "show what a launch would do: `megazero plan schedule` draws a pipeline schedule", _plan),
    Verb(
        "pretrain",
        "train, as pretrain_gpt.py does; `torchrun -m megazero.cli pretrain` starts ranks",
        _pretrain,
    ),
    Verb("verify", "check that a configuration's layout trains like one process", _verify),
    Verb("version", "print the version", _version),
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
