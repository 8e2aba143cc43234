"""Codes on the wire of the element types that a gradient may have, by their names in torch. They are never reused.

An aggregation server checks them without torch, whose import takes seconds and much memory.
"""

ELEMENT_CODES = {"float32": 1, "float16": 2, "bfloat16": 3, "float64": 4}
