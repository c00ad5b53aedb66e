"""vLLM as an engine: its LLMEngine in the compute thread, its KV cache handed off layer by layer by our transfer."""
