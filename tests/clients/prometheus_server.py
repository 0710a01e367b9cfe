"""A Prometheus server that scrapes /metrics. Without one, the client library parses what a scrape would get."""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from pathlib import Path

from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from rows import MODEL, run, works

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.vllm_dashboards import SERIES

PROGRAM = shutil.which("prometheus", path=f"{os.environ['PATH']}:build/clients/prometheus/usr/bin")
CONFIG = """
global: {{scrape_interval: 1s}}
scrape_configs: [{{job_name: kvarn, static_configs: [{{targets: ['{target}']}}]}}]
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return listening.getsockname()[1]


def get(url: str, **headers: str) -> bytes:
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10) as reply:
        return reply.read()


def query(prometheus: str, expression: str) -> list:
    found = json.loads(get(f"{prometheus}/api/v1/query?query={urllib.parse.quote(expression)}"))
    return found["data"]["result"]


def ready(prometheus: str, process: subprocess.Popen) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        assert process.poll() is None, "prometheus has ended"
        try:
            if query(prometheus, 'up{job="kvarn"} == 1'):
                return
        except OSError:  # it does not listen yet
            pass
        time.sleep(0.2)
    raise AssertionError("prometheus has not scraped the server")


def scraped(address: str) -> None:
    get(f"{address}/v1/models")  # a line in the log
    with tempfile.TemporaryDirectory() as folder:
        config, port = Path(folder) / "prometheus.yml", free_port()
        config.write_text(CONFIG.format(target=address.removeprefix("http://")))
        flags = [
            f"--config.file={config}",
            f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address=127.0.0.1:{port}",
        ]
        process = subprocess.Popen([PROGRAM, *flags], stderr=subprocess.DEVNULL)
        try:
            ready(f"http://127.0.0.1:{port}", process)
            asked = {name: query(f"http://127.0.0.1:{port}", f'vllm:{name}{{model_name="{MODEL}"}}') for name in SERIES}
        finally:
            process.terminate()
            process.wait()
    assert not [name for name, found in asked.items() if not found]


def parsed(address: str) -> None:
    get(f"{address}/v1/models")
    for accept, parse in (("text/plain", parse_text), ("application/openmetrics-text", parse_openmetrics)):
        families = list(parse(get(f"{address}/metrics", Accept=accept).decode()))
        names = {sample.name for family in families for sample in family.samples}
        assert not [name for name in SERIES if f"vllm:{name}" not in names]


ROWS = [works("text and OpenMetrics are parsed by prometheus-client", parsed)]
if PROGRAM:
    ROWS.append(works("scrapes; every series of vLLM's dashboards has data", scraped))

if __name__ == "__main__":
    said = subprocess.run([PROGRAM, "--version"], capture_output=True, text=True).stdout.split() if PROGRAM else []
    run(("prometheus-client",), ROWS, {"prometheus": said[2] if said else "not found: not tried"})
