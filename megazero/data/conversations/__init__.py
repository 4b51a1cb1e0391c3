"""conversations: chats as tokens, and the mask of those that a model learns to say."""
