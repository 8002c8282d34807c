"""All stages on one machine, one after the other: what `tokenmill run` does."""

from dataclasses import dataclass
from pathlib import Path

from tokenmill.corpus.options import SourceOptions
from tokenmill.errors import RequestError
from tokenmill.flow.run import run_stage
from tokenmill.flow.stage import Run
from tokenmill.flow.worker import Summary
from tokenmill.selection import Selection
from tokenmill.stages.concatenate import Concatenate
from tokenmill.stages.download import Download
from tokenmill.stages.extract import Extract
from tokenmill.stages.preprocess import Preprocess
from tokenmill.stages.registry import CONCATENATE, DOWNLOAD, EXTRACT, PREPROCESS, default_output
from tokenmill.tokens.options import PreprocessOptions


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """Where the text comes from, and what is made of it; `concatenate` is a number of files."""

    uri: str
    output: Path
    options: PreprocessOptions
    selection: Selection = Selection()
    source: SourceOptions = SourceOptions()
    extract: bool = False
    concatenate: int | None = None

    def run(self, run: Run) -> list[Summary]:
        """Run the stages in order, each into its place below the output; finished work is not done again.

        Each stage reads the one before it by name, so that what an earlier call with other options left
        beside them is not taken. The download selects; what it took is read whole.
        """

        everything, options, root = Selection(split="any"), self.options, self.output
        if options.format not in (None, "jsonl") and (self.extract or self.concatenate):
            raise RequestError(
                f"--format {options.format}: extract and concatenate take each line for a record; leave out --extract "
                "and --concatenate, preprocess reads it directly"
            )
        download = Download(
            uri=self.uri, output=root, selection=self.selection, source=self.source, format=options.format
        )
        done, made = [run_stage(download, run)], DOWNLOAD
        # Joining needs plain text; asking for it asks for that.
        if self.extract or self.concatenate:
            extract = Extract(
                input=root,
                output=default_output(root, EXTRACT),
                from_stage=made.name,
                selection=everything,
                format=options.format,
                zstd_window=options.zstd_window,
            )
            done, made = [*done, run_stage(extract, run)], EXTRACT
        if self.concatenate:
            concatenate = Concatenate(
                input=root,
                output=default_output(root, CONCATENATE),
                target_files=self.concatenate,
                name=options.name,
                from_stage=made.name,
                selection=everything,
                format=options.format,
            )
            done, made = [*done, run_stage(concatenate, run)], CONCATENATE
        preprocess = Preprocess(
            input=root,
            output=default_output(root, PREPROCESS),
            options=options,
            endpoint=self.source.endpoint,
            from_stage=made.name,
            selection=everything,
        )
        return [*done, run_stage(preprocess, run)]
