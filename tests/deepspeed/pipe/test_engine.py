"""What a script sees of a pipeline: arguments, refusals, evaluations, files and checkpoints."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import megazero
from megazero.deepspeed.engine.engine import DeepSpeedEngine
from megazero.deepspeed.pipe.model import PipelineModule
from megazero.deepspeed.pipe.specs import LayerSpec, PipelineError, TiedLayerSpec
from megazero.deepspeed.zero import Init
from megazero.errors import CheckpointError, ConfigError, DataError, MegazeroError
from tests.deepspeed.pipe.models import engine_of, fill, gpt, item, items, on_stages, settings, train
from tests.deepspeed.pipe.test_training import mean_square, rows
from tests.tables import over_table


def small(context, zero=0, accumulation=2, **arguments):
    layers = [nn.Linear(4, 4), nn.Linear(4, 4), torch.tanh, nn.Linear(4, 4)]
    return engine_of(context, settings(zero, accumulation), layers, loss_fn=mean_square, **arguments)


def solo(work):
    return on_stages(1, 1, work)[0]


@pytest.mark.parametrize("zero", [0, 2, 3])
@pytest.mark.parametrize(
    ("before", "after"), [((2, 1), (1, 1)), ((1, 1), (4, 1)), ((2, 2), (4, 1)), ((4, 1), (2, 2))]
)
def test_a_checkpoint_loads_on_other_stages(tmp_path, zero, before, after):
    expected = {}

    def save(context):
        engine = engine_of(context, settings(zero, 6 // context.data.size, optimizer=SGD))
        train(engine, 2)
        engine.save_checkpoint(tmp_path, client_state={"seen": 2})
        expected[context.rank] = engine.module_state_dict()

    def load(context):
        engine = engine_of(context, settings(3 - zero, 6 // context.data.size, optimizer=SGD))
        _, client = engine.load_checkpoint(tmp_path)
        assert client == {"seen": 2}
        assert engine.global_steps == 2
        return engine.module_state_dict()

    on_stages(*before, save)
    for state in on_stages(*after, load):
        assert state.keys() == expected[0].keys()
        for name, value in expected[0].items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=0)


SGD = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}


def test_a_resumed_pipeline_goes_on_as_if_it_had_not_stopped(tmp_path):
    def whole(context):
        engine = engine_of(context, settings(1))
        first = train(engine, 2)
        engine.save_checkpoint(tmp_path)
        return first, train(engine, 2, first=2)

    def rest(context):
        engine = engine_of(context, settings(1))
        engine.load_checkpoint(tmp_path)
        return train(engine, 2, first=2)

    expected = on_stages(2, 1, whole)[0][1]
    for losses, norms in on_stages(4, 1, rest):
        torch.testing.assert_close(losses, expected[0], rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(norms, expected[1], rtol=1e-6, atol=1e-7)


class Counting(nn.Module):
    """A buffer that counts calls."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return x * self.weight


def test_buffers_of_all_stages_are_saved(tmp_path):
    def layers():
        return [TiedLayerSpec("c", Counting), Counting(), Counting(), TiedLayerSpec("c", Counting)]

    def save(context):
        engine = engine_of(context, settings(1, 2), layers(), loss_fn=mean_square)
        engine.train_batch(map(rows, range(9)))
        engine.save_checkpoint(tmp_path)
        return engine.module_state_dict()

    def load(context):
        engine = engine_of(context, settings(1, 2), layers(), loss_fn=mean_square)
        engine.load_checkpoint(tmp_path)
        return engine.module_state_dict()

    first, second = on_stages(2, 1, save)
    assert {name: value.item() for name, value in first.items() if "calls" in name} == {
        "1.calls": 2.0,
        "2.calls": 2.0,
        "tied_modules.c.calls": 2.0,
    }
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], value) for name, value in on_stages(2, 1, load)[1].items())


@pytest.mark.parametrize("zero", [0, 3])
def test_files_of_layers_load_on_other_stages(tmp_path, zero):
    def save(context):
        engine = engine_of(context, settings(zero))
        train(engine, 1)
        engine.module.save_state_dict(tmp_path)
        return engine.module_state_dict()

    def load(context):
        engine = engine_of(context, settings(zero))
        engine.module.load_state_dir(tmp_path)
        return engine.module_state_dict(), train(engine, 1, first=1)

    expected = on_stages(2, 2, save)[0]
    assert [path.name for path in sorted(tmp_path.iterdir())] == [
        f"layer_{number:02d}-model_states.pt" for number in range(5)
    ]
    states = on_stages(3, 1, load)
    for state, _ in states:
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=0)
    assert states[0][1] == states[2][1]
    (tmp_path / "layer_01-model_states.pt").unlink()
    with pytest.raises(
        CheckpointError, match="layer_01-model_states.pt` must hold layer 1, but is not there"
    ):
        on_stages(2, 1, load)


def test_a_file_of_a_layer_that_names_code_is_refused_by_that_name(tmp_path):
    """torch's own message advised to let it run."""

    def load(context):
        engine = engine_of(context, settings(0))
        engine.module.save_state_dict(tmp_path)
        path = tmp_path / "layer_01-model_states.pt"
        torch.save({"weight": CallsPrint()}, path)
        with pytest.raises(CheckpointError, match="names builtins.print, which was not called") as refusal:
            engine.module.load_state_dir(tmp_path)
        assert "weights_only" not in str(refusal.value)
        torch.save(["weight"], path)
        with pytest.raises(CheckpointError, match="must fit its layer"):
            engine.module.load_state_dir(tmp_path)

    solo(load)


class CallsPrint:
    def __reduce__(self):
        return print, ("a file has run code",)


def test_the_whole_model_is_saved_in_16_bits(tmp_path):
    def work(context):
        engine = engine_of(context, settings(1, bf16={"enabled": True}))
        assert engine.save_16bit_model(tmp_path)
        return sorted(engine.module_state_dict())

    names = on_stages(2, 1, work)[0]
    assert sorted(torch.load(tmp_path / "pytorch_model.bin", weights_only=True)) == names


def test_evaluations():
    def work(context):
        engine = small(context, 1)

        def evaluate(**arguments):
            return engine.eval_batch(map(rows, range(9)), **arguments)

        average = evaluate()
        assert not engine.module.training
        each = evaluate(reduce_output=None)
        torch.testing.assert_close(torch.stack(each).mean(), average)
        mine = evaluate(bcast_loss=False)
        output = evaluate(compute_loss=False, num_micro_batches=3)
        both = evaluate(return_logits=True)
        torch.testing.assert_close(both[0], average)
        if engine.is_last_stage():
            torch.testing.assert_close(mine, average)
            assert output.shape == both[1].shape == (2, 4)
        else:
            assert (mine, output, both[1]) == (None, None, None)
        with pytest.raises(ConfigError, match="`reduce_output` must be avg or None, but is 'sum'"):
            evaluate(reduce_output="sum")
        return average

    first, *others = on_stages(2, 2, work)
    assert all(torch.equal(first, other) for other in others)


def test_tuples_of_losses_are_averaged_item_by_item():
    def work(context):
        engine = small(context)
        engine.module.loss_fn = lambda x, y: (mean_square(x, y), x.mean())
        return engine.eval_batch(map(rows, range(9)))

    one = solo(work)
    for found in on_stages(2, 1, work):
        torch.testing.assert_close(torch.stack(list(found)), torch.stack(list(one)))


def test_further_losses_are_the_same_on_all_ranks():
    class Reporting(PipelineModule):
        def get_additional_losses(self):
            return {"rank": torch.tensor(float(self.global_rank)), "two": 2.0}

    def work(context):
        module = Reporting([nn.Linear(4, 4), nn.Linear(4, 4)], topology=context, loss_fn=mean_square)
        engine = megazero.initialize(model=module, config=settings(0, 2))[0]
        assert engine.get_additional_losses() is None
        engine.train_batch(map(rows, range(9)))
        return {name: value.item() for name, value in engine.get_additional_losses().items()}

    assert on_stages(2, 2, work) == [{"rank": 2.5, "two": 2.0}] * 4


def test_a_pipeline_without_an_optimizer_only_evaluates():
    """It used to count as one that trains, and its `train_batch` updated nothing in silence."""

    def losses(context, config, trains):
        engine = engine_of(context, config, [Counting(), Counting()], loss_fn=mean_square)
        assert (engine.optimizer is not None) == trains
        if not trains:
            with pytest.raises(MegazeroError, match="optimizer"):
                engine.train_batch(map(rows, range(9)))
        return float(engine.eval_batch(map(rows, range(9))))

    trained, idle = settings(1, 2), {k: v for k, v in settings(1, 2).items() if k != "optimizer"}
    expected = on_stages(2, 1, lambda context: losses(context, trained, True))
    assert on_stages(2, 1, lambda context: losses(context, idle, False)) == expected


def test_an_engine_is_one_of_deepspeeds():
    def work(context):
        engine = small(context)
        assert isinstance(engine, DeepSpeedEngine)
        for call in (lambda: engine(torch.ones(2, 4)), lambda: engine.backward(None), engine.step):
            with pytest.raises(
                PipelineError, match="must be left to the pipeline, which computes whole batches"
            ):
                call()
        with torch.no_grad(), pytest.raises(PipelineError, match="with gradients enabled"):
            engine.train_batch(map(rows, range(9)))
        engine.set_train_batch_size(6)
        with pytest.raises(ConfigError, match="a multiple of 2 samples x 1 ranks, but is 7"):
            engine.set_train_batch_size(7)
        return engine.micro_batches, engine.train_batch_size()

    assert solo(work) == (3, 6)


@over_table(
    ("data", "message"),
    [
        ([rows(0)], "`data_iter` must be an iterator, but is a list"),
        (iter([rows(0)]), "`data_iter` must give 2 micro-batches, but ended after 1"),
        (iter([(1, 2, 3, 4)] * 2), r"must be a pair \(inputs, labels\), but is a tuple of 4"),
        (iter([{"x": 1}] * 2), r"must be a pair \(inputs, labels\), but is a dict"),
        (
            iter([("x", 1)] * 2),
            "inputs of a micro-batch must be a tensor or a tuple of tensors, but are a str",
        ),
        (None, "`data_iter` must be given if `initialize` was given no `training_data`"),
    ],
)
def test_wrong_data_ends_all_stages(data, message):
    with pytest.raises(DataError, match=message):
        solo(lambda context: small(context).train_batch(data))


def test_data_that_ends_is_a_stop_iteration_on_every_stage():
    def work(context):
        engine, data = small(context), iter([rows(0)] * 5)
        mine = data if any(engine.reads) else None
        for _ in range(2):
            engine.train_batch(mine)
        with pytest.raises(StopIteration):
            engine.train_batch(mine)
        return engine.global_steps

    assert on_stages(4, 1, work) == [2] * 4


def test_training_data_is_read_in_its_order():
    data = [(x[0], y[0]) for x, y in map(rows, range(8))]

    def work(context):
        layers = [nn.Linear(4, 4), nn.Linear(4, 4)]
        module = PipelineModule(layers, topology=context, loss_fn=mean_square)
        fill(module)
        engine, *_ = megazero.initialize(model=module, config=settings(0, 2), training_data=data)
        return [float(engine.train_batch()) for _ in range(3)]

    assert on_stages(2, 1, work)[0] == pytest.approx(solo(work), rel=1e-6)


def test_a_batch_function_makes_pairs():
    def work(context):
        engine = small(context)
        engine.set_batch_fn(lambda batch: (batch["x"], batch["y"]))
        engine.set_dataiterator({"x": x, "y": y} for x, y in map(rows, range(9)))
        return float(engine.train_batch())

    assert on_stages(2, 1, work)[0] == pytest.approx(solo(work), rel=1e-6)


def test_the_pipeline_section_of_a_json(capsys):
    section = {
        "activation_checkpoint_interval": 2,
        "stages": "auto",
        "partition": "best",
        "seed_layers": True,
    }

    def work(context, section):
        module = PipelineModule([nn.Linear(4, 4)], topology=context, loss_fn=mean_square)
        megazero.initialize(model=module, config=settings(pipeline=section))
        return module.activation_checkpoint_interval

    assert solo(lambda context: work(context, section)) == 2
    warnings = capsys.readouterr().err.splitlines()
    assert [line for line in warnings if "pipeline" in line] == [
        "warning: keys without effect here: pipeline.stages, pipeline.partition, pipeline.seed_layers "
        "(arguments of PipelineModule say it)."
    ]
    with pytest.raises(ConfigError, match="must be a number of layers, but is 'many'"):
        solo(lambda context: work(context, {"activation_checkpoint_interval": "many"}))


def refused(**arguments):
    arguments = {"layers": [nn.Linear(2, 2)], **arguments}
    return lambda context: PipelineModule(**{"topology": context, **arguments})


@over_table(
    ("build", "message"),
    [
        (lambda context: PipelineModule([]), "`num_stages` or `topology` must be given"),
        (
            lambda context: PipelineModule([], num_stages=3),
            "`num_stages` must divide the number of ranks (1)",
        ),
        (refused(layers=[3]), "`layers` must hold modules, specs and functions, but layer 0 is a int"),
        (refused(checkpointable_layers="Linear"), "`checkpointable_layers` must be a list"),
        (refused(activation_checkpoint_interval=-1), "`interval` must be at least 0"),
        (lambda context: LayerSpec(torch.tanh), "`typename` must be a class of torch.nn.Module"),
        (
            refused(layers=[TiedLayerSpec("a", nn.Tanh)]),
            "`tied_weight_attr` must name parameters of the module of 'a', but its Tanh has no 'weight'",
        ),
        (
            lambda context: small(context).module.stage_owner(4),
            "`layer_idx` must be below the number of layers",
        ),
    ],
)
def test_wrong_arguments_are_refused(build, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        solo(build)


def test_what_would_train_other_models_in_silence_is_refused():
    shared = nn.Linear(4, 4)
    with pytest.raises(ConfigError, match="layers 0 and 2 are the same Linear; use TiedLayerSpec"):
        on_stages(2, 1, lambda context: PipelineModule([shared, nn.Tanh(), shared], topology=context))

    def work(context):
        with Init(mpu=context), pytest.raises(ConfigError, match="`zero.Init` must be told of the stages"):
            PipelineModule([nn.Linear(2, 2)], num_stages=1)

    on_stages(1, 2, work)
    relu = nn.ReLU()
    on_stages(2, 1, lambda context: PipelineModule([relu, nn.Linear(2, 2), relu], topology=context))


def test_only_the_layers_of_a_stage_are_built():
    def work(context):
        module = PipelineModule(gpt(), topology=context, partition_method="uniform")
        return [name for name, _ in module.named_children()], list(module.fwd_map)

    assert on_stages(3, 1, work) == [
        (["tied_modules", "1"], ["1"]),
        (["tied_modules", "2", "3"], ["2", "3"]),
        (["tied_modules", "4"], ["4"]),
    ]


def test_seeds_do_not_depend_on_the_stages():
    seeds = []

    def work(context):
        layers = [LayerSpec(nn.Linear, 2, 2), torch.tanh, LayerSpec(nn.Linear, 2, 2)]
        module = PipelineModule(
            layers, topology=context, seed_layers=True, seed_fn=seeds.append, base_seed=10
        )
        module(torch.ones(1, 2))

    solo(work)
    assert seeds == [10, 11, 12, 20, 21, 22]


def test_which_layers_are_recomputed():
    class ParallelTransformerLayerPipe(nn.Linear):
        pass

    class GPTModelPipe(PipelineModule):
        pass

    def work(context):
        runs = []

        def recorded(function, *inputs):
            runs.append(len(inputs))
            return function(*inputs)

        def count(kind, names, interval=1):
            layers = [nn.Linear(4, 4), ParallelTransformerLayerPipe(4, 4), torch.tanh, nn.Linear(4, 4)]
            module = kind(
                layers,
                topology=context,
                activation_checkpoint_interval=interval,
                activation_checkpoint_func=recorded,
                checkpointable_layers=names,
            )
            runs.clear()
            module(torch.ones(1, 4))
            return len(runs)

        return [
            count(PipelineModule, None),
            count(PipelineModule, None, 2),
            count(PipelineModule, ["Linear"]),
            count(GPTModelPipe, None),
            count(GPTModelPipe, ["Linear"]),
            count(PipelineModule, ["tanh"]),
        ]

    assert solo(work) == [3, 2, 2, 1, 3, 0]


def test_a_middle_stage_needs_no_data():
    def work(context):
        engine = small(context)
        data = map(rows, range(9)) if any(engine.reads) else None
        return float(engine.train_batch(data))

    assert len(set(on_stages(4, 1, work))) == 1
    assert item(0, 0, 0)[1].shape == next(items(0, 1))[1].shape
