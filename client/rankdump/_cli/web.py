"""Command `rankdump web`: pages of dump trees and of a running job in a browser."""

from __future__ import annotations

from pathlib import Path

import click

from rankdump._cli.extra_modules import explain_missing_modules
from rankdump._cli.options import TREE_PATH


@click.command()
@click.argument("trees", metavar="[TREE]...", type=TREE_PATH, nargs=-1)
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
@click.option("--no-browser", is_flag=True, help="Print the address, and open no browser.")
def web(*, trees: tuple[Path, ...], port: int, job: str | None, no_browser: bool) -> int:
    """Show trees and a running job as pages in a browser.

    Without TREE, the current folder, and with --job alone no tree. ADDRESS is one that
    `rankdump status` takes, and the certificates are those of the environment; to control the job,
    their role has to be operator. The server listens on this host alone, until Ctrl-C. The printed
    address has a token that works once. The pages write nothing themselves.
    """
    with explain_missing_modules("web"):
        from rankdump._web.web_server import serve_trees
    source = None
    if job is not None:
        # Imported on use: trees alone need no gRPC.
        from rankdump._cli.job_connection import JobConnection

        source = JobConnection(job)
        trees = trees or ()
    else:
        trees = trees or (Path(),)
    serve_trees(trees, port=port, opens_browser=not no_browser, job=source)
    return 0
