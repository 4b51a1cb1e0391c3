"""multi_token: multi-token prediction (MTP), which predicts tokens beyond the next one in training.

`inputs.py` shifts a batch's arrays, `block.py` is the block that predicts one further token.
"""
