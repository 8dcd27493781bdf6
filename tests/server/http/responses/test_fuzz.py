"""Random bodies of /v1/responses: every answer is 200 or an error that names a field."""

from __future__ import annotations

import json
from typing import Any

from flask.testing import FlaskClient
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from megatron_hybrid.server.http.protocol.responses import ResponsesRequest
from tests.server.http.responses.responding import PATH, events_in
from tests.server.http.test_fuzz import values
from tests.thorough import usually

ITEM_FIELDS = "type role content id call_id name arguments output summary text status x".split()
ITEM_TYPES = (
    *("message", "function_call", "function_call_output", "reasoning", "item_reference"),
    *("input_text", "output_text", "refusal", "reasoning_text", "summary_text"),
)
fuzz = settings(
    max_examples=usually(60, 600),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
names = st.sampled_from([*ResponsesRequest.__struct_fields__, "other"])
inner = values | st.sampled_from([*ITEM_TYPES, "user", "assistant", "{}"])
items = st.lists(
    st.dictionaries(
        st.sampled_from(ITEM_FIELDS),
        inner | st.lists(st.dictionaries(st.sampled_from(ITEM_FIELDS), inner, max_size=3)),
        max_size=5,
    ),
    max_size=3,
)


def check(http: FlaskClient, body: dict[str, Any]) -> None:
    data = json.dumps(body)
    assume("~" not in data)  # the one text on which the fake engine fails on purpose
    answer = http.post(PATH, data=data, content_type="application/json")
    if answer.status_code != 200:
        assert answer.status_code in (400, 404), (data, answer.data)
        assert answer.get_json()["error"]["param"]
    elif answer.mimetype == "text/event-stream":
        *_, last = events_in(answer.get_data(as_text=True))
        assert last["type"] in ("response.completed", "response.incomplete")
    else:
        stored = http.get(f"{PATH}/{answer.get_json()['id']}")
        assert stored.status_code == (200 if answer.get_json()["store"] else 404)


@fuzz
@given(extra=st.dictionaries(names, values, max_size=3))
def test_random_fields_never_break_the_server(http: FlaskClient, extra: dict[str, Any]) -> None:
    check(http, {"input": "Hello", "max_output_tokens": 2, **extra})


@fuzz
@given(given=items)
def test_random_items_never_break_the_server(http: FlaskClient, given: list[Any]) -> None:
    check(http, {"input": given, "max_output_tokens": 2})
