"""Sampling parameters that a body does not have: what /openapi.json says of them is what engines get."""

from __future__ import annotations

from typing import Any

import pytest

from dynrt.runtime.http.parameters.fields import Fields, Problems
from dynrt.runtime.http.parameters.request_schema import Parameter
from dynrt.runtime.http.parameters.sampling import SAMPLING, read_sampling

DRAWN_LATER = "seed"


@pytest.mark.parametrize(
    "body", [{}, {parameter.name: None for parameter in SAMPLING}], ids=["absent", "null"]
)
@pytest.mark.parametrize("parameter", SAMPLING, ids=lambda parameter: parameter.name)
def test_what_is_not_given_has_its_declared_default(parameter: Parameter[Any], body: dict[str, Any]) -> None:
    sampling = read_sampling(Fields(body, Problems()), None, None)(max_tokens=1)
    default = 0 if parameter.name == DRAWN_LATER else parameter.default
    assert getattr(sampling, parameter.name) == default
