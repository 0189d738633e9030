"""Traces one output of a torch module that is dumped through an agent in this process. Prints
thread, file and function of each of our calls as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from types import FrameType

import torch

import rankdump
from rankdumpd.agent.service import DumpAgent
from rankdumpd.server.grpc_server import GrpcServer
from rankdumpd.settings import AgentSettings

ROOT = f"{Path(__file__).parents[2]}{os.sep}"
OURS = (f"{ROOT}client{os.sep}", f"{ROOT}daemon{os.sep}")
COMMON = {
    "op_debug_mode": 0,
    "dump_mode": 0,
    "net_name": "Net",
    "iteration": "all",
    "saved_data": "tensor",
    "input_output": 2,
    "kernels": [],
    "support_device": [0],
}
seen: dict[tuple[str, str, str], None] = {}
tracing = threading.Event()
acknowledged = threading.Event()


def note(frame: FrameType, event: str, _: object) -> None:
    """Note a call of a function of ours, and the last step of the way."""
    code = frame.f_code
    if event != "call" or not tracing.is_set() or not code.co_filename.startswith(OURS):
        return
    file = code.co_filename.removeprefix(ROOT)
    seen.setdefault((threading.current_thread().name, file, code.co_name))
    if code.co_name == "acknowledge" and file.endswith("frame_queue.py"):
        acknowledged.set()


def note_waiting_functions() -> None:
    """Note the functions in which threads wait for something to do: they were called before."""
    frames = sys._current_frames()
    for thread in threading.enumerate():
        frame = frames.get(thread.ident or 0)
        while frame is not None and thread is not threading.current_thread():
            code, frame = frame.f_code, frame.f_back
            if code.co_filename.startswith(OURS):
                seen.setdefault((thread.name, code.co_filename.removeprefix(ROOT), code.co_name))


def wait_until_acknowledged(session: rankdump.Session) -> None:
    """Wait until nothing is on its way: the next acknowledgement is that of the traced tensor.

    The agent may take a while to prepare shared memory; until then, tensors take the stream.
    """
    pipeline = session._pipeline
    assert pipeline is not None
    deadline_s = time.monotonic() + 300.0
    buffer = pipeline._send_buffer
    while buffer.ring is None or buffer.items.outstanding:
        assert time.monotonic() < deadline_s, "earlier iterations are not acknowledged"
        time.sleep(0.01)


def main(folder: Path) -> None:
    """Dump some iterations, and trace a call of one module in the last one."""
    plan = folder / "data_dump.json"
    sections = {
        "common_dump_settings": {**COMMON, "path": str(folder / "dump")},
        "e2e_dump_settings": {"enable": True, "trans_flag": True},
    }
    plan.write_text(json.dumps(sections))
    settings = AgentSettings(
        listen=f"unix:{folder}/agent.sock",
        state_dir=str(folder / "state"),
        runtime_dir=str(folder / "run"),
    )
    os.environ |= {"RANKDUMP_CONFIG": str(plan), "RANKDUMP_AGENT": settings.listen}
    threading.setprofile(note)
    agent = DumpAgent(settings)
    server = GrpcServer(settings.listen, [agent])
    agent.start()
    server.start()
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU())
    session = rankdump.attach(model)
    with torch.no_grad():
        for iteration in range(3):
            session.step(iteration)
            model(torch.full((64, 64), float(iteration)))
        wait_until_acknowledged(session)
        note_waiting_functions()
        tracing.set()
        sys.setprofile(note)
        model[1](torch.full((64, 64), 9.0))
        sys.setprofile(None)
    arrived = acknowledged.wait(60.0)
    tracing.clear()
    session.close()
    server.stop(1.0)
    agent.stop()
    print(json.dumps(list(seen)))
    sys.stdout.flush()
    os._exit(0 if arrived else 1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
