"""Sans-IO state machines of every conversation."""
