"""Rows of a run → numbers with intervals.

Owns: one definition for each number. May import: what its room may. Never: more than its room.
"""
