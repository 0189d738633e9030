"""Sessions of ranks: opening, resuming and finding them, what each has sent, and the balance of
every iteration.
"""
