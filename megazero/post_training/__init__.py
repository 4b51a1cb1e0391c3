"""post_training: chats, preferences and rewards, trained on any layout.

`run` dispatches by task and has what the tasks share; `chat` and `preference` have what differs, `losses`
the objectives of pairs; `reference` scores pairs with the initial weights, and `files` reads the data.
`policy` has policy gradients on a model's own answers.
"""
