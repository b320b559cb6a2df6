"""The verifier behind one narrow protocol.

Owns: target models, their K/V, hidden-state taps, rollback, and how names become local folders.
May import: core. Never: a drafter, a clock, a loop over steps.
"""
