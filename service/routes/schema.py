"""``GET /schema``: the OpenAPI document, and for browsers a page that shows it and tries it out.

The page is Swagger UI, served from a package that carries its files, so it works without the internet.
"""

import asyncio
from importlib.util import find_spec
from pathlib import Path

from litestar import MediaType, Request, Response, get
from litestar.datastructures import State
from litestar.di import NamedDependency
from litestar.params import FromPath

from service.errors import ServiceError, echo
from service.negotiate import prefers_html

PAGE = b"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>logitwire</title>
<link rel="icon" href="/schema/favicon-32x32.png">
<link rel="stylesheet" href="/schema/swagger-ui.css">
</head>
<body>
<div id="docs"></div>
<script src="/schema/swagger-ui-bundle.js"></script>
<script src="/schema/page.js"></script>
</body>
</html>
"""

SCRIPT = b"""SwaggerUIBundle({
  url: "/schema", dom_id: "#docs", validatorUrl: null,
  deepLinking: true, tryItOutEnabled: true, defaultModelsExpandDepth: 0
});
"""

ASSETS = {
    "swagger-ui.css": "text/css",
    "swagger-ui-bundle.js": "text/javascript",
    "favicon-32x32.png": "image/png",
}

# Swagger UI asks a validator elsewhere unless it is told not to; a browser that knows this never would.
POLICY = "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:"


def _folder() -> Path | None:
    """Return where Swagger UI's files are, if the extra ``docs`` is installed."""
    found = find_spec("swagger_ui")
    return None if found is None or found.origin is None else Path(found.origin).parent / "static"


@get("/schema", operation_id="schema", include_in_schema=False)
async def get_schema(
    request: Request[object, object, State], document: NamedDependency[bytes]
) -> Response[bytes]:
    """Return the document; as a page, if HTML is preferred and can be shown."""
    headers = {"vary": "accept"}
    if prefers_html(request.headers.get("accept")) and _folder() is not None:
        headers["content-security-policy"] = POLICY
        return Response(PAGE, media_type=MediaType.HTML, headers=headers)
    return Response(document, media_type=MediaType.JSON, headers=headers)


@get("/schema/{name:str}", operation_id="schemaAsset", include_in_schema=False)
async def get_asset(name: FromPath[str]) -> Response[bytes]:
    """Return a file of the page."""
    folder = _folder()
    headers = {"cache-control": "no-cache" if name == "page.js" else "max-age=86400"}
    if name == "page.js":
        return Response(SCRIPT, media_type="text/javascript", headers=headers)
    if folder is None or name not in ASSETS:
        raise ServiceError("not_found", f"there is no {echo(name)}")
    content = await asyncio.to_thread((folder / name).read_bytes)
    return Response(content, media_type=ASSETS[name], headers=headers)
