"""A drafter for one's own traffic, kept only where it is better: `paceline adapt`.

Owns: the split, the pace, the measurement, the verdict. May import: what its room may. Never: more than its room.
"""
