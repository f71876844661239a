"""Layouts, the recommendation, and the tail of many shards."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from typer.main import get_command

from helpers.cli import failure, knnlm
from knnlm.cli.app import app
from knnlm.datastore.codecs import parse_storage
from knnlm.errors import ParameterError
from knnlm.plan.constants import Constants, load_constants, parse_constants, user_constants
from knnlm.plan.cost import build_on_gpu, search_on_gpu
from knnlm.plan.layout import Hardware, make_plan, recommend
from knnlm.plan.sizes import ModelShape, TextShape
from knnlm.plan.tail import slowest_of, slowest_quantile, tail_table
from knnlm.plan.text import as_markdown, as_record, plan_sections, quantity, size
from knnlm.progress import duration

MODEL = ModelShape("bundled", 576, 134_000_000, 106_000_000, 30, 576)
CLUSTER = Hardware(nodes=4, cores=64, ram=512e9, gpus=8, gpu_memory=80e9, disk_bytes_per_second=2e9)


@pytest.fixture
def constants(monkeypatch, tmp_path) -> Constants:
    """The package's own, whatever was measured on this machine."""
    monkeypatch.setenv("KNNLM_CACHE", str(tmp_path))
    return load_constants()[0]


def test_slowest_of_uniform_latencies_is_the_closed_form():
    sample = (np.arange(20_000) + 0.5) / 20_000
    for shards in (1, 8, 64):
        found = slowest_of(sample, shards, rounds=20_000)
        assert found.mean() == pytest.approx(shards / (shards + 1), abs=0.005)
        assert np.quantile(found, 0.5) == pytest.approx(0.5 ** (1 / shards), abs=0.005)


def test_slowest_of_exponential_latencies_is_the_harmonic_number():
    sample = -np.log1p(-(np.arange(200_000) + 0.5) / 200_000)
    for shards in (1, 8, 64):
        harmonic = sum(1 / number for number in range(1, shards + 1))
        assert slowest_of(sample, shards, rounds=20_000).mean() == pytest.approx(harmonic, rel=0.03)


def test_fastest_replica_of_exponential_latencies_has_the_sum_of_the_rates():
    sample = -np.log1p(-(np.arange(200_000) + 0.5) / 200_000)
    assert slowest_of(sample, 1, rounds=20_000, replicas=4).mean() == pytest.approx(0.25, rel=0.03)


def test_quantile_without_a_simulation_is_that_of_a_simulation():
    sample = np.random.default_rng(3).lognormal(size=400)
    for shards in (1, 8, 64, 512):
        simulated = slowest_of(sample, shards, rounds=20_000)
        for quantile in (0.5, 0.9, 0.99):
            ordered = np.sort(sample)
            exact = slowest_quantile(sample, shards, quantile)
            near = np.quantile(simulated, [max(0, quantile - 0.01), min(1, quantile + 0.005)])
            assert near[0] <= exact <= near[1] or exact == ordered[-1]


def test_tail_grows_with_the_shards_and_is_deterministic():
    sample = np.random.default_rng(0).lognormal(size=300)
    rows = tail_table(sample, (1, 8, 64, 512))
    for place in range(3):
        column = [row.quantiles[place] for row in rows]
        assert column == sorted(column)
    assert rows == tail_table(sample, (1, 8, 64, 512))
    with pytest.raises(ParameterError):
        slowest_of([], 8)


def test_more_tokens_than_gpus_hold_are_split_over_gpus(constants):
    plan = make_plan(TextShape(3e9), MODEL, CLUSTER, constants, queries_per_second=200)
    half, int8 = plan.layouts[:2]
    per_gpu = 80e9 * 0.8 / (576 * 2 + 36)
    assert half.shards == math.ceil(3e9 / per_gpu)
    assert (half.fits, half.limit) == (False, "GPU memory")
    assert half.nodes_needed == math.ceil(half.shards / 8)
    assert int8.fits
    assert int8.shards == math.ceil(3e9 / (80e9 * 0.8 / (576 + 36)))
    assert plan.recommended is int8


# Queries per second on one H200, from docs/background/results.md: millions of keys, key type, batch.
H200 = {
    (20, "float16", 1): 166,
    (20, "float16", 16): 2599,
    (20, "float16", 32): 4844,
    (20, "float16", 256): 16_937,
    (20, "float16", 1024): 19_912,
    (20, "float16", 4096): 19_523,
    (1, "float16", 1): 816,
    (1, "float16", 1024): 113_900,
    (1, "float16", 4096): 123_883,
    (100, "int8", 1): 53,
    (100, "int8", 16): 805,
    (100, "int8", 32): 1562,
    (100, "int8", 256): 5744,
    (100, "int8", 1024): 6066,
    (100, "int8", 4096): 6242,
}


@pytest.mark.parametrize("row", H200, ids=str)
def test_search_on_the_gpu_of_the_package_is_predicted(constants, row):
    millions, key_dtype, queries = row
    seconds = search_on_gpu(millions * 1e6, 576, constants, queries=queries, key_dtype=key_dtype).seconds
    assert queries / seconds == pytest.approx(H200[row], rel=0.25)


def test_build_on_the_gpu_of_the_package_is_predicted(constants):
    text = TextShape(15.7e6, 15_700.0)  # 999 court opinions, in 31.6 s
    made = build_on_gpu(text, MODEL, parse_storage("float16"), constants)
    assert made.seconds == pytest.approx(31.6, rel=0.25)


def test_queries_make_replicas_and_replicas_need_hardware(constants):
    text = TextShape(1e7)
    few = make_plan(text, MODEL, CLUSTER, constants, queries_per_second=10).layouts[0]
    assert (few.shards, few.replicas, few.fits) == (1, 1, True)
    rate = few.queries_per_second
    more = make_plan(text, MODEL, CLUSTER, constants, queries_per_second=3.5 * rate).layouts[0]
    assert (more.replicas, more.fits) == (4, True)
    assert more.queries_per_second == pytest.approx(4 * rate)
    most = make_plan(text, MODEL, CLUSTER, constants, queries_per_second=1000 * rate).layouts[0]
    assert (most.fits, most.limit) == (False, "GPU time")


def test_recommendation_prefers_precise_keys_unless_they_are_slow(constants):
    layouts = make_plan(TextShape(1e8), MODEL, CLUSTER, constants).layouts
    first, second, *_ = (replace(layout, limit="", latency_p99=1.0) for layout in layouts)
    assert recommend([first, second]) is first
    slow = replace(first, latency_p99=2.1)
    assert recommend([slow, second]) is second
    assert recommend([replace(slow, limit="memory"), replace(second, limit="memory")]) is None


def test_too_large_a_text_is_a_plan_that_says_what_it_needs(constants):
    plan = make_plan(TextShape(1e15), MODEL, Hardware(ram=1e9), constants, origin="a test")
    assert plan.recommended is None
    shown = as_markdown(plan_sections(plan))
    assert "none fits; the smallest needs" in shown
    assert as_record(plan)["recommended"] is None


@pytest.mark.parametrize("tokens", [1.0, 1e3, 1e6, 1.03e8, 3e9, 1.4e12, 1e15])
@pytest.mark.parametrize("hardware", [Hardware(), CLUSTER, replace(CLUSTER, gpus=0, nodes=512)], ids=str)
def test_every_plan_has_finite_figures(constants, tokens, hardware):
    plan = make_plan(TextShape(tokens), MODEL, hardware, constants, queries_per_second=200)
    record = json.loads(json.dumps(as_record(plan), allow_nan=False))
    assert record["formats"][1]["storage"] == "float16"
    for row in record["formats"]:
        assert row["build_seconds"] > 0
    for layout in record["layouts"]:
        assert layout["shards"] * layout["keys_per_shard"] == pytest.approx(tokens)
        assert 0 < layout["latency"] <= layout["latency_p99"]
    assert len(record["assumptions"]) >= 8


def test_build_is_divided_among_nodes_and_cores(constants):
    one, two = (
        make_plan(TextShape(1e9), MODEL, Hardware(nodes=nodes, cores=2), constants).formats[1] for nodes in (1, 2)
    )
    cores = make_plan(TextShape(1e9), MODEL, Hardware(cores=4), constants).formats[1]
    assert two.build.seconds == pytest.approx(one.build.seconds / 2, rel=1e-3)
    assert cores.build.seconds == pytest.approx(one.build.seconds / 2)


def test_slow_disk_is_the_bottleneck_of_what_is_not_in_memory(constants):
    slow = Hardware(nodes=1, ram=8e9, cores=64, disk_bytes_per_second=1e8)
    layout = make_plan(TextShape(1e9), MODEL, slow, constants, queries_per_second=0.001).layouts[0]
    assert layout.one_query.bottleneck == "reading the disk"


def test_hardware_must_exist():
    for wrong in (
        {"nodes": 0},
        {"cores": 0},
        {"ram": 0.0},
        {"gpus": -1},
        {"disk_bytes_per_second": 0.0},
        {"ram": math.inf},
    ):
        with pytest.raises(ParameterError):
            Hardware(**wrong)


def test_plan_needs_a_text_and_queries(constants):
    for tokens, rate in ((0.0, 1.0), (math.nan, 1.0), (1e16, 1.0), (1e6, 0.0), (1e6, math.inf)):
        with pytest.raises(ParameterError):
            make_plan(TextShape(tokens), MODEL, Hardware(), constants, queries_per_second=rate)


def test_constants_survive_a_file(constants, tmp_path):
    constants.save(tmp_path / "new" / "c.json")
    again, origin = load_constants(tmp_path / "new" / "c.json")
    assert again == constants
    assert origin == str(tmp_path / "new" / "c.json")
    constants.save(user_constants())
    assert load_constants()[1] == str(user_constants())


@pytest.mark.parametrize(
    "change",
    [
        lambda record: record.update(format=2),
        lambda record: record.pop("disk"),
        lambda record: record["cpu"].pop("scan"),
        lambda record: record["cpu"].update(scan=-1),
        lambda record: record["cpu"].update(scan="fast"),
        lambda record: record["cpu"].update(scan=float("nan")),
        lambda record: record["models"].update(m={"cpu": 0}),
        lambda record: record.update(latencies=[]),
        lambda record: record.update(machine=None),
        lambda record: record.update(cpu=[]),
    ],
)
def test_damaged_constants_are_an_error(constants, change):
    record = json.loads(constants.as_json())
    change(record)
    with pytest.raises(ParameterError, match="knnlm plan --measure"):
        parse_constants(json.dumps(record), "c.json")
    with pytest.raises(ParameterError, match="not a file of constants"):
        parse_constants("[", "c.json")


def test_numbers_are_written_with_three_digits_and_a_unit():
    assert [size(count) for count in (12, 1500, 3.456e12, 1e15)] == ["12 B", "1.5 KB", "3.46 TB", "1 PB"]
    assert [quantity(count) for count in (12, 1.03e8, 1.4e12)] == ["12", "103M", "1.4T"]
    seconds = (2e-6, 0.0123, 1.0, 90, 5400, 1e6, 1e9)
    shown = ["2 µs", "12.3 ms", "1 s", "1.5 min", "1.5 h", "11.6 days", "31.7 years"]
    assert [duration(each) for each in seconds] == shown


def test_command_prints_tables_json_and_a_plot(capfd, model_folder, constants, tmp_path):
    constants.save(tmp_path / "c.json")
    options = ["--tokens", "3e9", "--model", model_folder, "--constants", tmp_path / "c.json"]
    options += ["--nodes", "4", "--gpus", "8", "--gpu-memory", "80", "--ram", "512", "--disk-gbps", "2"]
    code, out, _ = knnlm(capfd, "plan", *options, "--queries-per-second", "200", "--plot", tmp_path / "plan.png")
    assert code == 0
    for expected in ("Key formats", "Recommended", "bottleneck of the build", "Assumptions", "codes32", "4 nodes"):
        assert expected in out
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    code, out, _ = knnlm(capfd, "plan", *options, "--json")
    record = json.loads(out)
    assert record["tokens"] == 3e9
    assert record["model"]["width"] == 32
    assert record["hardware"]["ram"] == 512e9
    assert [row["shards"] for row in record["tail"]] == [8, 32, 128, 512]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--tokens", "inf"), "number of tokens must be from 1 to 1e+15, not inf"),
        (("--document-tokens", "1e16"), "number of tokens of a document must be from 1 to 1e+15"),
        (("--queries-per-second", "-1"), "Queries per second must be above 0"),
        (("--ram", "0"), "The memory must be a finite number above 0, not 0 GB"),
        (("--gpu-memory", "inf"), "memory of a GPU must be"),
        (("--disk-gbps", "-2"), "speed of the disk must be a finite number above 0, not -2 GB"),
        (("--device", "tpu"), "--device is for --measure only"),
        (("--plot", "plan.svg"), "ends in .png, not plan.svg"),
        (("--constants", "missing.json"), "cannot be read (No such file or directory)"),
    ],
)
def test_command_names_the_option_that_is_wrong(options, message, capfd, model_folder):
    assert message in failure(capfd, "plan", "--tokens", "1e6", "--model", model_folder, *options)


def commands(constants, hardware, *, tokens=1e6, model=MODEL, **options):
    """The commands that a plan ends with, as the command line reads them."""
    plan = make_plan(TextShape(tokens), model, hardware, constants, **options)
    section = next(section for section in plan_sections(plan) if section.title == "Recommended")
    found = dict(section.rows)
    for line in (found["build"], found["serve"]):
        for command in line.split(" && "):
            words = command.replace("STORE", "a.store").replace("ADDRESS", "10.0.0.1:6379").split()
            get_command(app).commands[words[1]].make_context(words[1], words[2:])
    return plan.recommended, found["build"], found["serve"]


def test_plan_ends_with_the_commands_of_its_layout(constants):
    one = Hardware(cores=2, ram=64e9)
    assert commands(constants, one, tokens=10_000, model=replace(MODEL, name="m"))[1:] == (
        "knnlm build TEXT --out STORE --model m --key-format float16",
        "knnlm serve STORE",
    )
    assert commands(constants, one)[1] == ("knnlm build TEXT --out STORE --key-format float16 && knnlm index STORE")
    assert commands(constants, Hardware(gpus=1))[2] == "knnlm serve STORE --device cuda"
    layout, build, serve = commands(constants, CLUSTER, tokens=3e9, queries_per_second=200)
    assert build.endswith(f"--key-format float16 --ray ADDRESS --shards {layout.shards}")
    assert serve.startswith("knnlm serve STORE --ray ADDRESS --shard-gpus 1 --key-dtype int8")
    layout, build, serve = commands(
        constants, Hardware(nodes=8, cores=64, ram=512e9), tokens=1e9, queries_per_second=1e4
    )
    assert build.endswith(f"--ray ADDRESS --shards {layout.shards} --index auto")
    assert layout.replicas > 1
    assert serve == f"knnlm serve STORE --ray ADDRESS --shard-replicas {layout.replicas}"


def test_quantiles_that_are_the_longest_measured_latency_are_marked(constants):
    constants = replace(constants, latencies=(0.9, 1.0, 1.0, 1.1, 2.0))
    plan = make_plan(TextShape(3e9), MODEL, CLUSTER, constants, queries_per_second=200)
    section = next(section for section in plan_sections(plan) if section.title.startswith("Slowest"))
    assert plan.recommended is not None
    longest = 2.0 * plan.recommended.one_query.seconds
    for row, shown in zip(plan.tail, section.rows, strict=True):
        for each, cell in zip(row.quantiles, shown[1:], strict=True):
            assert cell.startswith("≥ ") == (each == pytest.approx(longest))
    assert [cell.startswith("≥") for cell in section.rows[-1][1:]] == [True] * 3


def test_command_explains_what_is_missing(capfd, tmp_path, monkeypatch):
    monkeypatch.setenv("KNNLM_CACHE", str(tmp_path))
    assert "--tokens" in failure(capfd, "plan")
    assert "no such folder" in failure(capfd, "plan", "--tokens", "1e6", "--model", tmp_path / "none")
    (tmp_path / "bad.json").write_text("{}")
    message = failure(capfd, "plan", "--tokens", "1e6", "--constants", tmp_path / "bad.json")
    assert "bad.json" in message
