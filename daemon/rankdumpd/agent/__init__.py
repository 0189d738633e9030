"""The agent of one host: takes tensors from local ranks and writes the dump tree."""
