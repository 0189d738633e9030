"""Parts that a daemon process has around its services: gRPC server, access control, errors of
calls, audit log, TLS, metrics, logs and lifecycle. This package depends on no particular service.
"""
