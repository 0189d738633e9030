"""Commands of `rankdumpd certs`: create an authority, issue, revoke and list certificates."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rankdump._core.caller_roles import AGENT_ROLE, ROLES
from rankdump._core.certificate_files import read_revoked_fingerprints
from rankdump._wire.channel import TLS_VARIABLES
from rankdump.errors import ConfigError, RankdumpError

if TYPE_CHECKING:
    from rankdumpd.certs.authority import CertificateStore

_EXIT_FAILED, _EXIT_USAGE = 1, 2
_CERTIFICATE_DAYS = 365

_folder = click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))


@click.group()
def certs() -> None:
    """Create certificates for agents, coordinators, ranks and users that connect over TCP."""


@certs.command()
@_folder
@click.option("--name", default="rankdump", show_default=True, help="Name of the authority.")
def init(folder: Path, name: str) -> None:
    """Create an authority in DIR, a folder that only its owner can read."""
    from rankdumpd.certs.authority import AUTHORITY_NAME, create_authority

    with _report_errors():
        store = _open_store(folder)
        store.create_folder()
        store.write_certificate(AUTHORITY_NAME, create_authority(name, now=_now()))
        store.create_revoked_list()
        click.echo(
            f"{store.key()} signs all certificates: keep it safe, and do not copy it to other hosts"
        )


@certs.command()
@_folder
@click.option(
    "--role",
    "roles",
    multiple=True,
    type=click.Choice(ROLES),
    help="Role that the certificate grants; may be repeated.",
)
@click.option("--name", required=True, help="Name of the owner, and of the files.")
@click.option(
    "--host", "hosts", multiple=True, help="Host name or address of a server; may be repeated."
)
@click.option(
    "--days",
    type=click.IntRange(1, 3650),
    default=_CERTIFICATE_DAYS,
    show_default=True,
    help="Days of validity.",
)
def issue(folder: Path, roles: Sequence[str], name: str, hosts: Sequence[str], days: int) -> None:
    """Issue a certificate for a client (--role), a server (--host), or both."""
    from rankdumpd.certs.authority import check_certificate_name, issue_certificate

    with _report_errors():
        if not roles and not hosts:
            raise ConfigError("certs issue", "", "neither", "--role, --host or both")
        store = _open_store(folder)
        issued = issue_certificate(
            store.authority(),
            name=check_certificate_name(name),
            roles=roles,
            hosts=hosts,
            days=days,
            now=_now(),
        )
        store.write_certificate(name, issued)
        _print_use(store, name, serves=bool(hosts) or AGENT_ROLE in roles)


@certs.command()
@_folder
@click.argument("name")
def revoke(folder: Path, name: str) -> None:
    """Add a certificate to the list of revoked certificates."""
    with _report_errors():
        store = _open_store(folder)
        fingerprint = store.describe_certificate(name).fingerprint
        if store.revoked.exists() and fingerprint in read_revoked_fingerprints(store.revoked):
            click.echo(f"certificate {name} is revoked already")
            return
        store.revoke(fingerprint, name)
        click.echo(
            f"certificate {name} is revoked where tls.revoked names a copy of {store.revoked}"
        )


@certs.command()
@_folder
def show(folder: Path) -> None:
    """List the certificates in DIR with their roles, hosts and end of validity."""
    with _report_errors():
        store = _open_store(folder)
        store.check_authority()
        listed = (
            read_revoked_fingerprints(store.revoked) if store.revoked.exists() else frozenset[str]()
        )
        now = _now()
        for name, each in store.iter_certificates():
            state = "expired" if each.expires < now else "valid"
            if each.fingerprint in listed:
                state = "revoked"
            whose = f"roles {' '.join(each.roles) or '-'}  hosts {' '.join(each.hosts) or '-'}"
            click.echo(f"{name}  {state} until {each.expires:%Y-%m-%d}  {whose}")
            click.echo(f"    {each.fingerprint}")


def _print_use(store: CertificateStore, name: str, *, serves: bool) -> None:
    paths = [each.absolute() for each in (store.certificate(), store.certificate(name))]
    paths.append(store.key(name).absolute())
    if serves:
        click.echo("[tls]")
    for key, variable, path in zip(("ca", "certificate", "key"), TLS_VARIABLES, paths, strict=True):
        click.echo(f'{key} = "{path}"' if serves else f"export {variable}={path}")


def _open_store(folder: Path) -> CertificateStore:
    # Imported only here: importing cryptography takes longer than importing all other commands.
    from rankdumpd.certs.authority import CertificateStore

    return CertificateStore(folder)


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.timezone.utc)


@contextmanager
def _report_errors() -> Generator[None]:
    """Print an error of the block in one line, and exit with its status."""
    try:
        yield
    except RankdumpError as error:
        click.echo(f"rankdumpd: {error}", err=True)
        sys.exit(_EXIT_USAGE if isinstance(error, ConfigError) else _EXIT_FAILED)
