"""Routes that clients expect of an OpenAI-compatible server and that are not built: a 501 that says so."""

from __future__ import annotations

from aiohttp import web

from dynrt.runtime.errors import NotBuiltError
from dynrt.runtime.http.backend import BACKEND


async def embeddings(request: web.Request) -> web.Response:
    served = ", ".join(card.name for card in request.app[BACKEND].models()) or "the model"
    raise NotBuiltError(
        f"embeddings are not built: dynrt serves models that generate text ({served}); use a server of embedding models"
    )
