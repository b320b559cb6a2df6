"""A benchmark as it happens: plan, order, load, rows on disk.

Owns: the plan, the blocks, the records. May import: what its room may. Never: more than its room.
"""
