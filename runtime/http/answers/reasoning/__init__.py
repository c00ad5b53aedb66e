"""Tells what a reasoning model thinks from what it answers."""
