"""Process around the services of a daemon: gRPC server, access control, audit log, TLS, metrics,
logs and lifecycle. Knows no service by name.
"""
