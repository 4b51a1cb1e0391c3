"""commands: a module for each verb of `megazero VERB`, whose `main` takes the arguments after the verb.

A verb's module is imported only when it runs, because torch takes seconds to import.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module


@dataclass(frozen=True)
class Verb:
    """A word after `megazero` and its line of help; `main` of its module in `megazero.commands` runs it."""

    name: str
    help: str

    @property
    def module(self) -> str:
        """The dotted name of the verb's module."""
        return f"{__name__}.{self.name.replace('-', '_')}"

    def run(self, arguments: list[str]) -> int:
        """Run the verb; returns the exit status."""
        status: int = import_module(self.module).main(arguments)
        return status


VERBS = (
    Verb("ablate", "train a folder of configurations and compare what they learned"),
    Verb("analyze-loss", "order training samples by their loss under a checkpoint"),
    Verb("checkpoint", "inspect, verify, compare, convert and prune checkpoints"),
    Verb("completion", "print a script by which bash, zsh or fish completes verbs, flags and files"),
    Verb("config", "resolve a training's flags, and print the tree or why not; or a schema for editors"),
    Verb("data", "preprocess, train-tokenizer, inspect, merge, analyze: texts made into datasets"),
    Verb("env", "report on this machine, and on what is in the way of training on it"),
    Verb("evaluate", "run a line of Megatron's tasks/main.py, such as WIKITEXT103's"),
    Verb("fill-mask", "show what a model expects at the masked places of a text"),
    Verb("finetune", "fine-tune on labelled texts, as finetune.py does; under torchrun on several ranks"),
    Verb("generate", "generate text from a checkpoint"),
    Verb("incidents", "list what a run's guards found, and draw it over time"),
    Verb("kernels", "build the CUDA kernels, and show what they do and need"),
    Verb("launch", "start a script's ranks on one or many hosts, over ssh, pdsh, srun, mpirun or torchrun"),
    Verb("lm-eval", "score a checkpoint by lm-evaluation-harness's tasks, on any layout, with its flags"),
    Verb("memory-report", "show what each rank's memory holds, measured or planned"),
    Verb("merge-traces", "merge the traces of a run's ranks into one, with their clocks aligned"),
    Verb("moe-report", "show how evenly a mixture of experts uses its experts"),
    Verb("plan", "show what a launch would do: `megazero plan schedule` draws a pipeline schedule"),
    Verb("pretrain", "train, as pretrain_gpt.py does; `torchrun -m megazero.cli pretrain` starts ranks"),
    Verb("profile", "measure this machine, and write it as a device that plans can use"),
    Verb("quantize", "write a model in integers of 8 or 4 bits, as transformers and vLLM read it"),
    Verb("report", "write one page that shows runs, or watch them while they go on"),
    Verb("rl", "train by policy gradients (GRPO and its kin) on answers that the model gives itself"),
    Verb("run", "run a script that imports `deepspeed`, with megazero in its place"),
    Verb("score", "write the log-probabilities or rewards of a file's answers, on any layout"),
    Verb("serve", "answer requests over HTTP, as OpenAI's API, with a trained model on one rank or several"),
    Verb("tune", "look for the layout in which a training is quickest, on paper"),
    Verb("verify", "check that a configuration's layout trains like one process"),
    Verb("version", "print the version"),
)
