"""schemathesis on the OpenAPI document: whatever fits the schema, or nearly fits it, no request gets a 500."""

from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from support.serving import Served, serve, tiny_model

from kvarn.server.openapi import document

SCHEMA = schemathesis.openapi.from_dict(document())
EXAMPLES = 20


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serve(tiny_model(tmp_path_factory.mktemp("model"), 48), "--alias", "tiny", "-np", "8") as served:
        yield served
        served.until_idle()
        assert served.cache()["sequences"] == 0
        assert served.ask("/health").status == 200


@SCHEMA.parametrize()
@settings(max_examples=EXAMPLES, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_no_request_gets_a_500(case: schemathesis.Case, server: Served) -> None:
    response = case.call(base_url=server.url, timeout=60)
    case.validate_response(response, checks=[not_a_server_error])
    if response.status_code >= 400:
        assert response.json()["error"]["message"]
