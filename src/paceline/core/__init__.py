"""Laws of speculative decoding: pure functions and frozen values.

Owns: the vocabulary of types, the sampling law, the verification rule, block geometry, acceptance metrics, errors.
May import: torch and the standard library. Never: I/O, state, a model, a clock.
"""
