"""Calibration, candidates, trials and choice: what `auto` and `gradwire probe` share, and `auto` itself."""
