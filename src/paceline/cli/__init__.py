"""The command line: parse, make one call, print.

Owns: commands, their options, what the terminal shows, exit codes, environment variables.
May import: every room. Never: a decision that a Python user could not make too.
"""
