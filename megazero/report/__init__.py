"""report: what a finished or running training says of itself. So far: how evenly experts are used.

`loads.py` reads how many tokens each expert got, `balance.py` judges it in words, `picture.py` draws it,
`command.py` is `megazero moe-report`.
"""
