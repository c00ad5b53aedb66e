"""The OpenAI-compatible HTTP endpoint: a client of the runtime like any embedding program."""
