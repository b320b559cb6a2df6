"""Whether a speculating pair or server says what its target would: `paceline verify`.

Owns: checks, their statistics, the texts that they read. May import: what its room may. Never: more than its room.
"""
