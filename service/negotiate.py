"""Which representation the Accept header asks for (RFC 9110, section 12.5.1)."""

from enum import Enum

from schemas.arrow import MEDIA_TYPE
from service.errors import ServiceError, echo

EVENTS = "text/event-stream"
"""How JSON is streamed."""


class Representation(Enum):
    """The two forms of an answer."""

    JSON = "application/json"
    ARROW = MEDIA_TYPE


def negotiate(accept: str | None, *, has_arrow: bool = True) -> Representation:
    """Return the form that the header prefers; JSON where it has no preference.

    A more specific range wins over a wildcard, and ``q=0`` excludes. Members that are no media ranges are
    passed over, and a header with nothing else counts as absent.

    Args:
        accept: The header.
        has_arrow: Whether the endpoint has an Arrow form.

    Raises:
        ServiceError: ``not_acceptable``, if it names only forms that are not served.
    """
    ranges = [parsed for member in (accept or "").split(",") if (parsed := _parse(member))]
    if not ranges:
        return Representation.JSON
    # Clients that stream ask for events by ``stream``, and may also name them here.
    events_q = max((q for media_type, q in ranges if media_type == EVENTS), default=0.0)
    json_q = max(_quality(ranges, Representation.JSON.value), events_q)
    arrow_q = _quality(ranges, MEDIA_TYPE) if has_arrow else 0.0
    if json_q == arrow_q == 0:
        served = (
            f"application/json and {MEDIA_TYPE} are served" if has_arrow else "application/json is served"
        )
        raise ServiceError("not_acceptable", f"{served} here, not {echo(accept or '')}")
    if arrow_q > json_q:
        return Representation.ARROW
    # At equal weight a name is a wish, and a wildcard is none.
    named = {media_type for media_type, q in ranges if q > 0}
    is_arrow_wish = MEDIA_TYPE in named and not named & {Representation.JSON.value, EVENTS}
    return Representation.ARROW if is_arrow_wish and arrow_q == json_q else Representation.JSON


def prefers_html(accept: str | None) -> bool:
    """Tell whether the header prefers HTML to JSON, as those of browsers do."""
    ranges = [parsed for member in (accept or "").split(",") if (parsed := _parse(member))]
    return _quality(ranges, "text/html") > _quality(ranges, Representation.JSON.value)


def _parse(member: str) -> tuple[str, float] | None:
    """Return a media range and its weight."""
    media_type, *parameters = (part.strip().lower() for part in member.split(";"))
    if media_type.count("/") != 1 or "" in media_type.split("/"):
        return None
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name.strip() == "q":
            try:
                q = float(value)
            except ValueError:
                return None
            return (media_type, q) if 0 <= q <= 1 else None
    return media_type, 1.0


def _quality(ranges: list[tuple[str, float]], media_type: str) -> float:
    """Return the weight that the most specific matching range gives a type."""
    for candidate in (media_type, media_type.split("/", maxsplit=1)[0] + "/*", "*/*"):
        weights = [q for name, q in ranges if name == candidate]
        if weights:
            return max(weights)
    return 0.0
