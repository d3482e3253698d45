"""From an exception to an HTTP status and OpenAI's error body."""

from __future__ import annotations

from typing import Any

from agentkv import log
from agentkv.errors import (
    BudgetExceeded,
    Closed,
    GenerationCancelled,
    LedgerError,
    RemoteError,
    RequestInvalid,
    TemplateRejected,
)

PASSED_ON = frozenset({400, 404, 408, 413, 422, 429})
"""Statuses of a remote engine that are the caller's to mend; its others are a bad gateway."""

NO_RETRY = {"x-should-retry": "false"}
"""openai's clients retry 429 and 5xx unless told not to; asking again would change nothing here."""

_STATUSES = {"model_not_found": 404, "body_too_large": 413}
Refusal = tuple[int, dict[str, Any], dict[str, str]]


def refusal(error: BaseException) -> Refusal:
    """Status, body and headers for an error. What we did not foresee is logged and told without its inside."""
    text = str(error)
    if isinstance(error, RequestInvalid):
        return _invalid(error)
    if isinstance(error, BudgetExceeded):
        return 429, error_body(text, "budget_exceeded", error.limit, "budget_exceeded"), NO_RETRY
    if isinstance(error, RemoteError):
        status = error.status if error.status in PASSED_ON else 502
        return status, error_body(text, "upstream_error", None, "remote_error"), NO_RETRY
    if isinstance(error, GenerationCancelled):
        return 499, error_body(text, "cancelled", None, "cancelled"), NO_RETRY
    if isinstance(error, Closed):
        return 503, error_body(text, "server_error", None, "closed"), NO_RETRY
    return _failed(error)


def _failed(error: BaseException) -> Refusal:
    log.failed("server_call_failed", error=repr(error))
    if isinstance(error, LedgerError):
        told = "the budgets cannot be read just now, so nothing was started; come again later"
        return 503, error_body(told, "server_error", None, "ledger_unavailable"), {"retry-after": "1"}
    return 500, error_body("the engine failed; its log says why", "server_error", None, "internal_error"), NO_RETRY


def _invalid(error: RequestInvalid) -> Refusal:
    param, code = error.param, error.code
    if isinstance(error, TemplateRejected):
        param, code = param or "messages", code or "template_rejected"
    status = _STATUSES.get(code or "", 400)
    return status, error_body(str(error), "invalid_request_error", param, code), {}


def error_body(message: str, kind: str, param: str | None, code: str | None) -> dict[str, Any]:
    """OpenAI's error shape."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
