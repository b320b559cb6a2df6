"""Numbers → on, off, or cannot tell, by stated rules.

Owns: comparisons, findings, the decision. May import: what its room may. Never: more than its room.
"""
