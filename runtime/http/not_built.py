"""Routes that clients expect of an OpenAI-compatible server and that are not built: a 501 that says so."""

from __future__ import annotations

from dynrt.runtime.errors import NotBuiltError
from dynrt.runtime.http.request import Request
from dynrt.runtime.http.response import Response


async def embeddings(request: Request) -> Response:
    served = ", ".join(card.name for card in request.endpoint.backend.models()) or "the model"
    raise NotBuiltError(
        f"embeddings are not built: dynrt serves models that generate text ({served}); use a server of embedding models"
    )
