"""Why a test of llama.cpp's server does not pass against kvarn. Every reason is about an assertion, or about one test.

A failure for which nothing here holds is reported as failed.
"""

import re

MODEL, FLAGS, OTHERWISE, MISSING = "model", "flags", "otherwise", "missing"
KINDS = (MODEL, FLAGS, OTHERWISE, MISSING)
TITLES = {MODEL: "own model", FLAGS: "own flags", OTHERWISE: "different on purpose", MISSING: "not implemented"}
ABOUT = {
    MODEL: "These compare texts, numbers of tokens or abilities of llama.cpp's own test models.",
    FLAGS: "These need a flag of llama-server that kvarn does not have.",
    OTHERWISE: "kvarn does something else on purpose. Some of these would also fail for the text of their model.",
    MISSING: "These ask for something that kvarn does not have.",
}
HEAD = """\
# llama.cpp's tests of its server

llama.cpp's own tests (tools/server/tests, commit {commit}), unchanged, against `kvarn serve`. Each
test starts a server with its own flags; `tests/peers/llama_server.py` translates them. The tests were
written for small models that are not available here: stories15M with the vocabulary of Llama 2 takes
their place. A test that is counted in a column other than "passed" does not pass.
This page and bench/results/llama-tests.json are written by

```
make test-peers LLAMA=path/to/llama.cpp STORIES=stories15M.bin VOCABULARY=ggml-vocab-llama-spm.gguf
```

which fails if a test fails for a reason that is not listed here.
"""
# In the order in which they are looked for: what the failed test is called, what stands in its traceback, the reason.
RULES: tuple[tuple[str, str, str, str], ...] = (
    # -- own model
    (MODEL, "", r"match_regex\(", "compares the text that its own model writes"),
    (MODEL, "test_completion_stream_with_openai_library_stops", "", "needs Phi-3.5-mini"),
    (
        MODEL,
        "",
        r"== n_prompt|== n_tokens|2 \* 9|== n_cache|== batch_count",
        "counts the tokens of its own vocabulary or template",
    ),
    (MODEL, "test_nocache_long_input_prompt", "", "its own vocabulary has more tokens for this text"),
    (MODEL, "test_local_media_file|image|vision|multimodal", "", "needs a model that sees images"),
    (MISSING, "test_embedding_pooling_none", "", "the pooling `none`: a vector for every token"),
    # -- own flags
    (
        FLAGS,
        "test_completion_stream_vs_non_stream|test_completion_with_tokens_input",
        "",
        "`--seed`, `--temp`: a default for all requests",
    ),
    (FLAGS, "test_server_props", "", "`--seed`: a default for all requests"),
    (FLAGS, "test_server_slots", "", "`--no-slots`"),
    (FLAGS, "test_server_model_aliases_and_tags", "", "`--tags`, and several names in `--alias`"),
    (
        FLAGS,
        "test_chat_template$|test_chat_template_assistant_prefill|continue_final_message_vllm",
        "",
        "`--verbose`: shows the prompt of every request",
    ),
    (
        FLAGS,
        "test_reasoning.*-off-|test_reasoning.*-on-",
        "",
        "`--reasoning on` and `off`; kvarn takes `chat_template_kwargs` in a request",
    ),
    (FLAGS, "stream::", "", "the router: no model, `X-Conversation-Id`, `/v1/stream`"),
    (FLAGS, "test_cors_proxy|tools_enabled", "", "`--ui-mcp-proxy`, `--tools`"),
    # -- different on purpose
    (
        OTHERWISE,
        "test_responses_stream_with_llama_telemetry",
        "completed is not None|None is not None",
        "an answer that `max_output_tokens` cuts ends with `response.incomplete`, as OpenAI's",
    ),
    (OTHERWISE, "test_no_ui|static_assets", "", "the page at `/` is another one, and only for browsers"),
    (
        OTHERWISE,
        "security::test_correct_api_key",
        r'"content" in res\.body',
        "`/completions` without `/v1` is OpenAI's",
    ),
    (
        OTHERWISE,
        "test_cors_origins_localhost_reflects",
        "KeyError: 'Access-Control-Allow-Origin'",
        "names of headers are sent in lower case; the test looks for capitals",
    ),
    (
        OTHERWISE,
        "test_cors_options|test_cors_origins_localhost_rejects",
        "",
        "pages of other origins are refused, unless `--cors-origin` names them",
    ),
    (
        MISSING,
        "post_sampling|post_backend_sampling",
        "",
        "`post_sampling_probs`: probabilities after the samplers",
    ),
    (
        OTHERWISE,
        "test_completion_response_fields",
        "<s> ",
        "the prompt's text has no space after `<s>`, because the request's had none",
    ),
    (
        OTHERWISE,
        "test_context_size_exceeded",
        "",
        "the error has OpenAI's type and code: `invalid_request_error`, `context_length_exceeded`",
    ),
    (
        OTHERWISE,
        "test_invalid_chat_completion_req",
        "",
        "two messages of the assistant in a row are left to the chat template",
    ),
    (
        OTHERWISE,
        "test_reasoning.*-auto-",
        "",
        "templates are rendered as transformers does: `enable_thinking` is undefined if the request does not set it",
    ),
    (
        OTHERWISE,
        "test_date_inside_prompt",
        "",
        "templates are rendered as transformers does: there is no `date_string` and no `datetime`",
    ),
    (OTHERWISE, "test_embedding_error_prompt_too_long", "too large", "the message has other words"),
)


def find(test: str, trace: str, flags: list[str]) -> tuple[str, str]:
    """The kind and the reason of a failure; empty if there is none. `flags`: what the server was asked for and kvarn
    has no flag for: a reason that names flags holds only if one of them is there."""
    for kind, name, said, why in RULES:
        named = re.findall(r"--[a-z-]+", why) if kind == FLAGS else []
        if re.search(name, test) and re.search(said, trace) and (not named or set(named) & set(flags)):
            return kind, why
    return "", ""
