"""What is asked in a benchmark: built-in prompts, prompt files, logs of real traffic.

Owns: requests with kinds and arrivals, and their masking. May import: what its room may. Never: more than its room.
"""
