"""Push and pull of parameters: the conversation of workers and parameter servers, sans-IO, both ends."""
