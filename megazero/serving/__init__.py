"""serving: many requests at once, from prompts to tokens.

Start with `wanted.py`, what a request asks for and what it is told, and `engine.py`, which answers requests
on the ranks of a model. `scheduler.py` decides what each step computes, `pages.py` where keys and values
lie (`page_buffers.py` keeps them), `plan.py` is what ranks are told of a step, `runner.py` computes it, and
`sampled.py` draws the tokens.
"""
