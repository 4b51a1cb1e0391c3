"""The parts of `preprocess_data.py`.

`chunks` splits and parses jsonl, `encode` turns a chunk into tokens, `pool` runs chunks on processes in
order, `slots` returns their results, `progress` reports, `pipeline` connects them to the dataset writers.
"""
