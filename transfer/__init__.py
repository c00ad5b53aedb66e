"""The handoff: state machines of both ends and of the runtime, KV layout, NIXL agent and transfer thread."""
