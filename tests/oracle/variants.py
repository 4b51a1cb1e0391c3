"""Variants of the layers: factors of the oracle's cases."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

VARIANTS: Mapping[str, Mapping[str, Mapping[str, object]]] = MappingProxyType(
    {
        "query-norm": {
            "none": {},
            "head": {"qk-layernorm": True, "apply-wd-to-qk-layernorm": True},
            "all": {"qk-layernorm": True, "qk-layernorm-scope": "projection"},
        },
        "norms": {
            "input": {},
            "output": {"norm-position": "output"},
            "both": {"norm-position": "both"},
        },
        "halves": {
            "one-by-one": {},
            "at-once": {"use-parallel-residual": True},
            "of-one-norm": {"use-parallel-residual": True, "share-parallel-norm": True},
        },
        "gains": {
            "of-1": {},
            "of-0": {"apply-layernorm-1p": True},
            "alone": {"disable-norm-bias": True},
        },
        "bounds": {
            "none": {},
            "scores": {"attn-logit-softcapping": 0.7},
            "logits": {"final-logit-softcapping": 1.5},
            "both": {"attn-logit-softcapping": 2.0, "final-logit-softcapping": 4.0},
        },
        "z-loss": {"none": {}, "some": {"z-loss-coeff": 0.03}},
        "output-gate": {"no": {}, "yes": {"attention-output-gate": True}},
        "factors": {
            "none": {},
            "gemma": {"embedding-multiplier": 32**0.5, "softmax-scale": 0.2},
            "granite": {
                **{"embedding-multiplier": 3.0, "residual-multiplier": 0.4, "logits-multiplier": 0.7},
                "softmax-scale": 0.6,
            },
        },
    }
)
ACTIVATIONS: Mapping[str, Mapping[str, object]] = MappingProxyType(
    {
        "geglu": {"activation": "geglu"},
        "xielu": {"activation": "xielu"},
        "gpt-oss": {
            **{"activation": "quick_geglu", "glu-linear-offset": 1.0},
            "activation-func-clamp-value": 0.6,
        },
        "swiglu-bounded": {"activation": "swiglu", "activation-func-clamp-value": 1.1},
    }
)
TWO_BASES: Mapping[str, object] = MappingProxyType(
    {
        **{"position-embedding-type": "rope", "rotary-base": 400.0, "window-rotary-base": 20.0},
        "rotary-seq-len-interpolation-factor": 3.0,
    }
)
PAIRS: Mapping[str, object] = MappingProxyType(
    {
        **{"position-embedding-type": "rope", "rotary-base": 100.0, "rotary-percent": 0.75},
        "rotary-interleaved": True,
    }
)
SOME: Mapping[str, object] = MappingProxyType({"position-embedding-type": "rope", "no-rope-freq": (2,)})
NEVER = (
    # RMSNorm has no bias to leave out.
    frozenset({("gains", "alone"), ("normalization", "rms")}),
    # Each half's output has a norm of its own.
    *(frozenset({("halves", "of-one-norm"), ("norms", name)}) for name in ("output", "both")),
    frozenset({("halves", "of-one-norm"), ("residual", "after-norm")}),
    # A window's base needs a window.
    frozenset({("positions", "two-bases"), ("window", "none")}),
    # The MLP would read the sum.
    frozenset({("halves", "at-once"), ("residual", "after-norm")}),
    # There is no norm before the residual is taken.
    frozenset({("norms", "output"), ("residual", "after-norm")}),
    frozenset({("norms", "output"), ("recompute", "parts")}),
    # Rounding carries a value over a bound, where its gradient ends, and LAMB makes more of rounding.
    *(
        frozenset({("activation", unit), ("optimizer", name)})
        for unit in ("gpt-oss", "swiglu-bounded")
        for name in ("lamb", "lamb-bounded")
    ),
    *(frozenset({("bounds", name), ("recompute", "logits")}) for name in ("logits", "both")),
    # Linear biases are added to scores that have no bound.
    *(frozenset({("bounds", name), ("positions", "alibi")}) for name in ("scores", "both")),
)
