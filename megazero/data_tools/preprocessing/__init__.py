"""The parts of `megazero data preprocess`.

`inputs` recognizes and unpacks files, `tables` reads Parquet and Arrow, `chunks` cuts files, `parsing` takes
texts out of rows, `sentences` splits texts, and `encode` turns a chunk into tokens. `pool` encodes chunks on
several processes, which return results through `slots`; `watch` ends workers that hang. `progress` reports,
and `pipeline` connects all to the dataset writers. `units` are parts of a run that are made on any machine
and merged; `shards` makes them.
"""
