"""Certificates for tests, made by `rankdumpd certs`."""

from __future__ import annotations

import datetime
from pathlib import Path

from click.testing import CliRunner

from rankdump._wire.channel import TLS_VARIABLES, TlsCredentials
from rankdumpd.certs.authority import CertificateStore, IssuedCertificate, issue_certificate
from rankdumpd.certs.command import certs
from rankdumpd.settings import TlsSettings

LONG_AGO = datetime.datetime(2020, 1, 1, tzinfo=datetime.timezone.utc)


class CertificateAuthority:
    """One authority and its certificates, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = CertificateStore(folder)
        self.run("init", str(folder))

    def run(self, *arguments: str) -> str:
        """Run `rankdumpd certs`; return what it said."""
        done = CliRunner().invoke(certs, arguments)
        assert done.exit_code == 0, done.output
        return done.output

    def issue(self, name: str, *roles: str, hosts: tuple[str, ...] = ()) -> TlsCredentials:
        """Issue a certificate."""
        options = [word for role in roles for word in ("--role", role)]
        options += [word for host in hosts for word in ("--host", host)]
        self.run("issue", str(self.folder), "--name", name, *options)
        return self.credentials(name)

    def issue_expired(
        self, name: str, *roles: str, hosts: tuple[str, ...] = (), now: datetime.datetime = LONG_AGO
    ) -> TlsCredentials:
        """Issue a certificate whose time is over, or begins later than `now`."""
        authority = IssuedCertificate(
            self.store.certificate().read_bytes(), self.store.key().read_bytes()
        )
        made = issue_certificate(authority, name=name, roles=roles, hosts=hosts, days=1, now=now)
        self.store.write_certificate(name, made)
        return self.credentials(name)

    def server(self, name: str = "server", *roles: str) -> TlsSettings:
        """Issue a certificate for a server on this host; return its settings."""
        shown = self.issue(name, *(roles or ("agent",)), hosts=("127.0.0.1", "localhost"))
        return TlsSettings(shown.ca, shown.certificate, shown.key, str(self.store.revoked))

    def revoke(self, name: str) -> None:
        """Put a certificate on the list."""
        self.run("revoke", str(self.folder), name)

    def credentials(self, name: str) -> TlsCredentials:
        """Return the files of a certificate."""
        store = self.store
        paths = (store.certificate(), store.certificate(name), store.key(name))
        return TlsCredentials(*map(str, paths))


def variables(credentials: TlsCredentials) -> dict[str, str]:
    """Return the environment that names them."""
    files = (credentials.ca, credentials.certificate, credentials.key)
    return dict(zip(TLS_VARIABLES, files, strict=True))
