"""CANN's `bin` files: header, payloads and overflow records. Protobuf ends at `_binfile.header`."""
