"""Why a test of llama.cpp's server does not pass against kvarn. Every reason is about one assertion or one test."""

MODEL, FLAGS, OTHERWISE = "model", "flags", "otherwise"
KINDS = (MODEL, FLAGS, OTHERWISE)
TITLES = {MODEL: "own model", FLAGS: "own flags", OTHERWISE: "different on purpose"}
ABOUT: dict[str, str] = {}
HEAD = ""


def find(test: str, trace: str, flags: list[str]) -> tuple[str, str]:
    return "", ""
