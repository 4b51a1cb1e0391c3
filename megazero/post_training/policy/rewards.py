"""Reward functions by TRL's signature: found by name, called with a timeout, and never trusted to answer."""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megazero.errors import ConfigError
from megazero.mpu.threads import helper_thread
from megazero.post_training.policy.prompts import Prompt

RewardFunction = Callable[..., Sequence[float | None]]


@dataclass
class Rewards:
    """The reward functions of a run.

    Attributes:
        functions: name -> function.
        timeout: the most seconds that one may take for the answers of one call.
        failures: what went wrong in the last call, a clause for each function that failed.
    """

    functions: dict[str, RewardFunction]
    timeout: float
    failures: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, names: Sequence[str], timeout: float) -> Rewards:
        """Find the functions `module:function` or `file.py:function`.

        Raises:
            ConfigError: there is no such file, module or function.
        """
        return cls({name: _function(name) for name in names}, timeout)

    def __call__(
        self, prompts: Sequence[Prompt], texts: Sequence[str], ids: Sequence[Sequence[int]]
    ) -> np.ndarray:
        """The rewards of answers, float64 [answers, functions].

        NaN where a function says None or no finite number, raises an exception, takes too long, or does not
        return as many numbers.

        Args:
            prompts: the prompt of each answer.
            texts: the answers as text.
            ids: their tokens.
        """
        self.failures = []
        rewards = np.full((len(prompts), len(self.functions)), np.nan)
        if not prompts:
            return rewards
        columns = {name: [prompt.columns.get(name) for prompt in prompts] for name in _columns(prompts)}
        answers = [
            [{"role": "assistant", "content": text}] if isinstance(prompt.said, list) else text
            for prompt, text in zip(prompts, texts, strict=True)
        ]
        given: dict[str, Any] = {"prompts": [prompt.said for prompt in prompts], "completions": answers}
        given |= {**columns, "completion_ids": [list(one) for one in ids]}
        for column, (name, function) in enumerate(self.functions.items()):
            values, failure = self._called(function, given)
            if failure:
                self.failures.append(f"{name} {failure}")
            else:
                rewards[:, column] = values
        return rewards

    def _called(self, function: RewardFunction, given: dict[str, Any]) -> tuple[list[float], str]:
        """Its numbers, or what went wrong."""
        results: list[list[float]] = []
        errors: list[str] = []

        def call() -> None:
            try:
                numbers = [math.nan if x is None else float(x) for x in function(**given)]
                numbers = [x if math.isfinite(x) else math.nan for x in numbers]
                if len(numbers) != len(given["prompts"]):
                    raise ValueError(f"{len(numbers)} rewards for {len(given['prompts'])} answers")
                results.append(numbers)
            except Exception as error:  # a user's code may raise anything; the answer then has no reward
                errors.append(f"raised {type(error).__name__}: {str(error)[:200]}")

        thread = helper_thread(call, "reward")
        thread.start()
        thread.join(self.timeout)
        if results:
            return results[0], ""
        return [], errors[0] if errors else f"took longer than {self.timeout:g} s"


def _columns(prompts: Sequence[Prompt]) -> list[str]:
    """The names of all columns, in the order in which rows name them."""
    reserved = ("prompts", "completions", "completion_ids")
    return [name for name in dict.fromkeys(n for p in prompts for n in p.columns) if name not in reserved]


def _function(name: str) -> RewardFunction:
    where, _, attribute = name.rpartition(":")
    if not where or not attribute:
        raise ConfigError(
            f"`reward_functions` must be module:function or file.py:function, but has {name!r}; correct it"
        )
    try:
        if where.endswith(".py"):
            spec = importlib.util.spec_from_file_location(Path(where).stem, where)
            assert spec is not None, "a file of Python has a spec"
            assert spec.loader is not None, "a file of Python has a loader"
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(where)
        function: RewardFunction = getattr(module, attribute)
    except Exception as error:  # a user's module may raise anything while it is imported
        raise ConfigError(
            f"`reward_functions` must name a function that can be imported, but {name} cannot "
            f"({type(error).__name__}: {str(error)[:200]}); correct it"
        ) from error
    if not callable(function):
        raise ConfigError(f"`reward_functions` must name a function, but {name} is none; correct it")
    return function
