"""An HTTP error response in OpenAI's format, with a one-line message."""

from typing import Any

from starlette.responses import JSONResponse

KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class Refusal(Exception):
    """`logged`: the message for the log, without text of a user; by default the message itself."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
        logged: str | None = None,
        facts: dict[str, int] | None = None,
    ) -> None:
        super().__init__(message)
        self.logged = message if logged is None else logged
        self.status = status
        self.param = param
        self.code = code
        self.retry_after = retry_after
        self.facts = facts or {}  # numbers that some protocols report

    def body(self) -> dict[str, Any]:
        kind = KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def response(self, body: dict[str, Any] | None = None) -> JSONResponse:
        """`body`: in the form of another protocol."""
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(self.body() if body is None else body, self.status, headers)
