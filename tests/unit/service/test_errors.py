from collections.abc import Iterator
from typing import get_args

import pytest
from litestar.exceptions import MethodNotAllowedException, NotFoundException

from engine import errors as engine_errors
from schemas.errors import ErrorCode
from service.errors import ENGINE_ANSWERS, MAX_PROBLEMS, Problem, ProblemsError, ServiceError, describe


def subclasses(kind: type[engine_errors.EngineError]) -> Iterator[type[engine_errors.EngineError]]:
    for each in kind.__subclasses__():
        yield each
        yield from subclasses(each)


# Answered by the root of their tree: unforeseen, and nothing that a caller could do about.
INTERNAL = {engine_errors.LoadError, engine_errors.StepError, engine_errors.EngineDeadError}


@pytest.mark.parametrize("kind", list(subclasses(engine_errors.EngineError)))
def test_every_engine_error_has_its_answer(kind: type[engine_errors.EngineError]) -> None:
    nearest = next(each for each in kind.__mro__ if each in ENGINE_ANSWERS)
    assert (nearest is engine_errors.EngineError) == (kind in INTERNAL)


@pytest.mark.parametrize(
    ("error", "status", "code", "headers"),
    [
        (ProblemsError([Problem("malformed_json", "x")]), 400, "malformed_json", {}),
        (ProblemsError([Problem("invalid_value", "x", "n")]), 422, "invalid_value", {}),
        (ServiceError("model_not_found", "x"), 404, "model_not_found", {}),
        (ServiceError("not_acceptable", "x"), 406, "not_acceptable", {}),
        (ServiceError("logit_budget_exceeded", "x"), 422, "logit_budget_exceeded", {}),
        (engine_errors.InvalidRequestError("x", "messages"), 422, "invalid_value", {}),
        (engine_errors.ContextLengthError(9, 8, 7), 413, "context_length_exceeded", {}),
        (engine_errors.QueueFullError("x"), 503, "queue_full", {"retry-after": "1"}),
        (engine_errors.LoadingError("x"), 503, "loading", {"retry-after": "5"}),
        (engine_errors.ShuttingDownError("x"), 503, "shutting_down", {"retry-after": "5"}),
        (engine_errors.OutOfMemoryError("x"), 507, "out_of_memory", {"x-should-retry": "false"}),
        (engine_errors.NonFiniteLogitsError("x"), 500, "non_finite_logits", {"x-should-retry": "false"}),
        (engine_errors.LogitsOverflowError("x"), 500, "logits_overflow", {"x-should-retry": "false"}),
        (engine_errors.StepError("x"), 500, "internal_error", {}),
        (NotFoundException(), 404, "not_found", {}),
        (MethodNotAllowedException(headers={"Allow": "POST"}), 405, "method_not_allowed", {"allow": "POST"}),
        (KeyError("secret"), 500, "internal_error", {}),
    ],
)
def test_exceptions_become_answers(error: Exception, status: int, code: str, headers: dict[str, str]) -> None:
    got_status, got_headers, envelope = describe(error)
    assert (got_status, got_headers, envelope.error.code) == (status, headers, code)
    assert code in get_args(ErrorCode)


def test_an_unforeseen_error_names_its_type_and_nothing_else() -> None:
    message = describe(KeyError("secret"))[2].error.message
    assert "KeyError" in message
    assert "secret" not in message


def test_the_context_error_has_the_three_numbers() -> None:
    message = describe(engine_errors.ContextLengthError(900, 800, 1024))[2].error.message
    assert all(number in message for number in ("900", "800", "1024"))


def test_an_answer_lists_a_limited_number_of_problems() -> None:
    problems = [Problem("invalid_value", "x", f"field_{place}") for place in range(MAX_PROBLEMS + 5)]
    error = describe(ProblemsError(problems))[2].error
    assert error.param == "field_0"
    assert error.message.count("field_") == MAX_PROBLEMS
    assert "5 more" in error.message
