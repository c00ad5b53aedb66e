"""GET /v1/models and the look-up of the model that a request names."""

from __future__ import annotations

from dynrt.runtime.errors import InvalidRequestError, ModelNotFoundError, NoWorkerError
from dynrt.runtime.http.backend import Backend
from dynrt.runtime.http.openai.types import Model, ModelList
from dynrt.runtime.http.parameters.fields import shown
from dynrt.runtime.http.request import Request
from dynrt.runtime.http.response import Response, json_response
from dynrt.runtime.requests import ModelCard

MODEL_PREFIX = "/v1/models/"  # and the model's name, which may have slashes
MODEL_ROUTE = MODEL_PREFIX + "{model}"


def find_model(backend: Backend, name: str) -> ModelCard:
    """The card of model `name`; of the only model if `name` is empty."""
    cards = backend.models()
    if not cards:
        raise NoWorkerError(f"no model is served yet: {backend.ready() or 'it is loading'}; try again later")
    if not name and len(cards) == 1:
        return cards[0]
    for card in cards:
        if card.name == name:
            return card
    served = ", ".join(card.name for card in cards)
    if not name:
        raise InvalidRequestError(f"model is missing; name one of {served}", param="model")
    raise ModelNotFoundError(f"the model {shown(name)} is not served here; served: {served}", param="model")


async def list_models(request: Request) -> Response:
    cards = request.endpoint.backend.models()
    return json_response(ModelList([_model(card) for card in cards]))


async def show_model(request: Request) -> Response:
    return json_response(
        _model(find_model(request.endpoint.backend, request.path.removeprefix(MODEL_PREFIX)))
    )


def _model(card: ModelCard) -> Model:
    return Model(id=card.name, created=card.created, max_model_len=card.context_length)
