"""A policy of an AWS account that moto plays: what it refuses is refused as AWS refuses it.

`under_policy` puts it before every call of EC2's. Neighbours: `played_aws.py` and the test cloud's
`provider.py` have one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# Whether the account may not: region, action and the request's parameters, as EC2's query protocol has them.
Refuses = Callable[[str, str, dict[str, Any]], bool]
# Whether the session of an access key has ended.
Expired = Callable[[str], bool]


def under_policy(refuses: Refuses, expired: Expired = lambda key: False) -> Callable[[], None]:
    """From now on; until what is returned is called."""
    from moto.core.responses import ActionResult
    from moto.ec2.exceptions import EC2ClientError
    from moto.ec2.responses import EC2Response

    original = EC2Response.call_action

    def call_action(self: Any) -> Any:
        action = self._get_action()
        if expired(self.access_key):  # whose request it is comes before what it may
            error = EC2ClientError("RequestExpired", "Request has expired.")
        elif refuses(self.region, action, self.querystring):
            message = f"You are not authorized to perform this operation: ec2:{action} in {self.region}."
            error = EC2ClientError("UnauthorizedOperation", message)
        else:
            return original(self)
        status, headers, body = self.serialized(ActionResult(error))
        headers["status"] = status
        return status, headers, body

    EC2Response.call_action = call_action  # type: ignore[method-assign]

    def lift() -> None:
        EC2Response.call_action = original  # type: ignore[method-assign]

    return lift
