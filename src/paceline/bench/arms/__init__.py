"""Who answers: engines of this process, other implementations, servers.

Owns: one `Arm` a way to decode, with its fingerprint. May import: what its room may. Never: more than its room.
"""
