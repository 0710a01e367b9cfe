"""The series that vLLM's dashboards ask for: those in examples/observability of its repository, August 2026.

Names only: every series in the expressions of its panels and variables, for Grafana and Perses, and its labels.
"""

PLAIN = frozenset({"model_name", "engine"})
SERIES: dict[str, frozenset[str]] = {
    **{
        f"{name}_{part}": PLAIN
        for name in ("e2e_request_latency_seconds", "inter_token_latency_seconds", "time_to_first_token_seconds")
        for part in ("bucket", "sum", "count")
    },
    "generation_tokens_total": PLAIN,
    "prompt_tokens_total": PLAIN,
    "iteration_tokens_total_count": PLAIN,
    "kv_cache_usage_perc": PLAIN,
    "num_requests_running": PLAIN,
    "num_requests_waiting": PLAIN,
    "request_decode_time_seconds_sum": PLAIN,
    "request_prefill_time_seconds_sum": PLAIN,
    "request_queue_time_seconds_sum": PLAIN,
    "request_generation_tokens_bucket": PLAIN,
    "request_prompt_tokens_bucket": PLAIN,
    "request_max_num_generation_tokens_sum": PLAIN,
    "request_success_total": PLAIN | {"finished_reason"},
}
