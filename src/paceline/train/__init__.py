"""Grows a drafter: data, regeneration, features, batches, losses, the loop.

Owns: everything that changes weights. May import: llm, engine, checkpoint, drafter, target, core. Never: another
room of its own height (bench, serve, export).
"""
