"""The configurations that the product and the oracle both train: every pair of settings meets in one of them.

A factor is one choice that a user makes; a value of it is the flags that state this choice, by a short name.
To add a feature, add a factor or a value here, and what it means to `trainer.py`.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from itertools import combinations
from types import MappingProxyType

from megazero.config.derive import EXPERT_FIELDS
from megazero.config.fields import FIELDS
from megazero.config.hybrid.settings import HybridConfig
from megazero.config.latent import LatentConfig
from megazero.config.t5.settings import T5Config
from megazero.config.tree.attention import AttentionConfig
from megazero.config.tree.heads import MultiTokenConfig
from megazero.config.tree.sparse import SPARSE_FIELDS
from megazero.config.tree.transformer import TransformerConfig
from tests.oracle.text import VOCABULARY
from tests.oracle.variants import ACTIVATIONS, NEVER, PAIRS, SOME, TWO_BASES, VARIANTS

STEPS = 20
BERT_STEPS = 8  # the ramp takes two of its sizes
SEQUENCE = 16

Factors = Mapping[str, Mapping[str, Mapping[str, object]]]
Case = Mapping[str, str]

_GROUPED = {"group-query-attention": True}

MODEL = {
    "layers": {"2": {"num-layers": 2}, "1": {"num-layers": 1}},
    "positions": {
        "learned": {"position-embedding-type": "learned_absolute"},
        "learned-more": {"position-embedding-type": "learned_absolute", "max-position-embeddings": 19},
        "none": {"position-embedding-type": "none"},
        "rope": {"position-embedding-type": "rope"},
        "rope-half": {"position-embedding-type": "rope", "rotary-percent": 0.5},
        "rope-base": {"position-embedding-type": "rope", "rotary-percent": 0.75, "rotary-base": 50.0},
        "rope-linear": {"position-embedding-type": "rope", "rotary-seq-len-interpolation-factor": 4.0},
        "rope-llama3": {
            **{"position-embedding-type": "rope", "use-rope-scaling": True, "rope-scaling-factor": 6.0},
            **{"rope-low-freq-factor": 0.5, "rope-high-freq-factor": 2.0},
            "rope-original-max-position-embeddings": 8,
        },
        "rope-pairs": PAIRS,
        "rope-some": SOME,
        "yarn": {
            **{"position-embedding-type": "yarn", "rotary-scaling-factor": 4.0, "yarn-beta-fast": 2.0},
            **{"yarn-beta-slow": 0.1, "yarn-original-max-position-embeddings": 8, "rotary-base": 100.0},
            **{"mscale": 0.8, "mscale-all-dim": 0.3, "no-yarn-correction-range-round-to-int": True},
        },
        "alibi": {"position-embedding-type": "alibi"},
        "two-bases": TWO_BASES,
    },
    "window": {
        "none": {},
        "all": {"window-size": (5, 0)},
        "some": {"window-size": (2, -1), "window-attn-skip-freq": (2,)},
        "with-first": {"window-size": (3, 0), "window-sink-tokens": 2},
    },
    "softmax": {each: {"softmax-type": each} for each in ("vanilla", "off-by-one", "learnable")},
    "normalization": {"layer": {"normalization": "LayerNorm"}, "rms": {"normalization": "RMSNorm"}},
    "epsilon": {"small": {"norm-epsilon": 1e-5}, "large": {"norm-epsilon": 0.05}},
    "activation": {
        **{each: {"activation": each} for each in ("gelu", "gelu_exact", "swiglu", "squared_relu")},
        **ACTIVATIONS,
    },
    "bias": {"bias": {}, "no-bias": {"disable-bias-linear": True}},
    "heads": {
        "each": {"num-attention-heads": 4, **_GROUPED, "num-query-groups": 4},
        "grouped": {"num-attention-heads": 4, **_GROUPED, "num-query-groups": 2},
        "one": {"num-attention-heads": 4, **_GROUPED, "num-query-groups": 1},
        "wide": {"num-attention-heads": 2, **_GROUPED, "num-query-groups": 2, "kv-channels": 24},
    },
    "head": {"tied": {}, "untied": {"untie-embeddings-and-output-weights": True}},
    "embedding": {"plain": {}, "normed": {"embed-layernorm": True}},
    "residual": {"before": {}, "after-norm": {"apply-residual-connection-post-layernorm": True}},
    "hidden-dropout": {"0": {"hidden-dropout": 0.0}, "0.2": {"hidden-dropout": 0.2}},
    "attention-dropout": {"0": {"attention-dropout": 0.0}, "0.15": {"attention-dropout": 0.15}},
    "spread": {"0.1": {"init-method-std": 0.1}, "0.25": {"init-method-std": 0.25}},
    "ffn": {"four": {"ffn-hidden-size": 128}, "odd": {"ffn-hidden-size": 20}},
    **VARIANTS,
}

DATA = {
    "source": {
        "epochs-small": {"data-path": ("small",), "split": "100,0,0"},
        "epochs-middle": {"data-path": ("middle",), "split": "1,0,0"},
        "split": {"data-path": ("long",), "split": "90,10,0"},
        "blend": {"data-path": (3, "small", 7, "middle"), "split": "100,0,0"},
        "even-blend": {"data-path": (1, "left", 1, "right"), "split": "100,0,0"},
    },
    "reset-positions": {"no": {}, "yes": {"reset-position-ids": True}},
    "reset-attention": {"no": {}, "yes": {"reset-attention-mask": True}},
    "mask-ends": {"no": {}, "yes": {"eod-mask-loss": True}},
    "seed": {"7": {"seed": 7}, "1234": {"seed": 1234}},
}

BATCH = {
    "batch": {
        "whole": {"micro-batch-size": 4, "global-batch-size": 4},
        "accumulated": {"micro-batch-size": 2, "global-batch-size": 4},
        "stairs": {
            "micro-batch-size": 1,
            "global-batch-size": 2,
            "step-batch-size-schedule": ("0:2", "170:6", "500:4", "800:2"),
        },
        "ramp": {"micro-batch-size": 1, "global-batch-size": 6, "rampup-batch-size": (2, 2, 50)},
    },
    "length": {each: {"length": each} for each in ("iters", "samples", "tokens")},
}

OPTIMIZER = {
    "optimizer": {
        "adam": {"optimizer": "adam", "lr": 5e-3, "adam-beta1": 0.9, "adam-beta2": 0.999, "adam-eps": 1e-4},
        "adam-quick": {
            "optimizer": "adam",
            "lr": 5e-3,
            "adam-beta1": 0.7,
            "adam-beta2": 0.95,
            "adam-eps": 1e-3,
        },
        "ademamix": {
            **{"optimizer": "ademamix", "lr": 2e-3, "adam-beta1": 0.8, "adam-beta2": 0.99, "adam-eps": 1e-3},
            **{"ademamix-beta3": 0.97, "ademamix-alpha": 3.0},
            **{"ademamix-beta3-warmup": 15, "ademamix-alpha-warmup": 9},
        },
        "sgd": {"optimizer": "sgd", "lr": 0.1, "sgd-momentum": 0.0},
        "momentum": {"optimizer": "sgd", "lr": 0.03, "sgd-momentum": 0.9},
        "lamb": {
            "optimizer": "lamb",
            "lr": 0.02,
            "adam-beta1": 0.9,
            "adam-beta2": 0.999,
            "adam-eps": 1e-3,
            "lamb-max-coeff": 10.0,
            "lamb-min-coeff": 0.01,
            "lamb-bias-correction": "moments",
        },
        "lamb-bounded": {
            "optimizer": "lamb",
            "lr": 0.05,
            "adam-beta1": 0.7,
            "adam-beta2": 0.95,
            "adam-eps": 1e-3,
            "lamb-max-coeff": 0.3,
            "lamb-min-coeff": 0.1,
            "lamb-bias-correction": "rate",
            "lamb-adapt-all": True,
        },
    },
    "clip": {"no": {"clip-grad": 0.0}, "always": {"clip-grad": 0.1}, "sometimes": {"clip-grad": 1.0}},
    "decay-style": {
        "constant": {"lr-decay-style": "constant"},
        "linear": {"lr-decay-style": "linear"},
        "cosine": {"lr-decay-style": "cosine"},
        "inverse-square-root": {"lr-decay-style": "inverse-square-root"},
        "restarts": {"lr-decay-style": "cosine-restarts", "cycle-share": 0.3},
        "restarts-growing": {
            **{"lr-decay-style": "cosine-restarts", "cycle-share": 0.1, "lr-cycle-mult": 1.5},
        },
        **{
            f"wsd-{each}": {"lr-decay-style": "WSD", "lr-wsd-decay-style": each, "wsd-decay-share": 0.3}
            for each in ("exponential", "linear", "cosine", "minus_sqrt")
        },
    },
    "decay-length": {"training": {}, "shorter": {"decay-share": 0.8}},
    "warmup": {
        "none": {},
        "length": {"warmup-share": 0.25},
        "from-above-zero": {"warmup-share": 0.2, "lr-warmup-init": 1e-3},
        "fraction": {"lr-warmup-fraction": 0.17},
    },
    "lr-unit": {each: {"lr-unit": each} for each in ("iters", "samples", "tokens")},
    "floor": {"0": {"min-lr": 0.0}, "0.002": {"min-lr": 2e-3}},
    "decoupled": {
        "none": {},
        "peak": {"decoupled-lr": 3e-3},
        "both": {"decoupled-lr": 8e-3, "decoupled-min-lr": 1e-3},
    },
    "weight-decay": {
        "none": {"weight-decay": 0.0},
        "constant": {"weight-decay": 0.3},
        "linear": {"start-weight-decay": 0.0, "end-weight-decay": 0.4, "weight-decay-incr-style": "linear"},
        "cosine": {"start-weight-decay": 0.1, "end-weight-decay": 0.5, "weight-decay-incr-style": "cosine"},
    },
}

DEEPSEEK_FIELDS = tuple(
    name
    for kind in (LatentConfig, MultiTokenConfig)
    for name in vars(kind)["__annotations__"]
    if name in kind.model_fields
)
"""The settings of latent attention and of further tokens."""

_SIGNS = "rounding turns signs around, and each moves by the learning rate: tests/optim/test_conformance.py"
T5_FIELDS = T5Config.model_fields.keys() - AttentionConfig.model_fields.keys()
# Settings of these sections that no case states, and why.
SECTIONS = ("model", "data", "batch", "optimizer", "precision")
NOT_STATED = MappingProxyType(
    {
        "model.add_qkv_bias": "for models of transformers: tests/models/test_hf_parity.py",
        "model.bert_token_types": "for models of transformers: tests/formats/hf/test_encoder.py",
        **dict.fromkeys(
            (f"model.{name}" for name in DEEPSEEK_FIELDS),
            "DeepSeek's shapes have cases of their own: tests/oracle/test_deepseek.py",
        ),
        "data.t5_columns": "pairs of texts: tests/train/test_pairs.py",
        **dict.fromkeys(
            (f"model.{name}" for name in sorted(T5_FIELDS)),
            "an encoder and a decoder have cases of their own: tests/oracle/test_pairs.py",
        ),
        **dict.fromkeys(
            (f"model.{name}" for name in EXPERT_FIELDS),
            "experts have cases of their own: tests/oracle/test_experts.py",
        ),
        **dict.fromkeys(
            (f"model.{name}" for name in sorted(SPARSE_FIELDS)),
            "its oracle is dense attention with the same mask: tests/layers/test_patterns.py",
        ),
        **dict.fromkeys(
            (
                f"model.{name}"
                for name in HybridConfig.model_fields
                if name not in TransformerConfig.model_fields
            ),
            "layers of other kinds have cases of their own: tests/oracle/test_{hybrid,heterogeneous}.py",
        ),
        **dict.fromkeys(
            ("model.extra_vocab_size", "model.pad_vocab_size_to"),
            "rows of a table: tests/train/test_vocabulary.py",
        ),
        "data.index_memory_gib": "another order of samples: tests/data/test_computed_order.py",
        "data.train_idx_path": "a BERT's prepared sentences: tests/data/test_prepared.py",
        **dict.fromkeys(
            (f"data.train_{kind}_idx_path" for kind in ("doc", "sample", "shuffle")),
            "an index that is not built: tests/data/test_prepared.py",
        ),
        **dict.fromkeys(
            ("model.num_classes", "model.classifier_bias"),
            "fine-tuning has tests of its own: tests/equivalence/test_classifiers.py",
        ),
        "precision.tf32": "a CPU has no such products: tests/train/test_determinism.py",
        "optimizer.lion_beta1": _SIGNS,
        "optimizer.lion_beta2": _SIGNS,
        **dict.fromkeys(
            (
                f"optimizer.{name}"
                for name in ("adagrad_eps", "adadelta_rho", "adadelta_eps", "rmsprop_alpha")
            ),
            "torch's class is the oracle: tests/optim/test_conformance.py",
        ),
        **dict.fromkeys(
            (spec.path for spec in FIELDS if spec.name.startswith("muon_")),
            "torch's class is the oracle: tests/optim/test_muon.py",
        ),
        **dict.fromkeys(
            (
                spec.path
                for spec in FIELDS
                if spec.name.startswith("fp8_") or spec.name.endswith(("layers_bf16", "_in_bf16"))
            ),
            "8-bit products have an oracle of their own: tests/layers/test_fp8.py",
        ),
        "data.train_data_path": "another way to name the documents: tests/data/test_build.py",
        "data.valid_data_path": "no training reads it",
        "data.multiple_validation_sets": "no training reads them",
        "data.validation_set_names": "they are names",
        "data.test_data_path": "no training reads it",
        "data.data_cache_path": "where an index lies",
        "data.object_storage_cache_path": "where copies lie",
        "data.object_storage_cache_gib": "the room that copies may take: tests/storage/test_dataset.py",
        "data.train_data_exact_num_epochs": "the length of an index: tests/data/test_index_build.py",
        "data.dataloader_type": "its order is a law of its own: tests/data/test_sampler.py",
        "data.data_sharding": "a law of its own too: tests/data/test_sampler.py",
        "data.pack": "other samples, with documents: tests/data/packed/test_dataset.py",
        "data.mock_data": "there is nothing to read",
        "data.verify_data": "it only compares what is read: tests/data/indexed/test_guard.py",
        **dict.fromkeys(
            (
                spec.path
                for spec in FIELDS
                if spec.section == "optimizer" and spec.name.startswith(("onebit_", "zero_one_"))
            ),
            "their numbers depend on the replicas, with formulas of their own: tests/optim/compressed",
        ),
    }
)

# These must not change the numbers, so the oracle does not read them.
LAYOUT = {
    "layout": {
        "alone": {},
        "T2": {"tensor-model-parallel-size": 2},
        "T2-SP": {"tensor-model-parallel-size": 2, "sequence-parallel": True},
        "D2": {"zero-stage": 2},
    },
    "recompute": {
        "none": {},
        "selective": {"recompute-granularity": "selective"},
        "full": {"recompute-granularity": "full"},
        "parts": {"recompute-granularity": "selective", "recompute-modules": ("layernorm", "mlp")},
        "logits": {"recompute-logits": True},
    },
}
# 2 up to 10 samples, 6 up to 34, 4 up to 50, then 2 again.
STAIRS_SAMPLES = 64
RAMP_SAMPLES = 56  # of 20 steps: 13 of 2 samples, 6 of 4, 1 of 6
RANKS = MappingProxyType({"alone": 1, "T2": 2, "T2-SP": 2, "D2": 2, "P2": 2})

FACTORS: Factors = MappingProxyType({**MODEL, **DATA, **BATCH, **OPTIMIZER, **LAYOUT})

# A BERT has few settings of its own; those that it shares with GPT meet each other above.
BERT_FACTORS: Factors = MappingProxyType(
    {
        "two-tasks": {"both": {}, "one": {"bert-no-binary-head": True}},
        "residual": MODEL["residual"],
        "head-activation": {each: {"bert-head-activation": each} for each in ("gelu", "gelu_exact")},
        "activation": {each: {"activation": each} for each in ("gelu", "gelu_exact")},
        "head": MODEL["head"],
        "layers": MODEL["layers"],
        "rows": {"own": {}, "shared": {"bert-pack": True}},
        "window": {"none": {}, "near": {"window-size": (4, 2)}, "before": {"window-size": (3, -1)}},
        "softmax": MODEL["softmax"],
        "masked": {"0.15": {"mask-prob": 0.15}, "0.4": {"mask-prob": 0.4}},
        "short": {"0.1": {"short-seq-prob": 0.1}, "0.7": {"short-seq-prob": 0.7}},
        "batch": {name: BATCH["batch"][name] for name in ("whole", "accumulated", "ramp")},
        "optimizer": {name: OPTIMIZER["optimizer"][name] for name in ("adam", "lamb", "momentum")},
        "layout": {
            **LAYOUT["layout"],
            "P2": {"pipeline-model-parallel-size": 2},
        },
    }
)
BERT_FLAGS = MappingProxyType(
    {
        "model-family": "bert",
        "seq-length": 24,
        "tokenizer-type": "BertWordPieceLowerCase",
        "data-path": ("sentences",),
        "train-iters": BERT_STEPS,
        "lr-decay-style": "constant",
        "bert-no-binary-head": False,
        "bert-pack": False,
    }
)

PAIR_STEPS = 4
PAIR_FACTORS: Factors = MappingProxyType(
    {
        "positions": {
            "relative": {"position-embedding-type": "relative"},
            "near": {
                **{"position-embedding-type": "relative", "relative-attention-num-buckets": 8},
                "relative-attention-max-distance": 9,
            },
            "learned": {"position-embedding-type": "learned_absolute"},
        },
        "style": {each: {"t5-style": each} for each in ("megatron", "google")},
        "activation": {each: {"activation": each} for each in ("gelu", "relu", "geglu")},
        "normalization": MODEL["normalization"],
        "bias": MODEL["bias"],
        "head": MODEL["head"],
        "layers": {
            "one-each": {"encoder-num-layers": 1, "decoder-num-layers": 1},
            "more": {"encoder-num-layers": 1, "decoder-num-layers": 2},
        },
        "batch": BATCH["batch"],
        "optimizer": {name: OPTIMIZER["optimizer"][name] for name in ("adam", "lamb", "momentum")},
        "recompute": {name: LAYOUT["recompute"][name] for name in ("none", "selective", "full")},
        "layout": {**LAYOUT["layout"], "P2": {"pipeline-model-parallel-size": 2}},
    }
)
PAIR_FLAGS = MappingProxyType(
    {
        "model-family": "t5",
        "seq-length": 24,
        "decoder-seq-length": 16,
        "vocab-extra-ids": 8,
        "tokenizer-type": "BertWordPieceLowerCase",
        "data-path": ("sentences",),
        "train-iters": PAIR_STEPS,
        "lr-decay-style": "constant",
        "mask-prob": 0.3,
    }
)

# In half precision the comparison is looser, so pairs are covered for what half precision bears on alone.
HALF_FACTORS: Factors = MappingProxyType(
    {
        "precision": {
            "dynamic": {"params-dtype": "fp16", "initial-loss-scale": 2.0**21, "hysteresis": 2},
            "eager": {"params-dtype": "fp16", "initial-loss-scale": 2.0**18, "hysteresis": 1},
            "floor": {"params-dtype": "fp16", "initial-loss-scale": 2.0**18, "min-loss-scale": 2.0**17},
            "static": {"params-dtype": "fp16", "loss-scale": 1024.0},
            "bf16": {"params-dtype": "bf16"},
        },
        "window": {"3": {"loss-scale-window": 3}, "5": {"loss-scale-window": 5}},
        "residual-type": {"half": {}, "fp32": {"fp32-residual-connection": True}},
        **{name: MODEL[name] for name in ("normalization", "bias", "head", "hidden-dropout")},
        "positions": {name: MODEL["positions"][name] for name in ("learned", "rope-half")},
        "activation": {name: MODEL["activation"][name] for name in ("gelu", "swiglu")},
        "batch": BATCH["batch"],
        "optimizer": {name: OPTIMIZER["optimizer"][name] for name in ("adam-quick", "momentum")},
        "clip": {name: OPTIMIZER["clip"][name] for name in ("no", "sometimes")},
        # Slices of a tensor overflow where the whole does not, or the other way round.
        "layout": {name: LAYOUT["layout"][name] for name in ("alone", "D2")},
    }
)  # fmt: skip


_NEVER = (
    # One group of queries cannot be cut in two.
    frozenset({("heads", "one"), ("layout", "T2")}),
    frozenset({("heads", "one"), ("layout", "T2-SP")}),
    # Two replicas read two micro-batches at least.
    frozenset({("batch", "whole"), ("layout", "D2")}),
    # Linear biases hide what a window would not.
    frozenset({("positions", "alibi"), ("window", "with-first")}),
    *NEVER,
    # One layer is one stage.
    frozenset({("layers", "1"), ("layout", "P2")}),
)


def allowed(pair: frozenset[tuple[str, str]]) -> bool:
    """Whether two values can go together."""
    return pair not in _NEVER


def pairs_of(case: Case) -> set[frozenset[tuple[str, str]]]:
    """The pairs of values that meet in a case."""
    return {frozenset(pair) for pair in combinations(case.items(), 2)}


def all_pairs(factors: Factors) -> set[frozenset[tuple[str, str]]]:
    """The pairs of values of two factors that can go together."""
    found = set()
    for a, b in combinations(factors, 2):
        found |= {frozenset({(a, x), (b, y)}) for x in factors[a] for y in factors[b]}
    return {pair for pair in found if allowed(pair)}


def covering(factors: Factors, least: int = 0, tries: int = 6) -> list[Case]:
    """Cases in which all pairs meet, at least so many, chosen greedily (Cohen et al. 1997).

    Each starts with a pair that has not met yet; the other factors, in random order, take the value with the
    most new pairs. The best of some `tries` is kept.
    """
    dice, chosen, start = random.Random(1), [], sorted(sorted(pair) for pair in all_pairs(factors))
    # A value is a bit, a set of values a number: half a second for what takes ten with sets of pairs.
    bits = {
        value: 1 << n for n, value in enumerate((name, value) for name in factors for value in factors[name])
    }
    missing, barred = _beside(bits, start), _beside(bits, _NEVER)

    def attempt(starts: list[list[tuple[str, str]]]) -> Case:
        case = dict(dice.choice(starts))
        met = sum(bits[value] for value in case.items())
        for name in dice.sample(list(factors), len(factors)):
            if name in case:
                continue
            values = [
                value
                for value in dice.sample(list(factors[name]), len(factors[name]))
                if not barred[name, value] & met
            ]
            # Among values with as many new pairs, fewer ranks take less time.
            gains = {
                value: ((missing[name, value] & met).bit_count(), -RANKS[value] if name == "layout" else 0)
                for value in values
            }
            case[name] = max(values, key=gains.__getitem__)
            met |= bits[name, case[name]]
        return {name: case[name] for name in factors}

    def new_pairs(case: Case) -> int:
        met = sum(bits[value] for value in case.items())
        return sum((missing[value] & met).bit_count() for value in case.items())

    while any(missing.values()) or len(chosen) < least:
        starts = [pair for pair in start if missing[pair[0]] & bits[pair[1]]] or start
        best = max((attempt(starts) for _ in range(tries)), key=new_pairs)
        chosen.append(best)
        met = sum(bits[value] for value in best.items())
        for value in best.items():
            missing[value] &= ~met
    return chosen


def _beside(
    bits: Mapping[tuple[str, str], int], pairs: Iterable[Iterable[tuple[str, str]]]
) -> dict[tuple[str, str], int]:
    """The values that each is in a pair with."""
    beside = dict.fromkeys(bits, 0)
    for a, b in pairs:
        if a in bits and b in bits:
            beside[a] |= bits[b]
            beside[b] |= bits[a]
    return beside


_COMMON = {
    "num-layers": 2, "hidden-size": 32, "num-attention-heads": 4, **_GROUPED, "num-query-groups": 4,
    "seq-length": SEQUENCE, "ffn-hidden-size": 48, "position-embedding-type": "learned_absolute",
    "rotary-percent": 1.0, "rotary-base": 10000.0, "normalization": "LayerNorm", "norm-epsilon": 1e-5,
    "activation": "gelu", "hidden-dropout": 0.0, "attention-dropout": 0.0, "init-method-std": 0.1,
    "tokenizer-type": "NullTokenizer", "vocab-size": VOCABULARY, "make-vocab-size-divisible-by": 4,
    "data-path": ("small",), "split": "100,0,0", "seed": 7, "num-workers": 0,
    "optimizer": "adam", "lr-decay-style": "linear", "lr-warmup-init": 0.0, "min-lr": 0.0, "clip-grad": 1.0,
    "weight-decay": 0.1, "weight-decay-incr-style": "constant", "params-dtype": "fp32", "hysteresis": 2,
    "min-loss-scale": 1.0, "eval-iters": 0, "log-interval": 1000,
}  # fmt: skip
# Switches that the oracle reads: on if given.
SWITCHES = (
    "disable-bias-linear", "untie-embeddings-and-output-weights", "apply-residual-connection-post-layernorm",
    "embed-layernorm", "reset-position-ids", "reset-attention-mask", "eod-mask-loss", "lamb-adapt-all",
    "fp32-residual-connection", "qk-layernorm", "apply-wd-to-qk-layernorm", "apply-layernorm-1p",
    "attention-output-gate",
)  # fmt: skip


_FIRST = MappingProxyType({name: next(iter(values)) for name, values in FACTORS.items()})
# What shows only where more than two settings meet; the other factors have their first values.
TOGETHER: tuple[Case, ...] = tuple(
    {**_FIRST, **case}
    for case in (
        {"decay-style": "inverse-square-root", "warmup": "none", "lr-unit": "iters", "length": "iters"},
    )
)


def bert_flags_of(case: Case) -> dict[str, object]:
    """The flags of a case of BERT."""
    flags = flags_of(BERT_FACTORS, case)
    for name in ("vocab-size", "rotary-percent", "rotary-base"):
        del flags[name]
    return {**flags, **{name: value for name, value in BERT_FLAGS.items() if flags.get(name) is not True}}


def pair_flags_of(case: Case) -> dict[str, object]:
    """The flags of a case of T5."""
    flags = flags_of(PAIR_FACTORS, case)
    for name in ("vocab-size", "rotary-percent", "rotary-base", "num-layers"):
        del flags[name]
    return {**flags, **PAIR_FLAGS}


def flags_of(factors: Factors, case: Case) -> dict[str, object]:
    """The flags of a case; switches are true or false."""
    flags = {**_COMMON, **dict.fromkeys(SWITCHES, False)}
    for name, value in case.items():
        flags |= factors[name][value]
    samples = RAMP_SAMPLES if "rampup-batch-size" in flags else STEPS * flags["global-batch-size"]
    samples = STAIRS_SAMPLES if "step-batch-size-schedule" in flags else samples
    amounts = {"iters": STEPS, "samples": samples, "tokens": samples * SEQUENCE}
    length, unit = flags.pop("length", "iters"), flags.pop("lr-unit", "iters")
    flags[f"train-{length}"] = amounts[length]
    for stem in ("decay", "warmup", "wsd-decay", "cycle"):
        share = flags.pop(f"{stem}-share", None)
        if share is not None:
            flags[f"lr-{stem}-{unit}"] = int(share * amounts[unit])
    if "lr-warmup-tokens" in flags and length != "tokens":  # what the decay counts must be said then
        flags.setdefault("lr-decay-tokens", amounts["tokens"])
    return flags
