"""CANN's `bin` files: header, payloads and overflow records. Only `header` uses protobuf."""
