"""Generated protobuf code of the protocol between ranks, agents and coordinators; see `_wire`."""
