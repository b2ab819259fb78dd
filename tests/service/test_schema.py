"""The OpenAPI document, and the page that shows it to people."""

import json
import re
from typing import Any

import pytest
from litestar import Litestar
from openapi_spec_validator import validate

from schemas.meanings import MEANINGS
from schemas.sampling import GenerationFields
from service.app import ROUTES, create_app
from service.openapi import document
from service.settings import Settings
from tests.serving import ServerThread

BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"
DOCUMENT = json.loads(document(ROUTES))
OPERATIONS = [(path, *each) for path, item in DOCUMENT["paths"].items() for each in item.items()]
POSTS = [(path, each) for path, method, each in OPERATIONS if method == "post"]


def test_the_document_is_valid_openapi_3_1() -> None:
    assert DOCUMENT["openapi"] == "3.1.0"
    validate(DOCUMENT)


def test_every_route_of_the_app_is_in_it(serve: Any) -> None:
    server = serve()
    app: Any = create_app(Settings(model_name="scripted"), server.engine)
    while not isinstance(app, Litestar):
        app = app._app
    served = {route.path for route in app.routes if not route.path.startswith("/schema")}
    assert {re.sub(r":path}", "}", path) for path in served} == set(DOCUMENT["paths"])


def test_every_body_is_described_with_its_ranges_and_no_other_fields() -> None:
    schemas = DOCUMENT["components"]["schemas"]
    assert schemas["ChatRequest"]["additionalProperties"] is False
    assert schemas["ChatRequest"]["required"] == ["messages"]
    temperature = schemas["ChatRequest"]["properties"]["temperature"]["anyOf"][0]
    assert temperature == {"type": "number", "minimum": 0, "maximum": 100}
    inside = schemas["GenerateRequest"]["properties"]["sampling_params"]["anyOf"][0]["properties"]
    assert "temperature" in inside
    assert "token_ids" not in inside
    for _, operation in POSTS:
        assert operation["requestBody"]["content"]["application/json"]["schema"]
        assert {"400", "413", "415", "422", "503"} <= set(operation["responses"])


def test_every_field_that_goes_beyond_openai_is_explained() -> None:
    schemas = [DOCUMENT["components"]["schemas"][name] for name in ("ChatRequest", "CompletionRequest")]
    unexplained = {
        name for each in schemas for name, field in each["properties"].items() if "description" not in field
    }
    assert not unexplained & set(GenerationFields.__struct_fields__[13:])
    used = {
        name for each in DOCUMENT["components"]["schemas"].values() for name in each.get("properties", ())
    }
    assert set(MEANINGS) <= used


@pytest.mark.parametrize(("path", "operation"), POSTS, ids=[path for path, _ in POSTS])
def test_every_example_can_be_sent_as_it_is(scripted: ServerThread, path: str, operation: Any) -> None:
    example = operation["requestBody"]["content"]["application/json"]["example"]
    assert scripted.request("POST", path, example).status == 200


def test_programs_get_the_document_and_browsers_a_page(scripted: ServerThread) -> None:
    for accept in ("*/*", "application/json", "application/json,text/html"):
        reply = scripted.request("GET", "/schema", headers={"accept": accept})
        assert (reply.headers["vary"], reply.json) == ("accept", DOCUMENT)
    reply = scripted.request("GET", "/schema", headers={"accept": BROWSER})
    assert reply.headers.get_content_type() == "text/html"


def test_the_page_needs_nothing_from_elsewhere(scripted: ServerThread) -> None:
    page = scripted.request("GET", "/schema", headers={"accept": BROWSER})
    # A browser that obeys this loads nothing from elsewhere, whatever the scripts ask for.
    assert page.headers["content-security-policy"].startswith("default-src 'self'")
    script = scripted.request("GET", "/schema/page.js").body.decode()
    addresses = re.findall(r'(?:src|href|url)[=:] ?"([^"]+)"', page.body.decode() + script)
    assert len(addresses) == 5
    for address in addresses:
        assert address.startswith("/schema")
        assert scripted.request("GET", address).status == 200
    assert scripted.request("GET", "/schema/index.html").error["code"] == "not_found"
