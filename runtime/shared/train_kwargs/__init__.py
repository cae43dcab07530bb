"""What the keywords of other trainers' `train_kwargs` mean on this run: `read`, and their one `TABLE`."""

from runtime.shared.train_kwargs.bodies import Refusal, Trainer, TrainKwargs, TrainKwargsRead
from runtime.shared.train_kwargs.table import TABLE, TABLES, read
from runtime.shared.train_kwargs.translation import RunContext

__all__ = ["TABLE", "TABLES", "Refusal", "RunContext", "TrainKwargs", "TrainKwargsRead", "Trainer", "read"]
