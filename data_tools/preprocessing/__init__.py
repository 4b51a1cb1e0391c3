"""The parts of `preprocess_data.py`.

`chunks` cuts and parses jsonl, `encode` makes tokens of a chunk, `pool` runs chunks on processes in order,
`slots` brings their results over, `progress` reports, `pipeline` ties them to the dataset writers.
"""
