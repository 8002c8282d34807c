"""fit: the listed layouts fit and are valid, the ranking is correct, and the values file gives the same layout."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from support.commandline import CommandResult, run_in_process, run_many
from support.memory import total_bytes
from tokenmill.errors import RequestError
from tokenmill.fit.fit import Machines, estimate_cost, search_layouts
from tokenmill.fit.layout import find_argument_errors, find_runtime_errors
from tokenmill.fit.memory import GIB
from tokenmill.fit.options import LayoutConstraints
from tokenmill.fit.plan import GRACE_SECONDS
from tokenmill.fit.storage import CheckpointSchedule, parse_storage
from tokenmill.models.model import load_preset, model_from_fields, preset_names
from tokenmill.train.settings import Settings, derive_settings

ROOT = Path(__file__).parents[2]
H100 = ["--gpu-memory", "80"]


def fit(*arguments: Any) -> CommandResult:
    return run_in_process("fit", *arguments)


def planned(*arguments: Any) -> dict[str, Any]:
    ended = fit(*arguments, "--json")
    assert ended.code == 0, ended.err
    result: dict[str, Any] = ended.result
    return result


def only(*arguments: Any) -> dict[str, Any]:
    (layout,) = planned(*arguments)["layouts"]
    return dict(layout)


def refused(*arguments: Any) -> str:
    ended = fit(*arguments)
    assert (ended.code, ended.out) == (2, "")
    return ended.err


# -- the search


@pytest.mark.slow
@settings(max_examples=40)
@given(
    st.sampled_from(preset_names()),
    st.sampled_from([1, 2, 4, 8, 12, 24, 64, 256]),
    st.sampled_from([24.0, 80.0, 141.0]),
    st.sampled_from([None, "none", "selective", "full"]),
    st.sampled_from([None, 1, 2]),
)
def test_listed_layouts_are_valid_and_fit_and_are_sorted(
    name: str, gpus: int, memory: float, recompute: str | None, micro: int | None
) -> None:
    machines = Machines(gpus, min(8, gpus) if gpus != 12 else 4, memory)
    search = search_layouts(
        load_preset(name), machines, 16 * gpus, LayoutConstraints(recompute=recompute, micro_batch=micro)
    )
    for fit_, price in search.fits:
        layout = fit_.layout
        assert find_argument_errors(layout) == find_runtime_errors(layout) == []
        assert fit_.total == pytest.approx(total_bytes(layout)) and fit_.total <= machines.usable_bytes
        assert recompute in (None, layout.recompute) and micro in (None, layout.micro_batch)
        assert layout.tensor <= machines.gpus_per_node and layout.sequence_parallel == (layout.tensor > 1)
        assert price.total == pytest.approx(1 + sum(price.parts.values())) and min(price.parts.values()) >= 0
    totals = [price.total for _, price in search.fits]
    assert totals == sorted(totals, key=lambda total: round(total, 4))
    assert bool(search.fits) or search.nearest is not None
    kinds = {(f.layout.tensor, f.layout.pipeline, f.layout.context, f.layout.expert) for f, _ in search.fits}
    larger = search_layouts(
        load_preset(name),
        Machines(gpus, machines.gpus_per_node, 2 * memory),
        16 * gpus,
        LayoutConstraints(recompute=recompute),
    )
    assert kinds <= {(f.layout.tensor, f.layout.pipeline, f.layout.context, f.layout.expert) for f, _ in larger.fits}


def test_recomputation_depends_on_memory() -> None:
    roomy = planned("--model", "13b", "--gpus", 64, "--gpu-memory", 141)["layouts"][0]
    tight = only("--model", "13b", "--gpus", 64, "--gpu-memory", 16, "--tensor", 4, "--pipeline", 4, "--micro-batch", 4)
    assert (roomy["recompute"], tight["recompute"]) == ("none", "full")
    parts = tight["cost_parts"]
    assert parts["recompute"] == pytest.approx(1 / 3, rel=0.1)


def test_known_recipes_are_near_the_top() -> None:
    """NeMo's recipes for H100: Llama 3 8B on 8 GPUs with context 2, GPT-3 175B with tensor 4 x pipeline 8."""
    llama = planned("--model", "llama3-8b", "--gpus", 8, *H100, "--top", 3)["layouts"]
    assert (1, 1, 2) in [(layout["tensor"], layout["pipeline"], layout["context"]) for layout in llama]
    gpt = planned("--model", "175b", "--gpus", 1024, *H100, "--top", 3)["layouts"]
    assert (4, 8) in [(layout["tensor"], layout["pipeline"]) for layout in gpt]


def test_batch_arithmetic_matches_the_layout() -> None:
    result = planned("--model", "30b", "--gpus", 128, *H100, "--global-batch", 768, "--top", 50)
    assert result["global_batch"] == 768 and result["tokens_per_iteration"] == 768 * 2048
    for layout in result["layouts"]:
        model_parallel = layout["tensor"] * layout["pipeline"] * layout["context"]
        assert layout["data_parallel"] == 128 // model_parallel
        assert layout["micro_batch"] * layout["micro_batches"] * layout["data_parallel"] == 768
        stages, turns = layout["pipeline"], layout["micro_batches"] * layout["virtual_stages"]
        assert layout["bubble"] == pytest.approx((stages - 1) / (turns + stages - 1))
        parts = ("weight_bytes", "gradient_bytes", "optimizer_bytes", "activation_bytes")
        assert layout["total_bytes"] == pytest.approx(sum(layout[part] for part in parts))


def test_virtual_stages_shorten_the_bubble_and_cost_memory() -> None:
    arguments = ["--model", "175b", "--gpus", 256, *H100, "--tensor", 8, "--pipeline", 16, "--global-batch", 256]
    plain, virtual = only(*arguments), only(*arguments, "--layers-per-virtual-stage", 2)
    assert virtual["virtual_stages"] == 3
    assert virtual["bubble"] < plain["bubble"] and virtual["cost_parts"]["bubble"] < plain["cost_parts"]["bubble"]
    assert virtual["activation_bytes"] > plain["activation_bytes"]
    assert virtual["cost_parts"]["stages"] == pytest.approx(3 * plain["cost_parts"]["stages"])


def test_tensor_parallelism_across_nodes_costs_more() -> None:
    arguments = ["--model", "175b", "--gpus", 1024, *H100, "--pipeline", 8]
    run_in_process, across = only(*arguments, "--tensor", 8), only(*arguments, "--tensor", 16)
    assert across["cost_parts"]["tensor"] > 8 * run_in_process["cost_parts"]["tensor"]
    assert "tensor 16 is above the 8 GPUs of a node" in fit(*arguments, "--tensor", 16).out


def test_experts_are_ranked_by_traffic_between_nodes() -> None:
    result = planned("--model", "mixtral-8x7b", "--gpus", 64, *H100, "--top", 200)
    assert result["parameters"] == pytest.approx(46.7e9, rel=0.01)
    assert result["active_parameters"] == pytest.approx(12.9e9, rel=0.01)
    assert result["layouts"][0]["expert"] > 1
    machines = Machines(64, 8, 80)
    constraints = LayoutConstraints(pipeline=4, expert=8, expert_tensor=1, micro_batch=1)
    ((near, _),) = search_layouts(load_preset("mixtral-8x7b"), machines, 1024, constraints).fits
    # With 4 GPUs per node, the eight experts are on two nodes.
    assert estimate_cost(near.layout, 4).expert > 5 * estimate_cost(near.layout, 8).expert


def test_small_micro_batches_cost_small_models_more() -> None:
    arguments = ["--model", "125m", "--gpus", 8, *H100, "--tensor", 1, "--pipeline", 1]
    single, sixteen = only(*arguments, "--micro-batch", 1), only(*arguments, "--micro-batch", 16)
    assert single["cost_parts"]["small"] == pytest.approx(16 * sixteen["cost_parts"]["small"])
    assert single["cost"] > sixteen["cost"]


def test_a_long_sequence_is_cut_by_context_parallelism() -> None:
    result = planned("--model", "llama3-8b", "--gpus", 64, *H100, "--seq-length", 131072, "--global-batch", 64)
    assert result["model"] == "llama3-8b (changed)"
    assert result["tokens_per_iteration"] == 64 * 131072
    assert result["layouts"][0]["context"] >= 4


@pytest.mark.slow
def test_large_searches_are_fast() -> None:
    big = ["--gpus", 16384, "--gpu-memory", 80, "--top", 1]
    for name in ("175b", "mixtral-8x7b"):
        (layout,) = planned("--model", name, *big)["layouts"]
        assert layout["data_parallel"] > 1
    search = search_layouts(
        load_preset("mixtral-8x7b", seqLength=131072), Machines(16384, 8, 80), 16384, LayoutConstraints()
    )
    assert search.layouts_tried < 20_000  # 25 us each
    search = search_layouts(
        load_preset("125m", numLayers=10**10), Machines(10**12, 10**12, 80), 10**12, LayoutConstraints()
    )
    assert not search.fits and search.layouts_tried < 500_000


def test_nothing_heavy_is_imported() -> None:
    ended, modules = run_many([["fit", "--model", "175b", "--gpus", "128", "--gpu-memory", "80"]])
    assert ended[0].code == 0
    assert not {"numpy", "torch", "transformers", "huggingface_hub", "pyarrow", "requests"} & modules


# -- one layout


def test_golden_layout_takes_the_known_memory() -> None:
    layout = only(
        *["--model", "175b", "--gpus", 512, *H100, "--tensor", 8, "--pipeline", 16],
        *["--recompute", "selective", "--micro-batch", 1],
    )
    state_bytes = sum(layout[name] for name in ("weight_bytes", "gradient_bytes", "optimizer_bytes"))
    assert state_bytes / GIB == pytest.approx(12.05, abs=0.01)
    assert layout["activation_bytes"] / GIB == pytest.approx(9.6, abs=0.05)
    assert (layout["data_parallel"], layout["sequence_parallel"]) == (4, True)


def test_layout_that_does_not_fit_reports_the_excess() -> None:
    message = refused(
        *["--model", "175b", "--gpus", 512, *H100, "--tensor", 4, "--pipeline", 4],
        *["--recompute", "none", "--micro-batch", 2],
    )
    assert "this layout of 175b does not fit 512 GPUs of 80 GiB, of which 75.2 GiB are usable" in message
    assert (
        "tensor 4 x pipeline 4, micro-batch 2, recomputation none, and needs" in message
        and "GiB more (weights" in message
    )
    for change in ("a search over all sizes", "--micro-batch 1", "--recompute full", "GPUs of at least"):
        assert change in message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tensor", 5], "512 GPUs are not divisible by tensor 5 x pipeline 1 x context 1 = 5: 512 / 5 leaves 2 over"),
        (["--pipeline", 64], "96 layers are not divisible by pipeline 64"),
        (["--expert", 2], "expert parallel 2 needs a model with experts"),
        (["--expert-tensor", 2], "expert tensor 2 needs a model with experts"),
        (["--context", 64, "--seq-length", 2080], "2080 is not divisible by 2 x context 64 = 128"),
        (
            ["--tensor", 8, "--global-batch", 100],
            "global batch 100 is not divisible by micro-batch 1 x data parallel 64",
        ),
        (
            ["--tensor", 8, "--pipeline", 8, "--layers-per-virtual-stage", 6, "--global-batch", 48],
            "6 micro-batches (global batch 48 / (micro-batch 1 x data parallel 8)) are not divisible by pipeline 8",
        ),
    ],
)
def test_invalid_layout_reports_the_equation(arguments: list[Any], message: str) -> None:
    assert message in refused("--model", "175b", "--gpus", 512, *H100, *arguments)


# -- nothing fits


def test_no_fit_names_the_nearest_layout_and_changes() -> None:
    message = refused("--model", "175b", "--gpus", 16, *H100)
    assert (
        "no layout of 175b fits 16 GPUs of 80 GiB, of which 75.2 GiB are usable: the nearest is tensor 8 x pipeline 2"
        in message
    )
    assert "recomputation full" in message and "GiB more (weights" in message
    assert "GPUs of at least" in message
    (enough,) = [int(word.split()[0]) for word in message.split("; ") if word.strip().endswith(" GPUs")]
    assert planned("--model", "175b", "--gpus", enough, *H100)["fitting"] > 0


def test_indivisible_global_batch_reports_the_equation() -> None:
    message = refused("--model", "13b", "--gpus", 1024, *H100, "--global-batch", 7)
    assert "every layout of 13b" in message and "global batch 7 is not divisible by" in message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "13b", "--gpus", 12, *H100], "12 GPUs do not fill nodes of 8 GPUs: 12 / 8 leaves 4"),
        (["--model", "176b", "--gpus", 8, *H100], "unknown model '176b'; choose one of 125m"),
        (["--model", "custom", "--gpus", 8, *H100], "--custom FILE"),
        (["--model", "13b", "--gpus", 8, *H100, "--set", "layers=2"], "unknown field 'layers'"),
        (["--model", "13b", "--gpus", 8, *H100, "--set", "numLayer=2"], "did you mean numLayers?"),
        (["--model", "13b", "--gpus", 8, *H100, "--set", "numLayers"], "specify FIELD=VALUE"),
        (["--model", "13b", "--gpus", 8, *H100, "--set", "numLayers=two"], "numLayers=two: Expected `int`"),
        (["--model", "13b", "--gpus", 8, *H100, "--set", "numLayers=0"], "numLayers is 0: it must be above 0"),
        (["--model", "13b", "--gpus", 8, *H100, "--storage", "tape:3"], "unknown back end 'tape'"),
        (["--model", "13b", "--gpus", 8, *H100, "--storage", "amlfs-125"], "specify its capacity in TiB"),
        (["--model", "13b", "--gpus", 8, *H100, "--storage", "nfs:fast"], "specify its network in Gbit/s"),
        (["--model", "13b", "--gpus", 8, *H100, "--storage", "blob:-1"], "a number above 0"),
        (["--model", "13b", "--gpus", 8, *H100, "--storage", "blob", "--write-bandwidth", 1], "remove one of them"),
        (["--model", "13b", "--gpus", 8, *H100, "--storage", "fsx-250:24", "--capacity", 3], "remove --capacity"),
        (["--model", "13b", "--gpus", 8, *H100, "--data", "nan"], "--data"),
        (["--model", "13b", "--gpus", 8, *H100, "--data", "-1"], "--data"),
        (["--model", "13b", "--gpus", 8, *H100, "--keep", "1"], "--keep"),
        (["--model", "13b", "--gpus", 8, *H100, "--recompute", "some"], "none, selective, full"),
        (["--model", "13b", "--gpus", 8], "--gpu-memory"),
        (["--gpus", 8, *H100], "--model"),
        (["--model", "13b", "--gpus", 8, *H100, "--gpu-memory", "nan"], "--gpu-memory"),
        (["--model", "13b", "--gpus", 8, *H100, "--write-bandwidth", "inf"], "--write-bandwidth"),
        (["--model", "13b", "--gpus", 0, *H100], "--gpus"),
        (["--model", "13b", "--gpus", "9" * 400, *H100], "--gpus"),
        (["--model", "13b", "--gpus", 8, *H100, "--seq-length", "9" * 400], "--seq-length"),
        (["--model", "13b", "--gpus", 8, *H100, "--set", f"hiddenSize={'9' * 400}"], "at most 1099511627776"),
        (["--model", "13b", "--gpus", 8, *H100, "--set", "hiddenDropout=nan"], "hiddenDropout is nan: it must be"),
        (["--model", "13b", "--gpus", 8, *H100, "--set", "learningRate=-1"], "learningRate is -1.0: it must be above"),
        (["--model", "13b", "--gpus", 8, *H100, "--set", "learningRate=0"], "learningRate is 0.0: it must be above"),
        (["--model", "13b", "--gpus", 8, "--gpu-memory", "1e308", "--json"], "--gpu-memory"),
        (["--model", "13b", "--gpus", 8, *H100, "--write-bandwidth", "1e300"], "--write-bandwidth"),
        (["--model", "13b", "--gpus", 8, *H100, "--peak-tflops", "1e308"], "--peak-tflops"),
        (["--model", "13b", "--gpus", 8, *H100, "--mtbf-node", "1e308"], "--mtbf-node"),
        (["--model", "13b", "--gpus", 8, *H100, "--mtbf-run", "6 weeks"], "write it as 90m, 6h or 10d"),
        (["--model", "13b", "--gpus", 8, *H100, "--mtbf-run", "30s"], "--mtbf-run"),
        (["--model", "13b", "--gpus", 8, *H100, "--restart-time", "0h"], "--restart-time"),
        (["--model", "13b", "--gpus", 8, *H100, "--mtbf-run", "6h", "--mtbf-node", "6h"], "contradicts --mtbf-node"),
        (["--model", "13b", "--gpus", 8, *H100, "--set", "numQueryGroups=7"], "not divisible by 7 query groups"),
    ],
)
def test_invalid_request_is_refused(arguments: list[Any], message: str) -> None:
    assert message in refused(*arguments)


# -- checkpoints


def bandwidth(storage: str) -> float:
    return parse_storage(storage).bytes_per_second


def test_storage_table_is_the_vendors() -> None:
    assert bandwidth("amlfs-125:16") == 2e9  # not the 64 GB/s of 512 TiB
    assert bandwidth("amlfs-40:480") == 19.2e9 and bandwidth("amlfs-500:512") == 256e9
    assert bandwidth("fsx-40:1.7578125") == pytest.approx(70.3e6, rel=0.001)  # on hard disks
    assert parse_storage("amlfs-125:16").capacity == 16 * 2**40 and parse_storage("blob").capacity is None
    assert bandwidth("fsx-250:24") == 6e9 and bandwidth("fsx-scratch:12") == 1.2e9
    assert bandwidth("blob") == 3.125e9 and bandwidth("blob:60") == 7.5e9 and bandwidth("nfs:100") == 12.5e9
    for wrong in ("amlfs-125:0", "amlfs-125:inf", "amlfs-125:nan", "amlfs-60:16", "", ":16", "nfs:1e-300", "nfs:1e300"):
        with pytest.raises(RequestError, match="--storage"):
            bandwidth(wrong)


def test_save_of_the_guides_175b_takes_twenty_minutes() -> None:
    result = planned("--model", "175b", "--gpus", 512, *H100, "--storage", "amlfs-125:16", "--mtbf-node", 6000)
    checkpoint = result["checkpoint"]
    assert checkpoint["bytes"] == pytest.approx(2.44e12, rel=0.01)
    assert checkpoint["write_seconds"] / 60 == pytest.approx(20.4, abs=0.1)
    assert checkpoint["save_interval_seconds"] == pytest.approx((2 * 1222.2 * 6000 * 3600 / 64) ** 0.5, rel=0.001)
    assert checkpoint["save_interval_iterations"] is None  # the step time is unknown


def test_a_measured_rate_sets_the_interval_and_the_lost_share(tmp_path: Path) -> None:
    arguments = ["--model", "llama3-8b", "--gpus", 64, *H100, "--peak-tflops", 989, "--write-bandwidth", 2]
    more = ["--iterations", 100_000, "--values", tmp_path / "fit.yaml"]
    node = planned(*arguments, "--mtbf-node", "2d")["checkpoint"]
    run = planned(*arguments, "--mtbf-run", "6h", *more)["checkpoint"]
    assert node == run == planned(*arguments, "--mtbf-run", "360m")["checkpoint"]
    assert (run["node_hours"], run["run_hours"]) == (48, 6)
    interval = (2 * run["write_seconds"] * 6 * 3600) ** 0.5
    assert run["save_interval_seconds"] == pytest.approx(interval)
    assert run["lost_share"] == pytest.approx(run["write_seconds"] / interval + interval / 2 / (6 * 3600))
    values = yaml.safe_load((tmp_path / "fit.yaml").read_text())
    assert values["training"]["saveInterval"] == run["save_interval_iterations"]
    restarts = planned(*arguments, "--mtbf-run", "6h", "--restart-time", "15m")["checkpoint"]
    assert restarts["lost_share"] == pytest.approx(run["lost_share"] + 0.25 / 6)
    assert restarts["save_interval_seconds"] == run["save_interval_seconds"]
    harsh = planned(*arguments, "--mtbf-run", "1m", "--restart-time", "15m")["checkpoint"]
    assert harsh["lost_share"] == 1


def test_sufficient_storage_reports_free_space() -> None:
    arguments = ["--model", "175b", "--gpus", 512, *H100, "--storage", "amlfs-125:16", "--data", 1.18]
    result = planned(*arguments)
    size = result["checkpoint"]["bytes"]
    assert result["storage"] == {
        "capacity_bytes": 16 * 2**40,
        "data_bytes": 1.18e12,
        "checkpoints_kept": 2,
        "needed_bytes": pytest.approx(1.18e12 + 3 * size),
        "fits": True,
    }
    details = "2 checkpoints and the next save, 7.33 TB, and 1.18 TB of data; 9.08 TB are free"
    assert f"the storage has 17.59 TB: {details}" in fit(*arguments).out.splitlines()


def test_small_storage_reports_the_shortage(tmp_path: Path) -> None:
    file = tmp_path / "values.yaml"
    arguments = ["--model", "175b", "--gpus", 512, *H100, "--write-bandwidth", 10, "--values", file]
    arguments += ["--capacity", 10, "--data", 4.56, "--keep", 3]
    result = planned(*arguments)
    assert result["storage"]["fits"] is False
    (note,) = result["notes"]
    assert note == (
        "the storage is too small: 3 checkpoints and the next save, 9.78 TB, and 4.56 TB of data need 14.34 TB, 4.34 "
        "TB more than its 10.00 TB; use a larger storage, or lower --keep"
    )
    assert "4.34 TB are missing" in fit(*arguments).out
    assert yaml.safe_load(file.read_text())["checkpoint"] == {"keep": 3}
    assert planned(*arguments[:-2])["storage"]["needed_bytes"] < result["storage"]["needed_bytes"]


def test_data_without_a_capacity_is_added_up() -> None:
    arguments = ["--model", "175b", "--gpus", 512, *H100, "--storage", "blob", "--data", 1.18]
    assert planned(*arguments)["storage"] is None
    assert "1.18 TB of data, 8.51 TB in all; add --capacity to check it" in fit(*arguments).out


def test_slow_save_raises_the_grace_period(tmp_path: Path) -> None:
    """The default grace period is the chart's."""
    chart = yaml.safe_load((ROOT / "charts/megatron-training/values.yaml").read_text())
    assert chart["job"]["terminationGracePeriodSeconds"] == GRACE_SECONDS == 900
    file = tmp_path / "values.yaml"
    arguments = ["--model", "175b", "--gpus", 512, *H100, "--peak-tflops", 989, "--values", file]
    result = planned(*arguments, "--storage", "amlfs-125:16")
    grace = result["checkpoint"]["termination_grace_seconds"]
    assert grace > result["checkpoint"]["write_seconds"] + result["step_seconds"]
    assert yaml.safe_load(file.read_text())["job"] == {"terminationGracePeriodSeconds": grace}
    (note,) = result["notes"]
    assert note.startswith("a save takes 20 min 22 s and an iteration 16.5 s, but an evicted pod has only 15 min 00 s")
    assert f"set job.terminationGracePeriodSeconds={grace}" in note
    result = planned(*arguments, "--storage", "amlfs-125:64")
    assert result["notes"] == [] and "job" not in yaml.safe_load(file.read_text())


def test_storage_that_is_too_slow_is_reported() -> None:
    result = planned("--model", "175b", "--gpus", 4096, *H100, "--write-bandwidth", 0.01, "--mtbf-node", 6000)
    checkpoint = result["checkpoint"]
    assert checkpoint["save_interval_seconds"] == checkpoint["write_seconds"]
    assert any("it would mostly write checkpoints; use a faster storage" in note for note in result["notes"])


def test_step_time_gives_the_interval_in_iterations() -> None:
    result = planned(
        *["--model", "175b", "--gpus", 512, *H100, "--global-batch", 2048, "--write-bandwidth", 10],
        *["--peak-tflops", 989, "--mfu", 0.5],
    )
    work = 6 * 174e9 + 6 * 2048 * 12288 * 96  # for one token: six for each weight, and attention
    assert result["step_seconds"] == pytest.approx(work * 2048 * 2048 / (512 * 989e12 * 0.5), rel=0.01)
    assert result["mfu_assumed"] == 0.5
    checkpoint = result["checkpoint"]
    assert checkpoint["save_interval_iterations"] == round(checkpoint["save_interval_seconds"] / result["step_seconds"])


def test_interval_minimizes_the_lost_time() -> None:
    saving = CheckpointSchedule(2.4e12, 2e9, 6000, 64)

    def lost(seconds: float) -> float:
        return saving.write_seconds / seconds + seconds / 2 / saving.failure_seconds

    best = saving.interval_seconds
    assert saving.lost_share == pytest.approx(lost(best))
    assert lost(best) < min(lost(best * 0.9), lost(best * 1.1))
    assert CheckpointSchedule(2.4e12, 1e6, 1, 4096).interval_seconds == 2.4e6  # never shorter than the time of a save


# -- the values file


@pytest.mark.parametrize("name", preset_names())
def test_values_give_the_same_layout(tmp_path: Path, name: str) -> None:
    file = tmp_path / "values.yaml"
    result = planned(
        *["--model", name, "--gpus", 256, *H100, "--values", file],
        *["--write-bandwidth", 5, "--peak-tflops", 989],
    )
    values = yaml.safe_load(file.read_text())
    assert values["model"] == {"size": name}
    best = result["layouts"][0]
    interval = values["training"].pop("saveInterval")
    assert interval == min(1000, result["checkpoint"]["save_interval_iterations"])
    layout = _settings(values, msgspec.to_builtins(load_preset(name)), interval).layout()
    _assert_layout(layout, best)


def test_values_contain_the_complete_custom_model(tmp_path: Path) -> None:
    model = {"numLayers": 24, "hiddenSize": 1024, "numAttentionHeads": 16, "numExperts": 4, "addBiasLinear": False}
    (tmp_path / "model.yaml").write_text(yaml.safe_dump(model))
    file = tmp_path / "values.yaml"
    with (tmp_path / "model.yaml").open("a") as model_file:
        model_file.write("learningRate: 2e-4\n")  # a number for Helm, but text for PyYAML
    model["learningRate"] = 2e-4
    arguments = ["--model", "custom", "--gpus", 16, *H100, "--set", "normEpsilon=1e-6", "--values", file]
    result = planned(*arguments, "--custom", tmp_path / "model.yaml")
    values = yaml.safe_load(file.read_text())
    assert values["model"] == {"size": "custom", "custom": model | {"normEpsilon": 1e-6}}
    assert "saveInterval" not in values["training"]  # the storage is unknown
    _assert_layout(_settings(values, values["model"]["custom"]).layout(), result["layouts"][0])
    first = file.read_text()
    assert planned(*arguments, "--custom", file)["layouts"] == result["layouts"]  # fit reads its own output
    assert yaml.safe_load(file.read_text()) == yaml.safe_load(first)


def test_a_changed_preset_is_written_as_a_custom_model(tmp_path: Path) -> None:
    file = tmp_path / "values.yaml"
    planned("--model", "llama3-8b", "--gpus", 8, *H100, "--set", "numLayers=16", "--values", file)
    custom = yaml.safe_load(file.read_text())["model"]["custom"]
    fields = {
        name: getattr(load_preset("llama3-8b"), name) for name in ("ffn_hidden_size", "rotary_base", "learning_rate")
    }
    model = model_from_fields(custom, "written")
    assert model.num_layers == 16
    assert {name: getattr(model, name) for name in fields} == fields


def test_the_save_interval_stays_within_the_run(tmp_path: Path) -> None:
    file = tmp_path / "values.yaml"
    arguments = ["--model", "125m", "--gpus", 8, *H100, "--write-bandwidth", 5, "--peak-tflops", 989, "--values", file]
    assert planned(*arguments, "--iterations", 50)["checkpoint"]["save_interval_iterations"] > 1000
    training = yaml.safe_load(file.read_text())["training"]
    assert (training["iterations"], training["saveInterval"]) == (50, 50)
    planned(*arguments)
    assert yaml.safe_load(file.read_text())["training"]["saveInterval"] == 1000


@pytest.mark.slow
def test_default_batch_is_the_recipes(tmp_path: Path) -> None:
    """The file is used as a later -f: a default must not replace a value of values/models."""
    file = tmp_path / "values.yaml"
    for name in preset_names():
        recipe = yaml.safe_load((ROOT / f"values/models/{name}.yaml").read_text())["training"]
        arguments = ["--model", name, "--gpus", 8 * recipe["nodes"], *H100, "--values", file]
        result = planned(*arguments)
        batch = recipe["globalBatchSize"]
        assert result["global_batch"] == batch == yaml.safe_load(file.read_text())["training"]["globalBatchSize"]
        assert not any("global batch" in note for note in result["notes"])
    arguments = ["--model", "175b", "--gpus", 512, *H100, "--values", file]
    line = "global batch 1,536 sequences = 3,145,728 tokens per iteration (from values/models/175b.yaml)"
    assert line in fit(*arguments).out.splitlines()
    (note,) = planned(*arguments, "--global-batch", 8192)["notes"]
    rest = "pass this file with a later -f, and check the learning rate, which is for the recipe's batch"
    assert note == f"global batch 8,192 differs from 1,536 in values/models/175b.yaml: {rest}"
    assert f"# {note}" in file.read_text().splitlines()
    assert "8,192 sequences = 16,777,216 tokens per iteration\n" in fit(*arguments, "--global-batch", 8192).out


def test_indivisible_recipe_batch_is_replaced() -> None:
    arguments = ["--model", "13b", "--gpus", 96, *H100]
    result = planned(*arguments)
    assert result["global_batch"] == 16 * 96
    (note,) = result["notes"]
    assert note.startswith(
        "global batch 1,536 differs from 1,024 in values/models/13b.yaml, with which no layout fits: "
    )
    assert "tokens per iteration (assumed: 16 per GPU)\n" in fit(*arguments).out


def test_values_contain_the_gpu_options(tmp_path: Path) -> None:
    file = tmp_path / "values.yaml"
    arguments = ["--model", "125m", "--gpus", 8, "--gpu-memory", 79.6, "--values", file]
    planned(*arguments)
    assert yaml.safe_load(file.read_text())["gpu"] == {"memoryGib": 79.6}
    planned(*arguments, "--peak-tflops", 989)
    assert yaml.safe_load(file.read_text())["gpu"] == {"memoryGib": 79.6, "peakTflops": 989}


def test_unwritable_values_are_reported(tmp_path: Path) -> None:
    message = refused("--model", "13b", "--gpus", 8, *H100, "--values", tmp_path / "no" / "values.yaml")
    assert "values.yaml: No such file" in message


@pytest.mark.slow
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("numLayers: [", "is not valid YAML"),
        ("numLayers: 2026-99-99", "is not valid YAML"),
        ("[" * 100_000, "is not valid YAML"),
        ("- 1", "has no fields"),
        ("1: 2", "has no fields"),
        ("model: {size: 13b}", "has no fields"),
        ("numLayers: 2", "missing required field `hiddenSize`"),
        ("numLayers: 2\nhiddenSize: 64\nnumAttentionHeads: 4\nlayers: 3", "unknown field `layers`"),
        (None, "No such file or directory; check the path"),
    ],
)
def test_invalid_model_file_is_named(tmp_path: Path, content: str | None, message: str) -> None:
    file = tmp_path / "model.yaml"
    if content is not None:
        file.write_text(content)
    stderr = refused("--model", "custom", "--custom", file, "--gpus", 8, *H100)
    assert str(file) in stderr and message in stderr


def test_table_is_readable(tmp_path: Path) -> None:
    file = tmp_path / "values.yaml"
    arguments = ["--model", "375m", "--gpus", 16, *H100, "--storage", "nfs:10", "--peak-tflops", 989, "--top", 2]
    out = fit(*arguments, "--values", file).out
    lines = out.splitlines()
    assert lines[0] == "375m: 64 million parameters; sequences of 1,024 tokens"
    assert lines[1] == "note: 375m is the guide's name for it; it has 64 million parameters"
    start = lines.index("") + 1
    head, *rows = lines[start : lines.index("", start)]
    assert head.split()[:3] == ["TP", "PP", "VPP"] and len(rows) == 2
    assert {len(line) for line in (head, *rows)} == {len(head)}  # the columns are aligned
    for text in ("16 GPUs (2 x 8)", "512 sequences = 524,288 tokens", "cost 1.", "MFU of 40%", "checkpoint: 896.76 MB"):
        assert text in out, text
    assert "more layouts fit; show them with --top" in out and f"-f {file}" in out


def _settings(values: dict[str, Any], model: dict[str, Any], interval: int | None = None) -> Settings:
    content = {
        "release": "r",
        "model": model,
        "training": values["training"],
        "parallelism": values["parallelism"],
        "checkpoint": {"path": "/c", "saveInterval": interval},
        "dataset": {"path": "/d"},
    }
    return derive_settings(msgspec.convert(content, Settings))


def _assert_layout(layout: Any, best: dict[str, Any]) -> None:
    assert find_argument_errors(layout) == find_runtime_errors(layout) == []
    for name in (
        "tensor",
        "pipeline",
        "context",
        "expert",
        "virtual_stages",
        "micro_batch",
        "micro_batches",
        "recompute",
    ):
        assert getattr(layout, name) == best[name], name
    assert total_bytes(layout) == pytest.approx(best["total_bytes"])
