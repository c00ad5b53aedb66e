"""/v1/responses, answered as the chat that it asks for."""
