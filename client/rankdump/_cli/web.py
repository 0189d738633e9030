"""Command `rankdump web`: shows dump trees and a running job as pages in a browser."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from rankdump._cli.command_group import explain_missing_modules
from rankdump._cli.options import TREE_PATH, load_credentials

if TYPE_CHECKING:
    from rankdump._http.server_guard import HttpsGuard


@click.command()
@click.argument(
    "trees", metavar="[TREE]...", type=click.Path(file_okay=False, path_type=Path), nargs=-1
)
@click.option(
    "--port",
    type=click.IntRange(min=0, max=65535),
    default=0,
    show_default=True,
    help="Port on the loopback interface; 0 for a free one.",
)
@click.option(
    "--job",
    metavar="ADDRESS",
    help="Agent or coordinator of a running job, which is shown and controlled on the page Live.",
)
@click.option(
    "--listen",
    metavar="HOST:PORT",
    help="Address in place of loopback and --port. With RANKDUMP_TLS_CA, RANKDUMP_TLS_CERT and "
    "RANKDUMP_TLS_KEY it is served over HTTPS, to certificates with the role reader or operator; "
    "without them it has to be on loopback.",
)
@click.option(
    "--revoked",
    metavar="FILE",
    type=click.Path(path_type=Path),
    envvar="RANKDUMP_TLS_REVOKED",
    help="File of revoked certificates, one fingerprint per line; only with certificates. "
    "[environment: RANKDUMP_TLS_REVOKED]",
)
@click.option("--no-browser", is_flag=True, help="Print the address, but do not open a browser.")
def web(
    *,
    trees: tuple[Path, ...],
    port: int,
    job: str | None,
    listen: str | None,
    revoked: Path | None,
    no_browser: bool,
) -> int:
    """Show trees and a running job as pages in a browser.

    Without TREE, the current folder is shown, but with --job no tree. ADDRESS is one that
    `rankdump status` accepts; the certificates for it come from the environment, and must have the
    role operator to control the job. With --job, TREE may be a tree that the job has not begun yet.
    The server runs until Ctrl-C. It listens on this host only, and the printed address has a token
    that works once; any other address needs certificates. The pages themselves write nothing.
    """
    if listen and port:
        raise click.UsageError("--listen has a port: leave --port out")
    given = click.get_current_context().get_parameter_source("revoked")
    if given is ParameterSource.COMMANDLINE and not listen:
        raise click.UsageError("--revoked needs --listen, and certificates")
    with explain_missing_modules("web"):
        from rankdump._web.web_server import LOOPBACK, serve_trees
    source = None
    if job is None:
        _require_folders(trees)
    else:
        # Imported on use, because pages of trees alone need no gRPC.
        from rankdump._cli.job_connection import JobConnection

        source = JobConnection(job)
    serve_trees(
        trees or (() if source else (Path(),)),
        job=source,
        listen=listen or f"{LOOPBACK}:{port}",
        guard=_build_guard(revoked) if listen else None,
        opens_browser=not no_browser,
    )
    return 0


def _require_folders(trees: Iterable[Path]) -> None:
    context = click.get_current_context()
    argument = next(each for each in context.command.params if each.name == "trees")
    for tree in trees:
        TREE_PATH.convert(tree, argument, context)


def _build_guard(revoked: Path | None) -> HttpsGuard | None:
    """Return the access control with the certificates that environment variables name; None if
    there are none.
    """
    from rankdump._http.server_guard import HttpsGuard
    from rankdump._wire.channel import require_files

    own = load_credentials()
    if not own.has_files:
        if revoked:
            raise click.UsageError("--revoked needs certificates: RANKDUMP_TLS_CA and others")
        return None
    ca, certificate, key = require_files(own)
    return HttpsGuard(ca=ca, certificate=certificate, key=key, revoked=str(revoked or ""))
