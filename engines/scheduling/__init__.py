"""Which requests an engine computes when, and in which KV blocks: no torch, no clock, no device."""
