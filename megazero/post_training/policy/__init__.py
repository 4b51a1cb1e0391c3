"""policy: policy gradients on answers that the model in training gives itself.

`prompts` are read once. A `cycle` has a rollout and the updates on it: `rollout` draws answers, `rewards`
judges them, `reference` scores them by an earlier model, and `methods` makes advantages and losses, which
`objective` takes to the trainer. `run` puts these together.
"""
