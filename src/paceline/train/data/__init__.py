"""What is learned from: prompts, the target's answers, its hidden states, and blocks of them.

Owns: documents and how they are made, kept and drawn. May import: what its room may. Never: more than its room.
"""
