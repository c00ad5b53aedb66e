"""Ranks whose KV memory lies in processes of their own: an agent beside each, its calls sent over a Unix socket."""
