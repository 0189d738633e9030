"""The `rankdump` command: what people type. Only the edge: asks, reads, prints."""
