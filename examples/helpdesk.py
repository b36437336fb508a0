"""A helpdesk agent: it looks the problem up, then files a ticket, which a person must approve.

No key and no network: the model is a script. Each ticket filed is a line in `tickets.txt`.

    runfold run examples/helpdesk.py:agent --id a1 --input "VPN is down" --store ./runs
"""

import os
from pathlib import Path

from runfold import Agent, read, write
from runfold.testing import ScriptedModel, call, say

LEDGER = Path(os.environ.get("HELPDESK_LEDGER", "tickets.txt"))


@read
def lookup(query: str) -> str:
    """Search the knowledge base."""
    return f"no known outage for {query!r}"


@write
def create_ticket(title: str) -> str:
    """File a ticket with the network team."""
    with LEDGER.open("a") as ledger:
        ledger.write(f"{title}\n")
    return "TICKET-1"


model = ScriptedModel(
    call("lookup", query="VPN"),
    call("create_ticket", title="VPN is down"),
    say("Ticket filed."),
    ledger=os.environ.get("HELPDESK_MODEL_LEDGER"),
)
agent = Agent("helpdesk", model=model, tools=[lookup, create_ticket], system="You help users.")
