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
GPUs                  DCGM_FI_PROF_*, DCGM_FI_DEV_*                              GPU, every 30 s; pod at each scrape
clusters              envoy_cluster_upstream_rq_total, _xx, _active, _timeout,   pool, and over a service's pools; at
                      _retry, _pending_overflow                                  once
limits                envoy_http_local_rate_limit_rate_limited                   prefix per class x stage x attempt
tasks                 traces_span_metrics_calls_total (OpenTelemetry)            service x class, as a task ends

The test that shows each (tests hold that these are there):

Plant.scale           test_a_start_goes_through_its_parts_and_holds_gpus_meanwhile
Plant.sleep, wake     test_waking_from_level_2_takes_as_long_as_loading_the_weights
Plant.warm            test_a_warmed_replica_has_the_system_prompt_and_has_paid_for_it
Plant.set_weight      test_weights_split_the_traffic_in_proportion
Plant.limit           test_a_token_bucket_admits_its_rate_and_once_its_depth
Plant.limit(final)    test_a_final_answer_is_not_tried_again
PoolOf.max_parallel   test_a_full_breaker_answers_at_once
Engine.max_queued     test_a_full_queue_answers_at_once
Engine.by_priority    test_the_more_important_class_is_served_first
load, KV use          test_gauges_change_only_as_steps_end_and_stay_when_the_engine_stops
tokens, prefix cache  test_counters_are_those_of_the_plant_and_buckets_are_cumulative
latency of tokens     test_the_latency_of_a_call_is_known_only_as_it_finishes
latency of calls      test_the_latency_of_a_call_is_known_only_as_it_finishes
reuse of KV blocks    test_evicted_blocks_tell_how_long_they_lay_between_their_last_two_uses
rejections, sleep     test_rejections_are_shown_at_once, test_the_level_of_sleep_is_shown_until_the_replica_is_awake
GPUs                  test_gpu_values_are_repeated_for_30_s_and_follow_the_work
clusters              test_each_pool_is_a_cluster_of_the_gateway_beside_the_one_of_its_rule
limits                test_limited_calls_are_counted_by_class_stage_and_attempt
tasks                 test_tasks_are_counted_by_service_and_class_as_they_end

Modules: scenario (what there is, as values), plant (knobs, faults, the life of replicas), world (the memory), and the
compiled ones: run (time), clients, gateway, frontend, engine, steps, memory, meters, cache, events, chance; `compiled`
says how, and why so. What is read: telemetry (pages), dcgm, envoy, exposition. `recount` counts a world from scratch
and says what does not add up.
"""
