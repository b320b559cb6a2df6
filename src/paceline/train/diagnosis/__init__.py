"""What a drafter lacks, in numbers and in words: `paceline inspect --diagnose`.

Owns: scores, replays, experiments. May import: what its room may. Never: more than its room.
"""
