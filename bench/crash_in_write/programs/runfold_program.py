"""Runfold: the built-in loop. A write asks for approval unless told not to."""

import ledger

from runfold import Agent, write
from runfold.testing import ScriptedModel, call, say


@write
def charge(amount: int) -> str:
    """Charge the customer."""
    return ledger.charge(amount)


model = ScriptedModel(call("charge", amount=10), say("Paid."))
agent = Agent("till", model=model, tools=[charge])
