"""The command `megazero launch`: start the ranks of a script on one or many hosts."""

from __future__ import annotations

import argparse
import os
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

from megazero.errors import ConfigError, exit_status
from megazero.launch import assemble, environment, start
from megazero.launch.agent import run_to_the_end
from megazero.launch.flags import parse
from megazero.launch.job import Job
from megazero.launch.lines import say
from megazero.launch.node import run_node
from megazero.launch.secret import SECRET


def launch(argv: Sequence[str] | None = None) -> int:
    """Run a launch from its flags; returns its exit status.

    Raises:
        ConfigError: the flags, the hostfile or an environment file are refused.
        LaunchError: hosts do not answer, or do not reach each other.
    """
    flags = parse(argv)
    folder = Path.cwd()
    hosts = assemble.hosts_of(flags, os.environ)
    if flags.autotuning is not None:
        status = tune(flags, sum(len(host.slots) for host in hosts))
        if status or flags.autotuning == "tune":
            return status
    sent = assemble.variables_of(flags, os.environ, folder)
    as_deepspeed, notice = assemble.replaces_deepspeed(flags)
    reach, settings = assemble.reach_of(flags, str(folder)), assemble.settings_of(flags)
    hidden: list[str] = []
    if flags.launcher in ("pdsh", "srun", "mpirun"):
        sent, hidden = environment.without_secrets(sent)
    job = assemble.job_of(flags, hosts, assemble.script_of(flags, sent, str(folder), as_deepspeed))
    if flags.dry_run:
        print("\n".join(assemble.described(flags, reach, job)))
        return 0
    remote = not flags.no_ssh and not all(reach.is_here(host) for host in hosts)
    for text in [notice, *(_about_sending(job, hidden, flags.launcher) if remote else ())]:
        if text and not settings.quiet:
            say(text)
    if flags.no_ssh and not 0 <= flags.node_rank < len(hosts):
        raise ConfigError(f"`--node-rank` must be 0 to {len(hosts) - 1}, but is {flags.node_rank}")
    if flags.no_ssh and len(hosts) > 1:
        master = (flags.master_addr or hosts[0].name, flags.master_port or assemble.PORT)
        return run_to_the_end(run_node(job, flags.node_rank, master, prefix=settings.prefix))
    if flags.launcher in ("pdsh", "srun", "mpirun"):
        secret = os.environ.get(SECRET) or secrets.token_hex(32)
        words = assemble.command_of(flags, reach, job, secret)
        sys.stdout.flush()
        os.execvpe(words[0], words, {**os.environ, SECRET: secret})
    return run_to_the_end(start.run(job, reach, settings))


def tune(flags: argparse.Namespace, ranks: int) -> int:
    """Search the best layout of a script on `ranks` ranks; its settings replace the script's arguments.

    Returns the exit status of the search.

    Raises:
        ConfigError: the script is neither pretrain_gpt.py nor pretrain_bert.py.
    """
    # Imported here, because a launch without a search needs neither torch nor a configuration.
    from megazero.commands import profile, tune
    from megazero.config.flags import scan
    from megazero.mpu.launch import choose_device
    from megazero.plan.autotuning import Autotuning

    script, words = flags.script, flags.arguments
    family = {"pretrain_gpt.py": "gpt", "pretrain_bert.py": "bert"}.get(Path(script).name)
    if family is None:
        raise ConfigError(
            f"the script must be pretrain_gpt.py or pretrain_bert.py with `--autotuning`, but is `{script}`: "
            "a search on paper runs the model of a training; leave `--autotuning` out"
        )
    json_file = scan(words).deepspeed_config
    folder = (None if json_file is None else Autotuning.read(json_file).folder) or "autotuning_results"
    device = profile.name_like(choose_device("auto", 0).type)
    own = ["--gpus", str(ranks), "--device", device, "--output", folder]
    status = tune.main([*own, "--", "--model-family", family, *words])
    flags.arguments = ["--config", str(Path(folder, "01.yaml"))]
    return status


def _about_sending(job: Job, hidden: Sequence[str], launcher: str) -> list[str]:
    lines = [f"sent to all hosts: {', '.join(environment.shown(job.script.environment))}"]
    if hidden:
        lines.append(
            f"{', '.join(hidden)} would be seen in the hosts' lists of processes and must come from their "
            f"own environment with `--launcher {launcher}`; ssh sends them unseen"
        )
    if "CUDA_VISIBLE_DEVICES" in os.environ and "CUDA_VISIBLE_DEVICES" not in job.script.environment:
        lines.append(
            f"CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']} is this machine's and is not sent "
            "to others; choose slots with `--include`"
        )
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Run a launch; returns the first failed rank's exit status, 128 + n after signal n, 2 if refused."""
    try:
        return exit_status(lambda: launch(argv))
    except KeyboardInterrupt:  # before any rank was started
        return 130
