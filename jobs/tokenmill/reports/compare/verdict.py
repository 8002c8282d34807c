"""Whether two runs are comparable: the same data in the same order, with the same batch.

Fingerprints come first. A loss over tokens shows the effect of a setting only if both runs read the same samples, in
the same order, and as many in each step. A run without a record of its data is never called comparable.
"""

from pathlib import Path
from typing import Literal

import msgspec

from tokenmill.reports.compare.run import ComparedRun
from tokenmill.reports.compare.run_data import RunData
from tokenmill.samples.identity import SourceIdentity, list_differences
from tokenmill.samples.run_record import NAME

State = Literal["comparable", "not comparable", "unknown"]
REMEDY = (
    f"write {NAME} into the run's directory when it starts (tokenmill.samples.run_record.write_record), or train with "
    "tokenmill train"
)
_MAX_REASONS = 8


class Comparability(msgspec.Struct, frozen=True):
    """The verdict about a run and the baseline, with reasons; empty reasons for comparable runs."""

    run: str
    baseline: str
    state: State
    reasons: list[str]
    evidence: str = ""
    """The parts that are equal, for comparable runs."""

    @property
    def label(self) -> str:
        """Return the state for a reader, who must not miss a difference."""
        return "NOT comparable" if self.state == "not comparable" else self.state

    @property
    def subject(self) -> str:
        """Return the two runs; the order of the reasons is from the baseline to the run."""
        if self.state == "not comparable":
            return f"from {self.baseline} to {self.run}"
        return f"{self.run} and {self.baseline}"

    @property
    def text(self) -> str:
        """Return the verdict as one sentence."""
        detail = f" ({self.evidence})" if self.state == "comparable" else f": {'; '.join(self.reasons)}"
        return f"{self.label}: {self.subject}{detail}"


def judge(baseline: ComparedRun, run: ComparedRun) -> Comparability:
    """Return whether a run is comparable with the baseline."""
    reasons = _compare_known(baseline, run)
    before, now = baseline.data, run.data
    missing = [known.label for known, data in ((baseline, before), (run, now)) if data is None]
    unknown: list[str] = []
    evidence = ""
    if before is not None and now is not None:
        if Path(before.path).resolve() == Path(now.path).resolve():
            unknown.append(
                f"both have the same record {now.path}, which belongs to one run: give each run its own directory"
            )
        elif before.fingerprint and before.fingerprint == now.fingerprint:
            evidence = f"fingerprint {now.fingerprint[:12]}"
        else:
            differences, gaps = _compare_identities(before, now)
            reasons = [*differences, *(reason for reason in reasons if not reason.startswith("seq_length was "))]
            unknown += gaps
            evidence = "equal content, order and sequence length"
        unknown += [f"{known.label}: {data.change}" for known, data in ((baseline, before), (run, now)) if data.change]
        same_count = before.digest_samples == now.digest_samples
        if before.digest and now.digest and same_count and before.digest != now.digest:
            reasons.append(f"the digest of the first samples is {before.digest[:12]} and {now.digest[:12]}")
    elif missing:
        has = "has" if len(missing) == 1 else "have"
        unknown.append(
            f"{' and '.join(missing)} {has} no record of {'its' if len(missing) == 1 else 'their'} data: {REMEDY}"
        )
    equal_steps, difference = _compare_digests(baseline, run)
    if difference:
        reasons.append(difference)
    if not missing and not (baseline.global_batch and run.global_batch):
        unknown.append("the global batch is not recorded: write consumed_samples, or keep the arguments in the log")
    if equal_steps:
        evidence += f", equal samples in {equal_steps:,} steps"
    state: State = "not comparable" if reasons else "unknown" if unknown else "comparable"
    shown = reasons or unknown
    if len(shown) > _MAX_REASONS:
        shown = [*shown[:_MAX_REASONS], f"and {len(shown) - _MAX_REASONS} more differences"]
    return Comparability(run.label, baseline.label, state, shown, evidence if state == "comparable" else "")


def _compare_known(baseline: ComparedRun, run: ComparedRun) -> list[str]:
    """Return differences that need no record of the data."""
    reasons = []
    if baseline.is_synthetic != run.is_synthetic:
        reasons.append(f"{baseline.label if baseline.is_synthetic else run.label} was trained on random numbers")
    if baseline.seq_length and run.seq_length and baseline.seq_length != run.seq_length:
        reasons.append(f"seq_length was {baseline.seq_length:,}, and is {run.seq_length:,} now")
    if baseline.global_batch and run.global_batch and baseline.global_batch != run.global_batch:
        reasons.append(f"the global batch was {baseline.global_batch:,}, and is {run.global_batch:,} now")
    elif (first := baseline.series.global_batch) and (second := run.series.global_batch) and first != second:
        reasons.append(f"a step had {first:,} samples, and has {second:,} now, although the recorded batch is the same")
    return reasons


def _compare_identities(before: RunData, now: RunData) -> tuple[list[str], list[str]]:
    """Return differences of two identities, and reasons why a part of them is unknown.

    The identity of `tokenmill train` has shares instead of weights, no pad id and perhaps no number of samples; these
    parts are compared as far as both runs have them.
    """
    first, second = before.identity, now.identity
    unknown: list[str] = []
    if not before.fingerprint or not now.fingerprint:
        if first.samples is None or second.samples is None:
            unknown.append(
                "the number of requested samples is not recorded: keep the list of arguments at the start of "
                "Megatron-LM's log"
            )
        samples = first.samples if second.samples is None else second.samples
        has_tokenizers = bool(first.tokenizer and second.tokenizer)
        first, second = (
            msgspec.structs.replace(
                identity,
                sources=_normalize(identity.sources),
                samples=samples if identity.samples is None else identity.samples,
                blend=None,
                pad=None,
                surplus=0.0,
                tokenizer=identity.tokenizer if has_tokenizers else "",
            )
            for identity in (first, second)
        )
    differences = list_differences(first, second)
    if before.arguments != now.arguments:
        shown = (" ".join(arguments) or "absent" for arguments in (before.arguments, now.arguments))
        differences.append("the data arguments were {}, and are {} now".format(*shown))
    if not differences and first.fingerprint != second.fingerprint:
        differences.append("the fingerprints differ")
    return differences, unknown


def _normalize(sources: tuple[SourceIdentity, ...]) -> tuple[SourceIdentity, ...]:
    """Return the sources with shares of 1 instead of weights, rounded; a single source has no weight."""
    if len(sources) < 2:
        return tuple(msgspec.structs.replace(source, weight=None) for source in sources)
    total = sum(source.weight or 0.0 for source in sources) or 1.0
    return tuple(msgspec.structs.replace(source, weight=round((source.weight or 0.0) / total, 6)) for source in sources)


def _compare_digests(baseline: ComparedRun, run: ComparedRun) -> tuple[int, str]:
    """Return the number of steps with equal digests, and the first difference or ""."""
    before, now = (
        {int(step): digest for step, digest in zip(item.series.steps, item.series.digests, strict=False) if digest}
        for item in (baseline, run)
    )
    common = sorted(before.keys() & now.keys())
    for number, step in enumerate(common):
        if before[step] != now[step]:
            return number, f"the samples differ from step {step:,} on (the digests of the steps)"
    return len(common), ""


def summarize_verdicts(verdicts: list[Comparability], baseline: str) -> str:
    """Return the first line of a report."""
    if not verdicts:
        return f"one run: {baseline}"
    labels = {"NOT comparable": "NOT comparable with", "unknown": "unknown whether comparable with"}
    parts = []
    for label in ("NOT comparable", "unknown", "comparable"):
        if names := ", ".join(verdict.run for verdict in verdicts if verdict.label == label):
            parts.append(f"{labels.get(label, 'comparable with')} {baseline}: {names}")
    return "; ".join(parts)
