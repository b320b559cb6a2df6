"""Disk: formats are tables.

Owns: reading and writing drafter checkpoints, provenance. May import: drafter, target, core. Never: compute; what it
cannot name it refuses.
"""
