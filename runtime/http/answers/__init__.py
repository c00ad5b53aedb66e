"""An answer told apart: reasoning, text and tool calls."""
