"""fit: what it lists fits and would be accepted, its ranking adds up, and its values make the layout that it names."""

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
from tokenmill.training.model import load_preset, model_from_fields, preset_names
from tokenmill.training.planner.fit import LayoutConstraints, Machines, estimate_cost, search_layouts
from tokenmill.training.planner.layout import find_argument_errors, find_runtime_errors
from tokenmill.training.planner.memory import GIB
from tokenmill.training.planner.plan import GRACE_SECONDS
from tokenmill.training.planner.storage import CheckpointSchedule, parse_storage
from tokenmill.training.settings import Settings, derive_settings

ROOT = Path(__file__).parents[2]
H100 = ["--gpu-memory", "80"]


def fit(*arguments: Any) -> CommandResult:
    return run_in_process("fit", *arguments)


def planned(*arguments: Any) -> dict[str, Any]:
    ended = fit(*arguments, "--json")
    assert ended.code == 0, ended.err
    found: dict[str, Any] = ended.result
    return found


def only(*arguments: Any) -> dict[str, Any]:
    (found,) = planned(*arguments)["layouts"]
    return dict(found)


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
def test_what_is_listed_is_accepted_and_fits_and_is_in_order(
    name: str, gpus: int, memory: float, recompute: str | None, micro: int | None
) -> None:
    machines = Machines(gpus, min(8, gpus) if gpus != 12 else 4, memory)
    found = search_layouts(
        load_preset(name), machines, 16 * gpus, LayoutConstraints(recompute=recompute, micro_batch=micro)
    )
    for fit_, price in found.fits:
        layout = fit_.layout
        assert find_argument_errors(layout) == find_runtime_errors(layout) == []
        assert fit_.total == pytest.approx(total_bytes(layout)) and fit_.total <= machines.usable_bytes
        assert recompute in (None, layout.recompute) and micro in (None, layout.micro_batch)
        assert layout.tensor <= machines.gpus_per_node and layout.sequence_parallel == (layout.tensor > 1)
        assert price.total == pytest.approx(1 + sum(price.parts.values())) and min(price.parts.values()) >= 0
    totals = [price.total for _, price in found.fits]
    assert totals == sorted(totals, key=lambda total: round(total, 4))
    assert bool(found.fits) or found.nearest is not None
    kinds = {(f.layout.tensor, f.layout.pipeline, f.layout.context, f.layout.expert) for f, _ in found.fits}
    more = search_layouts(
        load_preset(name),
        Machines(gpus, machines.gpus_per_node, 2 * memory),
        16 * gpus,
        LayoutConstraints(recompute=recompute),
    )
    assert kinds <= {(f.layout.tensor, f.layout.pipeline, f.layout.context, f.layout.expert) for f, _ in more.fits}


def test_no_more_is_recomputed_than_memory_asks_for() -> None:
    roomy = planned("--model", "13b", "--gpus", 64, "--gpu-memory", 141)["layouts"][0]
    tight = only("--model", "13b", "--gpus", 64, "--gpu-memory", 16, "--tensor", 4, "--pipeline", 4, "--micro-batch", 4)
    assert (roomy["recompute"], tight["recompute"]) == ("none", "full")
    parts = tight["cost_parts"]
    assert parts["recompute"] == pytest.approx(1 / 3, rel=0.1)


def test_known_recipes_are_near_the_top() -> None:
    """NeMo's recipes for H100: Llama 3 8B on 8 GPUs with context 2, GPT-3 175B with tensor 4 x pipeline 8."""
    llama = planned("--model", "llama3-8b", "--gpus", 8, *H100, "--top", 3)["layouts"]
    assert (1, 1, 2) in [(each["tensor"], each["pipeline"], each["context"]) for each in llama]
    gpt = planned("--model", "175b", "--gpus", 1024, *H100, "--top", 3)["layouts"]
    assert (4, 8) in [(each["tensor"], each["pipeline"]) for each in gpt]


def test_batch_arithmetic_is_that_of_the_layout() -> None:
    found = planned("--model", "30b", "--gpus", 128, *H100, "--global-batch", 768, "--top", 50)
    assert found["global_batch"] == 768 and found["tokens_per_iteration"] == 768 * 2048
    for each in found["layouts"]:
        model_parallel = each["tensor"] * each["pipeline"] * each["context"]
        assert each["data_parallel"] == 128 // model_parallel
        assert each["micro_batch"] * each["micro_batches"] * each["data_parallel"] == 768
        stages, turns = each["pipeline"], each["micro_batches"] * each["virtual_stages"]
        assert each["bubble"] == pytest.approx((stages - 1) / (turns + stages - 1))
        parts = ("weight_bytes", "gradient_bytes", "optimizer_bytes", "activation_bytes")
        assert each["total_bytes"] == pytest.approx(sum(each[part] for part in parts))


def test_virtual_stages_shorten_the_bubble_and_cost_memory() -> None:
    asked = ["--model", "175b", "--gpus", 256, *H100, "--tensor", 8, "--pipeline", 16, "--global-batch", 256]
    plain, virtual = only(*asked), only(*asked, "--layers-per-virtual-stage", 2)
    assert virtual["virtual_stages"] == 3
    assert virtual["bubble"] < plain["bubble"] and virtual["cost_parts"]["bubble"] < plain["cost_parts"]["bubble"]
    assert virtual["activation_bytes"] > plain["activation_bytes"]
    assert virtual["cost_parts"]["stages"] == pytest.approx(3 * plain["cost_parts"]["stages"])


def test_tensor_parallelism_across_nodes_is_dear_and_said() -> None:
    asked = ["--model", "175b", "--gpus", 1024, *H100, "--pipeline", 8]
    run_in_process, across = only(*asked, "--tensor", 8), only(*asked, "--tensor", 16)
    assert across["cost_parts"]["tensor"] > 8 * run_in_process["cost_parts"]["tensor"]
    assert "tensor 16 is above the 8 GPUs of a node" in fit(*asked, "--tensor", 16).out


def test_experts_are_spread_and_their_layouts_ranked_by_what_crosses_nodes() -> None:
    found = planned("--model", "mixtral-8x7b", "--gpus", 64, *H100, "--top", 200)
    assert found["parameters"] == pytest.approx(46.7e9, rel=0.01)
    assert found["active_parameters"] == pytest.approx(12.9e9, rel=0.01)
    assert found["layouts"][0]["expert"] > 1
    machines = Machines(64, 8, 80)
    wanted = LayoutConstraints(pipeline=4, expert=8, expert_tensor=1, micro_batch=1)
    ((near, _),) = search_layouts(load_preset("mixtral-8x7b"), machines, 1024, wanted).fits
    assert (
        estimate_cost(near.layout, 4).expert > 5 * estimate_cost(near.layout, 8).expert
    )  # eight experts in two nodes of four


def test_small_micro_batches_cost_small_models_more() -> None:
    asked = ["--model", "125m", "--gpus", 8, *H100, "--tensor", 1, "--pipeline", 1]
    one, sixteen = only(*asked, "--micro-batch", 1), only(*asked, "--micro-batch", 16)
    assert one["cost_parts"]["small"] == pytest.approx(16 * sixteen["cost_parts"]["small"])
    assert one["cost"] > sixteen["cost"]


def test_a_long_sequence_is_cut_by_context_parallelism() -> None:
    found = planned("--model", "llama3-8b", "--gpus", 64, *H100, "--seq-length", 131072, "--global-batch", 64)
    assert found["model"] == "llama3-8b (changed)"
    assert found["tokens_per_iteration"] == 64 * 131072
    assert found["layouts"][0]["context"] >= 4


@pytest.mark.slow
def test_large_searches_end_soon() -> None:
    big = ["--gpus", 16384, "--gpu-memory", 80, "--top", 1]
    for name in ("175b", "mixtral-8x7b"):
        (layout,) = planned("--model", name, *big)["layouts"]
        assert layout["data_parallel"] > 1
    found = search_layouts(
        load_preset("mixtral-8x7b", seqLength=131072), Machines(16384, 8, 80), 16384, LayoutConstraints()
    )
    assert found.layouts_tried < 20_000  # 25 us each
    found = search_layouts(
        load_preset("125m", numLayers=10**10), Machines(10**12, 10**12, 80), 10**12, LayoutConstraints()
    )
    assert not found.fits and found.layouts_tried < 500_000


def test_nothing_heavy_is_imported() -> None:
    ended, modules = run_many([["fit", "--model", "175b", "--gpus", "128", "--gpu-memory", "80"]])
    assert ended[0].code == 0
    assert not {"numpy", "torch", "transformers", "huggingface_hub", "pyarrow", "requests"} & modules


# -- one layout


def test_the_golden_layout_fits_and_takes_what_is_known() -> None:
    found = only(
        *["--model", "175b", "--gpus", 512, *H100, "--tensor", 8, "--pipeline", 16],
        *["--recompute", "selective", "--micro-batch", 1],
    )
    held = sum(found[name] for name in ("weight_bytes", "gradient_bytes", "optimizer_bytes"))
    assert held / GIB == pytest.approx(12.05, abs=0.01)
    assert found["activation_bytes"] / GIB == pytest.approx(9.6, abs=0.05)
    assert (found["data_parallel"], found["sequence_parallel"]) == (4, True)


def test_one_layout_that_does_not_fit_says_by_how_much() -> None:
    said = refused(
        *["--model", "175b", "--gpus", 512, *H100, "--tensor", 4, "--pipeline", 4],
        *["--recompute", "none", "--micro-batch", 2],
    )
    assert "this layout of 175b does not fit 512 GPUs of 80 GiB, of which 75.2 GiB are usable" in said
    assert "tensor 4 x pipeline 4, micro-batch 2, recomputation none, and needs" in said and "GiB more (weights" in said
    for change in ("a search over all sizes", "--micro-batch 1", "--recompute full", "GPUs of at least"):
        assert change in said


@pytest.mark.parametrize(
    ("cut", "said"),
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
def test_one_layout_that_megatron_refuses_has_the_equation(cut: list[Any], said: str) -> None:
    assert said in refused("--model", "175b", "--gpus", 512, *H100, *cut)


# -- nothing fits


def test_nothing_fits_names_the_nearest_and_what_would_help() -> None:
    said = refused("--model", "175b", "--gpus", 16, *H100)
    assert (
        "no layout of 175b fits 16 GPUs of 80 GiB, of which 75.2 GiB are usable: the nearest is tensor 8 x pipeline 2"
        in said
    )
    assert "recomputation full" in said and "GiB more (weights" in said
    assert "GPUs of at least" in said
    (more,) = [int(word.split()[0]) for word in said.split("; ") if word.strip().endswith(" GPUs")]
    assert planned("--model", "175b", "--gpus", more, *H100)["fitting"] > 0


def test_a_global_batch_that_nothing_divides_is_refused_with_the_equation() -> None:
    said = refused("--model", "13b", "--gpus", 1024, *H100, "--global-batch", 7)
    assert "every layout of 13b" in said and "global batch 7 is not divisible by" in said


@pytest.mark.parametrize(
    ("asked", "said"),
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
        (["--model", "13b", "--gpus", 8, *H100, "--set", "numQueryGroups=7"], "not divisible by 7 query groups"),
    ],
)
def test_a_request_that_cannot_be_is_refused(asked: list[Any], said: str) -> None:
    assert said in refused(*asked)


# -- checkpoints


def bandwidth(storage: str) -> float:
    return parse_storage(storage).bytes_per_second


def test_the_storage_table_is_the_makers() -> None:
    assert bandwidth("amlfs-125:16") == 2e9  # not the 64 GB/s of 512 TiB
    assert bandwidth("amlfs-40:480") == 19.2e9 and bandwidth("amlfs-500:512") == 256e9
    assert bandwidth("fsx-40:1.7578125") == pytest.approx(70.3e6, rel=0.001)  # on hard disks
    assert parse_storage("amlfs-125:16").capacity == 16 * 2**40 and parse_storage("blob").capacity is None
    assert bandwidth("fsx-250:24") == 6e9 and bandwidth("fsx-scratch:12") == 1.2e9
    assert bandwidth("blob") == 3.125e9 and bandwidth("blob:60") == 7.5e9 and bandwidth("nfs:100") == 12.5e9
    for wrong in ("amlfs-125:0", "amlfs-125:inf", "amlfs-125:nan", "amlfs-60:16", "", ":16", "nfs:1e-300", "nfs:1e300"):
        with pytest.raises(RequestError, match="--storage"):
            bandwidth(wrong)


def test_the_guide_s_175b_on_its_own_file_system_takes_twenty_minutes() -> None:
    found = planned("--model", "175b", "--gpus", 512, *H100, "--storage", "amlfs-125:16", "--mtbf-node", 6000)
    checkpoint = found["checkpoint"]
    assert checkpoint["bytes"] == pytest.approx(2.44e12, rel=0.01)
    assert checkpoint["write_seconds"] / 60 == pytest.approx(20.4, abs=0.1)
    assert checkpoint["save_interval_seconds"] == pytest.approx((2 * 1222.2 * 6000 * 3600 / 64) ** 0.5, rel=0.001)
    assert checkpoint["save_interval_iterations"] is None  # no step time is known


def test_a_storage_that_holds_it_all_says_what_is_left() -> None:
    asked = ["--model", "175b", "--gpus", 512, *H100, "--storage", "amlfs-125:16", "--data", 1.18]
    found = planned(*asked)
    size = found["checkpoint"]["bytes"]
    assert found["storage"] == {
        "capacity_bytes": 16 * 2**40,
        "data_bytes": 1.18e12,
        "checkpoints_kept": 2,
        "needed_bytes": pytest.approx(1.18e12 + 3 * size),
        "fits": True,
    }
    said = "2 checkpoints and the next save, 7.33 TB, and 1.18 TB of data; 9.08 TB are free"
    assert f"the storage has 17.59 TB: {said}" in fit(*asked).out.splitlines()


def test_a_storage_that_is_too_small_is_said_with_the_numbers(tmp_path: Path) -> None:
    file = tmp_path / "values.yaml"
    asked = ["--model", "175b", "--gpus", 512, *H100, "--write-bandwidth", 10, "--values", file]
    asked += ["--capacity", 10, "--data", 4.56, "--keep", 3]
    found = planned(*asked)
    assert found["storage"]["fits"] is False
    (note,) = found["notes"]
    assert note == (
        "the storage is too small: 3 checkpoints and the next save, 9.78 TB, and 4.56 TB of data need 14.34 TB, 4.34 "
        "TB more than its 10.00 TB; use a larger storage, or lower --keep"
    )
    assert "4.34 TB are missing" in fit(*asked).out
    assert yaml.safe_load(file.read_text())["checkpoint"] == {"keep": 3}
    assert planned(*asked[:-2])["storage"]["needed_bytes"] < found["storage"]["needed_bytes"]


def test_data_without_a_capacity_is_added_up() -> None:
    asked = ["--model", "175b", "--gpus", 512, *H100, "--storage", "blob", "--data", 1.18]
    assert planned(*asked)["storage"] is None
    assert "1.18 TB of data, 8.51 TB in all; add --capacity to check it" in fit(*asked).out


def test_a_save_that_an_eviction_would_cut_off_gets_the_time(tmp_path: Path) -> None:
    """The chart's grace period is a run's where no values say otherwise."""
    chart = yaml.safe_load((ROOT / "charts/megatron-training/values.yaml").read_text())
    assert chart["job"]["terminationGracePeriodSeconds"] == GRACE_SECONDS == 900
    file = tmp_path / "values.yaml"
    asked = ["--model", "175b", "--gpus", 512, *H100, "--peak-tflops", 989, "--values", file]
    found = planned(*asked, "--storage", "amlfs-125:16")
    grace = found["checkpoint"]["termination_grace_seconds"]
    assert grace > found["checkpoint"]["write_seconds"] + found["step_seconds"]
    assert yaml.safe_load(file.read_text())["job"] == {"terminationGracePeriodSeconds": grace}
    (note,) = found["notes"]
    assert note.startswith("a save takes 20 min 22 s and an iteration 16.5 s, but an evicted pod has only 15 min 00 s")
    assert f"set job.terminationGracePeriodSeconds={grace}" in note
    found = planned(*asked, "--storage", "amlfs-125:64")
    assert found["notes"] == [] and "job" not in yaml.safe_load(file.read_text())


def test_a_storage_with_which_a_run_would_do_nothing_but_save_is_said() -> None:
    found = planned("--model", "175b", "--gpus", 4096, *H100, "--write-bandwidth", 0.01, "--mtbf-node", 6000)
    checkpoint = found["checkpoint"]
    assert checkpoint["save_interval_seconds"] == checkpoint["write_seconds"]
    assert any("it would mostly write checkpoints; use a faster storage" in note for note in found["notes"])


def test_a_step_s_time_turns_the_interval_into_iterations() -> None:
    found = planned(
        *["--model", "175b", "--gpus", 512, *H100, "--global-batch", 2048, "--write-bandwidth", 10],
        *["--peak-tflops", 989, "--mfu", 0.5],
    )
    work = 6 * 174e9 + 6 * 2048 * 12288 * 96  # a token's: six for each weight, and attention
    assert found["step_seconds"] == pytest.approx(work * 2048 * 2048 / (512 * 989e12 * 0.5), rel=0.01)
    assert found["mfu_assumed"] == 0.5
    checkpoint = found["checkpoint"]
    assert checkpoint["save_interval_iterations"] == round(checkpoint["save_interval_seconds"] / found["step_seconds"])


def test_the_interval_is_where_saving_and_repeating_cost_least() -> None:
    saving = CheckpointSchedule(2.4e12, 2e9, 6000, 64)

    def lost(seconds: float) -> float:
        return saving.write_seconds / seconds + seconds / 2 / saving.failure_seconds

    best = saving.interval_seconds
    assert saving.lost_share == pytest.approx(lost(best))
    assert lost(best) < min(lost(best * 0.9), lost(best * 1.1))
    assert CheckpointSchedule(2.4e12, 1e6, 1, 4096).interval_seconds == 2.4e6  # never shorter than a save takes


# -- what it writes


@pytest.mark.parametrize("name", preset_names())
def test_the_values_make_the_very_layout(tmp_path: Path, name: str) -> None:
    file = tmp_path / "values.yaml"
    found = planned(
        *["--model", name, "--gpus", 256, *H100, "--values", file],
        *["--write-bandwidth", 5, "--peak-tflops", 989],
    )
    values = yaml.safe_load(file.read_text())
    assert values["model"] == {"size": name}
    best = found["layouts"][0]
    interval = values["training"].pop("saveInterval")
    assert interval == min(1000, found["checkpoint"]["save_interval_iterations"])
    layout = _settings(values, msgspec.to_builtins(load_preset(name)), interval).layout()
    _is(layout, best)


def test_the_values_of_a_model_of_one_s_own_hold_it_whole(tmp_path: Path) -> None:
    model = {"numLayers": 24, "hiddenSize": 1024, "numAttentionHeads": 16, "numExperts": 4, "addBiasLinear": False}
    (tmp_path / "model.yaml").write_text(yaml.safe_dump(model))
    file = tmp_path / "values.yaml"
    with (tmp_path / "model.yaml").open("a") as more:
        more.write("learningRate: 2e-4\n")  # a number to Helm, and text to PyYAML
    model["learningRate"] = 2e-4
    asked = ["--model", "custom", "--gpus", 16, *H100, "--set", "normEpsilon=1e-6", "--values", file]
    found = planned(*asked, "--custom", tmp_path / "model.yaml")
    values = yaml.safe_load(file.read_text())
    assert values["model"] == {"size": "custom", "custom": model | {"normEpsilon": 1e-6}}
    assert "saveInterval" not in values["training"]  # nothing is known of the storage
    _is(_settings(values, values["model"]["custom"]).layout(), found["layouts"][0])
    first = file.read_text()
    assert planned(*asked, "--custom", file)["layouts"] == found["layouts"]  # it reads what it wrote
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
    asked = ["--model", "125m", "--gpus", 8, *H100, "--write-bandwidth", 5, "--peak-tflops", 989, "--values", file]
    assert planned(*asked, "--iterations", 50)["checkpoint"]["save_interval_iterations"] > 1000
    training = yaml.safe_load(file.read_text())["training"]
    assert (training["iterations"], training["saveInterval"]) == (50, 50)
    planned(*asked)
    assert yaml.safe_load(file.read_text())["training"]["saveInterval"] == 1000


@pytest.mark.slow
def test_the_batch_is_the_recipe_s_unless_another_is_given(tmp_path: Path) -> None:
    """The file is one more -f: what nobody asked for must not replace what values/models has."""
    file = tmp_path / "values.yaml"
    for name in preset_names():
        recipe = yaml.safe_load((ROOT / f"values/models/{name}.yaml").read_text())["training"]
        asked = ["--model", name, "--gpus", 8 * recipe["nodes"], *H100, "--values", file]
        found = planned(*asked)
        batch = recipe["globalBatchSize"]
        assert found["global_batch"] == batch == yaml.safe_load(file.read_text())["training"]["globalBatchSize"]
        assert not any("global batch" in note for note in found["notes"])
    asked = ["--model", "175b", "--gpus", 512, *H100, "--values", file]
    said = "global batch 1,536 sequences = 3,145,728 tokens per iteration (from values/models/175b.yaml)"
    assert said in fit(*asked).out.splitlines()
    (note,) = planned(*asked, "--global-batch", 8192)["notes"]
    rest = "pass this file with a later -f, and check the learning rate, which is for the recipe's batch"
    assert note == f"global batch 8,192 differs from 1,536 in values/models/175b.yaml: {rest}"
    assert f"# {note}" in file.read_text().splitlines()
    assert "8,192 sequences = 16,777,216 tokens per iteration\n" in fit(*asked, "--global-batch", 8192).out


def test_a_recipe_s_batch_that_no_layout_divides_is_replaced_and_said() -> None:
    asked = ["--model", "13b", "--gpus", 96, *H100]
    found = planned(*asked)
    assert found["global_batch"] == 16 * 96
    (note,) = found["notes"]
    assert note.startswith(
        "global batch 1,536 differs from 1,024 in values/models/13b.yaml, with which no layout fits: "
    )
    assert "tokens per iteration (assumed: 16 per GPU)\n" in fit(*asked).out


def test_the_values_hold_what_was_said_of_the_gpus(tmp_path: Path) -> None:
    file = tmp_path / "values.yaml"
    asked = ["--model", "125m", "--gpus", 8, "--gpu-memory", 79.6, "--values", file]
    planned(*asked)
    assert yaml.safe_load(file.read_text())["gpu"] == {"memoryGib": 79.6}
    planned(*asked, "--peak-tflops", 989)
    assert yaml.safe_load(file.read_text())["gpu"] == {"memoryGib": 79.6, "peakTflops": 989}


def test_values_that_cannot_be_written_are_said(tmp_path: Path) -> None:
    said = refused("--model", "13b", "--gpus", 8, *H100, "--values", tmp_path / "no" / "values.yaml")
    assert "values.yaml: No such file" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("content", "said"),
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
def test_a_model_s_file_that_is_none_is_named(tmp_path: Path, content: str | None, said: str) -> None:
    file = tmp_path / "model.yaml"
    if content is not None:
        file.write_text(content)
    err = refused("--model", "custom", "--custom", file, "--gpus", 8, *H100)
    assert str(file) in err and said in err


def test_the_table_is_one_that_a_person_can_read(tmp_path: Path) -> None:
    file = tmp_path / "values.yaml"
    asked = ["--model", "375m", "--gpus", 16, *H100, "--storage", "nfs:10", "--peak-tflops", 989, "--top", 2]
    out = fit(*asked, "--values", file).out
    lines = out.splitlines()
    assert lines[0] == "375m: 64 million parameters; sequences of 1,024 tokens"
    assert lines[1] == "note: 375m is the guide's name for it; it has 64 million parameters"
    start = lines.index("") + 1
    head, *rows = lines[start : lines.index("", start)]
    assert head.split()[:3] == ["TP", "PP", "VPP"] and len(rows) == 2
    assert {len(line) for line in (head, *rows)} == {len(head)}  # columns stand under each other
    for said in ("16 GPUs (2 x 8)", "512 sequences = 524,288 tokens", "cost 1.", "MFU of 40%", "checkpoint: 0.9 GB"):
        assert said in out, said
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


def _is(layout: Any, best: dict[str, Any]) -> None:
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
