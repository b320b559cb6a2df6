"""The only place where time passes: sequences, steps, admission, output.

Owns: the loop draft → verify → commit. May import: checkpoint, drafter, target, core. Never: HTTP, printing, training.
"""
