"""guards: concerns that check each step of a run and act on faults.

`spike_guard.py` detects spikes and numbers that are not finite, `copies.py` compares copies of the state, and
`concerns.py` has smaller guards. `rerun.py` computes a step again, `facts.py` gathers facts of a step for a
report, and `agreement.py` has the facts that ranks must agree on before the first step.
"""
