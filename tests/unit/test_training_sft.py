"""Fine-tuning by Megatron-LM's own --sft: data, command line, and what is refused before a GPU waits."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import AddedToken, Tokenizer

from support.commandline import tokenmill
from support.corpus import TOKENIZER as TINY
from support.training_chart import check_flags
from tokenmill.datasets.training_data import TrainingData
from tokenmill.errors import RequestError
from tokenmill.train import settings as s
from tokenmill.train.data.flags import write_data_arguments
from tokenmill.train.data.prompts import FORMATS, measure_conversations
from tokenmill.train.data.resolve import resolve
from tokenmill.train.data.summary import summarize
from tokenmill.train.identity import build_identity
from tokenmill.train.preflight import check_run

pytestmark = pytest.mark.slow

SPECIAL = ("<unk>", "<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_12>", "<SPECIAL_233>")
LENGTH = 64


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a tokenizer with the tokens of Nemotron's, in which a header of an answer has three tokens."""
    directory = tmp_path_factory.mktemp("tokenizer")
    shutil.copytree(TINY, directory, dirs_exist_ok=True)
    tokens = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    tokens.add_special_tokens(list(SPECIAL))
    tokens.add_tokens([AddedToken("Assistant", normalized=False)])
    tokens.save(str(directory / "tokenizer.json"))
    return directory


def chat(number: int, words: int = 3) -> dict[str, Any]:
    answer = " ".join(["word"] * words)
    return {
        "messages": [
            {"role": "user", "content": f"Question {number}?"},
            {"role": "assistant", "content": answer},
        ]
    }


Make = Callable[..., Path]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Return a function that writes rows and transforms them; it returns the output."""

    def write(name: str, rows: list[Any], *options: Any) -> Path:
        source = tmp_path / "source" / name
        source.mkdir(parents=True)
        (source / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        chosen = options if "--transform" in options else ("--transform", "megatron_sft", *options)
        ended = tokenmill("transform", source, tmp_path / name, *chosen)
        assert ended.code == 0, ended.err
        return tmp_path / name

    return write


def settings(
    tokenizer: Path, path: Path | str | None, prompt_format: str = "nemotron-nano-v2", **more: Any
) -> s.Settings:
    sections = {"training": {"gpusPerNode": 1, "iterations": 10, "globalBatchSize": 4, "evalIterations": 0}}
    sections |= {"dataset": {"split": "1,0,0", **({"path": str(path)} if path else {})}, "checkpoint": {"path": "/c"}}
    for key, value in more.items():
        section, _, field = key.partition("__")
        sections.setdefault(section, {})[field] = value
    model = {"name": "m", "numLayers": 2, "hiddenSize": 64, "numAttentionHeads": 4, "seqLength": LENGTH}
    content = {
        "release": "run",
        "model": model,
        "sft": {"promptFormat": prompt_format, "tokenizerPath": str(tokenizer)},
        **sections,
    }
    return s.derive_settings(msgspec.convert(content, s.Settings))


def refusal(*args: Any, **more: Any) -> str:
    with pytest.raises(RequestError) as caught:
        resolve(settings(*args, **more))
    assert caught.value.exit_code == 2
    return str(caught.value)


def arguments(data: TrainingData, run: s.Settings, directory: Path) -> list[str]:
    from tokenmill.train.arguments import megatron_arguments

    return megatron_arguments(run, write_data_arguments(data, run, directory))


def test_a_file_becomes_the_data_path_of_an_sft_run(tokenizer: Path, make: Make, tmp_path: Path) -> None:
    run = settings(tokenizer, make("rows", [chat(number) for number in range(20)], "--shards", "1"))
    data = resolve(run)
    composed = arguments(data, run, tmp_path)
    check_flags(composed)
    assert composed[composed.index("--data-path") + 1] == str(tmp_path / "rows/shard_000000.jsonl")
    for flag, value in {
        "--tokenizer-type": "SFTTokenizer",
        "--tokenizer-model": str(tokenizer),
        "--sft-tokenizer-prompt-format": "nemotron-nano-v2",
    }.items():
        assert composed[composed.index(flag) + 1] == value
    assert {"--sft", "--no-create-attention-mask-in-dataloader"} <= {*composed}
    assert data.vocab_size == Tokenizer.from_file(str(tokenizer / "tokenizer.json")).get_vocab_size()


def test_several_files_are_weighted_by_their_rows(tokenizer: Path, make: Make, tmp_path: Path) -> None:
    run = settings(tokenizer, make("rows", [chat(number) for number in range(9)], "--shards", "2"))
    flag, path, *_ = write_data_arguments(resolve(run), run, tmp_path).flags
    lines = [line.split() for line in Path(path).read_text().splitlines()]
    assert flag == "--data-args-path"
    assert [Path(name).name for _, name in lines] == ["shard_000000.jsonl", "shard_000001.jsonl"]
    assert [float(weight) for weight, _ in lines] == pytest.approx([5 / 9, 4 / 9])


def test_splits_are_lists_of_files(tokenizer: Path, make: Make, tmp_path: Path) -> None:
    """A file that is held out for validation is not trained."""
    output = make("rows", [chat(number) for number in range(9)], "--shards", "3")
    blend = {"train": [{"path": str(output)}], "validation": [{"path": str(output / "shard_000002.jsonl")}]}
    run = settings(tokenizer, None, dataset__blend=blend, training__evalIterations=1)
    data = resolve(run)
    flag, path = write_data_arguments(data, run, tmp_path).flags
    lists = json.loads(Path(path).read_text())
    assert flag == "--per-split-data-args-path"
    assert {key: [Path(item).name for item in items[1::2]] for key, items in lists.items() if items} == {
        "train": ["shard_000000.jsonl", "shard_000001.jsonl"],
        "valid": ["shard_000002.jsonl"],
    }
    assert f"excluded 1 files of {output}: other splits use them" in data.notes


def test_the_log_describes_rows_and_epochs(tokenizer: Path, make: Make) -> None:
    output = make("rows", [chat(number, 200 if number == 0 else 3) for number in range(20)], "--shards", "1")
    run = settings(tokenizer, output)
    lines = summarize(resolve(run), run)
    assert f"{output}: 20 rows in 1 files; 100.00% of the samples, 2.00 epochs" in lines
    assert any("conversations in the format nemotron-nano-v2" in line for line in lines)
    assert any(f"--sft pads each row to {LENGTH} tokens, so that" in line for line in lines)
    assert any(
        line.startswith("warning: 1 of the first 20 rows are longer than 64 tokens; --sft cuts") for line in lines
    )
    assert any("checkpoint.loadPath is not set" in line for line in lines)
    loading = settings(tokenizer, output, checkpoint__loadPath="/weights")
    assert not any("loadPath" in line for line in summarize(resolve(loading), loading))


def test_the_identity_contains_the_format(tokenizer: Path, make: Make, tmp_path: Path) -> None:
    from tokenmill.train.arguments import sft_arguments

    output = make("rows", [chat(number) for number in range(4)])
    identities = []
    for name in ("nemotron-nano-v2", "nemotron-h-aligned"):
        run = settings(tokenizer, output, name)
        data = resolve(run)
        identities.append(build_identity(data, arguments(data, run, tmp_path), sft_arguments(run)))
    first, second = identities
    assert first != second and msgspec.structs.replace(first, arguments=second.arguments) == second


def test_the_command_line_prints_the_run(tokenizer: Path, make: Make, tmp_path: Path) -> None:
    output = make("rows", [chat(number) for number in range(8)])
    run = {
        "release": "run",
        "model": {"name": "m", "numLayers": 2, "hiddenSize": 64, "numAttentionHeads": 4, "seqLength": LENGTH},
        "training": {"gpusPerNode": 1, "iterations": 10, "globalBatchSize": 4, "evalIterations": 0},
        "checkpoint": {"path": str(tmp_path / "checkpoints")},
        "dataset": {"path": str(output), "split": "1,0,0"},
        "sft": {"promptFormat": "identity", "tokenizerPath": str(tokenizer)},
    }
    path = tmp_path / "settings.json"
    path.write_text(json.dumps(run))
    ended = tokenmill("train", "--dry-run", path)
    assert ended.code == 0, ended.err
    assert "  --sft \\\n  --sft-tokenizer-prompt-format identity \\\n" in ended.out
    assert "warning: the format identity writes only the contents" in ended.err
    ended = tokenmill("train", "--build-index", path)
    assert ended.code == 2 and "a fine-tuning run (sft) has no sample index" in ended.err
    path.write_text(json.dumps(run | {"sft": {"promptFormat": "chatml", "tokenizerPath": "x"}}))
    ended = tokenmill("train", "--dry-run", path)
    assert ended.code == 2 and "sft.promptFormat" in ended.err


REFUSED_SETTINGS = {
    "masks nothing": ({"prompt_format": "default"}, "with this format Megatron-LM masks nothing"),
    "key": ({"dataset__key": "text"}, "dataset.key is text, but a fine-tuning run (sft) reads the key messages"),
    "held out": (
        {"dataset__split": "990,9,1"},
        "leaves validation and test without any of the 8 rows of",
    ),
    "evaluation": ({"training__evalIterations": 5}, "there is no validation data: dataset.split is 1,0,0"),
    "too many epochs": ({"training__maxEpochs": 1.5}, "times, but training.maxEpochs is 1.5"),
}


@pytest.mark.parametrize("name", REFUSED_SETTINGS)
def test_settings_that_cannot_work_are_refused(name: str, tokenizer: Path, make: Make) -> None:
    changed, message = REFUSED_SETTINGS[name]
    assert message in refusal(
        tokenizer, make("rows", [chat(number) for number in range(8)], "--shards", "1"), **changed
    )


def test_a_dataset_without_json_lines_is_refused(tokenizer: Path, tmp_path: Path, make: Make) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/a.jsonl").write_text('{"text": "a"}\n')
    message = refusal(tokenizer, tmp_path / "texts")
    assert "there is no output of tokenmill transform" in message and "--transform megatron_sft first" in message
    ended = tokenmill("preprocess", tmp_path / "texts", tmp_path / "pairs", "--tokenizer", TINY)
    assert ended.code == 0, ended.err
    assert "there is no output of tokenmill transform" in refusal(tokenizer, tmp_path / "pairs")
    assert f"{tmp_path / 'missing'} does not exist" in refusal(tokenizer, tmp_path / "missing")
    make("nested", [chat(1)])
    shutil.copytree(tmp_path / "nested", tmp_path / "both/a")
    shutil.copytree(tmp_path / "nested", tmp_path / "both/b")
    assert "there is more than one output of transform in" in refusal(tokenizer, tmp_path / "both")
    empty = make("dropped", [{"other": 1}, chat(1)], "--transform", "select(messages)", "--shards", "2")
    assert len(list(empty.glob("*.jsonl"))) == 2
    assert resolve(settings(tokenizer, empty)).sources[0].empty == 1
    only = empty / "shard_000000.jsonl"
    assert "has no rows there" in refusal(tokenizer, only)


def test_an_unfinished_output_is_refused(tokenizer: Path, make: Make) -> None:
    options = ("--shards", "2", "--workers", "2", "--worker-index", "0")
    half = make("half", [chat(1), chat(2)], "--transform", "megatron_sft", *options)
    assert "run the same tokenmill transform again to finish it" in refusal(tokenizer, half)


def test_a_compressed_or_damaged_output_is_refused(tokenizer: Path, make: Make) -> None:
    compressed = make("small", [chat(1)], "--compression", "zstd")
    assert "is compressed, and Megatron-LM's --sft reads plain JSON Lines" in refusal(tokenizer, compressed)
    damaged = make("damaged", [chat(1), chat(2)], "--shards", "1")
    with (damaged / "shard_000000.jsonl").open("ab") as file:
        file.write(b"{}\n")
    assert "bytes of its manifest; run the same tokenmill transform again" in refusal(tokenizer, damaged)


BAD_ROWS = {
    "no messages": ({"text": "a"}, "the row has no 'messages'; run tokenmill transform"),
    "a tool": (
        {"messages": [{"role": "user", "content": "a"}, {"role": "tool", "content": "b"}]},
        "message 2 has the role 'tool'",
    ),
    "no text": ({"messages": [{"role": "user", "content": None}]}, "message 1 has no text as its content"),
    "no answer": ({"messages": [{"role": "user", "content": "a"}]}, "a conversation has no answer"),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_a_row_on_which_megatron_fails_is_refused_with_its_line(name: str, tokenizer: Path, make: Make) -> None:
    row, message = BAD_ROWS[name]
    output = make("rows", [chat(1), row], "--transform", "passthrough", "--shards", "1")
    refused = refusal(tokenizer, output)
    assert f"{output / 'shard_000000.jsonl'}, line 2: {message}" in refused, refused


def test_a_row_whose_turns_have_other_ids_alone_is_refused(tokenizer: Path, make: Make) -> None:
    """The end of a question and the begin of its answer become one token, where Megatron-LM has an assertion."""
    row = {"messages": [{"role": "user", "content": "Ask wo"}, {"role": "assistant", "content": "rd word"}]}
    refused = refusal(tokenizer, make("rows", [row], "--transform", "passthrough"), "identity")
    assert "would end with an AssertionError; use another sft.promptFormat, or pack the conversations" in refused
    assert resolve(settings(tokenizer, make("other", [row]), "nemotron-h-aligned")).vocab_size


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_of_another_model_is_refused(name: str, make: Make) -> None:
    refused = refusal(TINY, make("rows", [chat(1)]), name)
    assert f"sft.promptFormat is {name}, which needs the tokens {FORMATS[name].pad}" in refused
    assert f"has no {FORMATS[name].pad}" in refused


def test_a_header_of_other_tokens_is_refused(tokenizer: Path, tmp_path: Path, make: Make) -> None:
    other = shutil.copytree(tokenizer, tmp_path / "other")
    tokens = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    tokens.add_special_tokens(list(SPECIAL))
    tokens.save(str(other / "tokenizer.json"))
    refused = refusal(other, make("rows", [chat(1)]))
    assert "Megatron-LM excludes the first 3 tokens of an answer from the loss, but the tokenizer" in refused


def test_a_missing_or_damaged_tokenizer_is_refused(tmp_path: Path, make: Make) -> None:
    output = make("rows", [chat(1)])
    assert f"there is no {tmp_path / 'none/tokenizer.json'}" in refusal(tmp_path / "none", output)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert "is not a tokenizer" in refusal(tmp_path, output)


def test_options_that_megatron_asserts_against_are_refused(tokenizer: Path, make: Make, tmp_path: Path) -> None:
    output = make("rows", [chat(number) for number in range(8)])
    run = settings(
        tokenizer,
        output,
        training__resetPositionIds=True,
        training__eodMaskLoss=True,
        trainer__backend="gloo",
        trainer__script=str(tmp_path / "pretrain.py"),
        trainer__python=["python3", "-S"],
        trainer__launcher=["sh"],
        checkpoint__path=str(tmp_path / "checkpoints"),
    )
    (tmp_path / "pretrain.py").touch()
    with pytest.raises(RequestError) as caught:
        check_run(run, resolve(run), machine=True)
    message = str(caught.value)
    assert (
        "training.resetPositionIds, training.eodMaskLoss: Megatron-LM's --sft separates conversations itself" in message
    )
    assert "trainer.backend is gloo: --sft packs conversations" in message
    assert "--sft needs datasets and transformers of Hugging Face, which python3 -S cannot import" in message


@pytest.mark.parametrize("flag", ["--sft", "--sft-tokenizer-prompt-format=default"])
def test_the_flags_are_not_extra_arguments(flag: str, tokenizer: Path) -> None:
    run = settings(tokenizer, "x")
    with pytest.raises(RequestError, match=r"extraArgs contains --sft.*set sft\."):
        s.derive_settings(msgspec.structs.replace(run, extra_args=[flag]))


def test_a_row_of_several_conversations_is_measured_by_conversation(tokenizer: Path) -> None:
    tokens = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    system = {"role": "system", "content": "Be short."}
    one = [system, *chat(1)["messages"]]
    for prompts in (*FORMATS.values(), replace(FORMATS["identity"])):
        single = measure_conversations(prompts, tokens, one)
        assert measure_conversations(prompts, tokens, [*one, *one]) == 2 * single > 0


def test_another_run_has_no_flags_of_sft(tmp_path: Path) -> None:
    from support.training_chart import compose_arguments

    run = s.derive_settings(
        msgspec.convert(
            {
                "release": "r",
                "model": {"name": "m", "numLayers": 2, "hiddenSize": 64, "numAttentionHeads": 4},
                "training": {},
                "checkpoint": {"path": str(tmp_path)},
                "dataset": {"path": "x"},
            },
            s.Settings,
        )
    )
    composed = compose_arguments(run)
    assert "--sft" not in composed and "HuggingFaceTokenizer" in composed
