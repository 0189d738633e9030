"""Generated protobuf code of CANN's `bin` files; see `_binfile`."""
