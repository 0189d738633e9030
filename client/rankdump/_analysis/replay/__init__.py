"""Replay of one dumped call of torch's API in float64."""
