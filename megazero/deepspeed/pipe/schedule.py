"""DeepSpeed's schedules and instructions, which describe what our executor runs.

The engine does not execute them: it runs a `Program` of `megazero.pipeline`, with forwards and backwards in
the same order.
"""

from __future__ import annotations

from collections.abc import Iterator


class PipeInstruction:
    """An instruction of a stage; its keyword arguments are attributes."""

    def __init__(self, **kwargs: object):
        self.name = type(self).__name__
        self.kwargs = kwargs
        self.__dict__.update(kwargs)

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{key}={value!r}' for key, value in self.kwargs.items())})"


class BufferOpInstruction(PipeInstruction):
    """An instruction on the micro-batch in a buffer of the stage."""

    def __init__(self, buffer_id: int, **kwargs: object):
        super().__init__(buffer_id=buffer_id, **kwargs)


class LoadMicroBatch(BufferOpInstruction):
    """Read the next micro-batch from the data iterator."""


class ForwardPass(BufferOpInstruction):
    """Run forward of the stage's layers."""


class BackwardPass(BufferOpInstruction):
    """Run backward of the stage's layers."""


class SendActivation(BufferOpInstruction):
    """Send the stage's output to the next stage."""


class RecvActivation(BufferOpInstruction):
    """Receive the output of the previous stage."""


class SendGrad(BufferOpInstruction):
    """Send the gradient of the stage's input to the previous stage."""


class RecvGrad(BufferOpInstruction):
    """Receive the gradient of the stage's output from the next stage."""


class ReduceTiedGrads(PipeInstruction):
    """Sum the gradients of tied weights over the stages that hold them."""


class ReduceGrads(PipeInstruction):
    """Sum gradients over the replicas."""


class OptimizerStep(PipeInstruction):
    """Update the weights."""


class PipeSchedule:
    """The instructions of one stage by step; a base class.

    Args:
        micro_batches: the number of micro-batches.
        stages: the number of stages.
        stage_id: the stage.
    """

    def __init__(self, micro_batches: int, stages: int, stage_id: int):
        self.micro_batches, self.stages, self.stage_id = micro_batches, stages, stage_id
        self.num_micro_batches, self.num_stages, self.stage = micro_batches, stages, stage_id
        self.prev_stage, self.next_stage = stage_id - 1, stage_id + 1
        self.is_first_stage, self.is_last_stage = stage_id == 0, stage_id == stages - 1

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """The instructions of each step."""
        raise NotImplementedError("each schedule has steps of its own")

    def num_pipe_buffers(self) -> int:
        """The number of buffers: the most micro-batches that the stage holds at a time."""
        return self.micro_batches

    def __iter__(self) -> Iterator[list[PipeInstruction]]:
        return self.steps()

    def _at(self, step: int, first: int, stride: int) -> int | None:
        """The micro-batch at a step, if any; they come every `stride` steps from step `first` on."""
        micro, rest = divmod(step - first, stride)
        return micro if not rest and 0 <= micro < self.micro_batches else None

    def _buffer(self, micro: int) -> int:
        return micro % self.num_pipe_buffers()


class TrainSchedule(PipeSchedule):
    """The schedule of `train_batch`: one forward, one backward."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """The instructions of each step; a forward or a backward takes one step."""
        total = 2 * (self.micro_batches + self.stages - 1)
        for step in range(total):
            instructions = [*self._transfers(step), *self._work(step)]
            if step == total - 1:
                instructions += [ReduceTiedGrads(), ReduceGrads(), OptimizerStep()]
            yield instructions

    def num_pipe_buffers(self) -> int:
        """The most micro-batches between forward and backward; at least 2, as one may be in transfer."""
        return max(2, min(self.stages - self.stage_id, self.micro_batches))

    def _forward(self, step: int) -> int | None:
        return self._at(step, self.stage_id, 2)

    def _backward(self, step: int) -> int | None:
        return self._at(step, 2 * self.stages - 1 - self.stage_id, 2)

    def _transfers(self, step: int) -> Iterator[PipeInstruction]:
        """The messages before the work of a step; a step exchanges messages with one neighbour alone."""
        forward, backward = self._forward(step), self._backward(step)
        if (step - self.stage_id) % 2 == 0:
            done = self._backward(step - 1)
            if done is not None and not self.is_first_stage:
                yield SendGrad(self._buffer(done))
            if forward is not None and not self.is_first_stage:
                yield RecvActivation(self._buffer(forward))
        else:
            done = self._forward(step - 1)
            if backward is not None and not self.is_last_stage:
                yield RecvGrad(self._buffer(backward))
            if done is not None and not self.is_last_stage:
                yield SendActivation(self._buffer(done))

    def _work(self, step: int) -> Iterator[PipeInstruction]:
        if (forward := self._forward(step)) is not None:
            if self.is_first_stage or self.is_last_stage:
                yield LoadMicroBatch(self._buffer(forward))
            yield ForwardPass(self._buffer(forward))
        if (backward := self._backward(step)) is not None:
            yield BackwardPass(self._buffer(backward))


class InferenceSchedule(PipeSchedule):
    """The schedule of `eval_batch`: forwards alone."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """The instructions of each step; a forward takes one step."""
        odd = self.stage_id % 2
        for step in range(self.micro_batches + self.stages - 1):
            current, done = self._at(step, self.stage_id, 1), self._at(step - 1, self.stage_id, 1)
            buffer, other = (step + odd) % 2, (step + 1 + odd) % 2
            loads = current is not None and (self.is_first_stage or self.is_last_stage)
            send = [SendActivation(other)] if done is not None and not self.is_last_stage else []
            receive = [RecvActivation(buffer)] if current is not None and not self.is_first_stage else []
            yield [
                *([LoadMicroBatch(buffer)] if loads else []),
                # Of two neighbours, one sends first and the other receives first.
                *([*receive, *send] if odd else [*send, *receive]),
                *([ForwardPass(buffer)] if current is not None else []),
            ]

    def num_pipe_buffers(self) -> int:
        """The number of buffers, which is 2: one to receive into, and one in computation."""
        return 2


class DataParallelSchedule(PipeSchedule):
    """A schedule of gradient accumulation without stages."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """The instructions of each step; a micro-batch takes one step."""
        for micro in range(self.micro_batches):
            last = [ReduceGrads(), OptimizerStep()] if micro == self.micro_batches - 1 else []
            yield [LoadMicroBatch(0), ForwardPass(0), BackwardPass(0), *last]

    def num_pipe_buffers(self) -> int:
        """The number of buffers, which is 1."""
        return 1
