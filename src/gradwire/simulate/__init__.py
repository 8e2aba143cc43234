"""The cluster simulator. Empty until the planner arrives; the layer is reserved here."""
