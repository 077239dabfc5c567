import pytest

from pdserve.telemetry.metrics import MasterMetrics, WorkerMetrics
from pdserve.wire.messages import NodeStats


def lines(metrics):
    return metrics.render().decode().splitlines()


def test_two_instances_share_nothing():
    one, other = MasterMetrics(), MasterMetrics()
    one.output_tokens(3)
    assert "pdserve_output_tokens_total 3.0" in lines(one)
    assert "pdserve_output_tokens_total 0.0" in lines(other)
    assert one.content_type.startswith("text/plain")


def test_a_request_is_in_flight_until_it_has_one_outcome():
    metrics = MasterMetrics()
    metrics.request_started("/generate")
    assert 'pdserve_requests_in_flight{endpoint="/generate"} 1.0' in lines(metrics)
    metrics.first_delta("/generate", 0.2, prompt_tokens=7, cached_tokens=4)
    metrics.request_finished("/generate", "busy", 0.5)
    text = lines(metrics)
    assert 'pdserve_requests_in_flight{endpoint="/generate"} 0.0' in text
    assert 'pdserve_requests_total{endpoint="/generate",outcome="busy"} 1.0' in text
    assert 'pdserve_ttft_seconds_sum{endpoint="/generate"} 0.2' in text
    assert 'pdserve_request_seconds_sum{endpoint="/generate"} 0.5' in text
    assert {"pdserve_prompt_tokens_total 7.0", "pdserve_cached_tokens_total 4.0"} <= set(text)


def test_the_gap_of_a_delta_counts_for_each_of_its_tokens():
    metrics = MasterMetrics()
    metrics.inter_token(1.0, 4)
    metrics.inter_token(1.0, 0)
    text = lines(metrics)
    assert "pdserve_itl_seconds_count 4.0" in text
    assert "pdserve_itl_seconds_sum 1.0" in text
    assert 'pdserve_itl_seconds_bucket{le="0.25"} 4.0' in text


def test_a_forgotten_node_leaves_no_series():
    metrics = MasterMetrics()
    stats = NodeStats(capacity=8, active=2, queued=1, pages_free=5, pages_quarantined=3, transfers=1)
    metrics.set_node("d1", "decode", stats)
    text = lines(metrics)
    assert 'pdserve_node_capacity{node="d1",role="decode"} 8.0' in text
    assert 'pdserve_node_kv_pages{node="d1",role="decode",state="quarantined"} 3.0' in text
    metrics.forget_node("d1")
    metrics.forget_node("d1")
    assert not any("d1" in line for line in lines(metrics))


def test_a_node_that_changes_its_role_has_one_series():
    metrics = MasterMetrics()
    metrics.set_node("x", "decode", NodeStats())
    metrics.set_node("x", "prefill", NodeStats())
    assert not any('role="decode"' in line for line in lines(metrics))


def test_refresh_runs_before_each_rendering():
    def refresh():
        worker.set_holds(5)

    worker = WorkerMetrics(refresh)
    assert "pdserve_holds 5.0" in lines(worker)


def test_master_counts_nodes_and_retries():
    metrics = MasterMetrics()
    metrics.node_connected("decode")
    metrics.node_lost("decode", "heartbeat")
    metrics.retried("link_lost")
    text = set(lines(metrics))
    assert 'pdserve_node_losses_total{reason="heartbeat",role="decode"} 1.0' in text
    assert {
        'pdserve_node_connects_total{role="decode"} 1.0',
        'pdserve_retries_total{reason="link_lost"} 1.0',
    } <= text


def test_a_worker_counts_its_work():
    metrics = WorkerMetrics()
    metrics.set_stats(NodeStats(capacity=4, active=3, queued=2, pages_free=9, transfers=1))
    metrics.set_slots(used=3, queued=2)
    metrics.admitted(0.3)
    metrics.refused("queue_full")
    metrics.transfer_finished("done")
    metrics.step(0.01, tokens=3)
    assert {
        'pdserve_leases{state="used"} 3.0',
        'pdserve_leases{state="capacity"} 4.0',
        "pdserve_slots_used 3.0",
        "pdserve_slots_queued 2.0",
        'pdserve_kv_pages{state="free"} 9.0',
        "pdserve_transfers_running 1.0",
        "pdserve_admission_wait_seconds_sum 0.3",
        'pdserve_refusals_total{reason="queue_full"} 1.0',
        'pdserve_transfers_total{outcome="done"} 1.0',
        "pdserve_steps_total 1.0",
        "pdserve_step_seconds_sum 0.01",
        "pdserve_tokens_generated_total 3.0",
    } <= set(lines(metrics))


@pytest.mark.parametrize(("value", "gauge"), [(None, "0.0"), ("3", "3.0"), ("x", "0.0")])
def test_restarts_come_from_the_supervisor(monkeypatch, value, gauge):
    monkeypatch.delenv("PDSERVE_RESTARTS", raising=False)
    if value is not None:
        monkeypatch.setenv("PDSERVE_RESTARTS", value)
    assert f"pdserve_restarts {gauge}" in lines(WorkerMetrics())
