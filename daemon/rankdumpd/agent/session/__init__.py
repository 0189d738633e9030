"""Sessions of ranks: opening, resuming and finding them, their received frames, and the balance of
every iteration.
"""
