"""What every layer shares: errors, tensor specs, the encode context, counter-based keys and events."""
