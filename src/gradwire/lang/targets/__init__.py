"""Emitters of the language, one folder for each target."""
