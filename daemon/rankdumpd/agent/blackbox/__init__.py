"""Black boxes of ranks: the ring of the latest steps, and the frozen trees that are made of it."""
