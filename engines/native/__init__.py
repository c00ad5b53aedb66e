"""The native engine: Llama-family models on torch, CPU and CUDA, over a paged KV cache."""
