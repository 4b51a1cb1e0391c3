"""The section `logging`: what a run reports, and where."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeInt, PositiveInt

from megazero.config.condition import config, here
from megazero.config.tree.option import Section, option
from megazero.config.tree.roles import Role
from megazero.config.tree.secret import SecretUrl

_NO_EVENTS = here.tensorboard_dir.because("there are no TensorBoard events")
_NO_WANDB = here.wandb_project.because("nothing goes to Weights & Biases")
_NO_MLFLOW = here.mlflow_experiment.because("nothing goes to MLflow")
_NO_COMET = here.comet_project.because("nothing goes to Comet")
_NO_TRACKIO = here.trackio_project.because("nothing goes to Trackio")

Operation = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send", "recv", "barrier"
]
"""A collective or a message between ranks."""


class LoggingConfig(Section):
    """Logging"""

    roles = Role.QUIET

    log_interval: PositiveInt = option(100, unit="iterations")
    """iterations between log lines"""
    metrics_jsonl: str | None = option(None, roles=Role.LOCAL | Role.OUTPUT)
    """file that gets one JSON object per iteration; `metrics.jsonl` in the folder of `--save` by default"""
    tensorboard_dir: str | None = option(None, roles=Role.LOCAL | Role.OUTPUT, package="tensorboard")
    """folder for TensorBoard events"""
    tensorboard_log_interval: PositiveInt = option(1, roles=Role.LOCAL, unit="iterations")
    """iterations between events"""
    tensorboard_queue_size: PositiveInt = option(1000, roles=Role.LOCAL)
    """events held before they are written"""
    log_validation_ppl_to_tensorboard: bool = option(False, idle_without=_NO_EVENTS)
    """also record validation perplexity"""
    log_timers_to_tensorboard: bool = option(False, idle_without=_NO_EVENTS)
    """also record the time of each phase"""
    wall_clock_breakdown: bool = option(False)
    """also print where the time went; the same as `--timing-log-level 2`"""
    timing_log_level: Literal[0, 1, 2] = option(0)
    """also print where the time went: by phase with 1, and with 2 also by what it waited for"""
    timing_log_option: Literal["max", "minmax", "all"] = option(
        "minmax", needs=here.wall_clock_breakdown | here.timing_log_level.among(1, 2)
    )
    """the ranks whose times are printed beside the first rank's: the slowest, also the fastest, or all"""
    comms_logger: bool = option(False)
    """count and time communication, and print a table of it at the end"""
    comms_logger_ops: tuple[Operation, ...] = option((), needs=here.comms_logger)
    """the operations that it times; all by default"""
    comms_logger_verbose: bool = option(False, needs=here.comms_logger)
    """also print each call on the first rank"""
    csv_dir: str | None = option(None, roles=Role.LOCAL | Role.OUTPUT)
    """folder for one CSV file per metric"""
    log_params_norm: bool = option(False)
    """also record the norm of the parameters"""
    log_stability: PositiveInt | None = option(None, unit="updates")
    """also record how steady the training is: the standard deviation of loss and gradient norm over so many
    updates, and the loss as a multiple of the lowest so far"""
    straggler_interval: NonNegativeInt = option(100, unit="iterations")
    """iterations after which the ranks' times are compared, to name one that is slow; 0 compares nothing"""
    log_num_zeros_in_grad: bool = option(False)
    """also record how many gradient elements are zero"""
    log_max_attention_logit: bool = option(
        False,
        needs=(
            config.acceleration.compile.is_off.because("compiled layers show nobody their logits"),
            config.acceleration.cuda_graph.is_off.because("captured layers show nobody their logits"),
        ),
    )
    """also record the largest attention logit of each step, before the softmax: of all layers, heads and
    ranks. Each layer multiplies queries and keys once more"""
    wandb_project: str | None = option(None, roles=Role.LOCAL, package="wandb")
    """Weights & Biases project; needs the wandb package"""
    wandb_exp_name: str | None = option(None, roles=Role.LOCAL, idle_without=_NO_WANDB)
    """Weights & Biases run name"""
    wandb_save_dir: str | None = option(None, roles=Role.LOCAL | Role.OUTPUT, idle_without=_NO_WANDB)
    """Weights & Biases local folder"""
    wandb_entity: str | None = option(None, roles=Role.LOCAL, idle_without=_NO_WANDB)
    """Weights & Biases team"""
    wandb_group: str | None = option(None, roles=Role.LOCAL, idle_without=_NO_WANDB)
    """Weights & Biases group of runs"""
    mlflow_experiment: str | None = option(
        None, roles=Role.LOCAL, package="mlflow", aliases=("--mlflow-experiment-name",)
    )
    """MLflow experiment; needs the mlflow package"""
    mlflow_run_name: str | None = option(None, roles=Role.LOCAL, idle_without=_NO_MLFLOW)
    """MLflow run name"""
    mlflow_tracking_uri: str | None = option(None, roles=Role.LOCAL, idle_without=_NO_MLFLOW)
    """MLflow server, folder or database; default: as MLFLOW_TRACKING_URI says"""
    comet_project: str | None = option(
        None, roles=Role.LOCAL, package="comet_ml", aliases=("--comet-project-name",)
    )
    """Comet project; needs the comet_ml package"""
    comet_experiment_name: str | None = option(None, roles=Role.LOCAL, idle_without=_NO_COMET)
    """Comet experiment name"""
    comet_workspace: str | None = option(None, roles=Role.LOCAL, idle_without=_NO_COMET)
    """Comet workspace"""
    comet_offline_dir: str | None = option(None, roles=Role.LOCAL | Role.OUTPUT, idle_without=_NO_COMET)
    """folder for an archive that `comet upload` sends later; nothing is sent while the training runs"""
    trackio_project: str | None = option(None, roles=Role.LOCAL, package="trackio")
    """Trackio project; needs the trackio package"""
    trackio_run_name: str | None = option(None, roles=Role.LOCAL, idle_without=_NO_TRACKIO)
    """Trackio run name"""
    trackio_dir: str | None = option(None, roles=Role.LOCAL | Role.OUTPUT, idle_without=_NO_TRACKIO)
    """folder for Trackio's data; default: as TRACKIO_DIR says"""
    notify: SecretUrl = option(None, roles=Role.LOCAL | Role.SECRET)
    """URL to which incidents, a failure and the end are posted, as JSON that Slack, Discord and Mattermost
    can show; it is printed and saved without its path"""

    @property
    def breakdown_level(self) -> int:
        """The detail of the table of times; 0 for no table."""
        return 2 if self.wall_clock_breakdown else self.timing_log_level
