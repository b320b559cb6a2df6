"""The trained thing: modules that guess a block of tokens.

Owns: drafter weights and configs, injected context K/V. May import: core. Never: disk, a target, a loop over steps.
"""
