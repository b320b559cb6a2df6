"""Measures: is the text the target's own, and how sure is that?

Owns: checks, statistics and reports about a pair or a server. May import: llm, engine, checkpoint, drafter, target,
core. Never: another room of its own height (serve, train, export), nor anything that changes a text.
"""
