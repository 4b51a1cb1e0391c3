"""report: what a finished or running training says of itself.

How evenly experts are used: `loads.py` reads how many tokens each expert got, `balance.py` judges it in
words, `picture.py` draws it, and `command.py` is `megazero moe-report`. What guards found: `incidents.py` is
`megazero incidents`.
"""
