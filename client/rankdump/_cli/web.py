"""Command `rankdump web`: pages of dump trees in a browser."""

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
@click.option("--no-browser", is_flag=True, help="Print the address, and open no browser.")
def web(*, trees: tuple[Path, ...], port: int, no_browser: bool) -> int:
    """Show trees as pages in a browser, until Ctrl-C.

    Without TREE, the current folder. The server listens on this host alone. The printed address
    has a token that works once. Nothing is written.
    """
    with explain_missing_modules("web"):
        from rankdump._web.web_server import serve_trees
    serve_trees(trees or (Path(),), port=port, opens_browser=not no_browser)
    return 0
