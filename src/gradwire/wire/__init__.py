"""Frames: fixed header, bounded reading, checksums."""
