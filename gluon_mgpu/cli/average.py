"""gluon-mgpu average: the mean of the last checkpoints of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Optional

import click

from ..checkpoint.average import average_checkpoints
from ._options import FOLDER


@click.command()
@click.argument("run", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--last", type=click.IntRange(2), help="Average so many of the latest checkpoints. By default all that train has kept."
)
@click.option("--output", type=FOLDER, help="Folder of the averaged checkpoint. By default average in RUN.")
def average(run: Path, last: Optional[int], output: Optional[Path]) -> None:
    """Average the weights of the last checkpoints of RUN.

    RUN is the --output of gluon-mgpu train resnet18 --keep 5 or train seq2seq --keep 5, or the folder of a Checkpoint.

    The result is a checkpoint without the optimizer's state. predict and translate read it.
    """
    print(f"saved {average_checkpoints(run, last=last, output=output)}")
