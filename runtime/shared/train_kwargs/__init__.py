"""The meaning of other trainers' `train_kwargs` on this run: `read`, and the keywords' one `TABLE`."""

from runtime.shared.train_kwargs.bodies import Refusal, Trainer, TrainKwargsRequest, TrainKwargsResponse
from runtime.shared.train_kwargs.table import TABLE, TABLES, read
from runtime.shared.train_kwargs.translation import RunContext

__all__ = [
    "TABLE",
    "TABLES",
    "Refusal",
    "RunContext",
    "TrainKwargsRequest",
    "TrainKwargsResponse",
    "Trainer",
    "read",
]
