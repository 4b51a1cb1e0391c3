"""guards: checks of each step of a run, and the actions that follow from them. Each guard is a concern.

`spike_guard.py` looks for values far above the usual and for numbers that are not finite, `copies.py`
compares copies, and `concerns.py` has the small ones. `rerun.py` computes a step again, `facts.py` gathers
the facts of a step for a report, and `agreement.py` has what ranks must agree on before the first step.
"""
