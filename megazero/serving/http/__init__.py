"""serving/http: OpenAI's, Megatron's and MII's requests over HTTP, answered by one engine."""
