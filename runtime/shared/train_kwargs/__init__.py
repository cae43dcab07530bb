"""What the keywords of other trainers' `train_kwargs` mean on this run: `read`, and their one `TABLE`."""

from runtime.shared.train_kwargs.bodies import Refusal, TrainKwargs, TrainKwargsRead
from runtime.shared.train_kwargs.reading import Run
from runtime.shared.train_kwargs.table import TABLE, read

__all__ = ["TABLE", "Refusal", "Run", "TrainKwargs", "TrainKwargsRead", "read"]
