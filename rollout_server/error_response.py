"""Errors in OpenAI's shape, for requests that are refused before vLLM's server sees them."""

from __future__ import annotations

from http import HTTPStatus

from starlette.responses import JSONResponse


def error_response(status: HTTPStatus, message: str, parameter: str | None = None) -> JSONResponse:
    """Return an error.

    Args:
        status: HTTP status.
        message: what is wrong, and what to do.
        parameter: name of the field or header that is wrong.
    """
    error = {"message": message, "type": status.phrase, "param": parameter, "code": int(status)}
    return JSONResponse({"error": error}, status_code=status)
