"""Transform, chat and pack by `helm install`, with killed pods: the bytes of a local run of the same commands."""

import json
import random
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from e2e.cluster import CLAIM, Namespace, conditions, exit_code, running, wait_for
from e2e.corpus import MODEL, TOKENIZER, assert_same, receipts, run_checked, serve, write_files
from support.commandline import data_of

pytestmark = pytest.mark.e2e

SMALL = "--set resources.requests.cpu=50m,resources.requests.memory=128Mi,processes=1"
STORAGE = f"--set storage.pvcName={CLAIM}"
SLOW = " --set resources.limits.cpu=250m"
"""With this limit, pods that would end within a second run for some seconds, and can be killed."""
CORPUS = "org/chats"
FILES, ROWS = 9, 400
PACK_SIZE = 1024

MODULE = """\
ROLES = {"question": "user", "answer": "assistant"}


def clean(record):
    if not record["dialog"]:
        return None
    return {"messages": [{"role": ROLES[turn["who"]], "content": turn["text"]} for turn in record["dialog"]]}
"""

TEMPLATE = """\
{%- for message in messages -%}
{{ '[' + message.role + '] ' + message.content }}{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}
{% endfor -%}
{%- if add_generation_prompt %}{{ '[assistant] ' }}{% endif -%}
"""
"""A template with the only special token of the sample tokenizer."""


def dialogs(seed: int) -> bytes:
    """Return JSONL of conversations in a form of our own; some have no turn."""
    dice = random.Random(seed)
    words = ("the", "cat", "asks", "what", "is", "one", "more", "question", "and", "answers")

    def text() -> str:
        return " ".join(dice.choices(words, k=dice.randint(3, 30)))

    lines = []
    for number in range(ROWS):
        turns = dice.randint(1, 3) if number % 20 else 0
        dialog = [{"who": who, "text": text()} for _ in range(turns) for who in ("question", "answer")]
        lines.append(json.dumps({"id": number, "dialog": dialog}).encode() + b"\n")
    return b"".join(lines)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the files of the values: a module, a template and a blend."""
    directory = tmp_path_factory.mktemp("files")
    (directory / "mine.py").write_text(MODULE)
    (directory / "chat.jinja").write_text(TEMPLATE)
    return directory


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory, files: Path) -> Path:
    """Write the files of a Hub: conversations, and a model with a tokenizer; `dialogs` has the user's own form."""
    directory = tmp_path_factory.mktemp("chats")
    shutil.copytree(TOKENIZER, directory / "models" / MODEL)
    write_files(directory / "dialogs", {f"part-{number}.jsonl": dialogs(number) for number in range(FILES)})
    transform(directory / "dialogs", directory / "transformed", files)
    data = directory / "datasets" / CORPUS / "data"
    data.mkdir(parents=True)
    for number, shard in enumerate(sorted((directory / "transformed").glob("*.jsonl"))):
        shutil.copy(shard, data / f"train-{number:05}-of-{FILES:05}.jsonl")
    return directory


def transform(source: Path, output: Path, files: Path) -> None:
    """Transform on this machine what the pods transform."""
    options = ("--transform", "mine:clean", "--shards", FILES)
    run_checked("transform", source, output, *options, PYTHONPATH=str(files))


@pytest.fixture(scope="module")
def expected(corpus: Path, files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the commands on this machine without a disturbance; return the directory of their outputs."""
    root = tmp_path_factory.mktemp("local") / "dialogs"
    shutil.copytree(corpus / "dialogs", root)
    transform(root, root / "transformed", files)
    with serve(corpus) as hub:
        template = files / "chat.jinja"
        run_checked("chat", root, root / "chat", "--tokenizer", MODEL, "--chat-template", template, hub=hub)
    run_checked("pack", root, root / "packed", "--pack-size", PACK_SIZE, "--shards", 6, "--valid-shards", 1)
    return root


@pytest.fixture(scope="module")
def place(namespace: Namespace, corpus: Path) -> Namespace:
    """Return the module's namespace with a Hub, and with the conversations of a user on the volume."""
    namespace.start_hub(corpus)
    copied = {path.name: path.read_bytes() for path in (corpus / "dialogs").glob("*.jsonl")}
    for name in ("disturbed", "umbrella"):  # metadata.json contains the name of the last directory
        write_files(namespace.data / name, {})
        write_files(namespace.data / name / "dialogs", copied)
    return namespace


def settings(files: Path, stage: str, section: str = "") -> str:
    """Return the values of a stage, with the prefix of the pipeline's section."""
    return {
        "transform": f"--set {section}function.name=mine:clean,{section}shards.number={FILES}"
        f" --set-file {section}function.source={shlex.quote(str(files / 'mine.py'))}",
        "chat": f"--set {section}tokenizer.name={MODEL}"
        f" --set-file dataset.chatTemplate={shlex.quote(str(files / 'chat.jinja'))}",
        "pack": f"--set dataset.packSize={PACK_SIZE},{section}shards.number=6,{section}shards.validation=1",
    }[stage]


def kill_pods(namespace: Namespace, job: str, output: Path, stage: str) -> set[str]:
    """Kill a running pod, and one of another worker after each of the next receipts; return the names of killed pods.

    Kubernetes waits longer before each new pod of the same worker.
    """
    assert wait_for(lambda: running(namespace, job), 120), namespace.describe(job)
    killed = dict[int, str]()
    for _ in range(3):
        before = len(receipts(output, stage))
        pods = {worker: pod for worker, pod in running(namespace, job).items() if worker not in killed}
        if not pods:
            break
        worker = min(pods)
        namespace.kill(pods[worker])
        killed[worker] = pods[worker]
        ended = "Complete" in conditions(namespace.job(job))
        if ended or not wait_for(lambda before=before: len(receipts(output, stage)) > before, 120):
            break
    return set(killed.values())


def data_without_paths(output: Path, root: Path) -> dict[str, bytes]:
    """Return the files of an output; paths in it are relative to `root`."""
    return {name: data.replace(str(root).encode(), b"") for name, data in data_of(output).items()}


@pytest.fixture(scope="module")
def disturbed(place: Namespace, files: Path) -> dict[str, set[str]]:
    """Install the three stages one after the other and kill their pods; return the killed pods of each."""
    root = place.data / "disturbed/dialogs"
    killed = {}
    for stage, workers, folder in (("transform", 3, "transformed"), ("chat", 3, "chat"), ("pack", 2, "packed")):
        place.install(
            f"dialogs-{stage} charts/dataset-{stage} {STORAGE} {SMALL} {settings(files, stage)}"
            f" --set dataset.root=disturbed/dialogs,workers={workers}" + ("" if stage == "chat" else SLOW)
        )
        job = f"dialogs-{stage}-{stage}"
        killed[stage] = kill_pods(place, job, root / folder, stage)
        place.wait_for_job(job, timeout=300)
    return killed


@pytest.mark.every_change
@pytest.mark.parametrize(("stage", "folder"), [("transform", "transformed"), ("chat", "chat"), ("pack", "packed")])
def test_killed_pods_change_no_byte(
    stage: str, folder: str, disturbed: dict[str, set[str]], place: Namespace, expected: Path
) -> None:
    actual = place.data / "disturbed/dialogs"
    assert_same(
        data_without_paths(actual / folder, Path("/data/disturbed/dialogs")),
        data_without_paths(expected / folder, expected),
    )
    assert receipts(actual / folder, stage).keys() == receipts(expected / folder, stage).keys()
    assert not (actual / folder / f".tokenmill/{stage}/attempts").exists(), "files of the killed pods' attempts remain"


def test_pods_of_each_stage_were_killed(disturbed: dict[str, set[str]], place: Namespace) -> None:
    assert all(disturbed.values())
    for stage, killed in disturbed.items():
        assert not killed & {pod["metadata"]["name"] for pod in place.pods(f"dialogs-{stage}-{stage}")}


def test_helm_test_verifies_each_output(disturbed: dict[str, set[str]], place: Namespace) -> None:
    for stage in disturbed:
        place.user.check(f"helm test dialogs-{stage} --timeout 120s")
        assert place.logs(f"dialogs-{stage}-{stage}-verify").endswith("no problems\n")


def test_streamed_conversations_have_the_same_bytes(
    place: Namespace, files: Path, expected: Path, tmp_path: Path
) -> None:
    """The volume has the bytes of the local run: its shards are the outputs of transform, with other names."""
    place.install(
        f"streamed charts/dataset-chat {STORAGE} {SMALL} {settings(files, 'chat')} --set workers=2"
        f" --set dataset.stream=true,dataset.repo={CORPUS},dataset.root=streamed"
    )
    place.wait_for_job("streamed-chat")

    def contents(directory: Path) -> list[bytes]:
        return sorted(path.read_bytes() for path in directory.glob("*_document.*"))

    streamed = contents(place.data / "streamed")
    assert len(streamed) == 4 * FILES
    assert streamed == contents(expected / "chat")


def test_a_blend_of_the_values_is_packed(disturbed: dict[str, set[str]], place: Namespace, expected: Path) -> None:
    blend = {"all": [{"path": "disturbed/dialogs", "weight": 1}]}
    place.install(
        f"mixture charts/dataset-pack {STORAGE} {SMALL} --set dataset.outputPath=mixture,dataset.packSize={PACK_SIZE}"
        f" --set-json {shlex.quote(f'dataset.blend={json.dumps(blend)}')} --set rows.algorithm=first-fit-decreasing"
    )
    place.wait_for_job("mixture-pack")
    (expected.parent / "blend.json").write_text(json.dumps({"datasets": [{"path": str(expected)}]}))
    options = ("--pack-size", PACK_SIZE, "--algorithm", "first-fit-decreasing")
    run_checked("pack", expected.parent / "blend.json", expected.parent / "mixture", *options)
    assert_same(
        data_without_paths(place.data / "mixture", Path("/data")),
        data_without_paths(expected.parent / "mixture", expected.parent),
    )


def test_a_bad_template_fails_once_and_names_its_line(place: Namespace, tmp_path: Path) -> None:
    (tmp_path / "bad.jinja").write_text(
        "{% for message in messages %}\n{{ message.content | nothing }}\n{% endfor %}\n"
    )
    place.install(
        f"bad charts/dataset-chat {STORAGE} {SMALL} --set dataset.stream=true,dataset.repo={CORPUS},dataset.root=bad"
        f" --set tokenizer.name={MODEL} --set-file dataset.chatTemplate={shlex.quote(str(tmp_path / 'bad.jinja'))}"
    )
    place.wait_for_job("bad-chat", "Failed")
    (pod,) = place.pods("bad-chat")
    assert exit_code(pod) == 2, "a retry cannot help"
    assert "/etc/tokenmill-files/chat-template.jinja, line 2" in place.logs(pod["metadata"]["name"])


def test_the_pipeline_runs_the_three_stages(place: Namespace, files: Path, expected: Path) -> None:
    verbs = "get,list,watch,create,update,patch,delete"
    place.admin.check(f"kubectl create role jobsets --verb={verbs} --resource=jobsets.jobset.x-k8s.io")
    place.admin.check(f"kubectl create rolebinding jobsets --role=jobsets --serviceaccount={place.name}:editor")
    stages = ("transform", "chat", "pack")
    place.install(
        f"umbrella charts/dataset-pipeline {STORAGE} --set resources.requests.cpu=50m,resources.requests.memory=128Mi"
        " --set dataset.root=umbrella/dialogs,download.enabled=false,preprocess.enabled=false "
        + " ".join(f"--set {stage}.enabled=true {settings(files, stage, f'{stage}.')}" for stage in stages)
    )

    def find_end() -> Any:
        return place.user.get("jobset umbrella").get("status", {}).get("terminalState")

    assert wait_for(find_end, 300) == "Completed", [place.describe(f"umbrella-{stage}-0") for stage in stages]
    starts = [place.job(f"umbrella-{stage}-0")["metadata"]["creationTimestamp"] for stage in stages]
    assert starts == sorted(starts)
    for folder in ("transformed", "chat", "packed"):
        assert_same(
            data_without_paths(place.data / "umbrella/dialogs" / folder, Path("/data/umbrella/dialogs")),
            data_without_paths(expected / folder, expected),
        )
    place.user.check("helm test umbrella --timeout 120s")
