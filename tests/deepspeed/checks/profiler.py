"""The FLOPs profiler, monitors and timers."""

from __future__ import annotations

import time

import torch

from tests.deepspeed.checks import check, outcome


def network():
    """Two linear layers and an activation."""
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))


@check()
def a_profile_of_linear_layers(deepspeed, scratch):
    from deepspeed.profiling.flops_profiler import get_model_profile

    return list(get_model_profile(network(), input_shape=(3, 8), print_profile=False, as_string=False))


@check()
def a_profile_as_text(deepspeed, scratch):
    from deepspeed.profiling.flops_profiler import get_model_profile

    model = network()
    found = get_model_profile(model, args=[torch.ones(100, 8)], print_profile=False)
    return [*found, model.training]


@check()
def a_profile_of_keywords(deepspeed, scratch):
    from deepspeed.profiling.flops_profiler import get_model_profile

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 2, bias=False)

        def forward(self, x, factor=1.0):
            return self.layer(x)

    kwargs = {"x": torch.ones(2, 5, 4), "factor": 2.0}
    return list(get_model_profile(Model(), kwargs=kwargs, print_profile=False, as_string=False))


@check()
def macs_of_a_convolution_and_attention(deepspeed, scratch):
    from deepspeed.profiling.flops_profiler import get_model_profile

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Conv2d(3, 4, 3, padding=1)

        def forward(self, x):
            y = self.layer(x).flatten(2)
            return torch.matmul(y, y.transpose(1, 2))

    return get_model_profile(Model(), input_shape=(2, 3, 5, 5), print_profile=False, as_string=False)[1]


@check()
def a_profile_needs_inputs(deepspeed, scratch):
    from deepspeed.profiling.flops_profiler import get_model_profile

    return outcome(lambda: get_model_profile(network(), print_profile=False))


@check()
def a_profiler_by_hand(deepspeed, scratch):
    from deepspeed.profiling.flops_profiler import FlopsProfiler

    model = network()
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    for _ in range(2):
        model(torch.ones(1, 8))
    profiler.stop_profile()
    model(torch.ones(1, 8))
    found = [profiler.get_total_flops(), profiler.get_total_macs(), profiler.get_total_params()]
    texts = [profiler.get_total_macs(as_string=True), profiler.get_total_params(as_string=True)]
    spent = profiler.get_total_duration()
    profiler.end_profile()
    return [found, texts, bool(spent > 0), profiler.started]


@check()
def a_report_in_a_file(deepspeed, scratch):
    from deepspeed.profiling.flops_profiler import get_model_profile

    path = scratch / "folder" / "profile.txt"
    get_model_profile(network(), input_shape=(1, 8), output_file=str(path), top_modules=2)
    text = path.read_text()
    return ["Linear" in text, "ReLU" in text, "params" in text, "MACs" in text]


@check()
def numbers_as_text(deepspeed, scratch):
    from deepspeed.profiling.flops_profiler.profiler import (
        duration_to_string,
        flops_to_string,
        macs_to_string,
        number_to_string,
        params_to_string,
    )

    values = (0, 1, 999, 1500, 2.5e6, 3.14159e9, 7e13, 0.002, 3e-6)
    found = [[f(v) for v in values] for f in (number_to_string, flops_to_string, macs_to_string)]
    fixed = [number_to_string(1500, units="M", precision=4), params_to_string(3e9, units="B")]
    return [*found, [params_to_string(v) for v in values], [duration_to_string(v) for v in values], fixed]


@check()
def a_monitor_in_csv_files(deepspeed, scratch):
    from deepspeed.monitor.config import get_monitor_config
    from deepspeed.monitor.monitor import MonitorMaster

    deepspeed.init_distributed("gloo")
    section = {"enabled": True, "output_path": str(scratch), "job_name": "job"}
    monitor = MonitorMaster(get_monitor_config({"csv_monitor": section, "train_batch_size": 4}))
    monitor.write_events([("Train/Samples/lr", 0.5, 8), ("Train/loss of it", 2.0, 8)])
    monitor.write_events([("Train/Samples/lr", 0.25, 16)])
    files = sorted((scratch / "job").glob("*.csv"))
    return [monitor.enabled, {path.name: path.read_text().splitlines() for path in files}]


@check()
def no_monitor(deepspeed, scratch):
    from deepspeed.monitor.config import get_monitor_config
    from deepspeed.monitor.monitor import MonitorMaster

    deepspeed.init_distributed("gloo")
    config = get_monitor_config({})
    monitor = MonitorMaster(config)
    monitor.write_events([("a", 1.0, 1)])
    return [
        *(monitor.enabled, config.tensorboard.enabled, config.wandb.project, config.csv_monitor.job_name),
        outcome(lambda: get_monitor_config({"csv_monitor": {"enabled": "perhaps"}})),
    ]


@check()
def a_timer_by_name(deepspeed, scratch):
    from deepspeed.utils.timer import SynchronizedWallClockTimer

    timers = SynchronizedWallClockTimer()
    for _ in range(2):
        timers("a").start()
        time.sleep(0.02)
        timers("a").stop()
    total = timers("a").elapsed(reset=False)
    mean = timers("a").mean()
    again = timers("a").elapsed(reset=True)
    return [
        *(bool(total >= 40), bool(mean >= 20), again == total, timers("a").elapsed()),
        *(list(timers.get_timers()), outcome(lambda: timers("a").stop())),
        outcome(lambda: (timers("b").start(), timers("b").start())),
    ]


@check()
def a_timer_goes_on(deepspeed, scratch):
    from deepspeed.utils.timer import SynchronizedWallClockTimer

    timer = SynchronizedWallClockTimer()("a")
    timer.start()
    time.sleep(0.01)
    first = timer.elapsed(reset=False)
    going = timer.started_
    timer.stop()
    return [bool(first >= 10), going, timer.started_, bool(timer.elapsed() >= first)]


@check()
def a_timer_of_nothing(deepspeed, scratch):
    from deepspeed.utils.timer import NoopTimer

    timers = NoopTimer()
    timers("a").start()
    timers("a").stop(record=True)
    return [timers("a").elapsed(reset=True), timers("a").mean(), timers.get_timers(), timers.log(["a"])]


@check()
def words_of_timers(deepspeed, scratch):
    from deepspeed.utils import timer

    words = ("FORWARD", "BACKWARD", "BACKWARD_INNER", "BACKWARD_REDUCE", "STEP")
    return [[getattr(timer, f"{w}_{size}_TIMER") for size in ("MICRO", "GLOBAL")] for w in words]


@check()
def trimmed_means(deepspeed, scratch):
    from deepspeed.utils.timer import trim_mean

    data = [5.0, 1.0, 100.0, 3.0, 2.0, 4.0, 6.0, 7.0, 8.0, 9.0]
    return [trim_mean(data, share) for share in (0.0, 0.1, 0.3)] + [trim_mean([], 0.1), data[0]]


class TimerConfig:
    """The two settings of a throughput timer."""

    enabled, synchronized = True, False


@check()
def throughput(deepspeed, scratch):
    from deepspeed.utils.timer import ThroughputTimer

    lines = []
    timer = ThroughputTimer(
        TimerConfig, batch_size=8, start_step=1, steps_per_output=2, logging_fn=lines.append
    )
    timer.update_epoch_count()
    for _ in range(4):
        timer.start()
        time.sleep(0.01)
        timer.stop(global_step=True)
    rate = timer.avg_samples_per_sec()
    counts = [timer.epoch_count, timer.micro_step_count, timer.global_step_count]
    return [counts, bool(0 < rate < 800), len(lines), [line.split(",")[0] for line in lines]]


@check()
def throughput_before_a_step(deepspeed, scratch):
    from deepspeed.utils.timer import ThroughputTimer

    return ThroughputTimer(TimerConfig, batch_size=None).avg_samples_per_sec() == float("-inf")
