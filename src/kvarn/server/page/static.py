"""The files of the page: one HTML file, its style and its modules, read once from the package.

Nothing comes from elsewhere and nothing is inline, so the content security policy allows this server alone.
"""

from hashlib import blake2b
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response

from kvarn.server.refusal import Refusal

TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
INDEX = "index.html"


class Static:
    def __init__(self) -> None:
        folder = files("kvarn.server.page") / "files"
        self._files = {each.name: each.read_bytes() for each in folder.iterdir() if _ending(each.name) in TYPES}
        self._tags = {name: f'"{blake2b(data, digest_size=12).hexdigest()}"' for name, data in self._files.items()}

    def answer(self, request: Request, name: str = INDEX) -> Response:
        if name not in self._files:
            raise Refusal(404, "the page has no such file")
        headers = HEADERS | {"ETag": self._tags[name]} | ({"Vary": "Accept"} if name == INDEX else {})
        if self._tags[name] in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(self._files[name], headers=headers | {"Content-Type": TYPES[_ending(name)]})


def wants_page(accept: str) -> bool:
    """Whether the client names HTML among what it accepts, as browsers do and programs do not."""
    for each in accept.lower().split(","):
        kind, *parameters = (part.strip() for part in each.split(";"))
        if kind in ("text/html", "application/xhtml+xml"):
            return not any(part in ("q=0", "q=0.0", "q=0.00", "q=0.000") for part in parameters)
    return False


def _ending(name: str) -> str:
    return name[name.rfind(".") :]
