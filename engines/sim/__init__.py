"""The simulated engine: computes nothing, but keeps honest time, real blocks and recognisable bytes in them."""
