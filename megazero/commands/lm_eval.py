"""The command `megazero lm-eval`: lm-evaluation-harness on a model of any layout, with all of its flags."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from megazero.errors import ConfigError, exit_status

_NAME = "megazero"
_OTHERS = ("ls", "validate", "-h", "--help")


def main(argv: Sequence[str]) -> int:
    """Run the harness with its flags; returns the exit status."""
    return exit_status(lambda: _run(list(argv)))


def _run(argv: list[str]) -> None:
    try:
        from lm_eval._cli.harness import HarnessCLI
        from lm_eval.utils import setup_logging
    except ImportError as error:
        raise ConfigError(
            f"lm_eval must be installed to score models by its tasks, but is not ({error}); pip install "
            "'megazero[harness]'"
        ) from error
    from megazero.harness.lm import register
    from megazero.mpu.launch import Launch

    runs = not argv or argv[0] not in _OTHERS
    if runs and argv[:1] != ["run"]:
        argv = ["run", *argv]
    if Launch.from_environment().rank == 0:
        setup_logging()
    before, sys.argv = sys.argv, ["megazero lm-eval", *argv]  # the harness's parser reads no other line
    try:
        flags = HarnessCLI().parse_args()
    finally:
        sys.argv = before
    if runs:
        _choose_model(flags)
    made, problem = register(), "the first rank failed"
    try:
        flags.func(flags)
        problem = ""
    except (ValueError, KeyError, OSError) as error:
        raise ConfigError(f"lm_eval must be able to run, but is not: {error}; correct its flags") from error
    finally:
        for model in made:
            model.close(problem)


def _choose_model(flags: argparse.Namespace) -> None:
    """Take ours if the line names no model, and a cache of answers for each checkpoint.

    The harness keys answers by the requests alone, so that two models would share them.
    """
    from lm_eval.config.evaluate_config import EvaluatorConfig

    from megazero.harness.arguments import HarnessArguments
    from megazero.harness.loading import fingerprint

    said = EvaluatorConfig.load_yaml_config(flags.config) if flags.config else {}
    flags.model = flags.model or said.get("model") or _NAME
    cache = getattr(flags, "use_cache", None) or said.get("use_cache")
    if flags.model == _NAME and cache:
        given = {**(said.get("model_args") or {}), **(flags.model_args or {})}
        flags.use_cache = f"{cache}_{fingerprint(HarnessArguments.of(given))}"
