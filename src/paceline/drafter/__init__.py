"""Who guesses a block of tokens: trained modules, and lookup in the text itself.

Owns: drafter weights and configs, and what a drafter remembers of a text. May import: core. Never: disk, a target, a
loop over steps.
"""
