"""schemathesis on the OpenAPI document: whatever fits the schema, or nearly fits it, no request gets a 500."""

from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from support.serving import Served, serve, tiny_model

from kvarn.server.openapi import document

SCHEMA = schemathesis.openapi.from_dict(document(page=False))  # a stream that does not end is no case for this
OTHERS = schemathesis.openapi.from_dict(document(page=False))
OTHERS.config.phases.coverage.enabled = False  # its many boundary cases are those of the same tables
FIRST = "^/v1/(chat/)?completions$|tokenize$"  # the parsers that the others share most of
SAME = "render$|input_tokens$"  # what they take is what the endpoint takes that they are named after
HOW = dict(deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serve(tiny_model(tmp_path_factory.mktemp("model"), 48), "--alias", "tiny", "-np", "8") as served:
        yield served
        served.until_idle()
        assert served.cache()["sequences"] == 0
        assert served.ask("/health").status == 200


@SCHEMA.include(path_regex=FIRST).parametrize()
@settings(max_examples=10, **HOW)
def test_no_request_gets_a_500(case: schemathesis.Case, server: Served) -> None:
    check(case, server)


@OTHERS.exclude(path_regex=f"{FIRST}|{SAME}").parametrize()
@settings(max_examples=4, **HOW)
def test_no_request_of_another_protocol_gets_a_500(case: schemathesis.Case, server: Served) -> None:
    check(case, server)


def check(case: schemathesis.Case, server: Served) -> None:
    response = case.call(base_url=server.url, timeout=60)
    case.validate_response(response, checks=[not_a_server_error])
    if response.status_code >= 400:
        error = response.json()["error"]
        assert error if isinstance(error, str) else error["message"]  # Ollama's form, and that of the others
