"""multi_token: the prediction of tokens beyond the next one, in training alone.

`ahead.py` shifts a batch's arrays, `block.py` is the block of one further token.
"""
