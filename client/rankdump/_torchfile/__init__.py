"""Files that torch writes as pickles: tensors in the archives of `torch.save`, and plain values."""
