"""The tree that is written to, and that it is: nobody mends it meanwhile."""

from __future__ import annotations

from rankdump.contract.errors import UnavailableError
from rankdump.contract.plan import Output
from rankdumpd import statefile
from rankdumpd.agent.holds import Hold
from rankdumpd.agent.tree import Tree
from rankdumpd.ingest.values import Task


def tree_of(task: Task) -> Tree:
    """Return the tree of a task, with the usual modes."""
    output = Output(str(task.tree))
    modes = output.file_mode, output.folder_mode
    return Tree(output.root, file_mode=modes[0], folder_mode=modes[1], synced=task.delete)


def held(tree: Tree) -> Hold:
    """Hold a tree; UnavailableError while somebody mends it."""
    hold = Hold(tree)
    try:
        hold.take()
    except BlockingIOError as error:
        raise UnavailableError(f"{tree.root}: {error.strerror}; try again then") from None
    except OSError as error:
        raise statefile.no_folder(tree.root, "--into", error) from None
    return hold
