"""The emitters, one folder for each target."""
