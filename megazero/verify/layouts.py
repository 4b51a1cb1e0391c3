"""Layouts of small models: all that the rules allow, and a selection that covers all pairs of settings."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import combinations, product
from types import MappingProxyType

from megazero.config.rules import broken_rules
from megazero.config.tree import (
    BatchConfig,
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    RecomputeConfig,
    TrainingConfig,
    ZeroConfig,
)
from megazero.mpu import ProcessGrid

GLOBAL_BATCH = 8
SEQUENCE = 16
VOCABULARY = 61  # a prime, so that it must be padded on every layout

_ENCODER = MappingProxyType(
    {
        "family": "bert",
        "num_attention_heads": 8,
        "normalization": "LayerNorm",
        "position_embedding_type": "learned_absolute",
        "add_bias_linear": True,
    }
)
SHAPES = MappingProxyType(
    {
        "gpt2": {
            "num_attention_heads": 8,
            "normalization": "LayerNorm",
            "activation": "gelu",
            "position_embedding_type": "learned_absolute",
            "add_bias_linear": True,
        },
        "llama": {
            "num_attention_heads": 16,
            "num_query_groups": 8,
            "normalization": "RMSNorm",
            "activation": "swiglu",
            "position_embedding_type": "rope",
            "add_bias_linear": False,
        },
        "bert": {**_ENCODER, "activation": "gelu"},
        "bert-original": {
            **_ENCODER,
            "activation": "gelu_exact",
            "apply_residual_connection_post_layernorm": True,
        },
    }
)
DECODERS, ENCODERS = ("gpt2", "llama"), ("bert", "bert-original")


@dataclass(frozen=True)
class Layout:
    """One way to train one small model.

    Attributes:
        tp, pp, dp: ranks of each axis.
        schedule: kind of the pipeline schedule.
        virtual: chunks per stage.
        zero: ZeRO stage.
        sequence_parallel, recompute: as in the configuration.
        micro_batch: sequences in a micro-batch; the global batch is 8, so 8 / (dp x micro_batch) are
            accumulated.
        keep: whether ZeRO stage 3 keeps gathered parameters for their next use in the step.
        shape, untied, layers, dropout, dtype: properties of the model.
        binary_head: whether an encoder has its second task too.
        packed: whether an encoder's samples share rows.
        optimizer, overlap, bucket_size, hpz, backend: as in the configuration.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    schedule: str = "1f1b"
    virtual: int = 1
    zero: int = 0
    sequence_parallel: bool = False
    recompute: str = "none"
    micro_batch: int = 1
    keep: bool = False
    shape: str = "gpt2"
    untied: bool = False
    layers: int = 2
    dropout: float = 0.0
    dtype: str = "fp32"
    binary_head: bool = True
    packed: bool = False
    optimizer: str = "adam"
    overlap: bool = True
    bucket_size: int = 3000  # gives several buckets, even for this small model
    hpz: int = 1
    backend: str = "auto"

    @property
    def world_size(self) -> int:
        """Total number of ranks."""
        return self.tp * self.pp * self.dp

    @property
    def grid(self) -> ProcessGrid:
        """The ranks' places."""
        return ProcessGrid(pp=self.pp, dp=self.dp, tp=self.tp)

    @property
    def serial(self) -> Layout:
        """The same model in one process with nothing recomputed: sample by sample, an encoder all at once."""
        return Layout(
            micro_batch=GLOBAL_BATCH if self.shape in ENCODERS else 1,
            shape=self.shape,
            untied=self.untied,
            layers=self.layers,
            dropout=self.dropout,
            dtype=self.dtype,
            binary_head=self.binary_head,
            optimizer=self.optimizer,
        )

    @property
    def name(self) -> str:
        """A one-word name that shows what differs from the defaults."""
        parts = [self.optimizer] if self.optimizer != "adam" else []
        parts += [self.shape, f"T{self.tp}P{self.pp}D{self.dp}", f"Z{self.zero}"]
        if self.pp > 1 or self.schedule != "1f1b":
            parts.append(self.schedule + (f"x{self.virtual}" if self.virtual > 1 else ""))
        parts += ["SP"] if self.sequence_parallel else []
        parts += ["untied"] if self.untied else []
        parts += [] if self.binary_head else ["one-head"]
        parts += ["packed"] if self.packed else []
        parts += [self.recompute] if self.recompute != "none" else []
        parts += [f"b{self.micro_batch}"] if self.micro_batch > 1 else []
        parts += ["keep"] if self.keep else []
        parts += [f"hpz{self.hpz}"] if self.hpz > 1 else []
        parts += ["dropout"] if self.dropout else []
        parts += [self.backend] if self.backend != "auto" else []
        return "-".join(parts)

    def config(self, steps: int = 5) -> Config:
        """The configuration for `steps` steps."""
        return Config(
            model=ModelConfig(
                num_layers=self.layers,
                hidden_size=32,
                seq_length=SEQUENCE,
                ffn_hidden_size=48,
                vocab_size=VOCABULARY,
                make_vocab_size_divisible_by=4,
                hidden_dropout=self.dropout,
                attention_dropout=self.dropout,
                untie_embeddings_and_output_weights=self.untied,
                init_method_std=0.1,
                bert_binary_head=self.binary_head,
                **SHAPES[self.shape],
            ),
            parallel=ParallelConfig(
                tensor_model_parallel_size=self.tp,
                pipeline_model_parallel_size=self.pp,
                pipeline_schedule=self.schedule,
                num_virtual_stages_per_pipeline_rank=self.virtual if self.virtual > 1 else None,
                sequence_parallel=self.sequence_parallel,
                distributed_backend=self.backend,
            ),
            zero=ZeroConfig(
                stage=self.zero,
                bucket_size=self.bucket_size,
                overlap_grad_reduce=self.overlap,
                param_persistence_threshold=40,  # norms stay whole
                prefetch_size=6000,
                max_live_parameters=10**9 if self.keep else 0,
                hpz_partition_size=self.hpz,
            ),
            data=DataConfig(mock_data=True, bert_pack=self.packed),
            batch=BatchConfig(micro_batch_size=self.micro_batch, global_batch_size=GLOBAL_BATCH),
            # Clipping is active. Epsilon is far above rounding noise: the key bias has no gradient except
            # noise (it cancels in the softmax), which Adam would otherwise amplify to full steps.
            optimizer=OptimizerConfig(
                optimizer=self.optimizer,
                lr=1e-2,
                clip_grad=0.5,
                lr_warmup_iters=2,
                weight_decay=0.1,
                adam_eps=1e-4,
            ),
            recompute=RecomputeConfig(granularity=self.recompute),
            precision=PrecisionConfig(dtype=self.dtype),
            training=TrainingConfig(train_iters=steps, seed=7, eval_iters=0),
        )

    def broken_rules(self) -> list[str]:
        """Names of the rules that it breaks."""
        return [rule.name for rule in broken_rules(self.config(), self.world_size)]


def all_layouts(most_ranks: int = 8) -> Iterator[Layout]:
    """Every distinct layout of a decoder on at most `most_ranks` ranks that the rules allow."""
    sizes = [
        (tp, pp, dp)
        for tp, pp, dp in product((1, 2, 4, 8), repeat=3)
        if pp < 8 and tp * pp * dp <= most_ranks
    ]
    schedules = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-v", 1)]
    for (tp, pp, dp), (schedule, virtual), zero in product(sizes, schedules, range(4)):
        if pp == 1 and schedule in ("gpipe", "interleaved"):
            continue
        chunks = pp * (2 if schedule in ("interleaved", "zb-v") else 1)
        for rest in product(
            (False, True), ("none", "full", "selective"), (1, 2), (False, True), DECODERS, (False, True)
        ):
            sequence_parallel, recompute, micro_batch, keep, shape, untied = rest
            if (sequence_parallel and tp == 1) or (keep and zero < 3):
                continue
            layout = Layout(
                tp=tp,
                pp=pp,
                dp=dp,
                schedule=schedule,
                virtual=virtual,
                zero=zero,
                sequence_parallel=sequence_parallel,
                recompute=recompute,
                micro_batch=micro_batch,
                keep=keep,
                shape=shape,
                untied=untied,
                layers=max(2, chunks),
            )
            if not layout.broken_rules():
                yield layout


def encoder_layouts(most_ranks: int = 8, count: int = 1200, seed: int = 1) -> list[Layout]:
    """`count` distinct layouts of an encoder on at most `most_ranks` ranks, drawn from all that are allowed.

    There are too many to list. Dropout and packing do not meet: which elements are dropped depends on
    which samples share a row.
    """
    dice, found = random.Random(seed), {}
    schedules = (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-v", 1))
    while len(found) < count:
        schedule, virtual = dice.choice(schedules)
        pp = dice.choice((1, 2, 4))
        chunks = pp * (2 if schedule in ("interleaved", "zb-v") else 1)
        dropout, packed = dice.choice(((0.0, False), (0.1, False), (0.0, True)))
        layout = Layout(
            tp=dice.choice((1, 2, 4)),
            pp=pp,
            dp=dice.choice((1, 2)),
            schedule=schedule,
            virtual=virtual,
            zero=dice.choice(range(4)),
            sequence_parallel=dice.choice((False, True)),
            recompute=dice.choice(("none", "full", "selective")),
            micro_batch=dice.choice((1, 2, 4)),
            shape=dice.choice(ENCODERS),
            untied=dice.choice((False, True)),
            binary_head=dice.choice((False, True)),
            optimizer=dice.choice(("adam", "lamb")),
            layers=max(2, chunks),
            dropout=dropout,
            packed=packed,
        )
        if pp == 1 and schedule in ("gpipe", "interleaved"):
            continue
        if layout.sequence_parallel and layout.tp == 1:
            continue
        # Many ranks and many micro-batches take long and show no more together.
        needed = GLOBAL_BATCH if layout.world_size <= 2 else pp if schedule == "interleaved" else 2
        quick = layout.dp * layout.micro_batch * needed >= GLOBAL_BATCH
        if layout.world_size <= most_ranks and quick and not layout.broken_rules():
            found[layout] = None
    return list(found)


def covering(layouts: Sequence[Layout], count: int, seed: int = 1, few_ranks: int = 4) -> list[Layout]:
    """`count` of the `layouts` that cover every pair of values of two settings that occurs in `layouts`.

    They are chosen greedily from a shuffled order (pairwise testing, Cohen et al. 1997), then filled up in
    that order, starting with layouts of `few_ranks`, as four take a quarter of the time of eight.
    """
    shuffled = list(layouts)
    random.Random(seed).shuffle(shuffled)
    names = [f.name for f in fields(Layout) if len({getattr(x, f.name) for x in shuffled}) > 1]

    def pairs(layout: Layout) -> set:
        values = [(name, getattr(layout, name)) for name in names]
        return set(combinations(values, 2))

    wanted = set().union(*map(pairs, shuffled))
    chosen: list[Layout] = []
    while wanted:
        best = max(shuffled[:400], key=lambda x: len(pairs(x) & wanted))
        gained = pairs(best) & wanted
        if not gained:
            # Only rare pairs are left: take any layout that has one.
            best = next(x for x in shuffled if pairs(x) & wanted)
            gained = pairs(best) & wanted
        chosen.append(best)
        wanted -= gained
    taken = set(chosen)
    rest = sorted((x for x in shuffled if x not in taken), key=lambda x: x.world_size > few_ranks)
    return [*chosen, *rest[: max(0, count - len(chosen))]]
