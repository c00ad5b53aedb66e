"""/v1/messages in Anthropic's shape, answered as the chat that it asks for."""
