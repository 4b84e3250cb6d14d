"""The plant: a request-level simulator of LLM fleets on virtual time. It shares no formula with the planning side.

What the controller may turn, and what it may read, with the product behind each. There are no other knobs and no other
series: a control law that needs one that is not here must first name the product that offers it.

KNOB                  PRODUCT FIELD                                              GRANULARITY; WHO SETS WHAT IT NEEDS
Plant.scale           Kubernetes /scale (Deployment, StatefulSet, LWS)           pool
Plant.sleep, wake     vLLM POST /sleep, /wake_up (dev mode, sleep mode)          replica, drained first
Plant.warm            vLLM POST /v1/completions, max_tokens 1                    replica, with a profile's system prompt
Plant.set_weight      HTTPRoute backendRefs weight, Envoy weighted_clusters      pool; per call, or per session where it
                                                                                 hashes the session header
Plant.limit           Envoy local rate limit by descriptors; Envoy Gateway       class x stage x attempt, per gateway;
                      BackendTrafficPolicy rateLimit.local; answers 429          headers set at the edge (1)
Plant.limit(final)    the same with x-should-retry: false                        as above; the client must heed it
PoolOf.max_parallel   Envoy circuit breaker max_requests; answers 503            pool = cluster; blind to classes
Engine.max_queued     vLLM --max-num-queued-reqs; answers 503                    replica, at start; blind to classes
Engine.by_priority    vLLM --scheduling-policy priority                          replica, at start; priority in the body

(1) An SDK's x-stainless-retry-count arrives from the client: it must be trusted or overwritten at the edge. Envoy sets
x-envoy-attempt-count only after rate limiting, so no bucket can tell attempts apart by it.

SERIES                PRODUCT METRIC                                             GRANULARITY, AND WHEN IT CHANGES
load, KV use          vllm:num_requests_running/_waiting, kv_cache_usage_perc    replica, as a step ends
tokens, prefix cache  vllm:*_tokens_total, prefix_cache_*, num_preemptions       replica, as a step ends
latency of tokens     vllm:time_to_first_token_, inter_token_latency_seconds     replica, at each token
latency of calls      vllm:e2e_request_latency_, request_queue_time_seconds,     replica, only as a call finishes
                      request_success_total
reuse of KV blocks    vllm:kv_block_reuse_gap_seconds (--kv-cache-metrics)       replica, as a block is evicted
rejections, sleep     vllm:admission_rejections_total, engine_sleep_state        replica, at once
GPUs                  DCGM_FI_PROF_*, DCGM_FI_DEV_*                              GPU, every 30 s
gateway               envoy_cluster_upstream_rq_*, envoy_http_local_rate_limit_* pool; prefix per class, stage, attempt
tasks                 traces_span_metrics_calls_total (OpenTelemetry)            service x class, as a task ends

Modules: scenario (what there is, as values), plant (knobs, faults, the life of replicas), world (the memory), and the
compiled ones: run (time), clients, gateway, engine, meters, cache, events, chance. `compiled` says how, and why so.
`recount` counts a world from scratch and says what does not add up.
"""
