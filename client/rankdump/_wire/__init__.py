"""Conversion between protobuf messages (generated code in `rankdump.wire.v1`) and frozen values,
and channels to daemons. Messages are used only in this package and its direct users.
"""
