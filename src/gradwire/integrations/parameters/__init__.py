"""Workers of parameter servers."""
