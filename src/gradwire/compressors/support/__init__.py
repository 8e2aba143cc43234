"""Helpers of single algorithms: tables, shared base classes of two or three of them, and fixed numbers."""
