"""A server whose model writes given texts (tests/support/scripted.py), for agents that need a model which uses tools.

    python tests/clients/stand_in/scripted_server.py FOLDER TEXTS

TEXTS is a JSON object of texts by name. Prints its address. Runs in kvarn's own environment until its input ends.
"""

import asyncio
import json
import socket
import sys
from pathlib import Path

import uvicorn

sys.path.insert(0, str(Path(__file__).parents[2]))
from support.scripted import HERMES, HERMES_CONTROL, scripted_llm, scripted_model

from kvarn.server.access import Access
from kvarn.server.app import Service
from kvarn.server.metrics import Metrics
from kvarn.server.worker import Worker

CONTEXT = 1 << 16  # a token is a character, and agents begin with 30,000 of them


async def main(folder: Path, texts: dict[str, str]) -> None:
    model = scripted_model(folder / "tiny.gguf", HERMES, HERMES_CONTROL, context=CONTEXT)
    llm = scripted_llm(model, texts, max_seqs=2, context=CONTEXT)
    metrics = Metrics(llm.engine, "tiny")
    service = Service(llm, "tiny", Access([]), metrics, Worker(llm, metrics))
    service.start(asyncio.get_running_loop())
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(service.app(), log_level="error"))
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    print(f"http://127.0.0.1:{listening.getsockname()[1]}", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    server.should_exit = True
    await serving
    service.stop()
    llm.close()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), json.loads(sys.argv[2])))
