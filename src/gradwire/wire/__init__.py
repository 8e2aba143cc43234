"""Frames: fixed header, bounded reading, checksums; and messages as JSON."""
