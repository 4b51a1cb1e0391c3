"""The parts of `megazero data preprocess`.

`chunks` cuts jsonl files, `parsing` parses lines, `sentences` splits texts, and `encode` turns a chunk into
tokens. `pool` encodes chunks on several processes, which return results through `slots`; `watch` ends workers
that hang. `progress` reports, and `pipeline` connects all to the dataset writers.
"""
