"""HTTP server of the pages of `rankdump web` and of the daemons: TLS, roles, limits and headers."""
