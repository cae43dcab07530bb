"""The run as DSPy's own weight optimizers know it: BootstrapFinetune, its GRPO, and BetterTogether with them.

    optimizer = dspy.BootstrapFinetune(metric=metric, train_kwargs={"num_train_epochs": 3})
    program = optimizer.compile(program, trainset)

A PolicyLM has one by itself; any other `dspy.LM` of this run takes `provider=SlipwayProvider()`.
Neighbours: `training_job.py` imitates, `reinforce_job.py` reinforces; `lm.py` has one. No call by DSPy starts
or ends anything: the run is `launch`'s. Knows nothing of steps.
"""

from __future__ import annotations

from typing import Any

from dspy.clients.provider import Provider

from launcher.client.dspy.reinforce_job import SlipwayReinforceJob
from launcher.client.dspy.training_job import SlipwayTrainingJob
from launcher.client.dspy.version_pinning import register_plain_copies
from launcher.client.session import Session, connect


class SlipwayProvider(Provider):
    """Trains the policy of one run: `session`, or the one that the program was started in."""

    def __init__(self, session: Session | None = None) -> None:
        super().__init__()
        self.finetunable = self.reinforceable = True
        self.TrainingJob = SlipwayTrainingJob
        self.ReinforceJob = SlipwayReinforceJob
        self._session = session

    @property
    def session(self) -> Session:
        """The run. Raises NotConnected outside one."""
        if self._session is None:
            self._session = connect()
        return self._session

    def finetune(  # pyrefly: ignore[bad-override] - DSPy calls it on the object
        self,
        job: SlipwayTrainingJob,
        model: str,
        train_data: list[dict[str, Any]],
        train_data_format: Any,
        train_kwargs: dict[str, Any] | None = None,
    ) -> str:
        """Train the policy to answer as in `train_data`; the name of the version that does."""
        return job.train(self.session, model, train_data, train_data_format, train_kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> SlipwayProvider:
        register_plain_copies(memo)
        return self  # a copied program is trained by the same run

    def __reduce__(self) -> tuple[Any, ...]:
        return SlipwayProvider, ()  # no address, no token: the run that it is unpickled in
