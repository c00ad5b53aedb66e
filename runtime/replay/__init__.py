"""Replay of a trace: the real runtime and planner against simulated workers in virtual time."""
