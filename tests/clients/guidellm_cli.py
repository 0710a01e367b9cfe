"""`guidellm run` against the server, as its documentation says.

guidellm needs torch for one thing: it reads its prompts with torch's DataLoader. torch is not installed here;
stand_in/torch.py takes its place. guidellm itself is unchanged.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from rows import MODEL, run, works

HERE = Path(__file__).parent
COUNT = 3


def benchmark(address: str, path: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        data, out = Path(folder) / "data.jsonl", Path(folder) / "out.json"
        prompts = ("What is the capital of France?", "Name three colours.", "Who wrote Hamlet?", "What is ice?")
        data.write_text("".join(json.dumps({"prompt": each, "output_tokens_count": 12}) + "\n" for each in prompts))
        backend = f"kind=openai_http,target={address},model={MODEL},request_format={path}"
        command = [sys.executable, "-m", "guidellm", "run", "--backend", backend, "--profile", "kind=synchronous"]
        command += ["--constraint", f"kind=max_requests,count={COUNT}", "--data", f"kind=json_file,path={data}"]
        command += ["--output", f"kind=json,path={out}"]
        environment = os.environ | {"PYTHONPATH": str(HERE / "stand_in"), "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stderr[-1000:] + done.stdout[-1000:]
        totals = json.loads(out.read_text())["benchmarks"][0]["metrics"]["request_totals"]
        assert (totals["successful"], totals["errored"]) == (COUNT, 0), totals


ROWS = [
    works("guidellm run, chat completions", lambda a: benchmark(a, "/v1/chat/completions")),
    works("guidellm run, text completions", lambda a: benchmark(a, "/v1/completions")),
]

if __name__ == "__main__":
    run(("guidellm",), ROWS)
