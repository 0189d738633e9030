"""Process around the services of a daemon: gRPC server, access control, errors of calls, audit log,
TLS, metrics, logs and lifecycle. Knows no service by name.
"""
