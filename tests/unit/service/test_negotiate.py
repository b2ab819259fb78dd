import pytest

from service.errors import ServiceError
from service.negotiate import Representation, negotiate

ARROW = "application/vnd.apache.arrow.stream"


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        (None, Representation.JSON),
        ("", Representation.JSON),
        ("*/*", Representation.JSON),
        ("application/*", Representation.JSON),
        ("application/json", Representation.JSON),
        (";;q=abc,,", Representation.JSON),
        ("image/png, */*;q=0.1", Representation.JSON),
        (ARROW, Representation.ARROW),
        (ARROW.upper(), Representation.ARROW),
        (f"{ARROW}, */*", Representation.ARROW),
        (f"{ARROW};q=0, */*", Representation.JSON),
        (f"{ARROW};q=0.5, application/json", Representation.JSON),
        (f"application/json;q=0.5, {ARROW}", Representation.ARROW),
        (f"application/json, {ARROW}", Representation.JSON),
        (f"application/json;q=0, text/*;q=0, {ARROW};q=0.1", Representation.ARROW),
        ("application/json;q=0, application/*", Representation.ARROW),
        ("application/json;q=0, */*", Representation.ARROW),
    ],
)
def test_accept_picks_a_form(accept: str | None, expected: Representation) -> None:
    assert negotiate(accept) is expected


@pytest.mark.parametrize("accept", ["image/png", "text/*", "*/*;q=0", f"{ARROW};q=0", "application/json;q=0"])
def test_only_forms_that_are_not_served_are_refused(accept: str) -> None:
    with pytest.raises(ServiceError) as caught:
        negotiate(accept)
    assert caught.value.code == "not_acceptable"
