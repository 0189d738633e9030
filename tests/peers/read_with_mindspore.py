"""Reads a dump tree with MindSpore 2.0's own programs and prints the results as JSON.

Runs under the Python of a virtual environment that has mindspore and mindinsight 2.0.0, and knows
nothing of rankdump.
"""

# pyright: reportMissingImports=false

import json
import re
import sys
from pathlib import Path

import mindinsight.debugger as mindinsight
import numpy as np
from mindspore.offline_debug import dbg_services

NAME = re.compile(
    r"(?P<type>[^.]+)\.(?P<op>.+)\.\d+\.\d+\.(?P<stamp>\d+)\.(?P<side>input|output)\.(?P<slot>\d+)"
    r"\.DefaultFormat\.npy"
)


def full_names(analyzer):
    """Return the graph's nodes by rank and by the last component of their names."""
    names = {}
    for rank in analyzer.get_ranks():
        nodes = analyzer.select_nodes(".*", use_regex=True, ranks=[rank])
        names[rank] = {node.name.rpartition("/")[2]: node.name for node in nodes}
    return names


def tensors_of(root):
    """Yield every tensor file with the place that its path gives it; the newest of a name."""
    newest = {}
    for path in sorted(root.glob("rank_*/*/*/*/*.npy")):
        found = NAME.fullmatch(path.name)
        iteration = path.parent.name
        if found and iteration.isdigit():
            rank = int(path.parts[-5][5:])
            # Gradients of parameters are no nodes of the graph: they go by their own names.
            named = found["op"] if found["type"] == "Parameter" else None
            place = (rank, int(path.parent.parent.name), int(iteration), found["op"], named)
            newest[(*place, found["side"], int(found["slot"]))] = path
    return newest.items()


def read_with_debugger(root, net, names):
    """Return how many tensors the C++ debugger reads as they are, and the names of others."""
    service = dbg_services.DbgServices(str(root))
    service.initialize(net, True)
    same, different = 0, []
    for (rank, graph, iteration, op, named, side, slot), path in tensors_of(root):
        node = named or names[rank].get(op, "no node of the graph")
        info = dbg_services.TensorInfo(node, slot, iteration, rank, graph, side == "output")
        read = service.read_tensors([info])[0]
        array = np.load(path)
        fits = bytes(read.data_ptr) == array.tobytes() and list(array.shape) == list(read.shape)
        same += fits
        if not fits:
            different.append(str(path.relative_to(root)))
    return same, different


def watch(analyzer, iteration, threshold):
    """Return the tensors of an iteration whose maximum the program finds above a threshold."""
    tensors = analyzer.select_tensors(".*", use_regex=True, iterations=[iteration])
    present = [tensor for tensor in tensors if tensor.value() is not None]
    condition = mindinsight.TensorTooLargeCondition(max_gt=threshold)
    hits = analyzer.check_watchpoints([mindinsight.Watchpoint(present, condition)])
    found = [
        [hit.tensor.rank, hit.tensor.node.name, hit.tensor.slot, hit.error_code] for hit in hits
    ]
    expected = [
        [tensor.rank, tensor.node.name, tensor.slot, 0]
        for tensor in present
        if tensor.value().size and tensor.value().max() > threshold
    ]
    return {"found": sorted(found), "expected": sorted(expected)}


def main(root, net):
    """Print what the programs see."""
    analyzer = mindinsight.DumpAnalyzer(str(root))
    names = full_names(analyzer)
    same, different = read_with_debugger(root, net, names)
    values = 0
    for iteration in analyzer.get_iterations():
        for tensor in analyzer.select_tensors(".*", use_regex=True, iterations=[iteration]):
            values += tensor.value() is not None
    found = {
        "ranks": list(analyzer.get_ranks()),
        "iterations": list(analyzer.get_iterations()),
        "nodes": {rank: sorted(known.values()) for rank, known in names.items()},
        "debugger_same": same,
        "debugger_different": different,
        "analyzer_values": values,
        "watched": watch(analyzer, analyzer.get_iterations()[0], 1.0),
    }
    print("FOUND " + json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
