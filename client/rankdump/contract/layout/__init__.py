"""Where a record stands in a tree, one module per tree. Pure, and each its own inverse."""
