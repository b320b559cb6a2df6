"""The report as one page that opens without a network.

Owns: figures, sections, words. May import: what its room may. Never: more than its room.
"""
