"""Train with MaxText, which reads the samples of tokenmill through Grain.

python examples/maxtext_grain.py out/preprocessed base.yml run_name=first steps=20 ...

The arguments after the data are MaxText's; its data_shuffle_seed is the seed of the samples. Its checkpoints have the
position in the samples, from which any number of processes continues.
"""

import argparse
import sys

import jax
from absl import app
from maxtext.input_pipeline import input_pipeline_interface
from maxtext.input_pipeline.multihost_dataloading import MultiHostDataLoadIterator
from maxtext.trainers.pre_train import train

import tokenmill.data
from tokenmill.loaders.grain import RankDataset


def main() -> None:
    """Train with MaxText's own training loop."""
    parser = argparse.ArgumentParser()
    parser.add_argument("data", help="output of tokenmill preprocess, a pair, or a file of tokenmill blend")
    parser.add_argument("--samples", type=int, help="samples for which the data is opened, if later runs train longer")
    options, arguments = parser.parse_known_args()

    def make_iterator(config, mesh, processes):  # type: ignore[no-untyped-def]
        """Return the batches of this process; MaxText calls this with the processes that read data."""
        batch = config.global_batch_size_to_load
        samples = tokenmill.data.open(
            options.data,
            seq_length=config.max_target_length,
            samples=options.samples or config.steps * batch,
            seed=config.data_shuffle_seed,
            documents="positions" if config.packing else "none",
        )
        dataset = RankDataset(
            samples,
            batch // len(processes),
            rank=processes.index(jax.process_index()),
            world=len(processes),
            fields="maxtext",
        )
        return MultiHostDataLoadIterator(dataset, mesh)

    input_pipeline_interface.make_grain_train_iterator = make_iterator
    # MaxText requires a name of files for this type of data, and saves its position only with it.
    app.run(train.main, [sys.argv[0], *arguments, "dataset_type=grain", f"grain_train_files={options.data}"])


if __name__ == "__main__":
    main()
