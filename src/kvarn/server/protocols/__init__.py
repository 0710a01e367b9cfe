"""The protocols that the server speaks. Each is a package here and a line of the table."""

from kvarn.server.protocols.anthropic import ANTHROPIC
from kvarn.server.protocols.base import Spoken
from kvarn.server.protocols.kept import KEPT
from kvarn.server.protocols.llamacpp import LLAMACPP
from kvarn.server.protocols.ollama import OLLAMA
from kvarn.server.protocols.openai import OPENAI
from kvarn.server.protocols.responses import RESPONSES

PROTOCOLS: tuple[Spoken, ...] = (OPENAI, RESPONSES, ANTHROPIC, LLAMACPP, OLLAMA, KEPT)
