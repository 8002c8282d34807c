"""Layouts: accepted if and only if Megatron-LM accepts them; a refusal names every number of the rule."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.commandline import CommandResult, run_in_process
from tokenmill.fit.layout import Layout, find_argument_errors, find_runtime_errors
from tokenmill.fit.memory import (
    GIB,
    activation_bytes,
    checkpoint_bytes,
    count_parameters,
    memory_use,
    weight_optimizer_bytes,
)

CASES = Path(__file__).parents[1] / "conformance" / "layouts.json"
GPT3 = Layout(
    num_layers=96,
    hidden_size=12288,
    num_attention_heads=96,
    seq_length=2048,
    max_position_embeddings=2048,
    world=512,
    global_batch=512,
    tensor=8,
    pipeline=16,
    sequence_parallel=True,
    distributed_optimizer=True,
    recompute="selective",
    vocab_size=50_257,
)
MIXTRAL = Layout(
    num_layers=32,
    hidden_size=4096,
    num_attention_heads=32,
    query_groups=8,
    ffn_hidden_size=14336,
    swiglu=True,
    rms_norm=True,
    untied=True,
    bias=False,
    experts=8,
    vocab_size=32_000,
    seq_length=4096,
    max_position_embeddings=4096,
    world=64,
    global_batch=1024,
    expert=8,
    expert_tensor=1,
    distributed_optimizer=True,
)
SMALL: dict[str, Any] = {
    "num_layers": 24,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "seq_length": 2048,
    "max_position_embeddings": 2048,
    "world": 8,
    "global_batch": 16,
}


def check(tmp_path: Path, content: Any) -> tuple[CommandResult, list[Any]]:
    file = tmp_path / "cases.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    ended = run_in_process("fit", "--check", file)
    return ended, [json.loads(line) for line in ended.out.splitlines()]


# -- Megatron-LM's own results


def test_all_cases_agree_with_megatron() -> None:
    cases = json.loads(CASES.read_text())["cases"]
    ended = run_in_process("fit", "--check", CASES)
    assert ended.code == 0, ended.err
    results = [json.loads(line) for line in ended.out.splitlines()]
    assert len(results) == len(cases) == 900
    for number, (case, result) in enumerate(zip(cases, results, strict=True)):
        assert result["case"] == number
        assert result["accepted"] == case["accepted"], (case, result)
        assert bool(result["why"]) == bool(result["reasons"]) == (not case["accepted"])
        for name in ("data_parallel", "weight_optimizer_bytes", "activation_bytes"):
            if name in case:
                assert result[name] == pytest.approx(case[name], rel=0.01 if name != "data_parallel" else 0), case
        for reason in result["reasons"]:
            assert any(char.isdigit() for char in reason), reason


def test_175b_takes_the_known_memory() -> None:
    assert GPT3.data_parallel == 4
    assert weight_optimizer_bytes(GPT3) / GIB == pytest.approx(12.05, abs=0.01)
    assert activation_bytes(GPT3) / GIB == pytest.approx(9.6, abs=0.05)
    assert checkpoint_bytes(GPT3) == pytest.approx(2.44e12, rel=0.01)


# -- each refusal has the complete equation


@pytest.mark.parametrize(
    ("changed", "numbers"),
    [
        ({"world": 12, "tensor": 2, "pipeline": 2, "context": 2}, ["12 GPUs", "2 x", "= 8", "leaves 4 over"]),
        ({"global_batch": 20, "micro_batch": 2}, ["20", "micro-batch 2 x data parallel 8 = 16", "16, 32"]),
        ({"global_batch": 3}, ["3", "= 8", "nearest multiples: 8"]),
        ({"pipeline": 8, "num_layers": 20, "world": 8}, ["20 layers", "pipeline 8"]),
        (
            {"pipeline": 4, "layers_per_virtual_stage": 4},
            ["24 layers / pipeline 4 = 6 layers per stage", "4 layers per virtual stage"],
        ),
        ({"layers_per_virtual_stage": 6}, ["4 virtual stages", "pipeline > 1, not 1"]),
        (
            {"pipeline": 8, "num_layers": 20, "layers_per_virtual_stage": 1},
            ["20 layers", "pipeline 8", "interleaved"],
        ),
        ({"hidden_size": 1000, "num_attention_heads": 16}, ["hidden size 1000", "16 attention heads"]),
        ({"context": 8, "seq_length": 2040}, ["2040", "2 x context 8 = 16"]),
        ({"seq_length": 4096}, ["4096", "2048 position embeddings"]),
        ({"expert": 2}, ["expert parallel 2", "model with experts"]),
        ({"expert": 4, "experts": 6}, ["6 experts", "expert parallel 4"]),
        ({"tensor": 8, "num_attention_heads": 12, "hidden_size": 1200}, ["12 attention heads", "tensor 8"]),
        (
            {"tensor": 4, "num_attention_heads": 12, "hidden_size": 1200, "query_groups": 6},
            ["6 query groups", "tensor 4"],
        ),
    ],
)
def test_a_refusal_prints_its_numbers(tmp_path: Path, changed: dict[str, Any], numbers: list[str]) -> None:
    ended, (accepted, refused) = check(tmp_path, [SMALL, SMALL | changed])
    assert ended.code == 0  # the output reports the refusal
    assert accepted["accepted"] and accepted["why"] is None and accepted["data_parallel"] == 8
    assert not refused["accepted"] and refused["weight_optimizer_bytes"] is None
    assert all(number in refused["why"] for number in numbers), refused["why"]


def test_all_reasons_are_reported(tmp_path: Path) -> None:
    _, (result,) = check(tmp_path, [SMALL | {"world": 7, "tensor": 3, "seq_length": 4096, "pipeline": 5}])
    assert len(result["reasons"]) == 4
    assert result["why"] == "; ".join(result["reasons"])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"pipeline": 4, "layers_per_virtual_stage": 3, "global_batch": 12},
            "6 micro-batches (global batch 12 / (micro-batch 1 x data parallel 2)) are not divisible by pipeline 4",
        ),
        ({"experts": 8, "bias": True}, "without biases"),
        ({"experts": 8, "experts_per_token": 9}, "9 experts per token are more than the 8 experts of a layer"),
        (
            {"experts": 8, "expert": 8, "tensor": 2, "sequence_parallel": True},
            "8 GPUs are not divisible by expert tensor 2",
        ),
        ({"experts": 8, "tensor": 2}, "needs sequence parallelism"),
        (
            {"tensor": 8, "sequence_parallel": True, "seq_length": 2044},
            "2044 is not divisible by tensor 8 x context 1 = 8",
        ),
    ],
)
def test_runtime_errors_are_separate(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    _, (result,) = check(tmp_path, [SMALL | changed])
    assert result["accepted"]
    assert len(result["later"]) == 1 and message in result["later"][0], result["later"]


def test_runtime_check_accepts_a_refused_layout() -> None:
    small = Layout(**SMALL | {"world": 2, "pipeline": 4, "layers_per_virtual_stage": 3})
    assert find_argument_errors(small)
    assert find_runtime_errors(small) == []


# -- a file of cases


def test_cases_are_a_list_or_a_conformance_file(tmp_path: Path) -> None:
    first = check(tmp_path, [SMALL, SMALL])[1]
    assert check(tmp_path, {"cases": [{"config": SMALL}, {"config": SMALL}]})[1] == first
    assert check(tmp_path, [])[1] == []


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (SMALL | {"tensors": 2}, "case 1: unknown key 'tensors'"),
        (SMALL | {"tensor": "2"}, "case 1: tensor is '2': Expected `int`, got `str`"),
        (SMALL | {"tensor": True}, "case 1: tensor is True"),
        (SMALL | {"swiglu": 1}, "case 1: swiglu is 1"),
        (SMALL | {"world": None}, "case 1: world is None"),
        (SMALL | {"pipeline": 0}, "case 1: pipeline is 0: it must be above 0"),
        (SMALL | {"context": -1}, "case 1: context is -1"),
        (SMALL | {"global_batch": 10**400}, "case 1: global_batch is 1000"),
        (SMALL | {"recompute": "some"}, "case 1: recompute is 'some': use one of none, selective, full"),
        ({"world": 8}, "case 1: missing key num_layers, hidden_size"),
        ("175b", "case 1: '175b' is not an object"),
    ],
)
def test_invalid_case_is_named_and_the_others_are_checked(tmp_path: Path, case: Any, message: str) -> None:
    ended, results = check(tmp_path, [SMALL, case, SMALL])
    assert ended.code == 2
    assert [result.get("accepted") for result in results] == [True, None, True]
    assert results[1]["error"].startswith(message)
    assert "1 of 3" in ended.err and message in ended.err


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "are not valid JSON"), ("7", "have another form"), ('{"config": {}}', "have another form")],
)
def test_a_file_without_cases_is_refused(tmp_path: Path, content: str, message: str) -> None:
    ended, _ = check(tmp_path, content)
    assert ended.code == 2 and "cases.json" in ended.err and message in ended.err


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    ended = run_in_process("fit", "--check", tmp_path / "none.json")
    assert ended.code == 2 and "none.json" in ended.err and "No such file" in ended.err


# -- memory, where Megatron-LM has no formula


def test_a_parameter_takes_two_four_and_twelve_bytes() -> None:
    alone = memory_use(replace(GPT3, distributed_optimizer=False))
    assert alone.gradients == 2 * alone.weights and alone.optimizer == 6 * alone.weights
    shared = memory_use(GPT3)
    assert (shared.weights, shared.gradients) == (alone.weights, alone.gradients)
    assert shared.optimizer == pytest.approx(alone.optimizer / GPT3.data_parallel)


def test_context_parallelism_cuts_activations_and_shares_the_optimizer() -> None:
    cut = replace(GPT3, context=2)
    assert cut.data_parallel == 2
    assert weight_optimizer_bytes(cut) == weight_optimizer_bytes(GPT3)
    assert activation_bytes(cut) == pytest.approx(activation_bytes(GPT3) / 2)


def test_full_recomputation_keeps_two_bytes_a_value_and_one_layer() -> None:
    width = GPT3.seq_length * GPT3.hidden_size
    waiting = 2 * width / 8 * 96 + (8 * GPT3.seq_length + width) * 16 / 8
    assert activation_bytes(replace(GPT3, recompute="full")) == pytest.approx(waiting + width * 34 / 8)


def test_without_sequence_parallelism_a_layer_is_partly_cut() -> None:
    with_it = activation_bytes(replace(GPT3, recompute="none"))
    without = activation_bytes(replace(GPT3, recompute="none", sequence_parallel=False))
    assert without / with_it == pytest.approx((10 + 24 / 8) / (34 / 8), rel=0.02)


def test_last_stage_decides_if_its_logits_are_large() -> None:
    wide = replace(GPT3, num_layers=8, hidden_size=4096, num_attention_heads=32, tensor=1, pipeline=2, recompute="full")
    tokens, hidden = wide.seq_length, wide.hidden_size
    logits = 4 * tokens * (wide.padded_vocab + hidden)
    assert activation_bytes(wide) == pytest.approx(2 * tokens * hidden * 4 + logits + 34 * tokens * hidden)


def test_expert_parallelism_cuts_experts_and_their_optimizer() -> None:
    count = count_parameters(MIXTRAL)
    experts = 32 * 8 * 3 * 4096 * 14336
    assert count.expert_sharded == experts
    dense = count.total - experts  # one stage holds both embeddings
    assert MIXTRAL.expert_data_parallel == 8
    assert weight_optimizer_bytes(MIXTRAL) == pytest.approx(dense * (6 + 12 / 64) + experts / 8 * (6 + 12 / 8))
    tensor = replace(MIXTRAL, tensor=2, sequence_parallel=True, expert=4, expert_tensor=2)
    assert tensor.expert_data_parallel == 8
    assert memory_use(tensor).weights == pytest.approx(
        2 * (count.tensor_sharded / 2 + count.replicated + count.embedding + experts / 8)
    )
