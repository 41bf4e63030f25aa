"""`fastgen bench` and `fastgen top` against a server, and their calculations."""

from __future__ import annotations

import json
import math
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from cluster.controlplane import free_ports
from engine.server.conftest import scripted as scripted
from engine.server.serving import Serving
from fastgen.api_client.http import RemoteError, RemoteServer
from fastgen.api_client.metrics import Interval, Scrape
from fastgen.bench.results import Answer, Results, percentile
from fastgen.bench.workload import Workload
from fastgen.commands import main

WORKLOAD = Workload(requests=50, clients=2, prompt_tokens=100, generation_tokens=20, deviation=0.3, seed=1)


def test_a_seed_gives_the_same_requests_with_lengths_near_their_means() -> None:
    asks = WORKLOAD.asks()
    assert asks == WORKLOAD.asks()
    lengths = [len(ask.text.split()) for ask in asks]
    assert 85 < sum(lengths) / len(lengths) < 115
    assert min(lengths) < 80
    assert max(lengths) > 120
    assert all(ask.max_tokens >= 1 for ask in asks)


def test_latencies_are_computed_from_arrivals() -> None:
    answers = (Answer(0.0, (1.0, 1.1, 1.3), 10, 3), Answer(0.5, (1.0, 1.4), 20, 2), Answer(0.6, (), 5, 0))
    results = Results(2.0, answers, ("refused",))
    first, gaps, per_token, whole = results.latencies()
    assert first.percentiles[0] == pytest.approx(0.75)
    assert gaps.most == pytest.approx(0.4)
    assert per_token.mean == pytest.approx((0.15 + 0.4) / 2)
    assert whole.most == pytest.approx(1.3)
    assert results.rate(results.prompt_tokens + results.generated_tokens) == 20.0
    assert Results(1.0, (), ()).latencies() == []


def test_a_percentile_lies_between_its_neighbours() -> None:
    assert percentile([1.0], 0.99) == 1.0
    assert percentile([0.0, 1.0, 2.0, 3.0], 0.5) == 1.5


def test_bench_measures_a_server(scripted: Serving, capsys: pytest.CaptureFixture[str]) -> None:
    load = ["--requests", "6", "--clients", "3", "--prompt-tokens", "20", "--generation-tokens", "5"]
    assert main.main(["bench", scripted.url, *load, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["answered"], found["failed"]) == (6, 0)
    assert found["generated_tokens"] >= 6
    assert main.main(["bench", f"{scripted.url}/v1", *load, "--deviation", "0"]) == 0
    said = capsys.readouterr().out
    for row in ("requests answered", "total tokens/s", "time to first token", "inter-token latency", "p99"):
        assert row in said


def test_bench_counts_requests_that_the_server_rejects(scripted: Serving, capsys: pytest.CaptureFixture[str]) -> None:
    load = ["--requests", "2", "--clients", "1", "--prompt-tokens", "2000", "--deviation", "0"]
    assert main.main(["bench", scripted.url, *load]) == 1
    assert "2 requests failed, the first: " in capsys.readouterr().err


def test_top_shows_the_interval_between_two_scrapes(scripted: Serving, capsys: pytest.CaptureFixture[str]) -> None:
    scripted.post("/v1/completions", {"prompt": "one two three", "max_tokens": 5})
    assert main.main(["top", scripted.url, "--once", "--interval", "0.1"]) == 0
    said = capsys.readouterr().out
    for row in ("smollm2", "budget fill", "KV cache", "requests", "backlog", "tokens/s", "between tokens"):
        assert row in said
    assert "of 256 tokens" in said


@pytest.mark.parametrize("command", [["top", "--once"], ["bench"]])
def test_an_unreachable_server_gives_a_one_line_error(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    name, *flags = command
    assert main.main([name, f"http://127.0.0.1:{free_ports(1)[0]}", *flags]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert "Connection refused" in said.err
    assert len(said.err.splitlines()) == 1


def test_an_error_contains_the_servers_message(scripted: Serving) -> None:
    remote = RemoteServer(scripted.url)
    with pytest.raises(RemoteError, match=r"404.*is not served here") as refused:
        remote.post("/v1/completions", {"model": "nothing", "prompt": "a"})
    assert refused.value.status == 404


@pytest.mark.parametrize(
    "url",
    ["ftp://somewhere", "http://", "http://host:abc", "host:99999", "http://host:0", "http://[::1", "http://[::x]:8000",
     "http://a host", "http://name:password@host"],
)  # fmt: skip
def test_an_invalid_url_gives_a_one_line_error(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["top", url]) == 1
    assert capsys.readouterr().err == f"fastgen: error: {url}: not a server URL: write it like http://127.0.0.1:8000\n"


def test_a_benchmark_of_a_server_without_models_ends_with_the_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"data": []}')

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as empty:
        Thread(target=empty.serve_forever, daemon=True).start()
        assert main.main(["bench", f"http://127.0.0.1:{empty.server_port}"]) == 1
        assert "the server lists no model; give a name with --served-model-name" in capsys.readouterr().err
        empty.shutdown()


@pytest.mark.parametrize("url", ["host", "host:", "https://host:443/v1", "http://[::1]:8000", "[::1]"])
def test_a_server_url_may_leave_out_scheme_and_port(url: str) -> None:
    assert RemoteServer(url).url == (url if "://" in url else f"http://{url}").removesuffix("/v1")


def test_the_server_of_something_else_is_named_as_one(capsys: pytest.CaptureFixture[str]) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<html>\ndata: go away\n")

        do_POST = do_GET

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as other:
        Thread(target=other.serve_forever, daemon=True).start()
        remote = RemoteServer(f"http://127.0.0.1:{other.server_port}")
        for ask in (remote.model_names, lambda: remote.post("/a", {}), lambda: list(remote.events("/a"))):
            with pytest.raises(RemoteError, match="the response has another form; check"):
                ask()
        assert main.main(["top", remote.url, "--once"]) == 1
        assert capsys.readouterr().err.splitlines()[-1] == (
            f"fastgen: error: {remote.url}/metrics: the response is not in Prometheus' text format; check that this is "
            "a FastGen server's URL"
        )
        other.shutdown()


@pytest.mark.parametrize("text", ["<html>", "a{", 'fastgen_x{="0.1"} 3', 'fastgen_x_bucket{le="b"} 3', "fastgen_x y"])
def test_text_of_another_format_is_not_a_scrape(text: str) -> None:
    with pytest.raises(ValueError, match=r"Prometheus' text format|to float"):
        Scrape.parse(text, 1.0)


def scrape_at(seconds: float, count: float, buckets: dict[str, float]) -> Scrape:
    lines = [f'fastgen_things_total{{model_name="m",kind="{kind}"}} {count * n}' for n, kind in ((1, "a"), (2, "b"))]
    lines += [f'fastgen_gap_seconds_bucket{{model_name="m",le="{le}"}} {n}' for le, n in buckets.items()]
    lines.append(f'fastgen_gap_seconds_count{{model_name="m"}} {buckets["+Inf"]}')
    lines.append('fastgen_gap_seconds_sum{model_name="m"} 1')
    text = "# TYPE fastgen_things counter\n" + "\n".join(lines[:2])
    return Scrape.parse(f"{text}\n# TYPE fastgen_gap_seconds histogram\n" + "\n".join(lines[2:]) + "\n", seconds)


def test_the_sum_of_two_servers_counts_what_each_did_also_after_a_restart() -> None:
    grown = Interval(scrape_at(0, 10, {"1": 4, "+Inf": 10}), scrape_at(2, 30, {"1": 4, "+Inf": 20}))
    restarted = Interval(scrape_at(0, 100, {"1": 50, "+Inf": 100}), scrape_at(2, 6, {"1": 6, "+Inf": 6}))
    both = Interval.sum_of([grown, restarted])
    assert both.seconds == 2
    for label in (None, "a", "b"):
        assert both.growth("things_total", label) == grown.growth("things_total", label) + restarted.growth(
            "things_total", label
        )
    assert both.after.value("things_total") == 3 * 36
    assert both.growth("gap_seconds_count") == 10 + 6
    # 6 of the 16 observations are at most 1.
    assert both.quantile("gap_seconds", 6 / 16) == pytest.approx(1.0)
    assert both.quantile("gap_seconds", 3 / 16) == pytest.approx(0.5)


def test_rates_and_quantiles_cover_only_the_interval() -> None:
    before = scrape_at(10.0, 5, {"0.1": 100, "0.2": 100, "+Inf": 100})
    after = scrape_at(12.0, 15, {"0.1": 100, "0.2": 110, "+Inf": 110})
    interval = Interval(before, after)
    assert after.model_name == "m"
    assert interval.rate("things_total") == 15.0
    assert interval.rate("things_total", "b") == 10.0
    assert interval.quantile("gap_seconds", 0.5) == pytest.approx(0.15)
    assert math.isnan(interval.quantile("nothing", 0.5))
    again = Interval(after, scrape_at(13.0, 1, {"0.1": 1, "0.2": 1, "+Inf": 1}))
    assert again.rate("things_total") == 3.0, "the server was started again"
